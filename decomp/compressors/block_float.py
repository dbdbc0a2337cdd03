"""Floating point numbers of 4, 6 or 8 bits, with a scale for every block."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decomp.base import Compressor, PyTree
from decomp.compressors.common import (
  coder,
  divide_blocks,
  largest_of_blocks,
  multiply_blocks,
  safe_divide,
)
from decomp.compressors.minifloat import (
  E2M1,
  E2M3,
  E3M0,
  E3M2,
  E4M3,
  E5M2,
  Minifloat,
  bits_of,
  power_of_two,
)
from decomp.compressors.rounding import round_with
from decomp.engine.cpu.loops import largest


def block_float(format: str, stochastic: bool = False) -> Compressor:
  """Divides each block by a scale, and rounds its elements to floating point numbers of few bits.

    C(x)_i = s q(x_i / s),   s found from the largest magnitude of the block.

  | format | elements | block | scale | bits | α², nearest | α², stochastic |
  |---|---|---|---|---|---|---|
  | mxfp8 | E4M3 | 32 | power of two, 1 byte | 8.25 | 8.7e-4 | 1.4e-3 |
  | mxfp8_e5m2 | E5M2 | 32 | power of two, 1 byte | 8.25 | 2.9e-3 | 5.6e-3 |
  | mxfp6 | E2M3 | 32 | power of two, 1 byte | 6.25 | 8.1e-4 | 1.6e-3 |
  | mxfp6_e3m2 | E3M2 | 32 | power of two, 1 byte | 6.25 | 2.9e-3 | 5.6e-3 |
  | mxfp4 | E2M1 | 32 | power of two, 1 byte | 4.25 | 0.013 | 0.027 |
  | nvfp4 | E2M1 | 16 | E4M3, 1 byte, times a float32 of the leaf | 4.5 | 0.0090 | 0.022 |
  | fp8 | E4M3 | 1024 | float32 | 8.03 | 7.0e-4 | 1.4e-3 |
  | e3m0 | 0, ±2**-6 to ±1 | 512 | float32 | 4.06 | 0.038 | 0.081 |

  EeMm has e bits of exponent and m of mantissa; α² is measured on 65,536 Gaussian elements. Blocks
  are consecutive elements of the leaf, whatever its shape. Those of fp8 are usually the rows of a
  matrix; 1024 elements suit leaves of every shape and cost little. e3m0 is decomp's own: neither
  the numbers nor the scale of other codes of this name are published.

  By default q rounds to the nearest, and C is biased. The scale of the mx formats is then the one
  of their specification, with which the largest element of a block may exceed the largest number:
  7.9 s becomes 6 s in mxfp4. With `stochastic`, q rounds at random to one of the two neighbours, so
  that E C(x) = x. Nothing may exceed the largest number then: the power of two is twice as large
  where necessary, and the scale of nvfp4 is rounded up.

  Where spacing grows, the error of an element is at most r |x_i|, and below that u s / 2, with u
  the smallest number. The largest element of a block of B is at least A s. Hence |C(x) - x|² / |x|²
  is at most r² + (B - 1) u² / 4A² in every block, on average where rounding is random. This is what
  is declared as α² or 1 - δ. It does not hold for a leaf that is below 1e-34 all over, where scales
  leave the range of float32.

  Args:
    format: one of the table.
    stochastic: whether to round at random, unbiased, and not to the nearest.

  Returns:
    A `Compressor`.

  >>> x = jnp.array([0.1, -1.0, 3.0, 7.0])
  >>> compressor = block_float('mxfp4')
  >>> payload = compressor.encode(jax.random.key(0), x)
  >>> payload.codes.nbytes, payload.scale.nbytes, compressor.decode(payload, x)
  (2, 1, Array([ 0., -1.,  3.,  6.], dtype=float32))

  References:
    OCP Microscaling Formats (MX) Specification, version 1.0, 2023.
    NVIDIA et al., Pretraining Large Language Models with NVFP4, arXiv 2509.25149.
  """
  if format not in _FORMATS:
    raise ValueError(f'format={format!r}: must be one of {", ".join(_FORMATS)}')
  element, block, scale = _FORMATS[format]
  sign = element.top.bit_length()

  def quantize(x: jax.Array) -> tuple[jax.Array, PyTree]:
    packed = scale.pack(largest_of_blocks(x, block), element, stochastic)
    return divide_blocks(x, scale.unpack(packed), block), packed

  def code(x: jax.Array, draws: jax.Array) -> jax.Array:
    def at_random(place: jax.Array) -> jax.Array:
      return round_with(draws, place)

    codes = element.code(jnp.abs(x), at_random if stochastic else jnp.round)
    return codes | ((x < 0).astype(jnp.int32) << sign)

  def dequantize(codes: jax.Array, packed: PyTree) -> jax.Array:
    magnitude = element.value(codes & (2**sign - 1))
    values = jnp.where(codes >> sign == 0, magnitude, -magnitude)
    return multiply_blocks(values, scale.unpack(packed), block)

  def noise(size: int) -> float:
    least, lost = scale.bounds(element, stochastic)
    ones = 2**element.mantissa
    if stochastic:
      relative2 = 1 / (4 * ones * (ones + 1))  # half-way, and a bit below, between 1 and 1 + 1/ones
    else:
      beyond = 1 - element.largest / (2 * element.power)
      relative2 = max(1 / (2 * ones + 1), beyond) ** 2
    small = 2.0 ** (element.least - element.mantissa - 1)
    return relative2 + max(0, min(size, block) - 1) * (small / least) ** 2 + lost * size

  facts: dict[str, Any] = {'name': f'block_float({format!r})', 'unbiased': stochastic}
  if stochastic:
    facts |= {'name': f'block_float({format!r}, stochastic=True)', 'alpha2': noise}
  else:
    facts |= {'delta': lambda size: 1 - noise(size)}
  dither = 'threefry' if stochastic else None
  return coder(quantize, code, dequantize, sign + 1, dither, **facts)


class _Scale(NamedTuple):
  """What blocks are divided by.

  Attributes:
    pack: (the largest magnitude of each block, elements, whether none may lie beyond the largest
      number) -> what is sent.
    unpack: what is sent -> the scales, float32.
    bounds: (elements, whether none may lie beyond the largest number) -> the least that the largest
      element of a block can be, divided by its scale; and how much the errors of elements in blocks
      for which that does not hold are, each as a part of the leaf's largest element squared.
  """

  pack: Callable[[jax.Array, Minifloat, bool], PyTree]
  unpack: Callable[[PyTree], jax.Array]
  bounds: Callable[[Minifloat, bool], tuple[float, float]]


class Scales(NamedTuple):
  """A code of E4M3 for each block, and what all of them are multiplied by."""

  codes: jax.Array
  unit: jax.Array


def _pack_power(most: jax.Array, element: Minifloat, within: bool) -> jax.Array:
  word = bits_of(most)
  if within:  # what is above the largest number's mantissa carries into the exponent
    word += 2**23 - 1 - int(2**23 * (element.largest / element.power - 1))
  byte = jnp.clip((word >> 23) - round(np.log2(element.power)), 1, 254)
  return jnp.where(jnp.isfinite(most), byte, 255).astype(jnp.uint8)


def _unpack_power(byte: jax.Array) -> jax.Array:
  return jnp.where(byte == 255, jnp.nan, power_of_two(byte.astype(jnp.int32) - 127))


def _power_bounds(element: Minifloat, within: bool) -> tuple[float, float]:
  return element.largest / 2 if within else element.power, 0.0


def _pack_float(most: jax.Array, element: Minifloat, within: bool) -> jax.Array:
  return most / element.largest


def _float_bounds(element: Minifloat, within: bool) -> tuple[float, float]:
  return element.largest, 0.0


def _pack_minifloat(most: jax.Array, element: Minifloat, within: bool) -> Scales:
  unit = largest(most) / (element.largest * E4M3.largest)
  scale = safe_divide(most / element.largest, unit)
  return Scales(E4M3.code(scale, jnp.ceil if within else jnp.round).astype(jnp.uint8), unit)


def _unpack_minifloat(packed: Scales) -> jax.Array:
  return E4M3.value(packed.codes) * packed.unit


def _minifloat_bounds(element: Minifloat, within: bool) -> tuple[float, float]:
  # Scales grow by an eighth at most where they are rounded up, by a 17th to the nearest. Those that
  # are too small for that belong to blocks of elements below this part of the leaf's largest one.
  small = 2.0**E4M3.least / E4M3.largest
  return element.largest / (1 + 1 / 8 if within else 1 + 1 / 17), small**2


_POWER = _Scale(_pack_power, _unpack_power, _power_bounds)
_FLOAT = _Scale(_pack_float, lambda scale: scale, _float_bounds)
_MINIFLOAT = _Scale(_pack_minifloat, _unpack_minifloat, _minifloat_bounds)

_FORMATS = {
  'mxfp8': (E4M3, 32, _POWER),
  'mxfp8_e5m2': (E5M2, 32, _POWER),
  'mxfp6': (E2M3, 32, _POWER),
  'mxfp6_e3m2': (E3M2, 32, _POWER),
  'mxfp4': (E2M1, 32, _POWER),
  'nvfp4': (E2M1, 16, _MINIFLOAT),
  'fp8': (E4M3, 1024, _FLOAT),
  'e3m0': (E3M0, 512, _FLOAT),
}
