"""Zero, or the largest magnitude."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from decomp.base import Compressor
from decomp.compressors.common import coder, safe_divide
from decomp.compressors.rounding import round_with
from decomp.engine.cpu.loops import largest


def ternary() -> Compressor:
  """Keeps each sign with a probability, else sends 0.

    C(x)_i = s sign(x_i) b_i,   s = max|x|,   b_i = 1 with probability |x_i| / s, else 0.

  E C(x) = x, and α² = |x|_∞ |x|₁ / |x|₂² - 1 exactly: at most (√d - 1) / 2. It is 2.8 for 65,536
  Gaussian elements. The numbers are those of `stochastic_quantizer(bits=2)`, in four fifths of the
  bytes. TernGrad also clips elements beyond 2.5 standard deviations, by which it is no longer
  unbiased; that is left out.

  Returns:
    An unbiased `Compressor` with 1.6 bits per element, five to a byte, and 4 bytes per leaf.

  >>> x = jnp.array([2.0, 0.0, -2.0, 0.0, 2.0])
  >>> payload = ternary().encode(jax.random.key(0), x)
  >>> payload.codes.nbytes, ternary().decode(payload, x)
  (1, Array([ 2.,  0., -2.,  0.,  2.], dtype=float32))

  Reference: Wen et al., TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep
  Learning, arXiv 1705.07878.
  """

  def quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    most = largest(x)
    return safe_divide(x, most), most

  def code(grid: jax.Array, draws: jax.Array) -> jax.Array:
    return jnp.clip(round_with(draws, grid) + 1, 0, 2)

  def dequantize(codes: jax.Array, most: jax.Array) -> jax.Array:
    return (codes.astype(jnp.float32) - 1) * most

  def alpha2(size: int) -> float:
    # The worst: one element, and the others smaller by 1 + √d.
    return max(0.0, (math.sqrt(size) - 1) / 2)

  facts: dict[str, Any] = {'unbiased': True, 'alpha2': alpha2, 'name': 'ternary()'}
  return coder(quantize, code, dequantize, 2, trits=True, **facts)
