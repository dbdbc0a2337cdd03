"""DCD converges while the noise of differences does not outgrow averaging."""

import math

import optax

from decomp.base import Compressor
from decomp.theory.evidence import Evidence, Finding, Theory
from decomp.theory.rules.common import judge_biased, judge_noise, noise_gain, noise_ratio

MARGIN = 1.2
"""α² is measured on a few messages, and drifts as the run goes on: a fifth above the limit is left
undecided."""


def theory(optimizer: optax.GradientTransformation, compressor: Compressor) -> Theory:
  """The rule of `dcd_psgd`."""
  return Theory(lambda evidence: _judge(evidence, compressor), optimizer, compressor)


def _judge(evidence: Evidence, compressor: Compressor) -> Finding:
  """Disagreement contracts in the mean square while α² < 1/K, with K from `noise_gain`.

  Below that limit every worker's noise settles at α²(1 + K)/(1 - α²K) times that of its gradients,
  since the difference z holds one gradient step and K times all noise injected.
  """
  graph, alpha2 = evidence.topology, evidence.alpha2
  if not compressor.unbiased:
    return judge_biased(compressor)
  advice = 'use more bits, smaller buckets or a larger fraction, or choco_sgd'
  if math.isfinite(compressor.limit):
    source = 'a fixed grid, whose error does not shrink with the differences,'
    advice = 'use stochastic_quantizer, or a smaller limit'
    if evidence.problem is None:
      return Finding('at risk', f'{source} adds noise to every step', advice)
    ratio = noise_ratio(alpha2 * evidence.message_norm**2, evidence.problem)
    return judge_noise(ratio, source, advice)
  gain = noise_gain(graph)
  limit = 1 / gain if gain else math.inf
  sufficient = ((1 - graph.rho) / (2 * graph.mu)) ** 2 if graph.mu else math.inf
  numbers = {'limit of alpha²': limit, 'sufficient alpha²': sufficient}
  if alpha2 > MARGIN * limit:
    reason = f'α² = {alpha2:.3g} is above {limit:.3g}, where noise outgrows averaging on this graph'
    return Finding('will diverge', reason, advice, numbers)
  ratio = alpha2 * (1 + gain) / (1 - alpha2 * gain) if alpha2 < limit else math.inf
  if ratio == math.inf:
    reason = f'α² = {alpha2:.3g} is about {limit:.3g}, where noise outgrows averaging on this graph'
    return Finding('at risk', reason, advice, numbers)
  source = f'α² = {alpha2:.3g} of the differences (noise outgrows averaging from {limit:.3g} on)'
  found = judge_noise(ratio, source, advice, proven=alpha2 < sufficient, numbers=numbers)
  if found.verdict == 'will stall':  # smaller steps make this noise smaller, so it need not
    return found._replace(verdict='at risk', advice=f'{advice}; or take smaller steps')
  return found
