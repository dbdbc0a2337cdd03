"""What the rules share: noise against noise, and how much of it a graph gives back."""

import math
from collections.abc import Mapping

import numpy as np

from decomp.base import Compressor
from decomp.theory.evidence import Finding, Problem
from decomp.topology import Topology

SAFETY = 2.0
"""Estimates of noise leave out constants and use a few steps' measurements: a factor of two either
way is left undecided."""


def judge_noise(
  ratio: float,
  source: str,
  advice: str,
  proven: bool = False,
  numbers: Mapping[str, float] | None = None,
) -> Finding:
  """A finding by r, the noise that compression adds to the average model over the gradients' own.

  Full precision ends at an error that is proportional to the noise of the gradients, so that
  compression ends at 1 + r times that error: r = 1 doubles it.

  Args:
    ratio: r.
    source: what the noise is, to begin the reason with.
    advice: what would make it smaller.
    proven: whether a theorem covers the case.
    numbers: what else to report.
  """
  numbers = {'noise ratio': ratio, **(numbers or {})}
  reason = f'{source} adds {ratio:.2g} times the noise of the gradients'
  if ratio <= 1 / SAFETY:
    return Finding('converges' if proven else 'likely', reason, '', numbers)
  return Finding('at risk' if ratio < SAFETY else 'will stall', reason, advice, numbers)


def noise_ratio(variance: float, problem: Problem) -> float:
  """Noise of this variance in every step, over that of a gradient step, γ²σ²."""
  own = (problem.step_size * problem.noise) ** 2
  if own:
    return variance / own
  return math.inf if variance else 0.0


def judge_biased(compressor: Compressor) -> Finding:
  """The finding for an algorithm without error feedback whose compressor is biased."""
  reason = f'{compressor} is biased, and nothing remembers what it drops: no theory covers that'
  advice = 'use an unbiased compressor, such as stochastic_quantizer, or choco_sgd'
  return Finding('at risk', reason, advice)


def noise_gain(topology: Topology) -> float:
  """K: how much of the noise that workers inject comes back in the differences of their models.

  If every worker adds independent noise of variance v_j to its model before each exchange, then
  disagreement settles, and worker i's difference (W - I)x has the variance sum_j A_ij v_j with

    A_ij = sum_{k>=0} ((W - I) Wᵏ)_ij²,

  whose largest eigenvalue is K. Where all workers have the same view of a symmetric graph (ring,
  torus, hypercube, complete) it is K = (1/n) sum_{j>=2} (1-λ_j)/(1+λ_j). Noise of α² times the
  difference contracts, in the mean square, if and only if α²K < 1. That is exact for every doubly
  stochastic W, directed ones too, where the noise has exactly α²|z_i|² (`random_k`), and an
  estimate where α² varies with the input.

  >>> from decomp import topology
  >>> round(1 / noise_gain(topology.ring(8)), 5), round(1 / noise_gain(topology.exponential(8)), 3)
  (1.36585, 1.171)
  """
  from scipy import linalg  # here, because it takes long to import

  n = topology.num_workers
  apart = topology.matrix - 1 / n  # (W - I)Wᵏ = (W - I)(W - J)ᵏ: the mean has no difference
  difference = topology.matrix - np.eye(n)
  # Power iteration, since A itself would take n⁴ operations; alike workers need one round of it.
  # The sum over k of (W - J)ᵏ diag(v) (W - J)ᵏᵀ solves a Lyapunov equation.
  variances, gain = np.ones(n), 0.0
  for _ in range(100):
    injected = linalg.solve_discrete_lyapunov(apart, np.diag(variances))
    found = ((difference @ injected) * difference).sum(1)
    before, gain = gain, float(found @ variances / (variances @ variances))
    if gain - before <= 1e-9 * gain:
      break
    variances = found / np.linalg.norm(found)
  return gain
