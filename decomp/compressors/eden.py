"""A random rotation before rounding: every message looks Gaussian, and few bits are enough."""

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

from decomp.base import Compressor
from decomp.compressors.common import check_bits, from_rows, rows, safe_divide
from decomp.engine import wire
from decomp.engine.cpu import keys
from decomp.engine.cpu.loops import largest, once

_ROWS = ((8, 4), (8, 8), (16, 8), (16, 16), (32, 16), (32, 32))
"""A row of 32 to 1024 elements as height and width. In a shorter one a large element would still
show after the rotation; in a longer one the transform takes longer and saves few bytes.

Arrays are [height, width · rows]: all rows side by side, so that loops are long, and CPUs need not
divide to find an element.
"""


class Rotated(NamedTuple):
  """Codes of the rotated elements, a scale for each row, and the seed of the rotation."""

  codes: jax.Array
  scale: jax.Array
  seed: jax.Array


def eden(bits: int) -> Compressor:
  """Rotates each leaf at random, then rounds its elements to the nearest of 2**bits points.

  Let R be a random rotation. Whatever x is, the elements of √d R x / |x| are close to independent
  standard normal numbers. q rounds them to the Lloyd-Max points of that distribution, ±0.8 for one
  bit, and the receiver rotates back:

    C(x) = s Rᵀ q,   s = |x|² / <q, R x>,   so that <C(x), x> = |x|² and E C(x) = x.

  With D the squared error of the points, |C(x) - x|² is close to |x|² D / (1 - D): α² = 0.571,
  0.133, 0.0358 and 0.0096 for 1 to 4 bits, of dense and of sparse input alike. Other unbiased
  codes need 3 bits to come below 1.

  R is random signs and a Hadamard transform, twice: after one pass a few large elements would still
  show. A leaf is cut into rows of a power of two, 1024 at most, each with a scale of its own. That
  C is unbiased and α² the same for every x is a theorem for uniformly random rotations, and
  measured for these.

  Args:
    bits: bits per element, 1 to 4.

  Returns:
    An unbiased `Compressor` whose message has `bits` bits per element, 4 bytes for each row and 4
    for the seed. The last row is filled up with zeros. The length of a row is the one with the
    shortest message; leaves for which that would be longer than their elements are sent as they
    are.

  >>> x = jnp.zeros(1000).at[7].set(10.0)
  >>> payload = eden(bits=1).encode(jax.random.key(0), x)
  >>> payload.codes.nbytes, payload.scale.nbytes, payload.seed.nbytes
  (128, 4, 4)

  Reference: Vargaftik et al., EDEN: Communication-Efficient and Robust Distributed Mean Estimation
  for Federated Learning, arXiv 2108.08842.
  """
  bits = check_bits(bits, 1, 4)
  points, edges, error = lloyd_max(bits)
  half = 2 ** (bits - 1)

  def encode(key: jax.Array, x: jax.Array) -> Rotated | jax.Array:
    if _as_it_is(x.size):
      return x.astype(jnp.float32)
    seed, turned, scale, unit = rotated(key, x)
    codes = once(code, turned, unit)  # each byte is made of several codes
    return Rotated(wire.pack_bits(codes, bits), scale, seed)

  def decode(payload: Rotated | jax.Array, like: Any) -> jax.Array:
    if not isinstance(payload, Rotated):
      return payload.astype(like.dtype)
    height, width, count = _layout(like.size)
    codes = wire.unpack_bits(payload.codes, bits, (height, width * count))
    return restored(payload.seed, near(codes) * jnp.tile(payload.scale, (1, width)), like)

  def quick_encode(key: jax.Array, x: jax.Array) -> jax.Array:
    # What everyone decodes is computed once: to rotate takes longer than to read.
    if _as_it_is(x.size):
      return x
    seed, turned, scale, unit = rotated(key, x)
    scale = jnp.tile(scale, (1, _layout(x.size)[1]))
    return restored(seed, near(code(turned, unit)) * scale, x)

  def quick_decode(value: jax.Array, like: Any) -> jax.Array:
    return value

  def rotated(key: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
    """(seed, R x / max|x|, s of each row, the standard deviation of each row, `width` times)."""
    seed = jax.random.bits(key, (), jnp.uint32)
    height, width, count = _layout(x.size)

    def total(x: jax.Array) -> jax.Array:
      return x.sum(0).reshape(width, count).sum(0)

    # Squares of large or small elements leave the range of float32; those of x / max do not.
    x = x.astype(jnp.float32)
    most = largest(x)
    x = once(lambda x: rows(x, height * width).reshape(height, width * count), x)
    first, second = _signs(seed, x.shape)
    turned = _flip(_hadamard(_flip(safe_divide(x, most), first), width), second)
    turned = _hadamard(turned, width)
    squares = total(turned**2)  # as many as before the rotation
    unit = jnp.tile(jnp.sqrt(squares / (height * width)), (1, width))
    found = once(lambda turned, unit: near(code(turned, unit)) * turned, turned, unit)
    scale = once(lambda *sums: most * safe_divide(*sums), squares, total(found))
    return seed, turned, scale, unit

  def restored(seed: jax.Array, turned: jax.Array, like: Any) -> jax.Array:
    width = _layout(like.size)[1]
    first, second = _signs(seed, turned.shape)
    x = _flip(_hadamard(_flip(_hadamard(turned, width), second), width), first)
    return once(lambda x: from_rows(x, like), x).astype(like.dtype)

  def code(turned: jax.Array, unit: jax.Array) -> jax.Array:
    """The number of the nearest point, its sign first."""
    codes = jnp.where(turned < 0, np.uint8(half), np.uint8(0))
    for edge in edges:
      codes += (jnp.abs(turned) > edge * unit).astype(jnp.uint8)
    return codes

  def near(codes: jax.Array) -> jax.Array:
    """The points that codes stand for."""
    value = jnp.float32(points[0])
    for number, point in enumerate(points[1:], 1):
      value = jnp.where(codes % half >= number, point, value)
    return jnp.where(codes >= half, -value, value)

  def alpha2(size: int) -> float:
    return 0.0 if _as_it_is(size) else error / (1 - error)

  def _layout(size: int) -> tuple[int, int, int]:
    """(height, width, rows): the elements with one last index are a row."""
    height, width, count = min(
      ((height, width, -(-size // (height * width))) for height, width in _ROWS),
      key=lambda layout: _bytes(*layout),
    )
    return height, width, count

  def _bytes(height: int, width: int, count: int) -> int:
    return wire.packed_size(count * height * width, bits) + 4 * count + 4

  def _as_it_is(size: int) -> bool:
    return 4 * size <= _bytes(*_layout(size))

  quick = quick_encode, quick_decode
  return Compressor(encode, decode, unbiased=True, alpha2=alpha2, quick=quick, name=f'eden({bits})')


@functools.lru_cache
def lloyd_max(bits: int) -> tuple[tuple[float, ...], tuple[float, ...], float]:
  """The 2**bits points with the least squared error D of a standard normal number, and D.

  Each point is the mean of its cell, each edge of a cell half-way between two points: iterated
  until both hold.

  Returns:
    The positive points, the edges between them, and D.

  >>> lloyd_max(1)
  ((0.7978845608028654,), (), 0.3633802276324186)
  """

  def density(x: float) -> float:
    return math.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)

  def mass(low: float, high: float) -> float:
    return (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2

  count = 2 ** (bits - 1)
  points = [3 * (number + 0.5) / count for number in range(count)]
  for _ in range(2000):
    middles = [(low + high) / 2 for low, high in itertools.pairwise(points)]
    cells = list(zip([0.0, *middles], [*middles, math.inf], strict=True))
    points = [(density(low) - density(high)) / mass(low, high) for low, high in cells]
  error = 1 - 2 * sum(p**2 * mass(*cell) for p, cell in zip(points, cells, strict=True))
  return tuple(points), tuple(middles), error


def _signs(seed: jax.Array, shape: tuple[int, ...]) -> list[jax.Array]:
  """Random signs of all elements for either pass, as the highest bits of uint32 words.

  The elements of a column share a word. Sender and receiver draw alike however they are vmapped.
  """

  def draw(seed: jax.Array) -> tuple[jax.Array, jax.Array]:
    numbers = jnp.arange(shape[1], dtype=jnp.uint32)
    return keys.threefry((seed, jnp.zeros_like(seed)), numbers, jnp.zeros_like(numbers))

  places = jnp.arange(shape[0], dtype=jnp.uint32)[:, None]
  return [word[None] << places for word in once(draw, seed)]


def _flip(x: jax.Array, signs: jax.Array) -> jax.Array:
  """x where the highest bit of `signs` is 0, -x where it is 1."""
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32) ^ (signs & np.uint32(1 << 31))
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _hadamard(x: jax.Array, width: int) -> jax.Array:
  """The orthonormal Hadamard transform of each row, its own inverse: products with two factors."""
  return _product(_product(x).reshape(x.shape[0], width, -1)).reshape(x.shape)


@jax.custom_batching.custom_vmap
def _product(x: jax.Array) -> jax.Array:
  """H x for the Hadamard matrix H, on the last axis but one.

  On CPU all other axes are batches of products: else the result would be laid out anew.
  """
  length = x.shape[-2]
  matrix = (scipy.linalg.hadamard(length) / math.sqrt(length)).astype(np.float32)

  def on_cpu(x: jax.Array) -> jax.Array:
    return jnp.matmul(
      jnp.broadcast_to(matrix, (*x.shape[:-2], length, length)), x, precision='highest'
    )

  def usual(x: jax.Array) -> jax.Array:
    return jnp.einsum('ij,...jk->...ik', matrix, x, precision='highest')

  return jax.lax.platform_dependent(x, cpu=on_cpu, default=usual)


@_product.def_vmap
def _product_of_all(axis_size: int, in_batched: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
  del axis_size
  return _product(x), in_batched[0]
