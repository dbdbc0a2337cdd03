"""Messages as bytes: codes of any width packed tightly, and any pytree as one uint8 vector.

XLA's collectives widen narrow types on some platforms (int4 to int8, float8 to float16), so
whatever must be small on a wire is packed into uint8 here. The sizes reported anywhere in decomp
are the sizes of these buffers.
"""

import math
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
  codes = codes.reshape(-1).astype(jnp.uint32)
  fields = []
  for part, shift in _parts(width):
    per_byte = 8 // part
    field = ((codes >> shift) & (2**part - 1)).astype(jnp.uint8)
    field = jnp.pad(field, (0, -field.size % per_byte)).reshape(per_byte, -1)
    packed = field[0]
    for row in range(1, per_byte):
      packed |= field[row] << (part * row)
    fields.append(packed)
  return jnp.concatenate(fields)


def unpack_bits(packed: jax.Array, width: int, count: int) -> jax.Array:
  """Undoes `pack_bits`: uint32 codes, `count` of them.

  >>> unpack_bits(jnp.array([65, 82, 3], jnp.uint8), 4, 5)
  Array([1, 2, 3, 4, 5], dtype=uint32)
  """
  codes, start = jnp.zeros(count, jnp.uint32), 0
  for part, shift in _parts(width):
    per_byte = 8 // part
    size = math.ceil(count / per_byte)
    field = packed[start : start + size]
    rows = [(field >> (part * row)) & (2**part - 1) for row in range(per_byte)]
    codes |= jnp.concatenate(rows)[:count].astype(jnp.uint32) << shift
    start += size
  return codes


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
