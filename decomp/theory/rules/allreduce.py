"""All-reduce is SGD with a larger batch."""

import optax

from decomp.theory.evidence import Evidence, Finding, Theory


def theory(optimizer: optax.GradientTransformation) -> Theory:
  """The rule of `allreduce`."""
  return Theory(_judge, optimizer)


def _judge(evidence: Evidence) -> Finding:
  return Finding('converges', 'gradients are averaged exactly')
