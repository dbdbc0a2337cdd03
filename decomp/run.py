"""The device's side of training: everything that is compiled.

Steps run in chunks inside one `while_loop` with donated buffers. The loop counts what a row of
metrics needs, and leaves at the very step where a worker's loss is no longer finite or explodes.
Everything random is a function of (seed, step, worker), so the carry is all a checkpoint holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from decomp import mapping as mappings
from decomp import metrics
from decomp.base import PyTree
from decomp.data import batches
from decomp.data.partition import Partition
from decomp.simulate import Simulation, State
from decomp.tasks import Task


class Totals(NamedTuple):
  """Sums over the steps since the last row."""

  steps: jax.Array
  loss: jax.Array
  gradient_norm: jax.Array
  compression_error: jax.Array
  clipped: jax.Array


class Carry(NamedTuple):
  """All that a step needs from the one before.

  Attributes:
    state: the algorithm's, of all workers.
    model_state: leaves [n, ...].
    totals: since the last row.
    losses: each worker's last loss, [n].
  """

  state: State
  model_state: PyTree
  totals: Totals
  losses: jax.Array


class Sampling(NamedTuple):
  """How a worker draws its batches: see `decomp.data.batches.sample`."""

  shards: Partition
  batch_size: int
  reshuffle: bool = False
  replacement: bool = False


class Run:
  """One run's compiled functions: `start`, `advance`, `measure` and `reset`."""

  def __init__(
    self,
    task: Task,
    sim: Simulation,
    sampling: Sampling,
    seed: int,
    mapping: str,
    worker_examples: int,
  ):
    self.task, self.sim, self.sampling = task, sim, sampling
    self._num_workers = sim.topology.num_workers
    init_key, *self._keys = jax.random.split(jax.random.key(seed), 4)
    self._params, self._model_state = jax.jit(task.init)(init_key)
    self.bytes_per_step = sim.bytes_per_step(self._params)
    self._examples = {name: jnp.asarray(values) for name, values in task.train.items()}
    self._test = _Batched.of(task.test, size=100)
    some = {name: values[:worker_examples] for name, values in task.test.items()}
    self._worker_test = _Batched.of(some, size=100)
    self._mapping = self._choose(mapping)
    mesh = sim.mesh or (mappings.local_mesh() if self._mapping == 'devices' else None)
    self._mesh = mesh
    self._gradients = mappings.lift(self._worker_gradient, self._mapping, mesh)
    self._shardings = _shardings(self._stacked_start, mesh) if mesh else None
    if mesh:  # else every chunk would copy them from the first device to the others
      self._examples = jax.device_put(self._examples, NamedSharding(mesh, PartitionSpec()))
    self._chunk: Any = jax.jit(self._steps, donate_argnums=0, out_shardings=self._shardings)
    self.measure = jax.jit(self._measure)

  def start(self) -> Carry:
    """The carry before the first step."""
    return jax.device_put(self._stacked_start(), self._shardings)

  def compile(self, carry: Carry) -> None:
    """Compiles ahead, so that compiling counts neither as training time nor as a stall."""
    self._chunk = self._chunk.lower(carry, np.int32(0), np.float32(0), self._examples).compile()

  def advance(self, carry: Carry, until: int, limit: float) -> Carry:
    """Steps up to number `until`, or to the first step at which a loss is not below `limit`."""
    return self._chunk(carry, np.int32(until), np.float32(limit), self._examples)

  def reset(self, carry: Carry) -> Carry:
    """The carry with sums over no steps, after a row."""
    shardings = self._shardings.totals if self._shardings else None
    return carry._replace(totals=jax.device_put(no_totals(), shardings))

  def _stacked_start(self) -> Carry:
    n = self._num_workers
    model_state = jax.tree.map(lambda x: jnp.repeat(x[None], n, 0), self._model_state)
    state = self.sim.init(self._params)
    return Carry(state, model_state, no_totals(), jnp.zeros(n, jnp.float32))

  def _steps(self, carry: Carry, until: jax.Array, limit: jax.Array, examples: PyTree) -> Carry:
    def going(carry: Carry) -> jax.Array:
      return (carry.state.round < until) & below(carry.losses, limit)

    return jax.lax.while_loop(going, functools.partial(self._step, examples=examples), carry)

  def _step(self, carry: Carry, examples: PyTree) -> Carry:
    data_key, loss_key, step_key = self._keys
    step, workers = carry.state.round, jnp.arange(self._num_workers)
    chosen = jax.vmap(lambda worker: self._sample(data_key, step, worker))(workers)
    batch = jax.tree.map(lambda x: x[chosen], examples)
    step_loss_key = jax.random.fold_in(loss_key, step)
    keys = jax.vmap(lambda worker: jax.random.fold_in(step_loss_key, worker))(workers)
    losses, grads, model_state = self._gradients(carry.state.params, carry.model_state, batch, keys)
    state, info = self.sim.step(step_key, grads, carry.state)
    totals = Totals(
      carry.totals.steps + 1,
      carry.totals.loss + losses.mean(),
      carry.totals.gradient_norm + metrics.gradient_norm(grads),
      carry.totals.compression_error + _mean_of(info, 'compression_error'),
      carry.totals.clipped + _mean_of(info, 'clipped'),
    )
    return Carry(state, model_state, totals, losses.astype(jnp.float32))

  def _sample(self, key: jax.Array, step: jax.Array, worker: jax.Array) -> jax.Array:
    shards, batch_size, reshuffle, replacement = self.sampling
    return batches.sample(
      key, step, worker, shards, batch_size, reshuffle=reshuffle, replacement=replacement
    )

  def _worker_gradient(
    self, params: PyTree, model_state: PyTree, batch: PyTree, key: jax.Array
  ) -> tuple[jax.Array, PyTree, PyTree]:
    gradient = jax.value_and_grad(self.task.loss, has_aux=True)
    (loss, model_state), grads = gradient(params, model_state, batch, key)
    return loss, grads, model_state

  def _choose(self, mapping: str) -> str:
    n, batch_size = self._num_workers, self.sampling.batch_size
    if mapping == 'devices' and n % jax.local_device_count():
      raise ValueError(
        f"mapping='devices': {n} workers cannot be split over {jax.local_device_count()} devices "
        "evenly; use 'scan' or 'auto'"
      )
    if mapping != 'auto':
      return mapping

    def shapes(key: jax.Array) -> PyTree:
      params, model_state = jax.tree.map(
        lambda x: jnp.zeros((n, *x.shape), x.dtype), (self._params, self._model_state)
      )
      batch = {
        name: jnp.zeros((n, batch_size, *x.shape[1:]), x.dtype)
        for name, x in self._examples.items()
      }
      return params, model_state, batch, jax.random.split(key, n)

    return mappings.choose(self._worker_gradient, *jax.eval_shape(shapes, jax.random.key(0)))

  def _measure(self, carry: Carry) -> dict[str, jax.Array]:
    """The metrics of a row that come from the device."""
    params, model_state = carry.state.params, carry.model_state
    mean = metrics.mean_over_workers((params, model_state))
    average = self._test.mean(functools.partial(self.task.evaluate, *mean))
    each = mappings.lift(
      lambda p, s: self._worker_test.mean(functools.partial(self.task.evaluate, p, s)),
      self._mapping,
      self._mesh,
    )(params, model_state)
    totals = carry.totals._asdict()
    steps = jnp.maximum(totals.pop('steps'), 1).astype(jnp.float32)
    return {
      'train_loss': totals.pop('loss') / steps,
      **{f'test_{name}': value for name, value in average.items()},
      **{f'worst_{name}': _worst(name, value) for name, value in each.items()},
      'consensus_distance': metrics.consensus_distance(params),
      **{name: total / steps for name, total in totals.items()},
    }


class _Batched(NamedTuple):
  """Test examples cut into batches of one size, the last one filled up and masked."""

  examples: PyTree
  mask: jax.Array
  total: int

  @classmethod
  def of(cls, examples: Mapping[str, np.ndarray], size: int) -> _Batched:
    total = len(next(iter(examples.values())))
    size = min(size, total)
    rows = np.arange(-(-total // size) * size)
    cut = {
      name: jnp.asarray(values[np.minimum(rows, total - 1)].reshape(-1, size, *values.shape[1:]))
      for name, values in examples.items()
    }
    return cls(cut, jnp.asarray((rows < total).reshape(-1, size).astype(np.float32)), total)

  def mean(self, evaluate: Callable[[PyTree], dict[str, jax.Array]]) -> dict[str, jax.Array]:
    """The mean of every metric over all examples, each counted once."""
    sums = jax.lax.map(
      lambda part: {k: (v * part[1]).sum() for k, v in evaluate(part[0]).items()},
      (self.examples, self.mask),
    )
    return {name: value.sum() / self.total for name, value in sums.items()}


def no_totals() -> Totals:
  """Sums over no steps, each in a buffer of its own that can be donated."""
  return Totals(jnp.zeros((), jnp.int32), *(jnp.zeros((), jnp.float32) for _ in range(4)))


def below(losses: Any, limit: Any) -> Any:
  """Whether all losses are finite and below `limit`; NaN compares false."""
  return ((losses > -np.inf) & (losses < limit)).all()


def _shardings(start: Callable[[], Carry], mesh: Mesh) -> Carry:
  """Everything with a worker axis is split over the mesh; the step and the sums are everywhere."""
  everywhere, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ('worker',)))
  carry = jax.tree.map(lambda _: split, jax.eval_shape(start))
  state = carry.state._replace(round=everywhere)
  return carry._replace(state=state, totals=jax.tree.map(lambda _: everywhere, no_totals()))


def _mean_of(info: Any, field: str) -> jax.Array:
  """The mean over workers; NaN where an algorithm of one's own does not report it."""
  return jnp.mean(jnp.asarray(getattr(info, field, jnp.nan)).astype(jnp.float32))


def _worst(metric: str, values: jax.Array) -> jax.Array:
  return values.min() if metric == 'accuracy' else values.max()
