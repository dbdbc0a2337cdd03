"""The largest elements."""

from typing import Any

import jax
import jax.numpy as jnp

from decomp.base import Compressor
from decomp.compressors import places
from decomp.compressors.common import check_fraction, kept
from decomp.compressors.selecting import kept_by_size, largest_in_order


def top_k(fraction: float) -> Compressor:
  """Keeps the k = fraction · d elements of the largest magnitude of each leaf, and drops the rest.

  Biased. Contractive with δ >= k/d; 0.08 for the top 1 % of Gaussian input.

  Args:
    fraction: the part to keep, above 0 and at most 1; at least one element of a leaf is kept.

  Returns:
    A `Compressor` with 4 bytes for each element kept, l = ⌊log₂(d/k)⌋ bits of its place, and
    k + ⌈d / 2ˡ⌉ bits for the rest of all places, which is 8.6 bits a place in all for the top 1 %.

  >>> x = jnp.array([1.0, -5.0, 2.0, 0.5])
  >>> top_k(0.5).decode(top_k(0.5).encode(jax.random.key(0), x), x)
  Array([ 0., -5.,  2.,  0.], dtype=float32)

  Reference: Stich et al., Sparsified SGD with Memory, arXiv 1809.07599.
  """
  fraction = check_fraction(fraction)

  def encode(key: jax.Array, x: jax.Array) -> places.Sparse:
    del key  # deterministic
    return places.sparse(*largest_in_order(x.reshape(-1), kept(x.size, fraction)), x.size)

  def quick_encode(key: jax.Array, x: jax.Array) -> jax.Array:
    del key
    return jnp.where(kept_by_size(x, kept(x.size, fraction)), x, 0)

  def quick_decode(payload: jax.Array, like: Any) -> jax.Array:
    return payload

  def delta(size: int) -> float:
    return kept(size, fraction) / size if size else 1.0

  quick = quick_encode, quick_decode
  name = f'top_k({fraction})'
  return Compressor(encode, places.dense, unbiased=False, delta=delta, quick=quick, name=name)
