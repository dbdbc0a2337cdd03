"""Keys for steps, workers and leaves: `jax.random.fold_in`, written out.

On CPU JAX compiles its generator, Threefry-2x32, to a loop of small programs, so that one key takes
longer than a whole step of a small problem. Written out, keys for all workers and leaves are one
small program; the numbers are the same.
"""

import jax
import jax.numpy as jnp

_TURNS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry(
  key: tuple[jax.Array, jax.Array], x: jax.Array, y: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The block function of Threefry-2x32 with 20 rounds, on arrays of uint32.

  References:
    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
  """
  words = (*key, key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
  x, y = x + words[0], y + words[1]
  for number in range(5):
    for turn in _TURNS[number % 2]:
      x = x + y
      y = ((y << turn) | (y >> (32 - turn))) ^ x
    x = x + words[(number + 1) % 3]
    y = y + words[(number + 2) % 3] + jnp.uint32(number + 1)
  return x, y


def murmur(x: jax.Array) -> jax.Array:
  """Mixes the bits of uint32 words: the finaliser of MurmurHash3."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)


def words(key: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Two uint32 words that tell keys apart, whatever generator they belong to."""
  found = jax.random.key_data(key)
  found = found if found.shape == (2,) else jax.random.bits(key, (2,), jnp.uint32)
  return found[0], found[1]


def fold_in(key: jax.Array, number: jax.typing.ArrayLike) -> jax.Array:
  """Threefry keys in the shape of `number`: those of `jax.random.fold_in`, if `key` is one too.

  >>> key = jax.random.key(0)
  >>> bool((fold_in(key, 7) == jax.random.fold_in(key, 7)).all())
  True
  """
  y = jnp.asarray(number).astype(jnp.uint32)
  return jax.random.wrap_key_data(
    jnp.stack(threefry(words(key), jnp.zeros_like(y), y), -1), impl='threefry2x32'
  )
