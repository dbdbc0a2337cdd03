"""The runs of the study: two problems, and one program for all quantizers."""

import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import decomp
from decomp import algorithms, data, metrics, tasks, topology, tree
from decomp.base import Compressor, PyTree
from decomp.compressors.common import safe_divide
from decomp.compressors.rounding import stochastic_round
from decomp.tasks.data import batches

BATCH_SIZE = 16
BOTH = 'momentum, weight decay'
BUCKET = 64
CURVATURES = 16

NORM, MAXIMUM, BUCKETS, FIXED = range(4)
"""What a grid is scaled by."""


class Grid(NamedTuple):
  """A quantizer's numbers; they are traced, so that one program serves all quantizers."""

  kind: int | jax.Array
  levels: float | jax.Array
  limit: float | jax.Array = math.inf


def quantizer(grid: Grid) -> Compressor:
  """compressors.qsgd, stochastic_quantizer or fixed_grid with dither='hash' and any levels."""

  def encode(key: jax.Array, x: jax.Array) -> jax.Array:
    flat = x.reshape(-1)
    buckets = jnp.abs(jnp.pad(flat, (0, -flat.size % BUCKET)).reshape(-1, BUCKET)).max(1)
    scales = jnp.stack([jnp.linalg.norm(flat), buckets.max(), 0.0, grid.limit])
    own = jnp.repeat(buckets, BUCKET)[: flat.size]
    cell = jnp.where(grid.kind == BUCKETS, own, scales[grid.kind]) / grid.levels
    points = jnp.clip(safe_divide(flat, cell), -grid.levels, grid.levels)
    rounded = stochastic_round(key, points, 'hash', fraction=15)  # room for the levels of 16 bits
    return (rounded * cell).reshape(x.shape)

  return Compressor(encode, lambda payload, like: payload, unbiased=True)


class Lab(Protocol):
  """A problem for the workers of a ring."""

  name: str
  rate: float
  graph: decomp.Topology

  def start(self, key: jax.Array) -> PyTree:
    """One worker's parameters, where all begin."""

  def gradients(self, key: jax.Array, t: jax.Array, params: PyTree) -> tuple[jax.Array, PyTree]:
    """Everyone's losses [n] and stochastic gradients [n, ...] in step t."""

  def losses(self, params: PyTree) -> jax.Array:
    """The loss of one model, above the least where that is known, in parts [H]."""

  def accuracy(self, params: PyTree) -> jax.Array:
    """On the test examples, of one model."""


class Quadratics:
  """Diagonal quadratics, the same curvatures and another center for each worker."""

  name = 'quadratic'
  rate = 0.1
  noise = 0.05

  def __init__(self, num_workers: int, dimension: int, seed: int):
    self.graph = topology.ring(num_workers)
    self.curvatures = np.geomspace(0.1, 1, CURVATURES).astype(np.float32)
    rng = np.random.default_rng(seed)
    shape = (num_workers, CURVATURES, dimension // CURVATURES)
    apart = rng.standard_normal(shape)
    apart -= apart.mean(0)
    apart /= np.sqrt(np.mean(apart**2))
    self.optimum = rng.standard_normal(shape[1:]).astype(np.float32)
    self.centers = (self.optimum + apart).astype(np.float32)

  def start(self, key: jax.Array) -> PyTree:
    """Zeros."""
    return jnp.zeros(self.optimum.shape)

  def gradients(self, key: jax.Array, t: jax.Array, params: PyTree) -> tuple[jax.Array, PyTree]:
    """h (x - b_i) and noise; the losses are those of f, not of f_i."""
    noise = self.noise * jax.random.normal(jax.random.fold_in(key, t), params.shape)
    losses = jax.vmap(self.losses)(params).sum(1)
    return losses, self.curvatures[None, :, None] * (params - self.centers) + noise

  def losses(self, params: PyTree) -> jax.Array:
    """f(x) - f*, by curvature."""
    return self.curvatures / 2 * ((params - self.optimum) ** 2).sum(1)

  def accuracy(self, params: PyTree) -> jax.Array:
    """There is none."""
    return jnp.array(jnp.nan)


class Digits:
  """The perceptron of the demo."""

  name = 'digits'
  rate = 0.2

  def __init__(self, num_workers: int, seed: int):
    self.graph = topology.ring(num_workers)
    self._task = tasks.digits()
    self._shards = data.partition.iid(self._task.train['label'], num_workers, seed)
    self._train, self._test = jax.tree.map(jnp.asarray, (self._task.train, self._task.test))

  def start(self, key: jax.Array) -> PyTree:
    """Drawn from the key."""
    return self._task.init(key)[0]

  def gradients(self, key: jax.Array, t: jax.Array, params: PyTree) -> tuple[jax.Array, PyTree]:
    """Of a batch for each worker."""

    def one(worker: jax.Array, params: PyTree) -> tuple[jax.Array, PyTree]:
      chosen = batches.sample(key, t, worker, self._shards, BATCH_SIZE)
      batch = jax.tree.map(lambda values: values[chosen], self._train)
      return jax.value_and_grad(lambda p: self._task.loss(p, {}, batch, key)[0])(params)

    return jax.vmap(one)(jnp.arange(self.graph.num_workers), params)

  def losses(self, params: PyTree) -> jax.Array:
    """The mean over all training examples."""
    return self._task.evaluate(params, {}, self._train)['loss'].mean()[None]

  def accuracy(self, params: PyTree) -> jax.Array:
    """On the test examples."""
    return self._task.evaluate(params, {}, self._test)['accuracy'].mean()


class Step(NamedTuple):
  """What is measured in every step; means over workers and elements.

  Attributes:
    message2: |z|².
    noise2: |C(z) - z|².
    clipped: the fraction of z beyond the limit.
    error2: |x̃ - x|², of ECD's estimates.
    largest: the largest elements of x' - x and of x + (t/2)(x' - x), without compression what DCD
      and ECD would send.
    worker: the loss of workers' own models, on their batches if there are any.
  """

  message2: Any
  noise2: Any
  clipped: Any
  error2: Any
  largest: Any
  worker: Any


class Track(NamedTuple):
  """A run, or its part up to a hopeless loss; seeds first.

  Attributes:
    losses: of the average model, in parts, [seeds, looks, H].
    steps: each [seeds, steps, ...].
    average: the average model at the end.
  """

  losses: np.ndarray
  steps: Step
  average: PyTree


class Runner:
  """The compiled program of one algorithm on one problem, for all quantizers and some seeds.

  Seeds are split over as many devices as can share them evenly.

  Args:
    lab: the problem.
    name: of the algorithm.
    optimizer: each worker's.
    steps: the length of a run.
    every: steps between two looks at the loss of the average model.
    keys: one for each seed, [seeds].
    starts: where all workers begin, leaves [seeds, ...].
  """

  def __init__(
    self,
    lab: Lab,
    name: str,
    optimizer: optax.GradientTransformation,
    steps: int,
    every: int,
    keys: jax.Array,
    starts: PyTree,
  ):
    self._lab, self._name, self._optimizer = lab, name, optimizer
    self._steps, self._every, self._keys, self._starts = steps, every, keys, starts
    self._init = jax.jit(jax.vmap(self._simulation(Grid(NORM, 1.0)).init))
    self._average = jax.jit(jax.vmap(_average))
    sharing = max(k for k in range(1, jax.device_count() + 1) if len(keys) % k == 0)
    self._advance = jax.jit(
      jax.shard_map(
        jax.vmap(self._chunk, in_axes=(0, 0, None, None)),
        mesh=Mesh(np.array(jax.devices()[:sharing]), 'seed'),
        in_specs=(P('seed'), P('seed'), P(), P()),
        out_specs=P('seed'),
        check_vma=False,
      )
    )

  def run(self, grid: Grid, hopeless: float = math.inf) -> Track:
    """All steps, unless before every seed has a loss above what is hopeless."""
    state = self._init(self._starts)
    numbers = Grid(jnp.int32(grid.kind), jnp.float32(grid.levels), jnp.float32(grid.limit))
    found = []
    for first in range(0, self._steps, self._every):
      state, measured = self._advance(state, self._keys, numbers, jnp.int32(first))
      found.append(jax.device_get(measured))
      if not (found[-1][0].sum(-1) < hopeless).any():
        break
    losses = np.stack([losses for losses, _ in found], 1)
    steps = jax.tree.map(lambda *parts: np.concatenate(parts, 1), *(steps for _, steps in found))
    return Track(losses, steps, self._average(state))

  def _simulation(self, grid: Grid) -> decomp.Simulation:
    if self._name == 'd_psgd':
      algorithm = algorithms.d_psgd(self._optimizer)
    else:
      algorithm = getattr(algorithms, self._name)(self._optimizer, quantizer(grid))
    return decomp.simulate(algorithm, self._lab.graph)

  def _chunk(
    self, state: decomp.State, key: jax.Array, grid: Grid, first: jax.Array
  ) -> tuple[decomp.State, tuple[jax.Array, Step]]:
    sim = self._simulation(grid)
    step_key, data_key = jax.random.split(key)

    def step(state: decomp.State, t: jax.Array) -> tuple[decomp.State, Step]:
      losses, grads = self._lab.gradients(data_key, t, state.params)
      after, info = sim.step(step_key, grads, state)
      change = optax.tree.sub(after.params, state.params)
      extrapolated = tree.add_scaled(state.params, after.round.astype(float) / 2, change)
      message, error2 = extrapolated, jnp.zeros(())
      if self._name == 'dcd_psgd':
        workers = state.workers
        updates, _ = jax.vmap(self._optimizer.update)(grads, workers.opt_state, workers.params)
        message = optax.tree.sub(
          optax.tree.add(self._mixed(workers.params), updates), workers.params
        )
      if self._name == 'ecd_psgd':
        off = optax.tree.sub(after.workers.estimate.value, after.params)
        error2 = optax.tree.norm(off, squared=True) / optax.tree.size(off)
      beyond = jax.tree.map(lambda leaf: (jnp.abs(leaf) > grid.limit).sum(), message)
      message2 = info.message_norm**2 / (optax.tree.size(message) // self._lab.graph.num_workers)
      return after, Step(
        message2.mean(),
        (info.compression_error * message2).mean(),
        optax.tree.sum(beyond) / optax.tree.size(message),
        error2,
        jnp.stack([optax.tree.norm(x, ord='inf') for x in (change, extrapolated)]),
        losses.mean(),
      )

    state, steps = jax.lax.scan(step, state, first + jnp.arange(self._every))
    return state, (self._lab.losses(_average(state)), steps)

  def _mixed(self, params: PyTree) -> PyTree:
    """sum_j W_ij x_j."""
    matrix = jnp.asarray(self._lab.graph.matrix, jnp.float32)
    return jax.tree.map(lambda x: jnp.einsum('ij,j...->i...', matrix, x), params)


def _average(state: decomp.State) -> PyTree:
  return metrics.mean_over_workers(state.params)
