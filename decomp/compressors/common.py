"""What the compressors share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decomp import wire
from decomp.base import Compressor, PyTree
from decomp.compressors.rounding import DITHERS
from decomp.once import once


class Coded(NamedTuple):
  """Packed codes of all elements, and what else is needed to decode them."""

  codes: jax.Array
  scale: PyTree


def coder(
  quantize: Callable[[jax.Array, jax.Array], tuple[jax.Array, PyTree]],
  dequantize: Callable[[jax.Array, PyTree], jax.Array],
  bits: int,
  **facts: Any,
) -> Compressor:
  """A compressor with a code of the same width for every element.

  Args:
    quantize: (key, float32 [d]) -> (codes [d] in 0 to 2**bits - 1 of any dtype, scale).
    dequantize: (codes as float32, or as `quantize` made them; scale) -> float32 [d].
    bits: of a code.
    **facts: the other fields of `Compressor`.
  """

  def encode(key: jax.Array, x: jax.Array) -> Coded:
    codes, scale = once(quantize, key, _flat(x))  # each byte is made of several
    return Coded(wire.pack_bits(codes, bits), scale)

  def decode(payload: Coded, like: Any) -> jax.Array:
    codes = wire.unpack_bits(payload.codes, bits, like.size)
    return dequantize(codes, payload.scale).reshape(like.shape).astype(like.dtype)

  def roundtrip(key: jax.Array, x: jax.Array) -> jax.Array:
    return dequantize(*quantize(key, _flat(x))).reshape(x.shape).astype(x.dtype)

  return Compressor(encode, decode, roundtrip=roundtrip, **facts)


def _flat(x: jax.Array) -> jax.Array:
  return x.astype(jnp.float32).reshape(-1)


def safe_divide(x: jax.Array, scale: jax.Array) -> jax.Array:
  """x / scale, and 0 where the scale is 0 or too small to divide by."""
  usable = ~(scale < jnp.finfo(jnp.float32).tiny)
  return jnp.where(usable, x / jnp.where(usable, scale, 1), 0)


def is_whole(value: Any) -> bool:
  """Whether it is a whole number, of Python's or NumPy's."""
  return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_bits(value: Any, least: int, most: int) -> int:
  """`bits` as an int, or a ValueError that says what is allowed."""
  if not is_whole(value) or not least <= value <= most:
    raise ValueError(f'bits={value!r}: must be a whole number from {least} to {most}')
  return int(value)


def check_dither(value: str) -> str:
  """`dither`, or a ValueError that says what is allowed; as text for the end of a name."""
  if value not in DITHERS:
    raise ValueError(f'dither={value!r}: must be one of {", ".join(DITHERS)}')
  return '' if value == 'threefry' else f', dither={value!r}'


def check_fraction(value: Any) -> float:
  """`fraction` as a float, or a ValueError that says what is allowed."""
  number = isinstance(value, int | float | np.floating) and not isinstance(value, bool)
  if not number or not 0 < value <= 1:
    raise ValueError(f'fraction={value!r}: must be above 0 and at most 1, such as 0.01 for 1 %')
  return float(value)


def kept(size: int, fraction: float) -> int:
  """How many of `size` elements a sparsifier keeps: the nearest whole number, at least one."""
  return min(size, max(1, round(fraction * size)))
