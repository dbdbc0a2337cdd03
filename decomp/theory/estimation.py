"""What is measured before a run: the task where it starts, and what messages lose."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decomp.base import Compressor, PyTree
from decomp.engine import tree
from decomp.engine.simulation import Simulation
from decomp.theory.evidence import Pilot, Problem

if TYPE_CHECKING:
  from decomp.tasks import Task
  from decomp.tasks.data.partition import Partition

Gradients = Callable[[jax.Array, PyTree], PyTree]
"""(key, everyone's params [n, ...]) -> everyone's stochastic gradients [n, ...], in jit."""

Loss = Callable[[PyTree], jax.Array]
"""One worker's params -> the loss that is to fall, in jit."""

PILOT_STEPS = 200
"""The most steps of a run that are tried. Stalling shows in a fifth of a run or not at all."""

ROWS = 20
"""How often a pilot looks at the loss."""

QUICK = {'xla_backend_optimization_level': 0}
"""Compiling is nearly all of a preflight's time on small tasks."""


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


def task_loss(task: Task, model_state: PyTree, examples: int = 1024) -> Loss:
  """The loss of one model on the first training examples.

  Args:
    task: what is trained.
    model_state: from `task.init`.
    examples: how many.
  """
  some = {name: jnp.asarray(values[:examples]) for name, values in task.train.items()}
  return lambda params: task.evaluate(params, model_state, some)['loss'].mean()


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
  linear = is_linear(optimizer)
  return Problem(smooth, curvature, math.sqrt(noise2), math.sqrt(zeta2), rate, linear)


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


def is_linear(optimizer: optax.GradientTransformation) -> bool:
  """Whether doubled gradients give doubled updates, apart from what the parameters add."""
  params = {'w': jnp.ones(3)}
  grads = jnp.array([[1.0, -2.0, 3.0], [0.5, 1.0, -4.0]])

  def updates(scale: float) -> jax.Array:
    state, last = optimizer.init(params), params
    for g in grads:
      last, state = optimizer.update({'w': scale * g}, state, params)
    return last['w']

  try:
    nothing, once, twice = (np.asarray(updates(scale)) for scale in (0.0, 1.0, 2.0))
  except Exception:  # made for parameters of another form: nothing is known of it
    return False
  return np.allclose(twice - nothing, 2 * (once - nothing), rtol=1e-4, atol=1e-8)


class Tried(NamedTuple):
  """What the first steps showed: see `Pilot`; losses are of the mean model, [ROWS]."""

  alpha2: float
  message_norm: float
  growth: float
  losses: np.ndarray


def try_out(
  sim: Simulation, params: PyTree, gradients: Gradients, key: jax.Array, steps: int, loss: Loss
) -> Tried:
  """The first steps of an algorithm.

  α² is the larger of two means, over steps 6 to 12 and over the last quarter: estimates first have
  whole models to follow, and later what compression dropped before. |z| is of steps 6 to 12.
  """
  gradient_key, key = jax.random.split(key)
  steps = ROWS * max(1, steps // ROWS)

  def run(params: PyTree) -> PyTree:
    def step(state: PyTree, t: jax.Array) -> tuple[PyTree, PyTree]:
      grads = gradients(jax.random.fold_in(gradient_key, t), state.params)
      state, info = sim.step(key, grads, state)
      nothing = jnp.full(
        sim.topology.num_workers, jnp.nan
      )  # an algorithm of one's own may say less
      fields = 'compression_error', 'message_norm'
      return state, [getattr(info, field, nothing) for field in fields]

    def row(state: PyTree, times: jax.Array) -> tuple[PyTree, PyTree]:
      state, info = jax.lax.scan(step, state, times)
      mean = jax.tree.map(lambda x: x.mean(0), state.params)
      apart = optax.tree.norm(jax.tree.map(lambda x, m: x - m[None], state.params, mean))
      return state, (info, apart, loss(mean))

    times = jnp.arange(steps).reshape(ROWS, -1)
    return jax.lax.scan(row, sim.init(params), times)[1]

  (errors, norms), apart, losses = jax.tree.map(
    np.asarray, jax.jit(run, compiler_options=QUICK)(params)
  )
  errors, norms = (values.reshape(steps, -1).mean(1) for values in (errors, norms))
  late = slice(-max(1, steps // 4), None)
  alpha2 = np.max([errors[6:12].mean(), errors[late].mean()])
  middle = slice(ROWS // 2 - 2, ROWS // 2)
  with np.errstate(all='ignore'):
    growths = [apart[-2:].mean() / apart[middle].mean()]
    growths += [norms[late].mean() / norms[steps // 2 - len(norms[late]) : steps // 2].mean()]
  known = [growth for growth in growths if not np.isnan(growth) or not np.isfinite(apart[-1])]
  growth = math.inf if not np.isfinite(apart[-1]) else max(known, default=1.0)
  return Tried(float(alpha2), float(norms[6:12].mean()), float(growth), losses)


def centralised(
  optimizer: optax.GradientTransformation,
  params: PyTree,
  num_workers: int,
  gradients: Gradients,
  key: jax.Array,
  steps: int,
  loss: Loss,
) -> tuple[float, np.ndarray]:
  """The loss at the start, and those of all-reduce's first steps, [ROWS]."""
  steps = ROWS * max(1, steps // ROWS)

  def run(params: PyTree) -> jax.Array:
    def step(carry: PyTree, t: jax.Array) -> tuple[PyTree, None]:
      params, state = carry
      everyone = jax.tree.map(lambda x: jnp.repeat(x[None], num_workers, 0), params)
      grads = gradients(jax.random.fold_in(key, t), everyone)
      mean = jax.tree.map(lambda g: g.mean(0), grads)
      updates, state = optimizer.update(mean, state, params)
      return (optax.apply_updates(params, updates), state), None

    def row(carry: PyTree, times: jax.Array) -> tuple[PyTree, jax.Array]:
      carry, _ = jax.lax.scan(step, carry, times)
      return carry, loss(carry[0])

    times = jnp.arange(steps).reshape(ROWS, -1)
    losses = jax.lax.scan(row, (params, optimizer.init(params)), times)[1]
    return jnp.concatenate([loss(params)[None], losses])

  first, *losses = np.asarray(jax.jit(run, compiler_options=QUICK)(params), np.float64)
  return float(first), np.array(losses)


def compare(tried: Tried, first: float, reference: np.ndarray, steps: int, whole: int) -> Pilot:
  """How the first steps of an algorithm compare with those of all-reduce.

  Args:
    tried: of the algorithm.
    first: the loss at the start.
    reference: all-reduce's losses, [ROWS].
    steps: how many steps were tried.
    whole: the length of the run.
  """

  def at(losses: np.ndarray, end: int) -> float:
    return float(losses[end - 3 : end].mean())

  best = at(reference, ROWS)
  fell = first - best
  progress = (first - at(tried.losses, ROWS)) / fell if fell > 0 else math.nan
  settled = at(reference, ROWS // 2) - best < 0.2 * abs(best)
  return Pilot(steps, steps / whole, tried.growth, progress, settled)


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
