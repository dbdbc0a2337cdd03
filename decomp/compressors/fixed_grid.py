"""Stochastic rounding to a grid that does not depend on the input."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decomp.base import Compressor
from decomp.checks import is_number
from decomp.compressors.common import check_bits, check_dither, coder
from decomp.compressors.rounding import round_with


def fixed_grid(bits: int, limit: float, dither: str = 'threefry') -> Compressor:
  """Rounds each element at random to one of the two nearest points of a fixed grid.

  The grid is {kΔ : |k| <= s} with s = 2**(bits-1) - 1 and Δ = limit / s, agreed on beforehand, so
  no scale is sent. This is the quantizer that Tang et al. assume for ECD-PSGD: E C(x) = x and
  E|C(x) - x|² <= d Δ²/4 WHATEVER the input is, as long as it stays within the limit. Elements
  beyond ±limit are clipped, which is biased: `Info.clipped` says how many were.

  Relative to a small input the error is unbounded, so there is no α²: DCD with this quantizer
  stalls at the grid's resolution.

  Args:
    bits: bits per element, 2 to 8 (a one-bit grid would have no 0).
    limit: the largest magnitude on the grid.
    dither: where random numbers come from, 'threefry' or the cheaper 'hash'.

  Returns:
    A `Compressor`, unbiased within the limit, with `bits` bits per element and nothing else.
    The one spare code stands for an element that is not finite.

  >>> compressor = fixed_grid(bits=3, limit=3.0)
  >>> x = jnp.array([1.0, -2.0, 9.0, jnp.nan])
  >>> compressor.decode(compressor.encode(jax.random.key(0), x), x)
  Array([ 1., -2.,  3., nan], dtype=float32)

  Reference: Tang et al., Communication Compression for Decentralized Training, arXiv 1803.06443.
  """
  bits, suffix = check_bits(bits, 2, 8), check_dither(dither)
  largest = float(np.finfo(np.float32).max)
  # A step of the grid must be a normal float32 as well.
  if not is_number(limit) or not 1e-30 < limit < largest:
    raise ValueError(f'limit={limit!r}: must be a positive number in the range of float32')
  levels = 2 ** (bits - 1) - 1
  step = limit / levels
  not_finite = 2**bits - 1

  def quantize(x: jax.Array) -> tuple[jax.Array, tuple[()]]:
    return jnp.where(jnp.isfinite(x), jnp.clip(x / step, -levels, levels), not_finite - levels), ()

  def code(grid: jax.Array, draws: jax.Array) -> jax.Array:
    return round_with(draws, grid) + levels

  def dequantize(codes: jax.Array, scale: tuple[()]) -> jax.Array:
    values = (codes.astype(jnp.float32) - levels) * step
    return jnp.where(codes == not_finite, jnp.nan, values)

  name = f'fixed_grid(bits={bits}, limit={limit}{suffix})'
  facts: dict[str, Any] = {'unbiased': True, 'limit': float(limit), 'name': name}
  return coder(quantize, code, dequantize, bits, dither, **facts)
