"""Whether a run can converge, before it is started.

`preflight` runs a few steps of an algorithm, measures what its compressor does to the messages it
really sends, and asks the algorithm's rule (a file under `rules/`) what that means on the topology.
"""

from decomp.theory.estimation import Gradients, Loss, estimate, task_gradients, task_loss
from decomp.theory.evidence import Evidence, Finding, Pilot, Problem, Theory, Verdict
from decomp.theory.expectation import Preflight, preflight, step_sizes

__all__ = [
  'Evidence',
  'Finding',
  'Gradients',
  'Loss',
  'Pilot',
  'Preflight',
  'Problem',
  'Theory',
  'Verdict',
  'estimate',
  'preflight',
  'step_sizes',
  'task_gradients',
  'task_loss',
]
