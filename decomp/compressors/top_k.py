"""The largest elements."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from decomp.base import Compressor
from decomp.compressors.common import check_fraction, kept
from decomp.engine import wire


class Sparse(NamedTuple):
  """Values, and their places with ⌈log₂ d⌉ bits each."""

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
    flat = x.reshape(-1)
    # NaN counts as the largest of all here, so it is always among those kept.
    _, indices = jax.lax.top_k(jnp.abs(flat), kept(x.size, fraction))
    packed = wire.pack_bits(indices.astype(jnp.uint32), _index_bits(x.size))
    return Sparse(flat[indices].astype(jnp.float32), packed)

  def decode(payload: Sparse, like: Any) -> jax.Array:
    count = payload.values.size
    indices = wire.unpack_bits(payload.indices, _index_bits(like.size), count)
    flat = jnp.zeros(like.size, jnp.float32).at[indices].set(payload.values)
    return flat.reshape(like.shape).astype(like.dtype)

  def delta(size: int) -> float:
    return kept(size, fraction) / size if size else 1.0

  return Compressor(encode, decode, unbiased=False, delta=delta, name=f'top_k({fraction})')


def _index_bits(size: int) -> int:
  return max(1, (size - 1).bit_length())
