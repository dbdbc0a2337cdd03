"""Whether a run can converge, before it is started.

`preflight` runs a few steps of an algorithm, measures what its compressor does to the messages it
really sends, and asks the algorithm's own `Theory` what that means on the topology. It warns and
never refuses: a verdict is an expectation, with the number that decides and what to change.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decomp import tree
from decomp.base import Algorithm, Compressor, Evidence, Finding, Problem, PyTree, Verdict
from decomp.simulate import Simulation, simulate
from decomp.topology import Topology

if TYPE_CHECKING:
  from decomp.data.partition import Partition
  from decomp.tasks import Task

__all__ = ['Preflight', 'estimate', 'preflight', 'step_sizes', 'task_gradients']

Gradients = Callable[[jax.Array, PyTree], PyTree]
"""(key, everyone's params [n, ...]) -> everyone's stochastic gradients [n, ...], in jit."""

PROBE_STEPS = 12
"""Steps of the algorithm that are run; messages of the second half are measured, since the first
ones of CHOCO still hold whole models."""

QUICK = {'xla_backend_optimization_level': 0}
"""Compiling is nearly all of a preflight's time, and what is compiled runs for milliseconds."""


@dataclasses.dataclass(frozen=True)
class Preflight:
  """What to expect of a run; `str()` says it in a paragraph.

  Attributes:
    algorithm: its name, with the compressor.
    topology: its name.
    verdict: see `decomp.base.Verdict`.
    reason: why, with the number that decides.
    advice: what to change; empty if nothing needs to be.
    numbers: rho, mu, spectral gap, alpha² by formula and as measured, and the algorithm's own.
    problem: what was measured of the task; None if only shapes are known.
    step_sizes: by the paper's corollaries, if the task is known; see `step_sizes`.
  """

  algorithm: str
  topology: str
  verdict: Verdict
  reason: str
  advice: str
  numbers: Mapping[str, float]
  problem: Problem | None
  step_sizes: Mapping[str, float]

  @property
  def is_good(self) -> bool:
    """Whether there is nothing to warn of."""
    return self.verdict in ('converges', 'likely')

  @property
  def headline(self) -> str:
    """The verdict in one line."""
    advice = f'; {self.advice}' if self.advice else ''
    return f'{self.algorithm} on {self.topology}: {self.verdict}: {self.reason}{advice}'

  def __str__(self) -> str:
    numbers = ', '.join(f'{name} {value:.3g}' for name, value in self.numbers.items())
    lines = [f'{self.headline}.', f'  {numbers}.']
    if self.problem:
      task = ', '.join(f'{k.replace("_", " ")} {v:.3g}' for k, v in self.problem._asdict().items())
      lines.append(f'  The task, where it starts: {task}.')
    if self.step_sizes:
      sizes = ', '.join(f'{value:.2g} ({name})' for name, value in self.step_sizes.items())
      lines.append(f'  Step sizes of the theory, safe rather than fast: {sizes}.')
    return '\n'.join(lines)


def preflight(
  algorithm: Algorithm,
  topology: Topology,
  params: PyTree,
  gradients: Gradients | None = None,
  problem: Problem | None = None,
  *,
  steps: int = 1000,
  seed: int = 0,
) -> Preflight:
  """What to expect of `steps` steps of an algorithm, from its first few.

  Args:
    algorithm: with its optimizer and compressor inside.
    topology: who talks to whom.
    params: one worker's parameters, where the run starts; without gradients shapes are enough.
    gradients: everyone's stochastic gradients, such as `task_gradients(...)`. None: nothing is run,
      and the compressor is measured on Gaussian numbers in the leaf size that most of `params` has.
      That is quick and knows nothing of the task.
    problem: what is known of the task, from `estimate`; None to estimate it from the gradients.
    steps: the length of the run that is asked about.
    seed: of the few steps.

  Returns:
    A `Preflight`.

  Raises:
    ValueError: the algorithm cannot run on the topology at all.

  >>> from decomp import algorithms, compressors, topology
  >>> algorithm = algorithms.dcd_psgd(optax.sgd(0.1), compressors.random_k(0.1))
  >>> found = preflight(algorithm, topology.ring(8), jnp.zeros(500))
  >>> found.verdict, round(found.numbers['limit of alpha²'], 2)
  ('will diverge', 1.37)
  """
  evidence = _gather(algorithm, topology, params, gradients, problem, steps, jax.random.key(seed))
  theory, problem = algorithm.theory, evidence.problem
  if algorithm.needs.connected and topology.num_workers > 1 and topology.spectral_gap < 1e-9:
    found = Finding('will stall', 'the spectral gap is 0: workers never agree', 'weigh oneself too')
  elif theory is None:
    reason = f'{algorithm.name} does not say when it converges'
    found = Finding('at risk', reason, 'give it a theory=decomp.base.Theory(...)')
  else:
    found = theory.judge(evidence)
  numbers = {'rho': topology.rho, 'mu': topology.mu, 'spectral gap': topology.spectral_gap}
  if theory and theory.compressor:
    numbers |= _alpha2(theory.compressor, params, evidence.alpha2)
  return Preflight(
    algorithm.name,
    topology.name,
    found.verdict,
    found.reason,
    found.advice,
    numbers | dict(found.numbers),
    problem,
    step_sizes(problem, topology, evidence.alpha2, steps) if problem else {},
  )


def _gather(
  algorithm: Algorithm,
  topology: Topology,
  params: PyTree,
  gradients: Gradients | None,
  problem: Problem | None,
  steps: int,
  key: jax.Array,
) -> Evidence:
  """All that is measured."""
  theory = algorithm.theory
  compressor = theory.compressor if theory else None
  alpha2, message_norm = 0.0, math.nan
  sim = simulate(algorithm, topology)  # which refuses a topology that a run would refuse
  if compressor and gradients:
    alpha2, message_norm = _probe(sim, params, gradients, key)
  elif compressor:
    alpha2 = _gaussian_alpha2(compressor, params, key)
  if theory and gradients and problem is None:
    problem = estimate(gradients, params, topology.num_workers, theory.optimizer, key)
  size = sum(leaf.size for leaf in jax.tree.leaves(params))
  return Evidence(topology, steps, alpha2, message_norm, size, problem)


def step_sizes(problem: Problem, topology: Topology, alpha2: float, steps: int) -> dict[str, float]:
  """Constant step sizes by corollaries 2 (DCD) and 4 (ECD) of Tang et al.

    DCD: 1 / (6 sqrt(D1) L + 6 sqrt(D2 L) + σ sqrt(T/n) + ζ^(2/3) T^(1/3))
    ECD: 1 / (12 L/(1-ρ) + σ sqrt(T/n) + ζ^(2/3) T^(1/3))

  with D2 = 2α² (2μ²(1 + 2α²)/((1-ρ)² - 4μ²α²) + 1) and D1 = D2/(1-ρ²) + 1/(1-ρ)². They make a bound
  small and are far below what works best. DCD's is left out where its condition
  α < (1-ρ)/(2μ) fails.

  >>> from decomp import topology
  >>> problem = Problem(smoothness=1.0, curvature=0.5, noise=1.0, heterogeneity=0.0, step_size=0.1)
  >>> sizes = step_sizes(problem, topology.complete(4), alpha2=0.0, steps=400)
  >>> {name: round(value, 4) for name, value in sizes.items()}
  {'DCD, corollary 2': 0.0625, 'ECD, corollary 4': 0.0455}
  """
  smooth, gap = problem.smoothness, topology.spectral_gap
  variance = problem.noise * math.sqrt(steps / topology.num_workers)
  shared = variance + problem.heterogeneity ** (2 / 3) * steps ** (1 / 3)
  room = gap**2 - 4 * topology.mu**2 * alpha2
  bounds = {}
  if room > 0:
    d2 = 2 * alpha2 * (2 * topology.mu**2 * (1 + 2 * alpha2) / room + 1)
    d1 = d2 / (1 - topology.rho**2) + 1 / gap**2
    slow = 6 * math.sqrt(d1) * smooth + 6 * math.sqrt(d2 * smooth)
    bounds['DCD, corollary 2'] = slow + shared
  if gap > 0:
    bounds['ECD, corollary 4'] = 12 * smooth / gap + shared
  return {name: 1 / bound if bound else math.inf for name, bound in bounds.items()}


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
  from decomp import mapping
  from decomp.data import batches

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


def _probe(
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


def _gaussian_alpha2(compressor: Compressor, params: PyTree, key: jax.Array) -> float:
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


def _alpha2(compressor: Compressor, params: PyTree, measured: float) -> dict[str, float]:
  """α² by the compressor's formula for the worst input, and as measured."""
  found = {'measured alpha²': measured}
  sizes = [leaf.size for leaf in jax.tree.leaves(params)]
  if compressor.alpha2:
    found['worst alpha²'] = max(compressor.alpha2(size) for size in sizes)
  elif compressor.delta:
    found['worst alpha²'] = 1 - min(compressor.delta(size) for size in sizes)
  return found


def _norms(stacked: PyTree) -> jax.Array:
  """Each worker's norm, [n]."""
  return jax.vmap(tree.norm)(stacked)


def _scaled(stacked: PyTree, scales: jax.Array) -> PyTree:
  """Each worker's tree times its own number."""
  return jax.vmap(lambda one, scale: optax.tree.scale(scale, one))(stacked, scales)
