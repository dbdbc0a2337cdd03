"""The largest elements."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from decomp.base import Compressor
from decomp.compressors.common import check_fraction, kept
from decomp.compressors.selecting import kept_by_size, largest_in_order
from decomp.engine import wire


class Sparse(NamedTuple):
  """Values in the order of their places, and these with ⌈log₂ d⌉ bits each."""

  values: jax.Array
  indices: jax.Array


def top_k(fraction: float) -> Compressor:
  """Keeps the k = fraction · d elements of the largest magnitude of each leaf, and drops the rest.

  Biased. Contractive with δ >= k/d; 0.08 for the top 1 % of Gaussian input.

  Args:
    fraction: the part to keep, above 0 and at most 1; at least one element of a leaf is kept.

  Returns:
    A `Compressor` with 4 bytes and ⌈log₂ d⌉ bits for each element kept.

  >>> x = jnp.array([1.0, -5.0, 2.0, 0.5])
  >>> top_k(0.5).decode(top_k(0.5).encode(jax.random.key(0), x), x)
  Array([ 0., -5.,  2.,  0.], dtype=float32)

  Reference: Stich et al., Sparsified SGD with Memory, arXiv 1809.07599.
  """
  fraction = check_fraction(fraction)

  def encode(key: jax.Array, x: jax.Array) -> Sparse:
    del key  # deterministic
    values, indices = largest_in_order(x.reshape(-1), kept(x.size, fraction))
    packed = wire.pack_bits(indices.astype(jnp.uint32), _index_bits(x.size))
    return Sparse(values.astype(jnp.float32), packed)

  def decode(payload: Sparse, like: Any) -> jax.Array:
    count = payload.values.size
    indices = wire.unpack_bits(payload.indices, _index_bits(like.size), count).astype(jnp.int32)
    flat = jnp.zeros(like.size, jnp.float32)
    flat = flat.at[indices].set(payload.values, unique_indices=True, indices_are_sorted=True)
    return flat.reshape(like.shape).astype(like.dtype)

  def quick_encode(key: jax.Array, x: jax.Array) -> jax.Array:
    del key
    return jnp.where(kept_by_size(x, kept(x.size, fraction)), x, 0)

  def quick_decode(payload: jax.Array, like: Any) -> jax.Array:
    return payload

  def delta(size: int) -> float:
    return kept(size, fraction) / size if size else 1.0

  quick = quick_encode, quick_decode
  name = f'top_k({fraction})'
  return Compressor(encode, decode, unbiased=False, delta=delta, quick=quick, name=name)


def _index_bits(size: int) -> int:
  return max(1, (size - 1).bit_length())
