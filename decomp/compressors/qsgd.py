"""QSGD: stochastic uniform quantization with the L2 norm as the scale."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from decomp.base import Compressor
from decomp.compressors.common import check_bits, check_dither, coder, safe_divide
from decomp.compressors.rounding import round_with
from decomp.engine.cpu.loops import largest


def qsgd(bits: int, dither: str = 'threefry') -> Compressor:
  """Rounds |x_i| s / |x|₂ at random to a whole level ξ_i, with s = 2**bits - 1.

    C(x)_i = |x|₂ sign(x_i) ξ_i / s

  E C(x) = x and α² <= min(d/s², √d/s), which grows with the leaf: few elements are anywhere near
  the norm, so most levels go unused. This is the quantizer of the CHOCO-SGD experiments; its
  authors count `bits` per element, and the sign makes it bits + 1 on the wire.

  Args:
    bits: bits of the level, 1 to 16; the sign is one more.
    dither: where random numbers come from, 'threefry' or the cheaper 'hash'.

  Returns:
    An unbiased `Compressor` with bits + 1 bits per element and 4 bytes per leaf.

  >>> compressor = qsgd(bits=4)
  >>> x = jnp.array([0.0, 3.0, 0.0, 0.0])
  >>> compressor.decode(compressor.encode(jax.random.key(0), x), x)
  Array([0., 3., 0., 0.], dtype=float32)

  Reference: Alistarh et al., QSGD, arXiv 1610.02132.
  """
  bits, suffix = check_bits(bits, 1, 16), check_dither(dither)
  levels = 2**bits - 1

  def quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Squares of large or small elements leave the range of float32; those of x / max do not.
    most = largest(x)
    norm = most * jnp.sqrt((safe_divide(x, most) ** 2).sum())
    return jnp.clip(safe_divide(x, norm) * levels, -levels, levels), norm

  def code(grid: jax.Array, draws: jax.Array) -> jax.Array:
    return round_with(draws, grid, fraction=min(16, 31 - bits)) + levels

  def dequantize(codes: jax.Array, norm: jax.Array) -> jax.Array:
    return (codes.astype(jnp.float32) - levels) * (norm / levels)

  def alpha2(size: int) -> float:
    return min(size / levels**2, math.sqrt(size) / levels)

  name = f'qsgd(bits={bits}{suffix})'
  facts: dict[str, Any] = {'unbiased': True, 'alpha2': alpha2, 'name': name}
  return coder(quantize, code, dequantize, bits + 1, dither, **facts)
