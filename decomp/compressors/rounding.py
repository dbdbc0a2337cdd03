"""Stochastic rounding, and the random numbers for it.

Random bits are most of what a quantizer costs. One block of the generator gives 64 of them, enough
for the 16-bit dithers of four elements; so that a compiler makes each block once, and in the very
loop that uses it, an array is worked on as four quarters side by side.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from decomp.engine.cpu import keys
from decomp.engine.cpu.loops import pieces

Dither = Callable[[jax.Array, int], tuple[jax.Array, jax.Array]]


def stochastic_round(
  key: jax.Array, x: jax.Array, dither: str = 'threefry', fraction: int = 16
) -> jax.Array:
  """Rounds each element up with the probability of its fractional part, else down: E round(x) = x.

  It does so in fixed point, where adding a dither and dropping the fraction is all there is to do.
  With 16 bits the bias is at most 2**-17 of the distance between two integers; integers stay what
  they are.

  Args:
    key: Decides.
    x: float32, |x| < 2**(31 - fraction).
    dither: 'threefry', JAX's own generator; or 'hash', which is cheaper and has passed the tests
      of uniformity and independence in tests/test_rounding.py, but no others.
    fraction: bits after the point, 16 at most; those of the dither too.
  """
  parts = round_quarters(key, x.reshape(-1), dither, fraction)
  return join(parts, x.size).reshape(x.shape).astype(x.dtype)


def round_quarters(
  key: jax.Array, x: jax.Array, dither: str = 'threefry', fraction: int = 16
) -> list[jax.Array]:
  """`quarters` of what `stochastic_round` makes of a flat array, int32."""
  parts = quarters(x)
  return [
    (jnp.round(part * 2.0**fraction).astype(jnp.int32) + (draw >> 16 - fraction)) >> fraction
    for draw, part in zip(dithers(key, len(parts[0]), dither), parts, strict=True)
  ]


def dithers(key: jax.Array, count: int, dither: str) -> list[jax.Array]:
  """Random numbers from 0 to 2**16 - 1 for four quarters of `count` elements, int32."""
  words = DITHERS[dither](key, count)
  # Inverted: a small one rounds up, as it did when they were compared with fractions.
  return [half.astype(jnp.int32) for word in words for half in (~word & 0xFFFF, ~word >> 16)]


def quarters(x: jax.Array) -> list[jax.Array]:
  """A flat array as `pieces` that share the words of a generator."""
  return pieces(x, 4)


def join(parts: Sequence[jax.Array], size: int) -> jax.Array:
  """Undoes `pieces`."""
  return jnp.concatenate(parts)[:size]


def threefry(key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """Random uint32 words, two for each number below `count`.

  Written out, the generator becomes part of the loop that uses the words, several times faster than
  `jax.random.bits` on CPU.
  """
  numbers = jnp.arange(count, dtype=jnp.uint32)
  return keys.threefry(keys.words(key), numbers, jnp.zeros_like(numbers))


def counter_hash(key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """Random uint32 words: two finalisers of MurmurHash3 of the word's number, a key in each."""
  first, second = keys.words(key)
  numbers = jnp.arange(count, dtype=jnp.uint32)
  low, high = (
    keys.murmur(keys.murmur(x ^ first) ^ second) for x in (numbers, numbers + jnp.uint32(count))
  )
  return low, high


DITHERS: dict[str, Dither] = {'threefry': threefry, 'hash': counter_hash}
