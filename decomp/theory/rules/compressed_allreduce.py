"""Compressed gradients are noisier gradients."""

import optax

from decomp.base import Compressor
from decomp.theory.evidence import Evidence, Finding, Theory
from decomp.theory.rules.common import SAFETY, judge_biased, judge_noise, noise_ratio


def theory(optimizer: optax.GradientTransformation, compressor: Compressor) -> Theory:
  """The rule of `compressed_allreduce`."""
  return Theory(lambda evidence: _judge(evidence, compressor), optimizer, compressor)


def _judge(evidence: Evidence, compressor: Compressor) -> Finding:
  """C(g) has α²|g|² more variance than g, and |g|² tends to σ² + ζ²."""
  alpha2, problem = evidence.alpha2, evidence.problem
  if not compressor.unbiased:
    return judge_biased(compressor)
  advice = 'use more bits, smaller buckets or a larger fraction'
  if problem is None:
    return judge_noise(alpha2, f'α² = {alpha2:.3g}', advice, proven=True)
  # On a quadratic the error's second moment contracts while γL(1 + α²/n) < 2.
  stretch = problem.step_size * problem.smoothness * (1 + alpha2 / evidence.topology.num_workers)
  if stretch > 2 * SAFETY:
    reason = f'γL(1 + α²/n) = {stretch:.3g} is above 2: noise outgrows the steps'
    return Finding('will diverge', reason, f'{advice}, or a smaller step size')
  variance = alpha2 * problem.step_size**2 * (problem.noise**2 + problem.heterogeneity**2)
  ratio = noise_ratio(variance, problem)
  return judge_noise(ratio, f'α² = {alpha2:.3g} of the gradients', advice, proven=True)
