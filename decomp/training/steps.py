"""The device's side of training: everything that is compiled.

Steps run in chunks inside one `while_loop` with donated buffers. The loop counts what a row of
metrics needs, and notes the very step where a worker's loss is no longer finite or explodes.
Everything random is a function of (seed, step, worker), so the carry is all a checkpoint holds.

On one device the loop leaves at that step. Workers on a mesh learn of each other's losses only
between chunks: inside one nothing travels but the algorithm's own messages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from decomp import mapping as mappings
from decomp import metrics
from decomp.base import PyTree
from decomp.data import batches
from decomp.data.partition import Partition
from decomp.keys import fold_in
from decomp.simulate import Simulation, State, simulate
from decomp.tasks import Task

OBSERVED = 8
"""Diagnostics of messages take time: every so many steps are enough."""

WIDE: dict[str, str | bool] = {'xla_cpu_prefer_vector_width': '512'}
"""XLA uses half of a vector register where it could use 512 bits: random numbers take longer."""


class Totals(NamedTuple):
  """What was seen since the last row: each worker's sums over steps, [n].

  Attributes:
    steps: their number, a scalar.
    observed: in how many of them diagnostics were taken, a scalar: in every eighth, and in a row's
      last one.
    gradient_norm: of the mean gradient, a scalar: it needs everyone's gradients, so it is taken
      once for a row, at its last step; NaN before.
  """

  steps: jax.Array
  observed: jax.Array
  loss: jax.Array
  compression_error: jax.Array
  clipped: jax.Array
  gradient_norm: jax.Array


class Carry(NamedTuple):
  """All that a step needs from the one before.

  Attributes:
    state: the algorithm's, of all workers.
    model_state: leaves [n, ...].
    totals: since the last row.
    losses: each worker's last loss, or the first bad one, [n].
    failed: the number of steps after which it was bad, [n]; 0 as long as all is well.
  """

  state: State
  model_state: PyTree
  totals: Totals
  losses: jax.Array
  failed: jax.Array


class Data(NamedTuple):
  """What the compiled functions read; arguments, since constants would be compiled in.

  Attributes:
    train: all examples, [N, ...]; on a mesh each worker's own ones, [n, longest, ...].
    test: for the mean model.
    worker_test: for single workers.
  """

  train: PyTree
  test: _Batched
  worker_test: _Batched


class Sampling(NamedTuple):
  """How a worker draws its batches: see `decomp.data.batches.sample`."""

  shards: Partition
  batch_size: int
  reshuffle: bool = False
  replacement: bool = False


class Run:
  """One run's compiled functions: `start`, `advance`, `outcome`, `measure` and `reset`."""

  def __init__(
    self,
    task: Task,
    sim: Simulation,
    sampling: Sampling,
    seed: int,
    mapping: str,
    worker_examples: int,
  ):
    self.task, self.sim, self.sampling, self._seed = task, sim, sampling, seed
    self._params, self._model_state = begin = initial(task, seed)
    self.bytes_per_step = sim.bytes_per_step(self._params)
    n = sim.topology.num_workers
    if mapping == 'devices' and not sim.mesh and n % jax.local_device_count():
      raise ValueError(
        f"mapping='devices': {n} workers cannot be split over {jax.local_device_count()} devices "
        "evenly; use 'scan' or 'auto'"
      )
    if mapping == 'auto':
      mapping = choose_mapping(task, begin, n, sampling.batch_size)
    mesh = sim.mesh or (mappings.local_mesh() if mapping == 'devices' else None)
    self.steps = Steps(task, sim, sampling, mapping, mesh)
    everywhere: Any = NamedSharding(mesh, PartitionSpec()) if mesh else None
    split: Any = NamedSharding(mesh, PartitionSpec('worker')) if mesh else None
    if self.steps.own_examples:
      train = {name: _of_workers(x, sampling.shards, split) for name, x in task.train.items()}
    else:
      train = {name: _place(x, everywhere) for name, x in task.train.items()}
    tests = batched_tests(task, worker_examples)
    self._data = Data(train, *jax.tree.map(lambda x: _place(x, everywhere), tests))
    start = self.steps.start
    carry = _shardings(jax.eval_shape(start, *begin), everywhere, split) if mesh else None
    self._started = jax.jit(start, out_shardings=carry)
    self._chunk: Any = jax.jit(self._advance, donate_argnums=0, out_shardings=carry)
    self._measured = jax.jit(self.steps.measure, out_shardings=everywhere)
    self.outcome = jax.jit(lambda carry: (carry.losses, carry.failed), out_shardings=everywhere)
    self.reset = jax.jit(reset, donate_argnums=0, out_shardings=carry)

  def compile(self, carry: Carry) -> None:
    """Compiles ahead, so that compiling counts neither as training time nor as a stall."""
    zero = np.int32(0)
    self._chunk = self._chunk.lower(carry, zero, zero, np.float32(0), self._data).compile(WIDE)

  def advance(self, carry: Carry, until: int, row_at: int, limit: float) -> Carry:
    """Steps up to number `until`, or on one device to the first loss that is not below `limit`."""
    return self._chunk(carry, np.int32(until), np.int32(row_at), np.float32(limit), self._data)

  def measure(self, carry: Carry) -> dict[str, float]:
    """The metrics of a row that come from the device."""
    return {name: float(value) for name, value in self._measured(carry, self._data).items()}

  def start(self) -> Carry:
    """The carry before the first step."""
    return self._started(self._params, self._model_state)

  def _advance(
    self, carry: Carry, until: jax.Array, row_at: jax.Array, limit: jax.Array, data: Data
  ) -> Carry:
    keys = step_keys(self._seed)
    watch = self.sim.mesh is None

    def going(carry: Carry) -> jax.Array:
      return (carry.state.round < until) & (~carry.failed.any() if watch else True)

    def step(carry: Carry) -> Carry:
      return self.steps.step(keys, row_at, limit, data.train, carry)

    return jax.lax.while_loop(going, step, carry)


class Steps:
  """One run's arithmetic, as pure functions of arrays: `start`, `step` and `measure`.

  Nothing here asks for the value of the algorithm's numbers, of keys or shards, so that `vmap` can
  make many runs of it, see `decomp.sweep`.
  """

  def __init__(
    self, task: Task, sim: Simulation, sampling: Sampling, mapping: str, mesh: Mesh | None = None
  ):
    self.task, self.sim, self.sampling = task, sim, sampling
    self._mapping, self._mesh = mapping, mesh
    # Left to itself, the compiler would give every device the messages of all workers.
    self._exchange = simulate(sim.algorithm, sim.topology, mesh) if mesh else sim
    self._num_workers = sim.topology.num_workers
    self.gradients = self._in_turn(mappings.lift(self._worker_gradient, mapping, mesh))
    # A worker that is dealt other examples every epoch needs access to all of them.
    self.own_examples = sim.mesh is not None and not sampling.reshuffle

  def start(self, params: PyTree, model_state: PyTree) -> Carry:
    """The carry before the first step."""
    n = self._num_workers
    model_state = jax.tree.map(lambda x: jnp.repeat(x[None], n, 0), model_state)
    state = self._exchange.init(params)
    nothing = jnp.zeros(n, jnp.float32), jnp.zeros(n, jnp.int32)
    return Carry(state, model_state, _no_totals(n), *nothing)

  def step(
    self, keys: jax.Array, row_at: jax.Array, limit: jax.Array, train: PyTree, carry: Carry
  ) -> Carry:
    """One step of all workers, its losses compared with `limit`; see `step_keys` for keys."""
    data_key, loss_key, step_key = keys
    step, workers = carry.state.round, jnp.arange(self._num_workers)
    chosen = jax.vmap(lambda worker: self.sample(data_key, step, worker))(workers)
    batch = self.pick(train, chosen)
    loss_keys = fold_in(fold_in(loss_key, step), workers)
    state = carry.state
    losses, grads, model_state = self.gradients(state.params, carry.model_state, batch, loss_keys)
    before, last = carry.totals, state.round + 1 == row_at
    # The factor orders the two uses of gradients, so that the last one may overwrite them.
    gradient_norm, one = jax.lax.cond(
      last,
      lambda: (metrics.gradient_norm(grads).astype(jnp.float32), jnp.float32(1)),
      lambda: (before.gradient_norm, jnp.float32(1)),
    )
    grads = jax.tree.map(lambda g: one.astype(g.dtype) * g, grads)
    observed = (state.round % OBSERVED == 0) | last
    state, info = self._exchange.step(step_key, grads, state, observed)
    losses = losses.astype(jnp.float32)
    totals = Totals(
      before.steps + 1,
      before.observed + observed.astype(jnp.int32),
      before.loss + losses,
      before.compression_error + jnp.where(observed, _reported(info, 'compression_error'), 0),
      before.clipped + jnp.where(observed, _reported(info, 'clipped'), 0),
      gradient_norm,
    )
    well = carry.failed == 0
    bad = well & ~below(losses, limit)
    return Carry(
      state,
      model_state,
      totals,
      jnp.where(well, losses, carry.losses),
      jnp.where(bad, state.round, carry.failed),
    )

  def sample(self, key: jax.Array, step: jax.Array, worker: jax.Array) -> jax.Array:
    """The positions of a batch in the dataset, or among the worker's own examples."""
    shards, batch_size, reshuffle, replacement = self.sampling
    if self.own_examples:
      places = np.broadcast_to(np.arange(shards.indices.shape[1]), shards.indices.shape)
      shards = shards._replace(indices=places)
    return batches.sample(
      key, step, worker, shards, batch_size, reshuffle=reshuffle, replacement=replacement
    )

  def pick(self, train: PyTree, chosen: jax.Array) -> PyTree:
    """The examples at these positions."""
    if not self.own_examples:
      return jax.tree.map(lambda x: x[chosen], train)
    pick = mappings.lift(lambda own, rows: jax.tree.map(lambda x: x[rows], own), 'vmap', self._mesh)
    return pick(train, chosen)

  def _worker_gradient(
    self, params: PyTree, model_state: PyTree, batch: PyTree, key: jax.Array
  ) -> tuple[jax.Array, PyTree, PyTree]:
    gradient = jax.value_and_grad(self.task.loss, has_aux=True)
    (loss, model_state), grads = gradient(params, model_state, batch, key)
    return loss, grads, model_state

  def measure(self, carry: Carry, data: Data) -> dict[str, jax.Array]:
    """The metrics of a row that come from the device."""
    params, model_state = carry.state.params, carry.model_state
    average, each = self._in_turn(self._evaluate)(params, model_state, data.test, data.worker_test)
    totals = carry.totals
    steps = jnp.maximum(totals.steps, 1).astype(jnp.float32)
    observed = totals.observed.astype(jnp.float32)
    return {
      'train_loss': totals.loss.mean() / steps,
      **{f'test_{name}': value for name, value in average.items()},
      **{f'worst_{name}': _worst(name, value) for name, value in each.items()},
      'consensus_distance': metrics.consensus_distance(params),
      'gradient_norm': totals.gradient_norm,
      'compression_error': totals.compression_error.mean() / observed,
      'clipped': totals.clipped.mean() / observed,
    }

  def _evaluate(
    self, params: PyTree, model_state: PyTree, test: _Batched, worker_test: _Batched
  ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Metrics of the mean model, and of each worker, [n]."""
    mean = metrics.mean_over_workers((params, model_state))
    each = mappings.lift(
      lambda p, s: worker_test.mean(functools.partial(self.task.evaluate, p, s)),
      self._mapping,
      self._mesh,
    )
    average = test.mean(functools.partial(self.task.evaluate, *mean))
    return average, each(params, model_state)

  def _in_turn(self, function: Callable[..., Any]) -> Callable[..., Any]:
    """Where workers are scanned, so are the runs of a sweep: `vmap` would undo the scan's gain."""
    return sequential_vmap(function) if self._mapping == 'scan' else function


def initial(task: Task, seed: int) -> tuple[PyTree, PyTree]:
  """The parameters and model state a run begins with, in NumPy.

  As such they may enter a program that runs in several processes.
  """
  return jax.device_get(jax.jit(task.init)(_keys(seed)[0]))


def step_keys(seed: Any) -> jax.Array:
  """The keys of batches, losses and the algorithm; each step folds its number in."""
  return _keys(seed)[1:]


def _keys(seed: Any) -> jax.Array:
  return jax.random.split(jax.random.key(seed), 4)


def choose_mapping(
  task: Task, start: PyTree, num_workers: int, batch_size: int, num_devices: int | None = None
) -> str:
  """The fastest mapping for the gradients of the task, whose `start` is `initial`'s."""

  def shapes(key: jax.Array) -> PyTree:
    params, model_state = jax.tree.map(lambda x: jnp.zeros((num_workers, *x.shape), x.dtype), start)
    batch = {
      name: jnp.zeros((num_workers, batch_size, *x.shape[1:]), x.dtype)
      for name, x in task.train.items()
    }
    return params, model_state, batch, jax.random.split(key, num_workers)

  gradient = jax.grad(task.loss, has_aux=True)
  examples = jax.eval_shape(shapes, jax.random.key(0))
  return mappings.choose(gradient, *examples, num_devices=num_devices)


def batched_tests(task: Task, worker_examples: int) -> tuple[_Batched, _Batched]:
  """The test examples for the mean model, and the first few of them for single workers."""
  if not len(next(iter(task.test.values()), ())):
    raise ValueError(f'task={task.name}: has no test examples, which rows of metrics need')
  some = {name: x[:worker_examples] for name, x in task.test.items()}
  return _Batched.of(task.test, size=100), _Batched.of(some, size=100)


def reset(carry: Carry) -> Carry:
  """The carry with sums over no steps, after a row."""
  return carry._replace(totals=_no_totals(len(carry.losses)))


class _Batched(NamedTuple):
  """Test examples cut into batches of one size, the last one filled up and masked."""

  examples: PyTree
  mask: Any

  @classmethod
  def of(cls, examples: Mapping[str, np.ndarray], size: int) -> _Batched:
    total = len(next(iter(examples.values())))
    size = min(size, total)
    rows = np.arange(-(-total // size) * size)
    cut = {
      name: values[np.minimum(rows, total - 1)].reshape(-1, size, *values.shape[1:])
      for name, values in examples.items()
    }
    return cls(cut, (rows < total).reshape(-1, size).astype(np.float32))

  def mean(self, evaluate: Callable[[PyTree], dict[str, jax.Array]]) -> dict[str, jax.Array]:
    """The mean of every metric over all examples, each counted once."""
    sums = jax.lax.map(
      lambda part: {k: (v * part[1]).sum() for k, v in evaluate(part[0]).items()},
      (self.examples, self.mask),
    )
    return {name: value.sum() / self.mask.sum() for name, value in sums.items()}


def _no_totals(num_workers: int) -> Totals:
  zeros = jnp.zeros(num_workers, jnp.float32)
  none = jnp.zeros((), jnp.int32)
  return Totals(none, none, zeros, zeros, zeros, jnp.float32(jnp.nan))


def below(losses: Any, limit: Any) -> Any:
  """Which losses are finite and below `limit`; NaN compares false."""
  return (losses > -np.inf) & (losses < limit)


def _place(x: Any, sharding: NamedSharding | None) -> jax.Array:
  """An array of the host on devices; each process takes what its own devices need."""
  if sharding is None:
    return jnp.asarray(x)
  return jax.make_array_from_callback(np.shape(x), sharding, lambda index: x[index])


def _of_workers(x: np.ndarray, shards: Partition, split: NamedSharding) -> jax.Array:
  """Examples [N, ...] as [n, longest, ...]; a process reads those of its own workers only."""

  def rows(index: Any) -> np.ndarray:
    return x[np.maximum(shards.indices[index[0]], 0)]

  return jax.make_array_from_callback((*shards.indices.shape, *x.shape[1:]), split, rows)


def _shardings(carry: Carry, everywhere: NamedSharding, split: NamedSharding) -> Carry:
  """Everything with a worker axis is split over the mesh; single numbers are everywhere."""
  return jax.tree.map(lambda x: split if x.ndim else everywhere, carry)


def _reported(info: Any, field: str) -> jax.Array:
  """Each worker's diagnostic; NaN where an algorithm of one's own does not report it."""
  return jnp.asarray(getattr(info, field, jnp.nan)).astype(jnp.float32)


def _worst(metric: str, values: jax.Array) -> jax.Array:
  return values.min() if metric == 'accuracy' else values.max()
