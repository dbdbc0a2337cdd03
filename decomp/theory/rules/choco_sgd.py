"""CHOCO converges while its estimates keep up with the models."""

import math

import numpy as np
import optax

from decomp.base import Compressor
from decomp.theory.evidence import Evidence, Finding, Theory, Verdict
from decomp.theory.rules.common import SAFETY
from decomp.topology import Topology


def theory(
  optimizer: optax.GradientTransformation, compressor: Compressor, consensus_rate: float
) -> Theory:
  """The rule of `choco_sgd`."""

  def judge(evidence: Evidence) -> Finding:
    return _judge(evidence, compressor, consensus_rate)

  return Theory(judge, optimizer, compressor)


def proven_rate(topology: Topology, delta: float) -> float:
  """The consensus rate of the convergence theorem for a compressor with contraction δ.

  γ = g²δ / (16g + g² + 4β² + 2gβ² - 8gδ),   g = 1 - ρ, β = |I - W|₂
  """
  gap, beta2 = topology.spectral_gap, topology.mu**2
  return gap**2 * delta / (16 * gap + gap**2 + 4 * beta2 + 2 * gap * beta2 - 8 * gap * delta)


def stable_rate(topology: Topology, delta: float) -> float:
  """The consensus rate up to which the estimates keep up: γβ < 1/sqrt(1-δ) - 1, β = |I - W|₂.

  With x̂ off by ε, a gossip step moves the fastest mode of x by γβ(ε - x), so that what is to be
  compressed next holds (1 + γβ)ε, of which compression leaves 1 - δ of the energy. An estimate:
  errors are taken as uncorrelated with the models. For ResNet-20 on a ring of 8 it gives 0.50 for
  signs (δ = 2/π) and 0.033 for the top 1 % (δ = 0.08); tuning found 0.45 and 0.0375.
  """
  if delta >= 1 or not topology.mu:
    return 1.0
  return min(1.0, (1 / math.sqrt(1 - delta) - 1) / topology.mu)


def _judge(evidence: Evidence, compressor: Compressor, rate: float) -> Finding:
  """Errors never reach the average model: what matters is that estimates follow, and agreement."""
  graph, delta = evidence.topology, 1 - evidence.alpha2
  bounded = math.isfinite(compressor.limit)
  if delta <= 0 and not bounded:
    reason = f'α² = {1 - delta:.3g} is not below 1: {compressor} is no contraction, no rate helps'
    advice = 'use more bits, smaller buckets, or a biased compressor such as top_k'
    return Finding('will diverge', reason, advice, {'contraction': delta})
  # On a fixed grid estimates are off by the grid at most, whatever the rate.
  proven = 0.0 if bounded else proven_rate(graph, delta)
  stable = 1.0 if bounded else stable_rate(graph, delta)
  lag = _lag(evidence, rate)
  numbers = {'contraction': delta, 'proven rate': proven, 'recommended rate': stable, 'lag': lag}
  reason = f'the contraction δ = {delta:.3g} bears consensus rates up to about {stable:.3g}'
  if rate > stable:
    verdict: Verdict = 'at risk' if rate < 2 * SAFETY * stable else 'will diverge'
    return Finding(verdict, reason, f'use consensus_rate={stable:.2g}', numbers)
  if lag > SAFETY:
    reason = f'workers, which differ, learn {lag:.2g} times as fast as they come to agree'
    advice = f'use a consensus_rate up to {stable:.2g}, a denser graph or smaller steps'
    return Finding('at risk', reason, advice, numbers)
  return Finding('converges' if rate <= proven else 'likely', reason, '', numbers)


def _lag(evidence: Evidence, rate: float) -> float:
  """How far workers go their own ways before they agree: γh τ ζ²/(σ² + ζ²).

  Disagreement lives for τ = the mean over modes of 1/(rate (1-λ)) steps, in which a worker goes
  γhτ of the way to its own optimum. That matters in so far as it is workers that differ, and not
  batches, whose noise averages out.
  """
  problem = evidence.problem
  if problem is None or not problem.heterogeneity:
    return 0.0
  eigenvalues = np.linalg.eigvalsh(evidence.topology.matrix)[:-1]
  lifetime = (1 / (1 - eigenvalues)).sum() / max(1, len(eigenvalues)) / rate
  share = 1 / (1 + (problem.noise / problem.heterogeneity) ** 2)
  return float(problem.step_size * problem.curvature * lifetime * share)
