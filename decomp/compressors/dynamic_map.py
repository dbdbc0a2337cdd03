"""A code book that is fine near zero."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decomp.base import Compressor
from decomp.compressors.common import coder, divide_blocks, largest_of_blocks, multiply_blocks

_BLOCK = 4096


def dynamic_map() -> Compressor:
  """Rounds each element to the nearest of 256 multiples of the largest magnitude of its block.

  They are 0, 1 and, for i = 0 to 6,

    ±10**(i-6) (0.1 + 0.9 (k + 1/2) / 2**i),   k = 0, ..., 2**i - 1:

  half of them lie above a tenth, the others between that and 5.5e-7. Biased; there is no -1, so
  that the largest element becomes 0.7 % less if it is negative. α² is 1.7e-4 on 65,536 Gaussian
  elements. At worst all elements but one are half-way between two points: δ >= 0.995.

  Returns:
    A `Compressor` with 8 bits per element, and 4 bytes per block of 4096 elements.

  >>> x = jnp.array([8.0, -5.0, 0.02, 0.0])
  >>> dynamic_map().decode(dynamic_map().encode(jax.random.key(0), x), x)
  Array([ 8.     , -5.01875,  0.01925,  0.     ], dtype=float32)

  Reference: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861.
  """

  def quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    most = largest_of_blocks(x, _BLOCK)
    return divide_blocks(x, most, _BLOCK), most

  def code(x: jax.Array, draws: jax.Array) -> jax.Array:
    number = _number(jnp.abs(x))
    return jnp.where((x < 0) & (number > 0), 128 + jnp.minimum(number, 127), number)

  def dequantize(codes: jax.Array, most: jax.Array) -> jax.Array:
    codes = codes.astype(jnp.int32)
    magnitude = _magnitude(jnp.where(codes > 128, codes - 128, codes))
    return multiply_blocks(jnp.where(codes > 128, -magnitude, magnitude), most, _BLOCK)

  def delta(size: int) -> float:
    # One element of each block is ±1. The others do most harm, in proportion, at an edge.
    points, others = _points(), min(size, _BLOCK) - 1
    edges, halves = (points[1:] + points[:-1]) / 2, (points[1:] - points[:-1]) / 2
    most = ((1 - points[-2]) ** 2 + others * halves**2) / (1 + others * edges**2)
    return float(1 - most.max()) if size else 1.0

  facts: dict[str, Any] = {'unbiased': False, 'delta': delta, 'name': 'dynamic_map()'}
  return coder(quantize, code, dequantize, 8, dither=None, **facts)


@functools.lru_cache
def _points() -> np.ndarray:
  """The magnitudes, in order: number 2**i + k is the one of i and k above."""
  decades = [10.0 ** (i - 6) * (0.1 + 0.9 * (np.arange(2**i) + 0.5) / 2**i) for i in range(7)]
  return np.concatenate([[0], *decades, [1]])


def _number(x: jax.Array) -> jax.Array:
  """The number of the magnitude that is nearest to x."""
  points = _points()
  first, width, last = jnp.float32(points[1]), jnp.float32(0.9e-6), jnp.int32(1)
  for i in range(1, 7):
    above = x > (points[2**i - 1] + points[2**i]) / 2
    first = jnp.where(above, np.float32(points[2**i]), first)
    width = jnp.where(above, np.float32(0.9 * 10.0 ** (i - 6) / 2**i), width)
    last = jnp.where(above, 2 ** (i + 1) - 1, last)
  within = jnp.maximum(jnp.round((x - first) / width), 0).astype(jnp.int32)
  number = jnp.minimum((last + 1) // 2 + within, last)
  number = jnp.where(x > points[1] / 2, number, 0)
  return jnp.where(x > (points[127] + 1) / 2, 128, number)


def _magnitude(number: jax.Array) -> jax.Array:
  """The magnitude of a number."""
  unit, power = jnp.float32(1e-6 / 20), jnp.int32(1)
  for i in range(1, 7):
    above = number >= 2**i
    unit = jnp.where(above, np.float32(10.0 ** (i - 6) / (20 * 2**i)), unit)
    power = jnp.where(above, 2**i, power)
  # A whole number times a constant is rounded once, and so in the same way everywhere.
  magnitude = (18 * number + 9 - 16 * power).astype(jnp.float32) * unit
  return jnp.where(number == 0, 0, jnp.where(number == 128, 1, magnitude))
