"""Stochastic rounding, and the random numbers for it."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from decomp import keys

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

  Written out, the generator becomes part of the loop that uses the words, several times faster than
  `jax.random.bits` on CPU although half of its output is not used.
  """
  numbers = jnp.arange(size, dtype=jnp.uint32)
  return keys.threefry(keys.words(key), numbers, jnp.zeros_like(numbers))[0]


def counter_hash(key: jax.Array, size: int) -> jax.Array:
  """Random uint32 words: two finalisers of MurmurHash3 of the element's number, a key in each."""
  first, second = keys.words(key)
  return keys.murmur(keys.murmur(jnp.arange(size, dtype=jnp.uint32) ^ first) ^ second)


DITHERS: dict[str, Dither] = {'threefry': threefry, 'hash': counter_hash}
