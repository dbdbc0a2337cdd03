"""What the compressors share."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decomp.base import Compressor, Decode, Encode, PyTree
from decomp.checks import is_whole as is_whole
from decomp.checks import whole
from decomp.compressors.rounding import DITHERS, Rounding, dithers_of, join, round_quarters
from decomp.engine import wire
from decomp.engine.cpu.loops import largest, once, pieces


class Coded(NamedTuple):
  """Codes of all elements, and what else is needed to decode them."""

  codes: jax.Array
  scale: PyTree


def coder(
  quantize: Callable[[jax.Array], tuple[jax.Array, PyTree]],
  code: Rounding,
  dequantize: Callable[[jax.Array, PyTree], jax.Array],
  bits: int,
  dither: str | None = 'threefry',
  trits: bool = False,
  **facts: Any,
) -> Compressor:
  """A compressor with a code of the same width for every element.

  Args:
    quantize: float32 x -> (where each element lies on a grid, float32, scale).
    code: (elements on the grid, their dithers) -> codes from 0 to 2**bits - 1.
    dequantize: (codes as unsigned integers, scale) -> float32, in the codes' shape.
    bits: of a code.
    dither: where dithers come from; None: `code` asks for none.
    trits: whether codes are 0, 1 and 2 only, and are packed as such.
    **facts: the other fields of `Compressor`.
  """

  def encode(key: jax.Array, x: jax.Array) -> Coded:
    def on_cpu(key: jax.Array, x: jax.Array) -> Coded:
      return in_order(once(in_words, key, x), x)  # each byte is made of several codes

    draft = jax.lax.platform_dependent(key, x, cpu=on_cpu, default=in_place)
    return Coded(pack(draft.codes), draft.scale)

  def decode(payload: Coded, like: Any) -> jax.Array:
    codes = unpack(payload.codes, like.shape)
    return dequantize(codes, payload.scale).astype(like.dtype)

  def quick_encode(key: jax.Array, x: jax.Array) -> Coded:
    def in_rows(key: jax.Array, x: jax.Array) -> Coded:
      codes, scale = in_place(key, x)
      rows = codes.reshape(-1)
      return Coded(jnp.stack(pieces(rows, 4)) if bits <= 8 else rows, scale)

    return jax.lax.platform_dependent(key, x, cpu=in_words, default=in_rows)

  def quick_decode(draft: Coded, like: Any) -> jax.Array:
    return dequantize(*in_order(draft, like)).astype(like.dtype)

  def in_place(key: jax.Array, x: jax.Array) -> Coded:
    grid, scale = quantize(x.astype(jnp.float32))
    draws = jnp.zeros_like(grid, jnp.int32) if dither is None else dithers_of(key, x.shape, dither)
    return Coded(code(grid, draws).astype(kind), scale)

  def in_words(key: jax.Array, x: jax.Array) -> Coded:
    def draw(key: jax.Array, x: jax.Array) -> Coded:
      grid, scale = quantize(x.astype(jnp.float32).reshape(-1))
      parts = round_quarters(code, key, grid, dither)
      return Coded(_words(parts) if bits <= 8 else join(parts, x.size).astype(kind), scale)

    draft = once(draw, key, x)  # four codes in a word, which share a block of random numbers
    return Coded(_bytes(draft.codes), draft.scale) if bits <= 8 else draft

  def in_order(draft: Coded, like: Any) -> Coded:
    return Coded(draft.codes.reshape(-1)[: like.size].reshape(like.shape), draft.scale)

  def pack(codes: jax.Array) -> jax.Array:
    return wire.pack_trits(codes) if trits else wire.pack_bits(codes, bits)

  def unpack(packed: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return wire.unpack_trits(packed, shape) if trits else wire.unpack_bits(packed, bits, shape)

  kind = jnp.uint8 if bits <= 8 else jnp.uint32
  return Compressor(encode, decode, quick=(quick_encode, quick_decode), **facts)


def _words(parts: Sequence[jax.Array]) -> jax.Array:
  """Four quarters of codes below 256 as the bytes of uint32 words."""
  low, *others = [part.astype(jnp.int32) & 0xFF for part in parts]
  for number, part in enumerate(others, 1):
    low |= part << (8 * number)
  return low.astype(jnp.uint32)


def _bytes(words: jax.Array) -> jax.Array:
  """Undoes `_words`: the four quarters in rows, uint8.

  To find an element among words takes a division where its array's last axis does not divide a
  quarter; bytes are in order.
  """
  shifts = 8 * jnp.arange(4, dtype=jnp.uint32)[:, None]
  return (words[None] >> shifts).astype(jnp.uint8)


def safe_divide(x: jax.Array, scale: jax.Array) -> jax.Array:
  """x / scale, and 0 where the scale is 0 or too small to divide by."""
  usable = ~(scale < jnp.finfo(jnp.float32).tiny)
  return jnp.where(usable, x / jnp.where(usable, scale, 1), 0)


def rows(x: jax.Array, length: int) -> jax.Array:
  """The elements of an array in rows of this length, the last one filled up with zeros.

  There is one row at least.

  >>> rows(jnp.arange(3), 2)
  Array([[0, 1],
         [2, 0]], dtype=int32)
  """
  count = max(1, -(-x.size // length))
  return jnp.pad(x.reshape(-1), (0, count * length - x.size)).reshape(count, length)


def from_rows(x: jax.Array, like: Any) -> jax.Array:
  """Undoes `rows`, given an array or its shape."""
  return x.reshape(-1)[: like.size].reshape(like.shape)


def decoded(encode: Encode, decode: Decode) -> tuple[Encode, Decode]:
  """A pair (encode, decode) whose payload is C(x): to decode takes longer than to read."""
  return lambda key, x: decode(encode(key, x), x), lambda value, like: value


def largest_of_blocks(x: jax.Array, length: int) -> jax.Array:
  """`largest` of every `length` elements in order; the last may be fewer.

  >>> largest_of_blocks(jnp.array([1.0, -2.0, 0.5]), 2)
  Array([2. , 0.5], dtype=float32)
  """
  if x.size <= length:
    return largest(x)[None]
  return jax.vmap(largest)(rows(x, length))


def divide_blocks(x: jax.Array, scales: jax.Array, length: int) -> jax.Array:
  """`safe_divide` of every `length` elements in order, each time by another scale.

  >>> divide_blocks(jnp.array([1.0, 2.0, 5.0]), jnp.array([2.0, 5.0]), 2)
  Array([0.5, 1. , 1. ], dtype=float32)
  """
  if x.size <= length:
    return safe_divide(x, scales[0])

  def divide(x: jax.Array, scales: jax.Array) -> jax.Array:
    return from_rows(safe_divide(rows(x, length), scales[:, None]), x)

  def on_cpu(x: jax.Array, scales: jax.Array) -> jax.Array:
    # In a loop over four quarters, to find each element's scale would take longer than the rest.
    return once(divide, x, scales)

  return jax.lax.platform_dependent(x, scales, cpu=on_cpu, default=divide)


def multiply_blocks(x: jax.Array, scales: jax.Array, length: int) -> jax.Array:
  """Undoes `divide_blocks`."""
  if x.size <= length:
    return x * scales[0]
  return from_rows(rows(x, length) * scales[:, None], x)


def check_bits(value: Any, least: int, most: int) -> int:
  """`bits` as an int, or a ValueError that says what is allowed."""
  return whole('bits', value, least, most)


def check_scales(name: str, compressor: Compressor) -> None:
  """A ValueError if it has a limit, which would not hold for the elements of a leaf."""
  if math.isfinite(compressor.limit):
    raise ValueError(
      f'{name}={compressor}: must scale with its input, such as stochastic_quantizer(bits=4)'
    )


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
