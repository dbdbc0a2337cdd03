"""Whether a run can converge, before it is started.

`preflight` runs a few steps of an algorithm, measures what its compressor does to the messages it
really sends, and asks the algorithm's own `Theory` what that means on the topology. It warns and
never refuses: a verdict is an expectation, with the number that decides and what to change.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from decomp.base import Algorithm, Compressor, PyTree
from decomp.engine.simulation import simulate
from decomp.theory.estimation import (
  PILOT_STEPS,
  ROWS,
  Gradients,
  Loss,
  centralised,
  compare,
  estimate,
  gaussian_alpha2,
  is_linear,
  try_out,
)
from decomp.theory.evidence import Evidence, Finding, Pilot, Problem, Verdict
from decomp.topology import Topology


@dataclasses.dataclass(frozen=True)
class Preflight:
  """What to expect of a run; `str()` says it in a paragraph.

  Attributes:
    algorithm: its name, with the compressor.
    topology: its name.
    verdict: see `decomp.theory.Verdict`.
    reason: why, with the number that decides.
    advice: what to change, or could be; empty if there is nothing.
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
  loss: Loss | None = None,
  steps: int = 1000,
  pilot: int | None = None,
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
    loss: what is to fall, such as `task_loss(...)`. With it the first steps are compared with those
      of all-reduce, which shows what no theory covers.
    steps: the length of the run that is asked about.
    pilot: how many steps are tried, if there are gradients; by default a fifth of the run and at
      most 200.
    seed: of the few steps.

  Returns:
    A `Preflight`.

  Raises:
    ValueError: the algorithm cannot run on the topology at all.

  >>> import jax.numpy as jnp, optax
  >>> from decomp import algorithms, compressors, topology
  >>> algorithm = algorithms.dcd_psgd(optax.sgd(0.1), compressors.random_k(0.1))
  >>> found = preflight(algorithm, topology.ring(8), jnp.zeros(500))
  >>> found.verdict, round(found.numbers['limit of alpha²'], 2)
  ('will diverge', 1.37)
  """
  count = max(20, min(PILOT_STEPS, steps // 5)) if pilot is None else pilot
  evidence, tried = _gather(
    algorithm, topology, params, gradients, problem, steps, count, loss, jax.random.key(seed)
  )
  theory, problem = algorithm.theory, evidence.problem
  if algorithm.needs.connected and topology.num_workers > 1 and topology.spectral_gap < 1e-9:
    found = Finding('will stall', 'the spectral gap is 0: workers never agree', 'weigh oneself too')
  elif theory is None:
    reason = f'{algorithm.name} does not say when it converges'
    found = Finding('unknown', reason, 'give it a theory=decomp.theory.Theory(...)')
  else:
    found = _covered(theory.judge(evidence), algorithm, evidence)
  if tried:
    found = _seen(found, tried)
  numbers = {'rho': topology.rho, 'mu': topology.mu, 'spectral gap': topology.spectral_gap}
  if theory and theory.compressor:
    numbers |= _alpha2(theory.compressor, params, evidence.alpha2)
  return Preflight(
    algorithm.name,
    topology.name,
    found.verdict,
    found.reason,
    found.advice or found.tip,
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
  pilot: int,
  loss: Loss | None,
  key: jax.Array,
) -> tuple[Evidence, Pilot | None]:
  """All that is measured."""
  theory, n = algorithm.theory, topology.num_workers
  compressor = theory.compressor if theory else None
  alpha2, message_norm, seen = 0.0, math.nan, None
  sim = simulate(algorithm, topology)  # which refuses a topology that a run would refuse
  if gradients:
    tried = try_out(sim, params, gradients, key, pilot, loss or (lambda _: jnp.full((), jnp.nan)))
    first, reference = math.nan, np.full(ROWS, math.nan)
    if loss and theory:
      optimizer = theory.optimizer
      first, reference = centralised(optimizer, params, n, gradients, key, pilot, loss)
    seen = compare(tried, first, reference, pilot, steps)
    if compressor:
      alpha2, message_norm = tried.alpha2, tried.message_norm
  elif compressor:
    alpha2 = gaussian_alpha2(compressor, params, key)
  if theory and gradients and problem is None:
    problem = estimate(gradients, params, n, theory.optimizer, key)
  size = sum(leaf.size for leaf in jax.tree.leaves(params))
  return Evidence(topology, steps, alpha2, message_norm, size, problem), seen


def _covered(found: Finding, algorithm: Algorithm, evidence: Evidence) -> Finding:
  """'likely' instead of 'converges' for what the theorems are not about, or may not be.

  They need updates that are linear in the gradients, and, with a constant step size on a graph,
  workers whose gradients differ by no more than their noise: of that shapes tell nothing.
  """
  theory, problem = algorithm.theory, evidence.problem
  if found.verdict != 'converges' or theory is None:
    return found
  among_others = evidence.topology.num_workers > 1
  if not (is_linear(theory.optimizer) if problem is None else problem.linear):
    why = 'no theorem covers an optimizer that is not linear in the gradient'
  elif problem is None and among_others and (algorithm.needs.connected or evidence.alpha2 > 0):
    why = 'shapes do not tell how much workers differ'
  elif problem and algorithm.needs.connected and problem.heterogeneity > problem.noise:
    why = f'workers differ: ζ = {problem.heterogeneity:.2g} beside σ = {problem.noise:.2g}'
  else:
    return found
  return found._replace(verdict='likely', reason=f'{found.reason}; {why}')


GROWTH, BEHIND, ABREAST = 30.0, 0.75, 0.88
"""What a pilot shows: divergence from that growth on; stalling below the one part of all-reduce's
progress, and none above the other. Set with the first half of the cells of studies.verdicts."""


def _seen(found: Finding, pilot: Pilot) -> Finding:
  """What is expected, after the first steps have been seen."""
  numbers = {**found.numbers, 'growth': pilot.growth, 'progress': pilot.progress}
  found = found._replace(numbers=numbers)
  advice = found.advice or 'take smaller steps, a denser graph or less compression'
  first = f'in the first {pilot.steps} steps'
  if pilot.growth > GROWTH:
    reason = f'messages or disagreement grew {pilot.growth:.2g} times {first}'
    return Finding('will diverge', reason, advice, numbers)
  if math.isnan(pilot.progress):
    return found
  behind = f'{first} the loss fell {pilot.progress:.2f} as far as with all-reduce'
  whole = pilot.part > 0.19  # a shorter part does not tell what the rest makes up for, or spoils
  if pilot.progress < BEHIND:
    return Finding('will stall' if whole else 'at risk', behind, advice, numbers)
  if pilot.progress < ABREAST:
    return Finding('at risk', behind, advice, numbers)
  if found.verdict in ('converges', 'likely') or pilot.settled or not whole:
    return found
  if found.late or found.verdict == 'will diverge':
    reason = f'{found.reason}; but {behind}'
    return Finding('at risk', reason, advice, numbers)
  return Finding('likely', f'{behind}; {found.reason}', '', numbers)


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


def _alpha2(compressor: Compressor, params: PyTree, measured: float) -> dict[str, float]:
  """α² by the compressor's formula for the worst input, and as measured."""
  found = {'measured alpha²': measured}
  sizes = [leaf.size for leaf in jax.tree.leaves(params)]
  if compressor.alpha2:
    found['worst alpha²'] = max(compressor.alpha2(size) for size in sizes)
  elif compressor.delta:
    found['worst alpha²'] = 1 - min(compressor.delta(size) for size in sizes)
  return found
