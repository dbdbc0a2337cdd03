"""The largest singular values of a matrix, about."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from decomp.base import Compressor
from decomp.checks import whole
from decomp.compressors.common import safe_divide
from decomp.engine.cpu.loops import largest


class Factors(NamedTuple):
  """P [rows, rank] and Q [columns, rank]."""

  left: jax.Array
  right: jax.Array


def low_rank(rank: int) -> Compressor:
  """A product of two thin matrices in the place of every large one.

  A leaf is taken as a matrix M of m rows and n columns, its last axis. From r = `rank` random
  Gaussian columns Ω, two products lead close to the r largest singular vectors, and M is projected
  onto them:

    P = orth(M Mᵀ M Ω),   Q = Mᵀ P,   C(M) = P Qᵀ = P Pᵀ M.

  A matrix of rank r or less is exact, up to rounding. Nothing is kept between steps, and Ω need not
  be sent: both factors are.

  Biased. Contractive with δ >= r / min(m, n), on average over Ω: with σ the singular values, row i
  of Σ³ G, of Gaussian G, has a share pᵢ of the projection, sum pᵢ = r. Where σᵢ is larger so is pᵢ
  (exchange rows i and j of G), and then sum σᵢ² pᵢ >= (r / min(m, n)) sum σᵢ². The declared δ holds
  for matrices of d elements of every shape, min(m, n) <= √d.

  Args:
    rank: r, above 0.

  Returns:
    A `Compressor` with 4 r (m + n) bytes; leaves for which that is not shorter, vectors above all,
    are sent as they are.

  >>> x = jnp.outer(jnp.arange(100.0), jnp.ones(50))
  >>> payload = low_rank(1).encode(jax.random.key(0), x)
  >>> payload.left.nbytes, payload.right.nbytes
  (400, 200)
  >>> bool(jnp.allclose(low_rank(1).decode(payload, x), x, atol=1e-4))
  True

  Reference: Vogels et al., PowerSGD, arXiv 1905.13727; there with Q of the last step for Ω, and one
  product.
  """
  rank = whole('rank', rank)

  def encode(key: jax.Array, x: jax.Array) -> Factors | jax.Array:
    if _as_it_is(x):
      return x.astype(jnp.float32)
    # Squares of large or small elements leave the range of float32; those of x / max do not.
    matrix = x.astype(jnp.float32).reshape(_sides(x))
    most = largest(matrix)
    matrix = safe_divide(matrix, most)
    start = jax.random.normal(key, (matrix.shape[1], rank), jnp.float32)
    # Orthogonal after each product: else small singular values would be lost in rounding.
    left = _orthonormal(_times(matrix, start))
    left = _orthonormal(_times(matrix, _orthonormal(_times(matrix.T, left))))
    return Factors(left, _times(matrix.T, left) * most)

  def decode(payload: Factors | jax.Array, like: Any) -> jax.Array:
    if isinstance(payload, Factors):
      payload = _times(payload.left, payload.right.T).reshape(like.shape)
    return payload.astype(like.dtype)

  def _as_it_is(x: Any) -> bool:
    return rank * sum(_sides(x)) >= math.prod(x.shape)

  def delta(size: int) -> float:
    return min(1.0, rank / math.isqrt(size)) if size else 1.0

  return Compressor(encode, decode, unbiased=False, delta=delta, name=f'low_rank({rank})')


def _sides(x: Any) -> tuple[int, int]:
  """(rows, columns) of a leaf as a matrix."""
  return math.prod(x.shape[:-1]), math.prod(x.shape[-1:])


def _times(a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.matmul(a, b, precision='highest')


def _orthonormal(x: jax.Array) -> jax.Array:
  """Orthonormal columns that span those of x, and others where x has fewer dimensions.

  By reflections: they are orthonormal whatever x is, zeros included.
  """
  return jnp.linalg.qr(x)[0]
