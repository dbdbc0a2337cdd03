"""What has to be done: an algorithm's messages, found by tracing a step, and its local work."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from decomp.base import Algorithm, PyTree
from decomp.cost.units import seconds
from decomp.engine import wire
from decomp.engine.meter import Meter
from decomp.topology import Topology


class Exchange(NamedTuple):
  """One exchange between workers within a step.

  Attributes:
    kind: 'mix' (with the neighbours), 'all-reduce', or 'all-gather' (of codes that don't add up).
    bytes: of one worker's packed message; of the whole array for an all-reduce.
  """

  kind: str
  bytes: int


class Workload(NamedTuple):
  """What has to be done to reach a target: `steps` times the same step.

  Attributes:
    name: of the algorithm.
    topology: who exchanges with whom.
    exchanges: of one step, one after another.
    compute: seconds until the slowest worker has its gradient.
    codec: seconds of one worker's other work in a step: compression, mixing, the optimizer.
    steps: how many steps it takes.
    spread: by how much that may be off either way.
  """

  name: str
  topology: Topology
  exchanges: tuple[Exchange, ...]
  compute: float
  codec: float
  steps: float = 1
  spread: float = 0.0


def workload(
  algorithm: Algorithm,
  topology: Topology,
  params: PyTree,
  *,
  compute: str | float,
  codec: str | float,
  steps: float = 1,
  spread: float = 0.0,
) -> Workload:
  """The workload of an algorithm, its exchanges found by tracing one step.

  Args:
    algorithm: such as `decomp.algorithms.dcd_psgd(...)`.
    topology: such as `decomp.topology.ring(8)`.
    params: one worker's parameters, or their shapes and dtypes.
    compute: of one gradient: '20ms' or seconds; see `measure_compute`, `straggling`, `slowest`.
    codec: of one worker's other work: '1ms' or seconds; see `measure_codec`.
    steps: to reach the target; see `steps_to`.
    spread: by how much that may be off either way.
  """
  meter = _Recorder(topology)
  state = jax.eval_shape(lambda p: algorithm.init(p, meter), params)
  meter.exchanges.clear()  # the start is not part of a step
  key = jax.eval_shape(lambda: jax.random.key(0))
  jax.eval_shape(lambda k, g, s: algorithm.step(k, g, s, meter), key, params, state)
  local = seconds('compute', compute), seconds('codec', codec)
  return Workload(algorithm.name, topology, tuple(meter.exchanges), *local, steps, spread)


def straggling(compute: str | float, num_workers: int, delay: float) -> float:
  """The expected time of the slowest of n workers, if delays are exponential.

  Each worker takes compute (1 + delay E) with independent E ~ Exp(1). The largest of n of them has
  the harmonic number as its mean:

    E max = compute (1 + delay H_n),   H_n = 1 + 1/2 + ... + 1/n ≈ ln n + 0.58

  In gossip a worker waits for its neighbours only, so that this is an upper bound there.

  >>> straggling(1.0, num_workers=4, delay=0.12)
  1.25

  Args:
    compute: of a worker that is not delayed.
    num_workers: n.
    delay: the mean delay, in units of `compute`.
  """
  if not (math.isfinite(delay) and delay >= 0):
    raise ValueError(f'delay={delay}: the mean delay must be a number of at least 0')
  return seconds('compute', compute) * (1 + delay * sum(1 / k for k in range(1, num_workers + 1)))


def slowest(samples: Any, num_workers: int) -> float:
  """The expected largest of n independent draws from measured seconds.

  With the m samples in order, x_1 <= ... <= x_m: Σ_k x_k ((k/m)ⁿ - ((k-1)/m)ⁿ).

  >>> slowest([1.0, 2.0], num_workers=2)
  1.75
  """
  ordered = np.sort(np.asarray(samples, float).reshape(-1))
  if not ordered.size or not np.isfinite(ordered).all():
    raise ValueError('samples must be finite seconds, and at least one of them')
  return float(ordered @ np.diff(np.linspace(0, 1, ordered.size + 1) ** num_workers))


class _Recorder(Meter):
  """A meter that notes each exchange."""

  def __init__(self, topology: Topology):
    super().__init__(topology)
    self.exchanges: list[Exchange] = []

  def mix(self, payload: PyTree, *args: Any, **kwargs: Any) -> PyTree:
    self.exchanges.append(Exchange('mix', wire.size(payload)))
    return super().mix(payload, *args, **kwargs)

  def mean(self, payload: PyTree, decode: Callable[[PyTree], PyTree] | None = None) -> PyTree:
    kind = 'all-gather' if decode else 'all-reduce'
    self.exchanges.append(Exchange(kind, wire.size(payload)))
    return super().mean(payload, decode)
