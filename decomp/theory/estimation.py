"""What is measured before a run: the task where it starts, and what messages lose."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decomp.base import Compressor, PyTree
from decomp.engine import tree
from decomp.engine.simulation import Simulation
from decomp.theory.evidence import Problem

if TYPE_CHECKING:
  from decomp.tasks import Task
  from decomp.tasks.data.partition import Partition

Gradients = Callable[[jax.Array, PyTree], PyTree]
"""(key, everyone's params [n, ...]) -> everyone's stochastic gradients [n, ...], in jit."""

PROBE_STEPS = 12
"""Steps of the algorithm that are run; messages of the second half are measured, since the first
ones of CHOCO still hold whole models."""

QUICK = {'xla_backend_optimization_level': 0}
"""Compiling is nearly all of a preflight's time, and what is compiled runs for milliseconds."""


def task_gradients(
  task: Task, model_state: PyTree, shards: Partition, batch_size: int
) -> Gradients:
  """Everyone's stochastic gradients of a task, each on a batch of its own examples.

  Args:
    task: what is trained.
    model_state: from `task.init`; the same for every worker.
    shards: who has which examples.
    batch_size: examples of each worker.
  """
  from decomp.engine import mapping
  from decomp.tasks.data import batches

  workers = jnp.arange(len(shards.lengths))
  examples = {name: jnp.asarray(values) for name, values in task.train.items()}

  def one(params: PyTree, batch: PyTree, key: jax.Array) -> PyTree:
    return jax.grad(lambda p: task.loss(p, model_state, batch, key)[0])(params)

  def gradients(key: jax.Array, params: PyTree) -> PyTree:
    data_key, loss_key = jax.random.split(key)
    step = jnp.zeros((), jnp.int32)
    chosen = jax.vmap(
      lambda i: batches.sample(data_key, step, i, shards, batch_size, replacement=True)
    )(workers)
    batch = jax.tree.map(lambda x: x[chosen], examples)
    arguments = params, batch, jax.random.split(loss_key, len(workers))
    how = mapping.choose(one, *arguments, num_devices=1)
    return mapping.lift(one, how)(*arguments)

  return gradients


def estimate(
  gradients: Gradients,
  params: PyTree,
  num_workers: int,
  optimizer: optax.GradientTransformation,
  key: jax.Array,
  samples: int = 8,
) -> Problem:
  """The `Problem` where the run starts, from 2 · `samples` stochastic gradients of each worker.

  σ² and ζ² are variances within and between workers. Curvatures are finite differences of
  gradients: first in the direction of each worker's noise (where there is none, of all parameters
  alike), and then by power iteration, which approaches the largest one from below; both are means
  over the workers.
  """
  if samples < 2:
    raise ValueError(f'samples={samples}: must be at least 2, to have a variance')
  stacked = jax.tree.map(lambda x: jnp.repeat(x[None], num_workers, 0), params)

  def run(key: jax.Array) -> tuple[jax.Array, ...]:
    keys = jax.random.split(key, samples + 1)
    drawn = jax.lax.map(lambda k: gradients(k, stacked), keys[:samples])
    own = optax.tree.cast(jax.tree.map(lambda g: g.mean(0), drawn), jnp.float32)
    mean = jax.tree.map(lambda g: g.mean(0), own)
    within = optax.tree.norm(jax.tree.map(lambda g, m: g - m[None], drawn, own), squared=True)
    between = optax.tree.norm(jax.tree.map(lambda g, m: g - m[None], own, mean), squared=True)
    noise = jax.tree.map(lambda g, m: jnp.where(within > 0, g[0] - m, 1), drawn, own)
    curvatures = _curvatures(lambda p: gradients(keys[-1], p), stacked, noise, samples)
    return within, between, curvatures[0], curvatures.max(), _step_size(optimizer, params, mean)

  within, between, curvature, smooth, rate = map(float, jax.jit(run, compiler_options=QUICK)(key))
  noise2 = within / (num_workers * (samples - 1))
  # The average of a worker's samples is still off by σ²/samples.
  apart2 = between / max(1, num_workers - 1) - noise2 / samples
  zeta2 = max(0.0, apart2) * (num_workers - 1) / num_workers
  return Problem(smooth, curvature, math.sqrt(noise2), math.sqrt(zeta2), rate)


def _curvatures(
  gradient: Callable[[PyTree], PyTree], params: PyTree, direction: PyTree, iterations: int
) -> jax.Array:
  """|∇F(x + εv) - ∇F(x)| / ε by power iteration from v on, the mean over workers, [iterations]."""
  # Half of the digits for the difference, half for the gradient's own rounding.
  distance = 1e-3 * (1 + _norms(params))
  at_start = gradient(params)

  def iterate(direction: PyTree, _: None) -> tuple[PyTree, jax.Array]:
    unit = _scaled(direction, 1 / jnp.maximum(_norms(direction), 1e-30))
    moved = optax.tree.add(params, _scaled(unit, distance))
    difference = _scaled(optax.tree.sub(gradient(moved), at_start), 1 / distance)
    return difference, _norms(difference).mean()

  return jax.lax.scan(iterate, direction, length=iterations)[1]


def _step_size(optimizer: optax.GradientTransformation, params: PyTree, grads: PyTree) -> jax.Array:
  """|u| / |g| after 50 updates with one gradient, by when momentum has come to its full length."""
  size = tree.norm(grads)
  grads = jax.tree.map(lambda g: jnp.where(size > 0, g, 1), optax.tree.cast_like(grads, params))

  def update(state: PyTree, _: None) -> tuple[PyTree, jax.Array]:
    updates, state = optimizer.update(grads, state, params)
    return state, tree.norm(updates)

  lengths = jax.lax.scan(update, optimizer.init(params), length=50)[1]
  return lengths[-1] / tree.norm(grads)


def probe(
  sim: Simulation, params: PyTree, gradients: Gradients, key: jax.Array
) -> tuple[float, float]:
  """α² and |z| of the first steps' messages: means over workers and the later ones of the steps."""
  gradient_key, key = jax.random.split(key)

  def run(params: PyTree) -> PyTree:
    def step(state: PyTree, t: jax.Array) -> tuple[PyTree, PyTree]:
      grads = gradients(jax.random.fold_in(gradient_key, t), state.params)
      return sim.step(key, grads, state)

    return jax.lax.scan(step, sim.init(params), jnp.arange(PROBE_STEPS))[1]

  info = jax.jit(run, compiler_options=QUICK)(params)

  def later(field: str) -> float:
    values = np.asarray(getattr(info, field, math.nan))[PROBE_STEPS // 2 :]
    return float(values.mean())

  return later('compression_error'), later('message_norm')


def gaussian_alpha2(compressor: Compressor, params: PyTree, key: jax.Array) -> float:
  """α² on Gaussian numbers, in the size of leaf that holds the most parameters."""
  sizes = [leaf.size for leaf in jax.tree.leaves(params)]
  size = max(sizes, key=lambda size: size * sizes.count(size))

  def draw(key: jax.Array) -> jax.Array:
    input_key, key = jax.random.split(key)
    x = jax.random.normal(input_key, (size,))
    return tree.compress(compressor, key, x).info.compression_error

  # Inputs are drawn anew as well: what scales with a maximum varies from one to the next.
  keys = jax.random.split(key, 8)
  return float(jax.jit(jax.vmap(draw), compiler_options=QUICK)(keys).mean())


def _norms(stacked: PyTree) -> jax.Array:
  """Each worker's norm, [n]."""
  return jax.vmap(tree.norm)(stacked)


def _scaled(stacked: PyTree, scales: jax.Array) -> PyTree:
  """Each worker's tree times its own number."""
  return jax.vmap(lambda one, scale: optax.tree.scale(scale, one))(stacked, scales)
