"""Elements at random places."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decomp.base import Compressor
from decomp.compressors.common import check_fraction, kept


class Sampled(NamedTuple):
  """Values, and the seed from which the receiver draws their places again."""

  values: jax.Array
  seed: jax.Array


def random_k(fraction: float, unbiased: bool = True) -> Compressor:
  """Keeps k = fraction · d elements of each leaf at random places, and drops the rest.

  Places come from a seed that sender and receiver share, so they cost NOTHING on the wire beyond
  the 4 bytes of that seed per leaf. With `unbiased`, values are multiplied by d/k, so that
  E C(x) = x and α² = d/k - 1 exactly; without, C is contractive with δ = k/d exactly.

  The leaf is cut into k strata of nearly equal length, rotated at random, and one element is drawn
  from each: every element is kept with probability k/d exactly and none twice, at the cost of k
  random numbers instead of a shuffle of d.

  Args:
    fraction: the part to keep, above 0 and at most 1; at least one element of a leaf is kept.
    unbiased: whether to rescale.

  Returns:
    A `Compressor` with 4 bytes for each element kept and 4 bytes per leaf.

  >>> x = jnp.ones(8)
  >>> random_k(0.25).decode(random_k(0.25).encode(jax.random.key(0), x), x).sum()
  Array(8., dtype=float32)

  Reference: Stich et al., Sparsified SGD with Memory, arXiv 1809.07599.
  """
  fraction = check_fraction(fraction)

  def encode(key: jax.Array, x: jax.Array) -> Sampled:
    seed = jax.random.bits(key, (), jnp.uint32)
    count = kept(x.size, fraction)
    values = x.reshape(-1)[_places(seed, x.size, count)].astype(jnp.float32)
    scale = x.size / count if unbiased and count else 1.0
    # What is dropped must not hide that something is not finite.
    return Sampled(jnp.where(jnp.isfinite(x).all(), values * scale, jnp.nan), seed)

  def decode(payload: Sampled, like: Any) -> jax.Array:
    places = _places(payload.seed, like.size, payload.values.size)
    flat = jnp.zeros(like.size, jnp.float32).at[places].set(payload.values)
    return flat.reshape(like.shape).astype(like.dtype)

  def alpha2(size: int) -> float:
    return size / max(1, kept(size, fraction)) - 1 if size else 0.0

  def delta(size: int) -> float:
    return kept(size, fraction) / size if size else 1.0

  return Compressor(
    encode,
    decode,
    unbiased,
    alpha2=alpha2 if unbiased else None,
    delta=None if unbiased else delta,
    name=f'random_k({fraction}{"" if unbiased else ", unbiased=False"})',
  )


def _places(seed: jax.Array, size: int, count: int) -> jax.Array:
  """`count` different places below `size`, each with probability count / size."""
  if not count:
    return jnp.zeros(0, jnp.int32)
  # Sender and receiver must draw alike however they are vmapped, which only threefry promises.
  edges = (np.arange(count + 1) * size // count).astype(np.int32)
  within, rotation = jax.random.split(jax.random.key(seed, impl='threefry2x32'))
  places = jax.random.randint(within, (count,), edges[:-1], edges[1:])
  return (places + jax.random.randint(rotation, (), 0, size)) % size
