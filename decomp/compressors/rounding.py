"""Stochastic rounding, and the random numbers for it."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

Dither = Callable[[jax.Array, int], jax.Array]


def stochastic_round(key: jax.Array, x: jax.Array, dither: str = 'threefry') -> jax.Array:
  """Rounds each element up with the probability of its fractional part, else down: E round(x) = x.

  The dither has 24 bits, so the bias is at most 2**-25 of the distance between two integers, and
  integers stay what they are.

  Args:
    key: Decides.
    x: float32.
    dither: 'threefry', JAX's own generator; or 'hash', which is cheaper and has passed the tests
      of uniformity and independence in tests/test_rounding.py, but no others.
  """
  low = jnp.floor(x)
  words = DITHERS[dither](key, x.size).reshape(x.shape)
  uniform = (words >> 8).astype(jnp.float32) * 2.0**-24 + 2.0**-25
  return low + (uniform < x - low).astype(x.dtype)


def threefry(key: jax.Array, size: int) -> jax.Array:
  """Random uint32 words, one of the generator's two for each element.

  This is the Threefry-2x32 of `jax.random.bits`, which on CPU is a loop that writes its state to
  memory 5 times. Written out it becomes part of the loop that uses the words, several times faster
  although half of its output is not used.

  References:
    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
  """
  first, second = _words(key)
  keys = (first, second, first ^ second ^ jnp.uint32(0x1BD11BDA))
  x, y = jnp.arange(size, dtype=jnp.uint32) + first, second
  for number in range(5):
    for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[number % 2]:
      x = x + y
      y = ((y << turn) | (y >> (32 - turn))) ^ x
    x = x + keys[(number + 1) % 3]
    y = y + keys[(number + 2) % 3] + jnp.uint32(number + 1)
  return x


def counter_hash(key: jax.Array, size: int) -> jax.Array:
  """Random uint32 words: two finalisers of MurmurHash3 of the element's number, a key in each."""
  first, second = _words(key)
  return _mix(_mix(jnp.arange(size, dtype=jnp.uint32) ^ first) ^ second)


DITHERS: dict[str, Dither] = {'threefry': threefry, 'hash': counter_hash}


def _words(key: jax.Array) -> jax.Array:
  """Two uint32 words that tell keys apart, whatever generator they belong to."""
  words = jax.random.key_data(key)
  return words if words.shape == (2,) else jax.random.bits(key, (2,), jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)
