"""The largest elements of every chunk."""

from typing import Any

import jax
import jax.numpy as jnp

from decomp.base import Compressor
from decomp.checks import whole
from decomp.compressors import places
from decomp.compressors.common import from_rows, rows
from decomp.compressors.selecting import kept_by_size, largest_in_order


def chunk_top_k(k: int, chunk: int) -> Compressor:
  """Keeps the k elements of the largest magnitude of every `chunk` elements, and drops the rest.

  Every part of a leaf is heard, which `top_k` does not promise, and chunks are searched side by
  side. Of the last chunk, which may be shorter, as many are kept, or all.

  Biased. Contractive with δ >= k / chunk; 0.12 for 64 of 4096 Gaussian elements.

  Args:
    k: how many of each chunk, from 1 to `chunk`.
    chunk: the length of a chunk.

  Returns:
    A `Compressor` with 4 bytes for each element kept, and places coded as those of `top_k`, over
    the whole leaf: 8.0 bits for each of 64 of every 4096.

  >>> x = jnp.array([1.0, -5.0, 2.0, 0.5, 0.25])
  >>> chunk_top_k(1, 2).decode(chunk_top_k(1, 2).encode(jax.random.key(0), x), x)
  Array([ 0.  , -5.  ,  2.  ,  0.  ,  0.25], dtype=float32)

  Reference: Peng et al., DeMo: Decoupled Momentum Optimization, arXiv 2411.19870.
  """
  chunk = whole('chunk', chunk)
  k = whole('k', k, 1, chunk)

  def encode(key: jax.Array, x: jax.Array) -> places.Sparse:
    del key  # deterministic
    cut, count = cut_up(x)
    values, within = jax.vmap(lambda row: largest_in_order(row, count))(cut)
    chunks, length = cut.shape
    indices = length * jnp.arange(chunks)[:, None] + within
    # What the last chunk is filled up with comes last, and is left out.
    whole, rest = divmod(x.size, length)
    total = whole * count + min(count, rest)
    return places.sparse(values.reshape(-1)[:total], indices.reshape(-1)[:total], x.size)

  def quick_encode(key: jax.Array, x: jax.Array) -> jax.Array:
    del key
    cut, count = cut_up(x)
    kept = jax.vmap(lambda row: kept_by_size(row, count))(cut)
    return jnp.where(from_rows(kept, x), x, 0)

  def quick_decode(payload: jax.Array, like: Any) -> jax.Array:
    return payload

  def cut_up(x: jax.Array) -> tuple[jax.Array, int]:
    """(the chunks, how many of each are kept)."""
    length = min(chunk, max(1, x.size))
    return rows(x, length), min(k, length)

  def delta(size: int) -> float:
    return min(1.0, k / min(chunk, size)) if size else 1.0

  quick = quick_encode, quick_decode
  name = f'chunk_top_k({k}, {chunk})'
  return Compressor(encode, places.dense, unbiased=False, delta=delta, quick=quick, name=name)
