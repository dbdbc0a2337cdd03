"""Checksums of arrays, the same however an array is split over devices and processes.

CRC-32 without the inversions at its start and end is linear: the checksum of an array's bytes is
the exclusive or of those of its pieces, each with zeros for all other bytes. Zeros in front change
nothing, and a zero byte behind multiplies by x^8, modulo the polynomial. So each process reads what
it holds, and nothing else is exchanged than 4 bytes for each array.
"""

import functools
import math
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from decomp.training import processes

_POLYNOMIAL = 0xEDB88320
_ONE = 0x80000000
"""The polynomial 1: the highest bit is the coefficient of x^0."""


def checksums(leaves: Mapping[str, Any]) -> dict[str, int]:
  """The checksum of each array's bytes, in row-major order; all processes call it together.

  >>> checksums({'a': np.arange(3, dtype=np.int32)})
  {'a': 1722009621}
  """
  own = np.array([_own(leaf) for leaf in leaves.values()], np.uint32)
  whole = np.bitwise_xor.reduce(processes.gather(own)).tolist()
  return dict(zip(leaves, whole, strict=True))


def checksum(array: np.ndarray) -> int:
  """The checksum of one array in NumPy, for which no device is asked.

  >>> checksum(np.arange(3, dtype=np.int32))
  1722009621
  """
  return _plain(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _own(leaf: Any) -> int:
  """What this process has of an array's checksum."""
  if getattr(leaf, 'is_fully_addressable', True) and not processes.is_first():
    return 0  # the first one has all of it, too
  if not isinstance(leaf, jax.Array):
    return checksum(leaf)
  shards = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
  pieces = [_piece(np.asarray(shard.data), shard.index, leaf.shape) for shard in shards]
  return functools.reduce(int.__xor__, pieces, 0)


def _piece(data: np.ndarray, index: tuple[slice, ...], shape: tuple[int, ...]) -> int:
  """The checksum of an array of zeros but for `data` at `index`."""
  split = [axis for axis, size in enumerate(shape) if data.shape[axis] != size]
  axes = split[-1] if split else 0  # what lies behind them is in one piece
  runs = np.ascontiguousarray(data).reshape(math.prod(data.shape[:axes]), -1).view(np.uint8)
  strides = [data.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
  first = sum((part.start or 0) * stride for part, stride in zip(index, strides, strict=True))
  size, total = data.itemsize * math.prod(shape), 0
  for place, run in zip(np.ndindex(data.shape[:axes]), runs, strict=True):
    start = first + sum(i * stride for i, stride in zip(place, strides, strict=False))
    total ^= _product(_plain(run), _power(size - start - run.size))
  return total


def _plain(data: np.ndarray) -> int:
  """CRC-32 without the inversions, so that it is linear."""
  return zlib.crc32(data.data, 0xFFFFFFFF) ^ 0xFFFFFFFF


@functools.cache
def _power(zeros: int) -> int:
  """x^(8 · zeros): what so many zero bytes behind a message multiply its checksum by."""
  if zeros < 2:
    return _ONE >> 8 * zeros
  half = _power(zeros // 2)
  return _product(_product(half, half), _power(zeros % 2))


def _product(a: int, b: int) -> int:
  """The product of two polynomials modulo that of CRC-32, with coefficients modulo 2."""
  total = 0
  while a:
    if a & _ONE:
      total ^= b
    a = a << 1 & 0xFFFFFFFF
    b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
  return total
