"""The k largest of many elements, without sorting them.

The k-th largest magnitude is found bit by bit: a number that at least k elements reach is kept, and
the next lower bit is tried. Counting is one pass over the array, and there are 31 of them at most;
a sort of a million elements takes a processor as long as hundreds of such passes.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

_LANES = {'cpu': 8, 'default': 128}
"""The length of the rows in which kept elements are looked for: of the k rows that hold one, all
elements are read. Accelerators read 128 as quickly as one."""


def kept_by_size(x: jax.Array, count: int) -> jax.Array:
  """Which elements are the `count` of the largest magnitude; of equal ones the first are taken.

  NaN is larger than anything, so that it is always among those kept.

  >>> kept_by_size(jnp.array([1.0, -5.0, 2.0, 2.0]), 2)
  Array([False,  True,  True, False], dtype=bool)
  """
  bits, places = _bits(x), _places(x.shape)
  least, last = _threshold(bits, count)
  return _kept(bits, places, least, last)


def largest_in_order(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """The `count` elements of the largest magnitude of a flat array, and their places in order.

  >>> largest_in_order(jnp.array([1.0, -5.0, 2.0, 2.0]), 2)
  (Array([-5.,  2.], dtype=float32), Array([1, 2], dtype=int32))
  """
  least, last = _threshold(_bits(x), count)
  size = x.size

  def kept(x: jax.Array, places: jax.Array) -> jax.Array:
    return _kept(_bits(x), places, least, last) & (places < size)

  def in_rows_of(lanes: int, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows = jnp.pad(x, (0, -size % lanes)).reshape(-1, lanes)
    ends = jnp.cumsum(kept(rows, _places(rows.shape)).sum(-1))
    # The row of each one that is kept: how many rows end before it.
    row = jnp.cumsum(jnp.zeros(count, jnp.int32).at[ends].add(1, mode='drop'))
    numbers = jnp.arange(count)
    first = jax.lax.cummax(jnp.where(row != jnp.roll(row, 1), numbers, 0))
    found = rows[row]
    places = row[:, None] * lanes + jax.lax.broadcasted_iota(jnp.int32, found.shape, 1)
    among = kept(found, places)
    chosen = among & (_running(among) == (numbers - first + 1)[:, None])
    return jnp.where(chosen, found, 0).sum(-1), jnp.where(chosen, places, 0).sum(-1)

  ways = {name: functools.partial(in_rows_of, lanes) for name, lanes in _LANES.items()}
  return jax.lax.platform_dependent(x, **ways)


def _bits(x: jax.Array) -> jax.Array:
  """Magnitudes as whole numbers in the same order, NaN last."""
  return jax.lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.uint32)


def _places(shape: tuple[int, ...]) -> jax.Array:
  """The number of each element, in order."""
  return jnp.arange(math.prod(shape), dtype=jnp.int32).reshape(shape)


def _kept(bits: jax.Array, places: jax.Array, least: jax.Array, last: jax.Array) -> jax.Array:
  """Which elements a threshold keeps."""
  return (bits > least) | ((bits == least) & (places < last))


def _threshold(bits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """(the least magnitude that is kept, the place before which elements equal to it are)."""

  def search(width: int) -> tuple[jax.Array, jax.Array]:
    """(the largest number that `count` elements reach, how many do), `width` bits at a time.

    It is over as soon as exactly `count` do; what is lower cannot change that.
    """

    def lower(state: tuple[Any, ...]) -> tuple[Any, ...]:
      left, least, reached = state
      left = left - width
      for tried in [least | (jnp.uint32(digit) << left) for digit in range(1, 2**width)]:
        found = _total(bits >= tried)
        least, reached = jax.tree.map(
          functools.partial(jnp.where, found >= count), (tried, found), (least, reached)
        )
      return left, least, reached

    def unsettled(state: tuple[Any, ...]) -> jax.Array:
      left, _, reached = state
      return (left > 0) & (reached > count)

    start = jnp.uint32(32 // width * width), jnp.uint32(0), jnp.int32(bits.size)
    return jax.lax.while_loop(unsettled, lower, start)[1:]

  # A pass with many comparisons costs accelerators no more than one: they wait for the memory.
  least, reached = jax.lax.platform_dependent(cpu=lambda: search(1), default=lambda: search(4))
  # All bits are known, and there may still be too many: they are equal.
  larger, places = _total(bits > least), _places(bits.shape)

  def next_place(state: tuple[Any, ...]) -> tuple[Any, ...]:
    left, last = state
    tried = last | (jnp.int32(1) << left - 1)
    few = larger + _total((bits == least) & (places < tried)) <= count
    return left - 1, jnp.where(few, tried, last)

  def too_many(state: tuple[Any, ...]) -> jax.Array:
    return (state[0] > 0) & (reached > count)

  start = jnp.int32(bits.size.bit_length()), jnp.int32(0)
  _, last = jax.lax.while_loop(too_many, next_place, start)
  return least, jnp.where(reached > count, last, bits.size)


def _total(which: jax.Array) -> jax.Array:
  """How many there are, int32."""

  def product(which: jax.Array) -> jax.Array:
    flat = which.reshape(-1).astype(jnp.float32)
    return (flat @ jnp.ones_like(flat)).astype(jnp.int32)

  def plain(which: jax.Array) -> jax.Array:
    return which.sum(dtype=jnp.int32)

  # XLA's sum of whole numbers takes twice as long on CPU; a float32 counts up to 2**24.
  on_cpu = product if which.size < 1 << 24 else plain
  return jax.lax.platform_dependent(which, cpu=on_cpu, default=plain)


def _running(kept: jax.Array) -> jax.Array:
  """Sums along rows, as a product: counts up to 128 are exact in any precision."""
  lanes = kept.shape[-1]
  upto = jnp.triu(jnp.ones((lanes, lanes), jnp.float32))
  return (kept.astype(jnp.float32) @ upto).astype(jnp.int32)
