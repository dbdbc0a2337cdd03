"""Stochastic rounding, and the random numbers for it.

Random bits are most of what a quantizer costs. One block of the generator gives 64 of them, enough
for the 16-bit dithers of four elements. So that XLA on CPU makes each block once, and in the very
loop that uses it, an array is worked on there as four quarters side by side. Accelerators find four
blocks of arithmetic cheaper than to cut an array up: there every element makes its own block anew.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from decomp.base import SharedKey
from decomp.engine.cpu import keys
from decomp.engine.cpu.loops import piece_length, pieces

Key = jax.Array | SharedKey

Rounding = Callable[[jax.Array, jax.Array], jax.Array]
"""(float32 elements, their dithers, int32 from 0 to 2**16 - 1) -> codes, element by element."""


def stochastic_round(
  key: jax.Array, x: jax.Array, dither: str = 'threefry', fraction: int = 16
) -> jax.Array:
  """Rounds each element up with the probability of its fractional part, else down: E round(x) = x.

  Args:
    key: Decides.
    x: float32, |x| < 2**(31 - fraction).
    dither: 'threefry', JAX's own generator; or 'hash', which is cheaper and has passed the tests
      of uniformity and independence in tests/test_rounding.py, but no others.
    fraction: bits after the point, 16 at most; those of the dither too.
  """

  def rounded(part: jax.Array, draws: jax.Array) -> jax.Array:
    return round_with(draws, part, fraction)

  return dithered(rounded, key, x, dither).astype(x.dtype)


def round_with(draws: jax.Array, x: jax.Array, fraction: int = 16) -> jax.Array:
  """Whole numbers, int32, given the dithers: in fixed point it is to add one and drop the fraction.

  With 16 bits the bias is at most 2**-17 of the distance between two integers; integers stay what
  they are.
  """
  fixed = jnp.round(x * 2.0**fraction).astype(jnp.int32)
  return (fixed + (draws >> 16 - fraction)) >> fraction


def dithered(function: Rounding, key: jax.Array, x: jax.Array, dither: str) -> jax.Array:
  """function(x, dithers), the same dithers on every platform."""

  def in_quarters(key: jax.Array, x: jax.Array) -> jax.Array:
    return join(round_quarters(function, key, x.reshape(-1), dither), x.size).reshape(x.shape)

  def in_place(key: jax.Array, x: jax.Array) -> jax.Array:
    return function(x, dithers_of(key, x.shape, dither))

  return jax.lax.platform_dependent(key, x, cpu=in_quarters, default=in_place)


def round_quarters(
  function: Rounding, key: jax.Array, x: jax.Array, dither: str | None
) -> list[jax.Array]:
  """`function` of the `pieces` of a flat array, which share the words of a generator, if any."""
  parts = pieces(x, 4)
  none = [jnp.zeros_like(part, jnp.int32) for part in parts]
  draws = none if dither is None else dithers(key, len(parts[0]), dither)
  return [function(part, draw) for part, draw in zip(parts, draws, strict=True)]


def dithers(key: Key, count: int, dither: str) -> list[jax.Array]:
  """Random numbers from 0 to 2**16 - 1 for four quarters of `count` elements, int32."""
  key, shifted = _drawn_with(key)
  words = DITHERS[dither](key, count)
  # Inverted: a small one rounds up, as it did when they were compared with fractions.
  return [shifted(half) for word in words for half in (~word & 0xFFFF, ~word >> 16)]


def dithers_of(key: Key, shape: tuple[int, ...], dither: str) -> jax.Array:
  """`dithers` of the elements of an array, each where its element is."""
  size, place = math.prod(shape), jnp.zeros(shape, jnp.int32)
  for axis, length in enumerate(shape):
    place = place * length + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
  count = piece_length(size, 4)
  quarter = sum((place >= count * number).astype(jnp.int32) for number in (1, 2, 3))
  key, shifted = _drawn_with(key)
  low, high = DITHERS[dither](key, count, (place - count * quarter).astype(jnp.uint32))
  word = ~jnp.where(quarter < 2, low, high)
  return shifted(jnp.where(quarter % 2 == 0, word & 0xFFFF, word >> 16))


def _drawn_with(key: Key) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
  """The key to draw 16-bit numbers with, and what makes dithers, int32, of them."""
  if not isinstance(key, SharedKey):
    return key, lambda draws: draws.astype(jnp.int32)
  return key.key, lambda draws: (draws.astype(jnp.int32) + key.shift) & 0xFFFF


def join(parts: Sequence[jax.Array], size: int) -> jax.Array:
  """Undoes `pieces`."""
  return jnp.concatenate(parts)[:size]


def threefry(
  key: jax.Array, count: int, numbers: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
  """Random uint32 words, two for each number below `count`, or for these `numbers` of them.

  Written out, the generator becomes part of the loop that uses the words, several times faster than
  `jax.random.bits` on CPU.
  """
  numbers = jnp.arange(count, dtype=jnp.uint32) if numbers is None else numbers
  return keys.threefry(keys.words(key), numbers, jnp.zeros_like(numbers))


def counter_hash(
  key: jax.Array, count: int, numbers: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
  """Random uint32 words: two finalisers of MurmurHash3 of the word's number, a key in each."""
  first, second = keys.words(key)
  numbers = jnp.arange(count, dtype=jnp.uint32) if numbers is None else numbers
  low, high = (
    keys.murmur(keys.murmur(x ^ first) ^ second) for x in (numbers, numbers + jnp.uint32(count))
  )
  return low, high


DITHERS: dict[str, Callable[..., tuple[jax.Array, jax.Array]]] = {
  'threefry': threefry,
  'hash': counter_hash,
}
