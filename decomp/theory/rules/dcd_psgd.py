"""DCD converges while the noise of differences does not outgrow averaging."""

import math

import jax
import jax.numpy as jnp
import optax

from decomp.base import Compressor
from decomp.compressors.eden import eden
from decomp.engine import wire
from decomp.theory.evidence import Evidence, Finding, Theory
from decomp.theory.rules.common import SAFETY, judge_biased, judge_noise, noise_gain, noise_ratio

MARGIN = 1.2
"""α² is measured on a few messages, and drifts as the run goes on: a fifth above the limit is left
undecided."""


def theory(optimizer: optax.GradientTransformation, compressor: Compressor) -> Theory:
  """The rule of `dcd_psgd`."""
  return Theory(lambda evidence: _judge(evidence, compressor), optimizer, compressor)


def _judge(evidence: Evidence, compressor: Compressor) -> Finding:
  """Disagreement contracts in the mean square while α² < 1/K, with K from `noise_gain`.

  Below that limit every worker's noise settles at α²(1 + K)/(1 - α²K) times that of its gradients,
  since the difference z holds one gradient step and K times all noise injected. Of the `eden`
  codecs, whose α² is the same for every message, the shortest that would do is named.
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
  codec, part = _rotation(gain, evidence.size, compressor)
  if codec:
    advice = f'use {codec}, with {part:.2g} times as many bytes, or choco_sgd'
  sufficient = ((1 - graph.rho) / (2 * graph.mu)) ** 2 if graph.mu else math.inf
  numbers = {'limit of alpha²': limit, 'sufficient alpha²': sufficient}
  if alpha2 > MARGIN * limit:
    reason = f'α² = {alpha2:.3g} is above {limit:.3g}, where noise outgrows averaging on this graph'
    return Finding('will diverge', reason, advice, numbers)
  ratio = _settled(alpha2, gain)
  if ratio == math.inf:
    reason = f'α² = {alpha2:.3g} is about {limit:.3g}, where noise outgrows averaging on this graph'
    return Finding('at risk', reason, advice, numbers)
  source = f'α² = {alpha2:.3g} of the differences (noise outgrows averaging from {limit:.3g} on)'
  found = judge_noise(ratio, source, advice, proven=alpha2 < sufficient, numbers=numbers)
  if found.verdict == 'will stall':  # smaller steps make this noise smaller, so it need not
    return found._replace(verdict='at risk', advice=f'{advice}; or take smaller steps')
  if codec and part < 0.7 and not found.advice:
    found = found._replace(tip=f'{codec} would do with {part:.2g} of the bytes')
  return found


def _settled(alpha2: float, gain: float) -> float:
  """A worker's noise over that of its gradients: α²(1 + K)/(1 - α²K), infinite from 1/K on."""
  return alpha2 * (1 + gain) / (1 - alpha2 * gain) if alpha2 * gain < 1 else math.inf


def _rotation(gain: float, size: int, compressor: Compressor) -> tuple[str, float]:
  """(the shortest `eden` whose noise is well below that of gradients, its part of the bytes)."""
  for bits in (1, 2, 3, 4):
    codec = eden(bits)
    if codec.alpha2 and _settled(codec.alpha2(size), gain) <= 1 / SAFETY:
      return codec.name, _bytes(codec, size) / _bytes(compressor, size)
  return '', math.inf


def _bytes(compressor: Compressor, size: int) -> int:
  """Of a message of so many elements."""
  shapes = jax.eval_shape(lambda: jax.random.key(0)), jax.ShapeDtypeStruct((size,), jnp.float32)
  return max(1, wire.size(jax.eval_shape(compressor.encode, *shapes)))
