"""Signs and one magnitude."""

from typing import Any

import jax
import jax.numpy as jnp

from decomp.base import Compressor
from decomp.compressors.common import coder, safe_divide
from decomp.engine.cpu.loops import largest


def sign_norm() -> Compressor:
  """C(x) = (|x|₁ / d) sign(x): one bit per element.

  Biased. Contractive with δ = |x|₁² / (d |x|₂²): 2/π for Gaussian input, 1/d at worst.

  Returns:
    A `Compressor` with 1 bit per element and 4 bytes per leaf.

  >>> x = jnp.array([1.0, -3.0])
  >>> sign_norm().decode(sign_norm().encode(jax.random.key(0), x), x)
  Array([ 2., -2.], dtype=float32)

  Reference: Karimireddy et al., Error Feedback Fixes SignSGD, arXiv 1901.09847.
  """

  def quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Sums of large or small elements leave the range of float32; those of x / max do not.
    most = largest(x)
    return x, most * (jnp.abs(safe_divide(x, most)).sum() / max(1, x.size))

  def code(x: jax.Array, draws: jax.Array) -> jax.Array:
    return (x >= 0).astype(jnp.int32)

  def dequantize(codes: jax.Array, magnitude: jax.Array) -> jax.Array:
    return (2 * codes.astype(jnp.float32) - 1) * magnitude

  def delta(size: int) -> float:
    return 1 / max(1, size)

  facts: dict[str, Any] = {'unbiased': False, 'delta': delta, 'name': 'sign_norm()'}
  return coder(quantize, code, dequantize, 1, dither=None, **facts)
