"""What DCD and ECD should do with a quantizer, by formula: nothing here is fitted to a run.

Every quantizer of this study rounds at random to a uniform grid. They differ in one
number, the cell Δ of the grid over the root mean square of what is rounded: √d/s for the L2 norm,
about √(2 ln 2d)/s for the largest of d elements, limit/(s rms) for a fixed grid, with s levels a
side. That number gives α², and α² decides.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from scipy import integrate, optimize, stats

from decomp import Topology

Noise = Callable[[np.ndarray], np.ndarray]
"""Mean square of messages -> that of what rounding adds, both for each curvature."""


class Problem(Protocol):
  """Worker i has f_i(x) = sum_k h_k (x_k - b_ik)²/2, with as many elements k for each curvature h.

  Attributes:
    curvatures: the different h, [H].
    centers: the b_i, [n, H, elements], whose mean over the workers is the optimum.
    noise: the standard deviation of each element of a stochastic gradient.
  """

  curvatures: np.ndarray
  centers: np.ndarray
  noise: float


class Moments(NamedTuple):
  """Expectations after each step; mean squares are per element.

  Attributes:
    excess: f(x̄) - f*, by curvature, [T, H].
    message2: |z|², [T].
    noise2: |C(z) - z|², [T].
    error2: |x̃ - x|², of the estimates of ECD, [T].
    clipped: the fraction of Gaussian z beyond the limit, [T].
  """

  excess: np.ndarray
  message2: np.ndarray
  noise2: np.ndarray
  error2: np.ndarray
  clipped: np.ndarray


def rounding_noise(cell: npt.ArrayLike) -> np.ndarray:
  """α² of random rounding to a uniform grid whose cell is so many times the input's RMS.

  The error of x is Δ² f(1 - f) with f the fractional part of x/Δ, and f(1 - f) = 1/6 -
  sum_m cos(2πmx/Δ)/(πm)². For Gaussian x, with r = Δ/rms,

    α² = r² (1/6 - sum_m exp(-2π²m²/r²)/(πm)²):  r²/6 for fine grids, √(2/π) r - 1 for coarse ones.

  >>> rounding_noise([0.1, 4.0]).round(3).tolist()
  [0.002, 2.192]
  """
  cell = np.asarray(cell, float)
  fine = np.minimum(cell, 20.0)[None]  # beyond, the other formula is exact to all digits
  m = np.arange(1, 60).reshape(-1, *[1] * cell.ndim)
  with np.errstate(divide='ignore', under='ignore'):
    waves = (np.exp(-2 * (np.pi * m / fine) ** 2) / (np.pi * m) ** 2).sum(0)
  return np.where(cell > 20, np.sqrt(2 / np.pi) * cell - 1, cell**2 * (1 / 6 - waves))


def coarsest_cell(alpha2: float) -> float:
  """The cell, in RMS of the input, that has this α².

  >>> round(coarsest_cell(1.366), 2)
  2.96
  """
  return float(optimize.brentq(lambda cell: float(rounding_noise(cell)) - alpha2, 1e-6, 1e6))


def largest(size: int) -> float:
  """The RMS of max|x| over `size` standard normal elements.

  >>> round(largest(1), 3), round(largest(4096), 2)
  (1.0, 3.81)
  """
  square = integrate.quad(lambda x: 2 * x * -np.expm1(size * stats.halfnorm.logcdf(x)), 0, 12)[0]
  return float(np.sqrt(square))


def noise_of_scaled(alpha2: float) -> Noise:
  """The noise of a quantizer that scales with its input: the same for every element."""
  return lambda message2: np.full_like(message2, alpha2 * message2.mean())


def noise_of_fixed(cell: float) -> Noise:
  """The noise of a fixed grid within its limit."""
  return lambda message2: message2 * rounding_noise(cell / np.sqrt(message2))


def moments(
  problem: Problem,
  graph: Topology,
  algorithm: str,
  noise: Noise,
  rates: np.ndarray,
  limit: float = np.inf,
) -> Moments:
  """The second moments of a whole run, from 0, step by step.

  W, the curvatures and the noise's independence make it a recursion for each eigenvalue λ of W and
  each h. Around the expected path, with μ = λ - γh and noise q of variance v = noise(E z²),

    DCD   x' = μx - γξ + q,         z = (μ - 1) x - γξ
    ECD   x' = μx + λe - γξ,        z = x + (t/2)(x' - x),      e' = (1 - 2/t) e + (2/t) q

  Exact if v depends on nothing but E z² and workers are alike, as on a ring; clipping is left out.

  Args:
    problem: the quadratics.
    graph: who talks to whom.
    algorithm: 'dcd_psgd' or 'ecd_psgd'.
    noise: of the compressor; zeros for D-PSGD.
    rates: γ of every step, [T].
    limit: of a fixed grid.
  """
  eigenvalues, modes = np.linalg.eigh(graph.matrix)
  lam, h = eigenvalues[:, None], problem.curvatures.astype(float)
  centers2 = (np.tensordot(modes.T, problem.centers.astype(float), 1) ** 2).mean(-1)
  n = len(lam)
  path = x2 = xe = e2 = np.zeros((n, len(h)))  # `path`: what part of the way the mean has gone
  found: list[tuple[npt.ArrayLike, ...]] = []
  for t, rate in enumerate(rates, start=1):
    mu, gradient2 = lam - rate * h, (rate * problem.noise) ** 2
    step = (mu - 1) * path + rate * h
    if algorithm == 'dcd_psgd':
      z2 = (mu - 1) ** 2 * x2 + gradient2 + step**2 * centers2
    else:
      own, others = 1 + t / 2 * (mu - 1), t / 2 * lam
      z2 = own**2 * x2 + 2 * own * others * xe + others**2 * e2
      z2 = z2 + (t / 2) ** 2 * gradient2 + (path + t / 2 * step) ** 2 * centers2
    z2 = z2.mean(0)
    v = noise(z2)
    if algorithm == 'dcd_psgd':
      x2 = mu**2 * x2 + gradient2 + v
    else:
      x2 = mu**2 * x2 + 2 * mu * lam * xe + lam**2 * e2 + gradient2
      xe = (1 - 2 / t) * (mu * xe + lam * e2)
      e2 = (1 - 2 / t) ** 2 * e2 + (2 / t) ** 2 * v
    path = path + step
    mean2 = x2[-1] / n + (path[-1] - 1) ** 2 * centers2[-1] / n  # the last mode is the mean
    excess = h / 2 * problem.centers.shape[-1] * mean2
    clipped = 2 * stats.norm.sf(limit / np.sqrt(z2)).mean()
    found.append((excess, z2.mean(), v.mean(), e2.mean(), clipped))
    if not excess.sum() < 1e30:  # infinity from here on
      found += [(np.full_like(h, np.inf), np.inf, np.inf, np.inf, np.nan)] * (len(rates) - t)
      break
  return Moments(*(np.array(values) for values in zip(*found, strict=True)))


def dcd_ratio(alpha2: np.ndarray, gain: float) -> np.ndarray:
  """DCD's error over D-PSGD's, 1 + α²(1 + K)/(1 - α²K) with K = noise_gain(graph).

  The difference z holds one gradient step and K times all noise injected, and α² of it is injected:
  from α²K = 1 on there is no end.
  """
  with np.errstate(divide='ignore'):
    ratio = 1 + alpha2 * (1 + gain) / (1 - alpha2 * gain)
  return np.where(alpha2 * gain < 1, ratio, np.inf)


def ecd_error_bounded(variance: float, t: np.ndarray) -> np.ndarray:
  """|x̃ - x|² of ECD after step t >= 2, of noise of constant variance: it tends to 4v/(3t)."""
  return variance * 2 * (2 * t - 1) / (3 * t * (t - 1))


def ecd_error_scaled(alpha2: float, model2: float, change2: float, t: np.ndarray) -> np.ndarray:
  """|x̃ - x|² of ECD, of noise α²|z|² with |z|² = |x|² + (t/2)²|w|², w the change of x in a step."""
  return alpha2 * (4 / 3 * model2 / t + change2 * t / 5)
