"""What a theory judges by, and what it says."""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import optax

from decomp.base import Compressor
from decomp.topology import Topology

Verdict = Literal['converges', 'likely', 'unknown', 'at risk', 'will stall', 'will diverge']
"""What `decomp.theory.preflight` expects of a run, from best to worst.

'converges': a theorem's condition holds. 'likely': no theorem, or too little is known to say that
its condition holds, but what is known speaks for it: an estimate of what compression adds is well
below the noise of the gradients, or the first steps do as well as all-reduce. 'unknown': no theory
covers it. 'at risk': too close to call. 'will stall': the run stays well above what full precision
reaches. 'will diverge': errors outgrow averaging.
"""


class Problem(NamedTuple):
  """What is known of the task, measured where the run starts.

  Attributes:
    smoothness: L, the largest curvature of a worker's loss.
    curvature: h, the curvature in the directions of the gradients' noise.
    noise: σ, where σ² is the variance of a worker's stochastic gradient (all elements together).
    heterogeneity: ζ, where ζ² is the variance of the workers' expected gradients.
    step_size: γ, the length of the optimizer's update for a gradient of length 1.
    linear: whether updates are linear in the gradients, as those of SGD and momentum are; theorems
      are about such.
  """

  smoothness: float
  curvature: float
  noise: float
  heterogeneity: float
  step_size: float
  linear: bool = True


class Pilot(NamedTuple):
  """What the first steps of a run showed.

  Attributes:
    steps: how many.
    part: of the whole run.
    growth: how many times as large messages and disagreement were at the end as in the middle.
    progress: how far the loss of the mean model fell, over how far it fell with all-reduce; not a
      number if no loss is known.
    settled: whether all-reduce's loss fell no more in the second half, so that noise decides.
  """

  steps: int
  part: float
  growth: float
  progress: float
  settled: bool


class Evidence(NamedTuple):
  """What an algorithm's theory judges by.

  Attributes:
    topology: the graph.
    steps: T, the length of the run.
    alpha2: |C(z) - z|² / |z|², measured on messages z of the algorithm's own first steps; on
      Gaussian numbers if only shapes are known.
    message_norm: |z|, of the same messages; not a number if only shapes are known.
    size: d, the number of parameters.
    problem: what is known of the task; None if only shapes are.
  """

  topology: Topology
  steps: int
  alpha2: float
  message_norm: float
  size: int
  problem: Problem | None


class Finding(NamedTuple):
  """What an algorithm's theory says.

  Attributes:
    verdict: in a word or two.
    reason: why, with the number that decides.
    advice: what to change; empty if nothing needs to be.
    numbers: the quantities that entered, by name.
    tip: what would do as well with fewer bytes; empty if nothing is known to.
    late: whether what it warns of grows with time, so that first steps cannot refute it.
  """

  verdict: Verdict
  reason: str
  advice: str = ''
  numbers: Mapping[str, float] = {}
  tip: str = ''
  late: bool = False


class Theory(NamedTuple):
  """An algorithm's entry for `decomp.theory.preflight`.

  Attributes:
    judge: evidence -> finding.
    optimizer: the worker's, from which the step size is measured.
    compressor: what is applied to messages; None if they are exact.
  """

  judge: Callable[[Evidence], Finding]
  optimizer: optax.GradientTransformation
  compressor: Compressor | None = None
