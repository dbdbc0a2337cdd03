"""One run's arithmetic: a step of all workers, and the metrics of a row.

The carry of a step notes what a row of metrics needs, and the very step where a worker's loss or
gradient is no longer finite, or the loss explodes. Everything random is a function of (seed, step,
worker), so the carry is all a checkpoint holds.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap
from jax.sharding import Mesh

from decomp.base import PyTree
from decomp.engine import mapping as mappings
from decomp.engine.cpu.keys import fold_in
from decomp.engine.simulation import Simulation, State, simulate
from decomp.tasks import Task
from decomp.tasks.data import batches
from decomp.tasks.data.partition import Partition
from decomp.training import metrics
from decomp.training.evaluation import Batched

OBSERVED = 8
"""Diagnostics of messages take time: every so many steps are enough."""
CHECKED = 4096
"""Gradients are checked in leaves of up to so many elements, or in the smallest: see `finite`."""


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
    losses: each worker's last loss, or that of the step where it failed, [n].
    failed: the step in which its loss or gradient was bad, from 1, [n]; 0 as long as all is well.
  """

  state: State
  model_state: PyTree
  totals: Totals
  losses: jax.Array
  failed: jax.Array


class Data(NamedTuple):
  """What the compiled functions read; arguments, since constants would be compiled in.

  Attributes:
    train: all examples, [N, ...]; or each worker's own ones, [n, longest, ...].
    test: for the mean model.
    worker_test: for single workers.
    validation: for the mean model; None where the task has none.
  """

  train: PyTree
  test: Batched
  worker_test: Batched
  validation: Batched | None = None


class Sampling(NamedTuple):
  """How a worker draws its batches: see `decomp.data.batches.sample`."""

  shards: Partition
  batch_size: int
  reshuffle: bool = False
  replacement: bool = False


class Steps:
  """One run's arithmetic, as pure functions of arrays: `start`, `step` and `measure`.

  Nothing here asks for the value of the algorithm's numbers, of the seed or shards, so that `vmap`
  can make many runs of it, see `decomp.training.program`. With `own_examples` the training data
  are each worker's own, [n, longest, ...].
  """

  def __init__(
    self,
    task: Task,
    sim: Simulation,
    sampling: Sampling,
    seed: Any,
    mapping: str,
    mesh: Mesh | None = None,
    own_examples: bool = False,
  ):
    self.task, self.sim, self.sampling, self._seed = task, sim, sampling, seed
    self._mapping, self._mesh, self._own_examples = mapping, mesh, own_examples
    # Left to itself, the compiler would give every device the messages of all workers.
    self._exchange = simulate(sim.algorithm, sim.topology, mesh) if mesh else sim
    self._num_workers = sim.topology.num_workers
    self.gradients = self._in_turn(mappings.lift(self._worker_gradient, mapping, mesh))

  def start(self, params: PyTree, model_state: PyTree) -> Carry:
    """The carry before the first step."""
    n = self._num_workers
    model_state = jax.tree.map(lambda x: jnp.repeat(x[None], n, 0), model_state)
    state = self._exchange.init(params)
    nothing = jnp.zeros(n, jnp.float32), jnp.zeros(n, jnp.int32)
    return Carry(state, model_state, _no_totals(n), *nothing)

  def follow(self, carry: Carry) -> Carry:
    """A carry that was made on other devices, as these need it."""
    return carry._replace(state=self._exchange.follow(carry.state))

  def keys(self) -> jax.Array:
    """The keys of batches, losses and the algorithm; each step folds its number in."""
    return _keys(self._seed)[1:]

  def step(
    self, keys: jax.Array, row_at: jax.Array, limit: jax.Array, train: PyTree, carry: Carry
  ) -> Carry:
    """One step of all workers, its losses compared with `limit`; `keys` are `self.keys()`."""
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
    # Unless the optimizer leaves out what is not finite, as optax.apply_if_finite does.
    spoilt = ~finite(grads) & ~finite(state.params)
    bad = well & (spoilt | ~below(losses, limit))
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
    if self._own_examples:
      places = np.broadcast_to(np.arange(shards.indices.shape[1]), shards.indices.shape)
      shards = shards._replace(indices=places)
    return batches.sample(
      key, step, worker, shards, batch_size, reshuffle=reshuffle, replacement=replacement
    )

  def pick(self, train: PyTree, chosen: jax.Array) -> PyTree:
    """The examples at these positions."""
    if not self._own_examples:
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
    tests = data.test, data.worker_test, data.validation
    average, each, held = self._in_turn(self._evaluate)(params, model_state, *tests)
    totals = carry.totals
    steps = jnp.maximum(totals.steps, 1).astype(jnp.float32)
    observed = totals.observed.astype(jnp.float32)
    return {
      'train_loss': totals.loss.mean() / steps,
      **{f'test_{name}': value for name, value in average.items()},
      **{f'validation_{name}': value for name, value in held.items()},
      **{f'worst_{k}': v.min() if k == 'accuracy' else v.max() for k, v in each.items()},
      'consensus_distance': metrics.consensus_distance(params),
      'gradient_norm': totals.gradient_norm,
      'compression_error': totals.compression_error.mean() / observed,
      'clipped': totals.clipped.mean() / observed,
    }

  def _evaluate(
    self,
    params: PyTree,
    model_state: PyTree,
    test: Batched,
    worker_test: Batched,
    validation: Batched | None,
  ) -> tuple[dict[str, jax.Array], dict[str, jax.Array], dict[str, jax.Array]]:
    """Metrics of the mean model, of each worker, [n], and of the mean model on validation."""
    mean = metrics.mean_over_workers((params, model_state))
    each = mappings.lift(
      lambda p, s: worker_test.mean(functools.partial(self.task.evaluate, p, s)),
      self._mapping,
      self._mesh,
    )
    average = test.mean(functools.partial(self.task.evaluate, *mean))
    held = {} if validation is None else validation.mean(functools.partial(self._validate, *mean))
    return average, each(params, model_state), held

  def _validate(self, params: PyTree, model_state: PyTree, batch: PyTree) -> dict[str, jax.Array]:
    """Loss and accuracy: a suboptimality, say, is one on its own examples only."""
    found = self.task.evaluate(params, model_state, batch)
    if 'loss' not in found:
      raise ValueError(f"task: evaluate gives {sorted(found)}: must give 'loss' for validation")
    return {name: found[name] for name in ('loss', 'accuracy') if name in found}

  def _in_turn(self, function: Callable[..., Any]) -> Callable[..., Any]:
    """Where workers are scanned, so are the runs of a sweep: `vmap` would undo the scan's gain."""
    return function if self._mapping == 'vmap' else sequential_vmap(function)


def initial(task: Task, seed: int) -> tuple[PyTree, PyTree]:
  """The parameters and model state a run begins with, in NumPy.

  As such they may enter a program that runs in several processes.
  """
  return jax.device_get(jax.jit(task.init)(_keys(seed)[0]))


def _keys(seed: Any) -> jax.Array:
  return jax.random.split(jax.random.key(seed), 4)


def choose_mapping(
  task: Task, start: PyTree, num_workers: int, batch_size: int, mapping: str, mesh: Mesh | None
) -> tuple[str, Mesh | None]:
  """How gradients are computed, the fastest way if `mapping` is 'auto', and on which devices."""
  if mapping == 'auto':
    params, model_state = jax.eval_shape(lambda x: x, start)
    batch = {
      name: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype)
      for name, x in task.train.items()
    }
    one = params, model_state, batch, jax.eval_shape(lambda: jax.random.key(0))
    everyone = jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_workers, *x.shape), x.dtype), one)
    platform = mesh.devices.flat[0].platform if mesh else None
    mapping = mappings.choose(jax.grad(task.loss, has_aux=True), *everyone, platform=platform)
  elif mapping == 'devices' and not mesh and num_workers % jax.local_device_count():
    raise ValueError(
      f"mapping='devices': {num_workers} workers cannot be split over {jax.local_device_count()} "
      "devices evenly; use 'scan' or 'auto'"
    )
  return mapping, mesh or (mappings.local_mesh() if mapping == 'devices' else None)


def reset(carry: Carry) -> Carry:
  """The carry with sums over no steps, after a row."""
  return carry._replace(totals=_no_totals(len(carry.losses)))


def _no_totals(num_workers: int) -> Totals:
  zeros = jnp.zeros(num_workers, jnp.float32)
  none = jnp.zeros((), jnp.int32)
  return Totals(none, none, zeros, zeros, zeros, jnp.float32(jnp.nan))


def below(losses: Any, limit: Any) -> Any:
  """Which losses are finite and below `limit`; NaN compares false."""
  return (losses > -np.inf) & (losses < limit)


def finite(tree: PyTree) -> jax.Array:
  """Whose leaves [n, ...] are finite, [n], as far as one looks.

  That is at leaves of up to `CHECKED` elements a worker, or at the smallest if there are none. To
  look at all takes 1.4 to 1.6 times as long a step of 64 MLPs (784-256-10), and this no time that
  could be measured, there or with ResNet-8. What is not finite in a network's gradients comes by
  way of activations, whose gradients add up to those of biases. What reaches large leaves only is
  found a step later, by the loss.
  """
  leaves = jax.tree.leaves(tree)
  n = len(leaves[0])
  most = max(CHECKED, min(leaf.size // n for leaf in leaves))
  small = [leaf.reshape(n, -1) for leaf in leaves if leaf.size // n <= most]
  return functools.reduce(jnp.logical_and, [jnp.isfinite(leaf).all(1) for leaf in small])


def _reported(info: Any, field: str) -> jax.Array:
  """Each worker's diagnostic; NaN where an algorithm of one's own does not report it."""
  return jnp.asarray(getattr(info, field, jnp.nan)).astype(jnp.float32)
