"""ECD converges while the error of its estimates does not grow."""

import math

import jax
import numpy as np
import optax

from decomp.base import Compressor
from decomp.compressors.measuring import measure
from decomp.theory.evidence import Evidence, Finding, Problem, Theory
from decomp.theory.rules.common import SAFETY, judge_biased, judge_noise, noise_gain
from decomp.topology import Topology

_ADVICE = 'use fixed_grid, whose noise is bounded, more bits, or dcd_psgd'


def theory(optimizer: optax.GradientTransformation, compressor: Compressor) -> Theory:
  """The rule of `ecd_psgd`."""
  return Theory(lambda evidence: _judge(evidence, compressor), optimizer, compressor)


def _judge(evidence: Evidence, compressor: Compressor) -> Finding:
  """The average model settles where its gradient is e/γ, with e the mean error of the estimates.

  So |e|²/γ² stands against the γhσ²/2 of SGD itself, both over n.
  """
  problem, alpha2 = evidence.problem, evidence.alpha2
  bounded = math.isfinite(compressor.limit)
  if not compressor.unbiased:
    return judge_biased(compressor)
  if problem is None:
    if bounded:
      return Finding('likely', f'noise is bounded while |z| < {compressor.limit:g}; z grows with t')
    return Finding('at risk', f'α² = {alpha2:.3g} of z, and z grows with t', _ADVICE)
  # A model changes by w in one step: its own update, and what comes back from the neighbours.
  change2 = (problem.step_size * problem.noise) ** 2 * (1 + noise_gain(evidence.topology))
  if bounded:
    error2 = _bounded_error(evidence, compressor, change2)
    numbers, advice = {}, 'use more bits, or a limit that holds z, which grows with t; or dcd_psgd'
  else:
    feedback = alpha2 * _memory(evidence.topology, problem)
    numbers, advice = {'feedback': feedback}, _ADVICE
    if feedback > SAFETY and evidence.steps * alpha2 > 4:  # before, estimates forget too fast
      reason = f'errors come back {feedback:.3g} times in the z of later steps, which grows with t'
      return Finding('will diverge', reason, advice, numbers, late=True)
    error2 = _growing_error(evidence, change2) / max(1 - feedback, 1 / SAFETY)
  own = problem.step_size**3 * problem.curvature * problem.noise**2 / 2
  ratio = error2 / own if own else math.inf if error2 else 0.0
  source = f'the error of the estimates, {math.sqrt(error2):.3g} at step {evidence.steps},'
  proven = bounded or not alpha2
  return judge_noise(ratio, source, advice, proven, numbers)._replace(late=True)


def _bounded_error(evidence: Evidence, compressor: Compressor, change2: float) -> float:
  """|e|² = (4/3) v/T, with v measured on Gaussian z of the size it has at the end, x + (T/2)w."""
  size = math.sqrt((evidence.message_norm**2 + change2 * evidence.steps**2 / 4) / evidence.size)
  z = size * jax.random.normal(jax.random.key(0), (evidence.size,))
  alpha2 = measure(compressor, z, jax.random.key(1), samples=4).alpha2
  return 4 / 3 * alpha2 * size**2 * evidence.size / evidence.steps


def _growing_error(evidence: Evidence, change2: float) -> float:
  """|e|² = (4/3) α²|x|²/T + α²|w|²T/5, from e ← (1-2/t)e + (2/t)n with |n|² = α²|x + (t/2)w|²."""
  start2 = 4 / 3 * evidence.message_norm**2 / evidence.steps
  return evidence.alpha2 * (start2 + change2 * evidence.steps / 5)


def _memory(topology: Topology, problem: Problem) -> float:
  """M = (1/n) (sum_{j>=2} λ_j²/(1-λ_j²) + 1/(2γh)): for how long a change of e changes the models.

  Late in a run a change of e by α|w| changes the models, w ← (λ - γh)w + λ(change of e), and with
  them the next z: from α²M = 1 on that explodes.
  """
  squares = np.linalg.eigvalsh(topology.matrix)[:-1] ** 2
  pace = problem.step_size * problem.curvature
  mean_mode = 1 / (2 * pace) if pace else math.inf
  return float((squares / (1 - squares)).sum() + mean_mode) / topology.num_workers
