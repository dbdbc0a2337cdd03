"""What the model needs to know of this machine and its network, from measurements."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decomp.base import Algorithm, PyTree
from decomp.cost.links import Links
from decomp.cost.model import step_seconds
from decomp.cost.workloads import Workload
from decomp.engine import wire
from decomp.engine.meter import Meter
from decomp.engine.stacked import as_is
from decomp.topology import Topology

if TYPE_CHECKING:
  from decomp.tasks import Task


def measure_codec(algorithm: Algorithm, topology: Topology, params: PyTree) -> float:
  """Seconds of one worker's part of a step on this machine, gradient and wire left out.

  That is: compressing and packing its message, unpacking and decoding those of its neighbours,
  mixing, and the optimizer. In a compiled loop; the median of five.
  """
  net, key = _Loopback(topology), jax.random.key(0)
  params = jax.tree.map(jnp.asarray, params)
  grads = optax.tree.random_like(key, params)

  def step(number: jax.Array, state: Any) -> Any:
    return algorithm.step(jax.random.fold_in(key, number), grads, state, net)[0]

  return _median_seconds(step, jax.jit(lambda p: algorithm.init(p, net))(params))


def measure_compute(task: Task, batch_size: int) -> float:
  """Seconds of one worker's gradient on this machine, in a compiled loop; the median of five."""
  key = jax.random.key(0)
  params, model_state = jax.jit(task.init)(key)
  batch = {
    name: jnp.asarray(np.take(values, np.arange(batch_size), 0, mode='wrap'))
    for name, values in task.train.items()
  }

  def step(_: Any, carry: Any) -> Any:
    params, model_state = carry
    grads, model_state = jax.grad(task.loss, has_aux=True)(params, model_state, batch, key)
    # The next gradient must differ, or the compiler would move it out of the loop.
    return jax.tree.map(lambda x, g: x - 1e-3 * g, params, grads), model_state

  return _median_seconds(step, (params, model_state))


def fit_transport(measured: Sequence[tuple[Workload, Links, float]]) -> tuple[float, float]:
  """What measurements say of `efficiency` and `window`, which no data sheet tells.

  Least squares of log(predicted / measured), robust against single rows that are far off.

  Args:
    measured: workloads on networks with their seconds per step, on networks that differ.

  Returns:
    (efficiency, window in bytes), for `lan`.
  """
  from scipy import optimize  # here, because it takes long to import

  def errors(logs: np.ndarray) -> np.ndarray:
    efficiency, window = np.exp(logs)
    predicted = [
      step_seconds(work, dataclasses.replace(links, efficiency=efficiency, window=window))
      for work, links, _ in measured
    ]
    return np.log(np.array(predicted) / [seconds for *_, seconds in measured])

  # Where a wide window changes nothing, a search for a narrow one would not begin; and where a
  # narrow one explains no more, the widest is to be believed.
  fits = [
    optimize.least_squares(errors, np.log([0.9, start]), bounds=([-3, 0], [0, 30]), loss='soft_l1')
    for start in (1e9, 1e6, 1e5, 1e4)
  ]
  efficiency, window = np.exp(min(fits, key=lambda fit: round(fit.cost, 6)).x)
  return float(efficiency), float(window)


class _Loopback(Meter):
  """A network of one worker who hears itself in place of the others, with all that costs."""

  def mix(self, payload: PyTree, decode: Callable[[PyTree], PyTree] = as_is) -> PyTree:
    return _hear(payload, decode, self.topology.degree)

  def mean(self, payload: PyTree, decode: Callable[[PyTree], PyTree] | None = None) -> PyTree:
    # An all-reduce adds as many numbers as the array has, a little less than once.
    return _hear(payload, decode or as_is, self.topology.num_workers - 1 if decode else 1)


def _hear(payload: PyTree, decode: Callable[[PyTree], PyTree], times: int) -> PyTree:
  exact = decode is as_is  # floats are sent as they are: there is nothing to pack
  total, buffer = decode(payload), payload if exact else wire.pack(payload)
  for _ in range(times):
    # The barrier keeps the compiler from decoding equal messages only once.
    total, buffer = jax.lax.optimization_barrier((total, buffer))
    total = optax.tree.add(total, buffer if exact else decode(wire.unpack(buffer, payload)))
  return optax.tree.scale(1 / (times + 1), total)


def _median_seconds(step: Callable[[Any, Any], Any], state: Any) -> float:
  """Seconds of a step in a compiled loop: the median of five loops of at least 20 ms."""
  loop = jax.jit(lambda state, steps: jax.lax.fori_loop(0, steps, step, state))

  def timed(steps: int) -> float:
    began = time.perf_counter()
    jax.block_until_ready(loop(state, np.int32(steps)))
    return (time.perf_counter() - began) / steps

  timed(1)  # compiles
  steps = math.ceil(0.02 / timed(10))
  return float(np.median([timed(steps) for _ in range(5)]))
