"""Problems whose optimum is known, to measure f(x) - f* exactly."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decomp import checks
from decomp.tasks.data.dataset import Dataset

MOST_NUMBERS = 10**8
MOST_DIMENSIONS = 3000
"""Of what is drawn, so that it takes seconds."""


class Quadratic(NamedTuple):
  """Worker i has f_i(x) = 1/2 (x - b_i)ᵀ A_i (x - b_i); f is the average over the workers.

  Attributes:
    hessians: The A_i, float32 [n, d, d].
    centers: The b_i, float32 [n, d].
    optimum: The minimiser of f, float32 [d].
    noise: σ, where σ² is the expected squared norm of the noise in a stochastic gradient.
  """

  hessians: np.ndarray
  centers: np.ndarray
  optimum: np.ndarray
  noise: float

  def loss(self, x: jax.Array, worker: jax.Array) -> jax.Array:
    """Returns f_i(x) for worker i, without noise."""
    difference = x - jnp.asarray(self.centers)[worker]
    return 0.5 * difference @ jnp.asarray(self.hessians)[worker] @ difference

  def gradient(self, key: jax.Array, x: jax.Array, worker: jax.Array) -> jax.Array:
    """Returns a stochastic gradient of f_i at x: the gradient plus Gaussian noise."""
    exact = jnp.asarray(self.hessians)[worker] @ (x - jnp.asarray(self.centers)[worker])
    return exact + self.noise / len(x) ** 0.5 * jax.random.normal(key, x.shape, x.dtype)

  def suboptimality(self, x: jax.Array) -> jax.Array:
    """Returns f(x) - f*, computed from x - x* so that nothing cancels."""
    difference = x - self.optimum
    return 0.5 * difference @ self.hessians.mean(axis=0) @ difference


def quadratic(
  num_workers: int,
  dimension: int,
  heterogeneity: float = 1.0,
  noise: float = 0.0,
  condition: float = 10.0,
  seed: int = 0,
) -> Quadratic:
  """Draws a quadratic for each worker; every A_i has its own axes and eigenvalues in [1/κ, 1].

  Args:
    num_workers: n.
    dimension: d.
    heterogeneity: ζ at the optimum: the mean over the workers of ||∇f_i(x*)||² is ζ².
    noise: σ, where σ² is the expected squared norm of the noise in a stochastic gradient.
    condition: κ, the condition number of each A_i; at least 1.
    seed: Of the random draws.

  Returns:
    The `Quadratic`, with its optimum from the normal equations Σ A_i x* = Σ A_i b_i.

  Example:
    >>> problem = quadratic(num_workers=4, dimension=3)
    >>> float(problem.suboptimality(problem.optimum))
    0.0
  """
  seed = checks.seed(seed)
  dimension = checks.whole('dimension', dimension, 1, MOST_DIMENSIONS)
  num_workers = checks.whole('num_workers', num_workers, 1, MOST_NUMBERS // dimension**2)
  heterogeneity = checks.real('heterogeneity', heterogeneity, 0, 1e6)
  noise = checks.real('noise', noise, 0, 1e6)
  condition = checks.real('condition', condition, 1, 1e9)
  if num_workers == 1 and heterogeneity:
    raise ValueError(f'heterogeneity={heterogeneity}: must be 0 for num_workers=1')
  rng = np.random.default_rng(seed)
  axes = np.linalg.qr(rng.standard_normal((num_workers, dimension, dimension))).Q
  hessians = (axes * np.geomspace(1 / condition, 1, dimension)) @ axes.mT
  gradients = rng.standard_normal((num_workers, dimension))
  if heterogeneity:
    gradients -= gradients.mean(axis=0)
    gradients /= np.sqrt(np.mean(np.sum(gradients**2, axis=1)))
  steps = np.linalg.solve(hessians, heterogeneity * gradients[..., None])[..., 0]
  # Rounded first, so that the optimum is that of the numbers a worker really holds.
  hessians = hessians.astype(np.float32)
  centers = (rng.standard_normal(dimension) - steps).astype(np.float32)
  exact = hessians.astype(np.float64)
  right = (exact @ centers[..., None].astype(np.float64)).sum(axis=0)[:, 0]
  optimum = np.linalg.solve(exact.sum(axis=0), right).astype(np.float32)
  return Quadratic(hessians, centers, optimum, noise)


class LogisticRegression(NamedTuple):
  """f(w) = mean over the examples of log(1 + exp(-s xᵀw)) + regularization/2 ||w||².

  Attributes:
    dataset: Inputs x float32 [N, d], labels 0 (s = -1) and 1 (s = +1).
    regularization: Strength of the L2 term.
    optimum: The minimiser of f over the training examples, float64 [d].
    optimal_value: f*, float.
  """

  dataset: Dataset
  regularization: float
  optimum: np.ndarray
  optimal_value: float

  def loss(self, weights: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Returns f restricted to a batch; its gradient is what a worker uses."""
    signs = (2 * batch['label'] - 1).astype(weights.dtype)
    losses = jax.nn.softplus(-signs * (batch['input'] @ weights))
    return losses.mean() + 0.5 * self.regularization * weights @ weights

  def suboptimality(self, weights: np.ndarray) -> float:
    """Returns f(w) - f* over all training examples, in float64 on the host."""
    weights = np.asarray(weights, np.float64)
    return _value(weights, _signed(self.dataset.train), self.regularization) - self.optimal_value


def logistic_regression(
  num_examples: int = 1000, dimension: int = 20, regularization: float = 1e-2, seed: int = 0
) -> LogisticRegression:
  """Draws Gaussian inputs with labels from a logistic model, and finds the optimum.

  Args:
    num_examples: Training examples; a quarter as many more are held out.
    dimension: Number of features.
    regularization: Strength of the L2 term; positive, so that the optimum is unique.
    seed: Of the random draws.

  Returns:
    The `LogisticRegression`, its optimum within 1e-8 of the exact one in Euclidean norm.
  """
  from scipy import special

  seed = checks.seed(seed)
  dimension = checks.whole('dimension', dimension, 1, MOST_DIMENSIONS)
  num_examples = checks.whole('num_examples', num_examples, 1, MOST_NUMBERS // dimension)
  if not checks.real('regularization', regularization, 0, 1e6):
    raise ValueError(f'regularization={regularization}: must be positive')
  rng = np.random.default_rng(seed)
  inputs = rng.standard_normal((num_examples + num_examples // 4, dimension)).astype(np.float32)
  truth = rng.standard_normal(dimension) * 3 / np.sqrt(dimension)
  labels = rng.random(len(inputs)) < special.expit(inputs @ truth)
  splits = [
    {'input': inputs[part], 'label': labels[part].astype(np.int32)}
    for part in (slice(num_examples), slice(num_examples, None))
  ]
  signed = _signed(splits[0])
  optimum = _logistic_optimum(signed, regularization)
  return LogisticRegression(
    Dataset(train=splits[0], test=splits[1], name='logistic_regression', num_classes=2),
    regularization,
    optimum,
    _value(optimum, signed, regularization),
  )


def _signed(split) -> np.ndarray:
  """Returns the rows s x, all that f needs to know of the examples, in float64."""
  return split['input'].astype(np.float64) * (2 * split['label'] - 1)[:, None]


def _value(weights: np.ndarray, signed: np.ndarray, regularization: float) -> float:
  losses = np.logaddexp(0, -signed @ weights)
  return float(losses.mean() + 0.5 * regularization * weights @ weights)


def _logistic_optimum(signed: np.ndarray, regularization: float) -> np.ndarray:
  from scipy import optimize, special

  def gradient(weights: np.ndarray) -> np.ndarray:
    slopes = special.expit(-signed @ weights)
    return regularization * weights - slopes @ signed / len(signed)

  def hessian(weights: np.ndarray) -> np.ndarray:
    slopes = special.expit(-signed @ weights)
    curvature = (signed.T * (slopes * (1 - slopes))) @ signed / len(signed)
    return curvature + regularization * np.eye(len(weights))

  # The root of the gradient: minimising f itself stalls where its differences round to 0.
  weights = optimize.root(gradient, np.zeros(signed.shape[1]), jac=hessian, tol=1e-13).x
  # f is strongly convex, so the gradient bounds the distance to the optimum.
  if np.linalg.norm(gradient(weights)) / regularization > 1e-8:
    raise ValueError(f'regularization={regularization}: must be larger for an optimum to 1e-8')
  return weights
