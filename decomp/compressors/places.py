"""Values at some places of a large array, and these places in few bits."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from decomp.engine import wire


class Sparse(NamedTuple):
  """Values in the order of their places, and these as `encode` packs them."""

  values: jax.Array
  indices: jax.Array


def sparse(values: jax.Array, indices: jax.Array, size: int) -> Sparse:
  """The message that holds these values, which lie at rising places below `size`."""
  return Sparse(values.astype(jnp.float32), encode(indices, size))


def dense(payload: Sparse, like: Any) -> jax.Array:
  """Undoes `sparse`: an array in this shape, 0 where nothing was sent."""
  places = decode(payload.indices, payload.values.size, like.size)
  flat = jnp.zeros(like.size, jnp.float32)
  flat = flat.at[places].set(payload.values, unique_indices=True, indices_are_sorted=True)
  return flat.reshape(like.shape).astype(like.dtype)


def encode(indices: jax.Array, size: int) -> jax.Array:
  """Packs k rising places below d = `size`, by the code of Elias and Fano.

  The l = ⌊log₂(d/k)⌋ low bits of each place are sent as they are. The others, pᵢ >> l, rise slowly
  from 0 to d / 2ˡ: they become a vector of k + ⌈d / 2ˡ⌉ bits, in which bit i + (pᵢ >> l) is the
  i-th one. That makes l + 2 to l + 3 bits a place, whatever the places are, where ⌈log₂ d⌉ would
  do for any order: 8.6 instead of 20 for 1 % of 10⁶ elements.

  One bit for each element is shorter where more than about a quarter of them is kept, and sent
  there; so are places as they are where there are very few. For all elements nothing is sent.

  >>> encode(jnp.arange(10) * 99, 1000).nbytes
  12

  Reference: Vigna, Quasi-Succinct Indices, arXiv 1206.4300.
  """
  low, marks = _layout(indices.size, size)
  ones = jnp.zeros(marks, jnp.uint8)
  if marks:
    at = (indices >> low) + _added(indices.size, low)
    ones = ones.at[at].set(1, unique_indices=True, indices_are_sorted=True)
  parts = wire.pack_bits((indices & (2**low - 1)).astype(jnp.uint32), low), wire.pack_bits(ones, 1)
  return jnp.concatenate(parts)


def decode(packed: jax.Array, count: int, size: int) -> jax.Array:
  """Undoes `encode`: `count` places below `size`, int32.

  >>> decode(encode(jnp.array([2, 3, 700]), 1000), 3, 1000)
  Array([  2,   3, 700], dtype=int32)
  """
  low, marks = _layout(count, size)
  if not low and not marks:
    return jnp.arange(count)
  end = wire.packed_size(count, low)
  places = wire.unpack_bits(packed[:end], low, count).astype(jnp.int32)
  if marks:
    ones = _ones(wire.unpack_bits(packed[end:], 1, marks), count)
    places |= (ones - _added(count, low)) << low
  return places


def _layout(count: int, size: int) -> tuple[int, int]:
  """(l, the length of the bit vector), of the code that makes the fewest bytes."""
  if count in (0, size):
    return 0, 0
  low = (size // count).bit_length() - 1
  plain, a_bit_each, coded = ((size - 1).bit_length(), 0), (0, size), (low, count - -size // 2**low)

  def packed(layout: tuple[int, int]) -> int:
    return wire.packed_size(count, layout[0]) + wire.packed_size(layout[1], 1)

  return min(a_bit_each, coded, plain, key=packed)


def _added(count: int, low: int) -> jax.Array:
  """What is added to the high part of each place: its number, but 0 if every element has a bit."""
  return jnp.arange(count) if low else jnp.zeros(count, jnp.int32)


def _ones(bits: jax.Array, count: int) -> jax.Array:
  """The places of the `count` ones among bits, in order."""
  numbers = jnp.arange(bits.size)
  # Each goes where its rank is; zeros go beyond the end, where they are dropped.
  ranks = jnp.where(bits > 0, jnp.cumsum(bits.astype(jnp.int32)) - 1, count + numbers)
  return jnp.zeros(count, jnp.int32).at[ranks].set(numbers, mode='drop', unique_indices=True)
