"""Messages as bytes: codes of any width packed tightly, and any pytree as one uint8 vector.

XLA's collectives widen narrow types on some platforms (int4 to int8, float8 to float16), so
whatever must be small on a wire is packed into uint8 here. The sizes reported anywhere in decomp
are the sizes of these buffers.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decomp.base import PyTree


def packed_size(count: int, width: int) -> int:
  """Bytes that `pack_bits` makes of `count` codes of `width` bits."""
  return sum(math.ceil(count * part / 8) for part, _ in _parts(width))


def pack_bits(codes: jax.Array, width: int) -> jax.Array:
  """Packs codes in [0, 2**width) into a uint8 vector of `packed_size(codes.size, width)` bytes.

  A code is cut into fields of 8, 4, 2 and 1 bits (5 bits: 4 + 1), and the fields of one size are
  packed 8 // size to a byte. No byte is shared by two sizes, so every width costs only shifts, and
  at most three bytes more than the information. Byte j holds elements j, j + m, j + 2m, ...
  (m bytes in all): long contiguous runs instead of neighbours, which is what vectorises.

  >>> pack_bits(jnp.array([1, 2, 3, 4, 5]), 4)
  Array([65, 82,  3], dtype=uint8)
  """
  fields = []
  for part, shift in _parts(width):
    field = ((codes >> shift) & (2**part - 1)).astype(jnp.uint8)
    packed, *others = _cut(field, 8 // part)
    for row, other in enumerate(others, 1):
      packed |= other << (part * row)
    fields.append(packed.reshape(-1))
  return jnp.concatenate(fields) if fields else jnp.zeros(0, jnp.uint8)


def unpack_bits(packed: jax.Array, width: int, shape: int | tuple[int, ...]) -> jax.Array:
  """Undoes `pack_bits`: codes of this shape, uint8 up to 8 bits and uint32 beyond.

  >>> unpack_bits(jnp.array([65, 82, 3], jnp.uint8), 4, 5)
  Array([1, 2, 3, 4, 5], dtype=uint8)
  """
  shape = (shape,) if isinstance(shape, int) else shape
  kind = jnp.uint8 if width <= 8 else jnp.uint32
  codes, start = jnp.zeros(shape, kind), 0
  for part, shift in _parts(width):
    rows = _cut_shape(shape, 8 // part)
    end = start + math.prod(rows)
    field = packed[start:end].reshape(rows)
    fields = [(field >> (part * row)) & (2**part - 1) for row in range(8 // part)]
    whole = fields[0] if part == 8 else jnp.concatenate(fields).reshape(-1)[: math.prod(shape)]
    codes, start = codes | (whole.reshape(shape).astype(kind) << shift), end
  return codes


def pack_trits(codes: jax.Array) -> jax.Array:
  """Packs codes 0, 1 and 2, five to a byte, because 3**5 = 243 <= 256.

  Byte j holds elements j, j + m, ..., as in `pack_bits`.

  >>> pack_trits(jnp.array([2, 1, 0, 2, 2, 1], jnp.uint8))
  Array([20, 16], dtype=uint8)
  """
  packed, *others = _cut(codes.astype(jnp.uint8), 5)
  for number, other in enumerate(others, 1):
    packed += other * np.uint8(3**number)
  return packed.reshape(-1)


def unpack_trits(packed: jax.Array, shape: int | tuple[int, ...]) -> jax.Array:
  """Undoes `pack_trits`: codes of this shape, uint8.

  >>> unpack_trits(jnp.array([20, 16], jnp.uint8), 6)
  Array([2, 1, 0, 2, 2, 1], dtype=uint8)
  """
  shape = (shape,) if isinstance(shape, int) else shape
  rest, fields = packed.astype(jnp.int32), []
  for _ in range(5):
    third = rest * 171 >> 9  # rest // 3, below 256; few processors divide quickly
    fields.append((rest - 3 * third).astype(jnp.uint8).reshape(_cut_shape(shape, 5)))
    rest = third
  return jnp.concatenate(fields).reshape(-1)[: math.prod(shape)].reshape(shape)


def _cut_shape(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
  """The shape of each of `count` equal runs of an array's elements in order.

  Rows stay whole where they can, so that nothing has to be laid out anew.
  """
  for axes in (1, len(shape) - 1):
    if 0 < axes < len(shape) and math.prod(shape[:axes]) % count == 0:
      return (math.prod(shape[:axes]) // count, *shape[axes:])
  return (-(-math.prod(shape) // count),)


def _cut(x: jax.Array, count: int) -> list[jax.Array]:
  """An array's elements in order, in `count` equal runs, the last one filled up with zeros."""
  rows = _cut_shape(x.shape, count)
  if len(rows) == 1:
    x = jnp.pad(x.reshape(-1), (0, count * rows[0] - x.size))
  return list(x.reshape(count, *rows))


def pack(tree: PyTree) -> jax.Array:
  """One uint8 vector that holds every leaf of `tree`: the message as it is sent.

  >>> pack({'scale': jnp.float32(1.0), 'codes': jnp.array([7], jnp.uint8)})
  Array([  7,   0,   0, 128,  63], dtype=uint8)
  """
  leaves = [_to_bytes(leaf) for leaf in jax.tree.leaves(tree)]
  return jnp.concatenate(leaves) if leaves else jnp.zeros(0, jnp.uint8)


def unpack(buffer: jax.Array, like: PyTree) -> PyTree:
  """Undoes `pack`, given arrays or `ShapeDtypeStruct`s of the right shapes and dtypes."""
  leaves, treedef = jax.tree.flatten(like)
  sizes = [_leaf_size(leaf) for leaf in leaves]
  ends = np.cumsum(sizes, dtype=int)
  pieces = [
    _from_bytes(buffer[end - size : end], leaf)
    for leaf, size, end in zip(leaves, sizes, ends, strict=True)
  ]
  return jax.tree.unflatten(treedef, pieces)


def parcels(
  tree: PyTree, joined: int | None
) -> tuple[list[jax.Array], Callable[[list[jax.Array]], PyTree]]:
  """The arrays that a message travels as, and the way back.

  Args:
    tree: the message.
    joined: leaves of at most so many bytes travel in one array for each size of their elements,
      and larger ones as they are; None: all leaves as one vector of bytes.

  >>> arrays, message = parcels({'scale': jnp.float32(1.0), 'codes': jnp.zeros(9, jnp.uint8)}, 8)
  >>> [array.shape for array in arrays], message(arrays)['scale']
  ([(9,), (1,)], Array(1., dtype=float32))
  """
  like = jax.eval_shape(lambda: tree)
  if joined is None:
    return [pack(tree)], lambda arrays: unpack(arrays[0], like)
  leaves, treedef = jax.tree.flatten(tree)
  groups: dict[Any, list[int]] = {}  # the leaves of each array
  for number, leaf in enumerate(leaves):
    alone = _leaf_size(leaf) > joined
    groups.setdefault(number if alone else f'uint{8 * _itemsize(leaf.dtype)}', []).append(number)

  def outward(group: Any, members: list[int]) -> jax.Array:
    if group == members[0]:
      return leaves[group]
    return jnp.concatenate([_as(leaves[number], group).reshape(-1) for number in members])

  def back(arrays: list[jax.Array]) -> PyTree:
    found: dict[int, jax.Array] = {}
    for array, (group, members) in zip(arrays, groups.items(), strict=True):
      start = 0
      for number in members:
        leaf, end = leaves[number], start + leaves[number].size
        if group != members[0]:
          found[number] = _as(array[start:end].reshape(leaf.shape), leaf.dtype)
        else:
          found[number] = array
        start = end
    return jax.tree.unflatten(treedef, [found[number] for number in range(len(leaves))])

  return [outward(*group) for group in groups.items()], back


def size(tree: PyTree) -> int:
  """Bytes of `pack(tree)`, from shapes and dtypes alone."""
  return sum(_leaf_size(leaf) for leaf in jax.tree.leaves(tree))


def _parts(width: int) -> list[tuple[int, int]]:
  """The fields of a code: (bits, shift) pairs, e.g. 5 -> [(4, 0), (1, 4)]."""
  parts, shift = [], 0
  while shift < width:
    part = next(p for p in (8, 4, 2, 1) if p <= width - shift)
    parts.append((part, shift))
    shift += part
  return parts


def _leaf_size(leaf: Any) -> int:
  return math.prod(leaf.shape) * _itemsize(leaf.dtype)


def _itemsize(dtype: Any) -> int:
  if jnp.issubdtype(dtype, jax.dtypes.extended) or jnp.dtype(dtype).name in _SUB_BYTE:
    raise ValueError(
      f'a message holds a leaf of dtype {dtype}, which has no whole number of bytes; '
      'pack it into uint8 with wire.pack_bits, or send key data instead of keys'
    )
  return jnp.dtype(dtype).itemsize


_SUB_BYTE = ('int2', 'uint2', 'int4', 'uint4', 'float4_e2m1fn')


def _as(x: jax.Array, dtype: Any) -> jax.Array:
  """The same bits as elements of another kind of the same size."""
  if jnp.bool_ in (x.dtype, dtype):
    return x.astype(dtype)
  return jax.lax.bitcast_convert_type(x, dtype)


def _to_bytes(leaf: jax.Array) -> jax.Array:
  leaf = jnp.asarray(leaf)
  _itemsize(leaf.dtype)
  if leaf.dtype == jnp.bool_:
    leaf = leaf.astype(jnp.uint8)
  return jax.lax.bitcast_convert_type(leaf.reshape(-1), jnp.uint8).reshape(-1)


def _from_bytes(raw: jax.Array, like: Any) -> jax.Array:
  if like.dtype == jnp.bool_:
    return raw.astype(jnp.bool_).reshape(like.shape)
  width = _itemsize(like.dtype)
  shaped = raw.reshape(*like.shape, width) if width > 1 else raw.reshape(like.shape)
  return jax.lax.bitcast_convert_type(shaped, like.dtype)
