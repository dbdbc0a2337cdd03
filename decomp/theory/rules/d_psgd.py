"""D-PSGD sends whole models: what decides is the graph."""

import optax

from decomp.theory.evidence import Evidence, Finding, Theory


def theory(optimizer: optax.GradientTransformation) -> Theory:
  """The rule of `d_psgd`."""
  return Theory(_judge, optimizer)


def _judge(evidence: Evidence) -> Finding:
  gap = evidence.topology.spectral_gap
  return Finding('converges', f'models are exchanged exactly, with a spectral gap of {gap:.3g}')
