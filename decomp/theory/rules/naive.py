"""Compressing models adds noise that never shrinks."""

import optax

from decomp.base import Compressor
from decomp.theory.evidence import Evidence, Finding, Theory
from decomp.theory.rules.common import judge_noise, noise_ratio


def theory(optimizer: optax.GradientTransformation, compressor: Compressor) -> Theory:
  """The rule of `naive`."""
  return Theory(_judge, optimizer, compressor)


def _judge(evidence: Evidence) -> Finding:
  """Noise of variance α²|x|² enters every step, where SGD's own has γ²σ²."""
  problem, alpha2 = evidence.problem, evidence.alpha2
  advice = 'use dcd_psgd or choco_sgd, whose errors shrink as the run settles'
  source = f'compressing models, with α² = {alpha2:.3g} however settled they are,'
  if problem is None:
    return Finding('at risk', f'{source} adds noise to every step', advice)
  variance = alpha2 * evidence.message_norm**2
  return judge_noise(noise_ratio(variance, problem), source, advice, proven=not variance)
