"""Examples that are read when they are needed, because they fit neither a device nor memory."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax
import numpy as np

from decomp import checks
from decomp.tasks import arrays


class Source(Protocol):
  """Records by their number, such as a `grain.MapDataset` or a file of ArrayRecord."""

  def __len__(self) -> int: ...

  def __getitem__(self, number: int) -> tuple[Any, Any]: ...


class Records(Mapping[str, 'Column']):
  """Training examples of a `Task` that stay where they are until a batch has them.

  It is a mapping of names to columns like any task's `train`, and reads a record once for all of
  its columns.

  Example:
    >>> records = Records([(np.arange(2.0), 0), (np.ones(2), 1)])
    >>> records['input'].shape, records.rows([1, 1])['label']
    ((2, 2), array([1, 1], dtype=int32))

  Args:
    source: `len(source)` records `source[i]`, each a pair (x, y) of one example's arrays. It is
      asked by several threads at once, and must give the same record each time. Labels that the
      model has no output for are not found before a batch has them: its loss is then NaN.
    threads: how many read.
  """

  def __init__(self, source: Source, threads: int = 8):
    if not len(source):
      raise ValueError('source has no records: must have some')
    self._source = source
    self._pool = ThreadPoolExecutor(checks.whole('threads', threads))
    first = self.rows([0])
    self._columns = {
      name: Column(self, name, (len(source), *x.shape[1:]), x.dtype) for name, x in first.items()
    }

  def rows(self, numbers: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
    """The examples of these numbers, stacked."""
    pairs = list(self._pool.map(lambda number: self._source[int(number)], numbers))
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *pairs)
    return arrays.examples('train', stacked)

  def __getitem__(self, name: str) -> 'Column':
    return self._columns[name]

  def __iter__(self) -> Iterator[str]:
    return iter(self._columns)

  def __len__(self) -> int:
    return len(self._columns)


class Column:
  """One array of all records: its form, and rows of it by slices or numbers."""

  def __init__(self, records: Records, name: str, shape: tuple[int, ...], dtype: np.dtype):
    self._records, self._name, self.shape, self.dtype = records, name, shape, dtype

  def __len__(self) -> int:
    return self.shape[0]

  def __array__(self, *_: Any, **__: Any) -> np.ndarray:
    raise ValueError(
      f"task: train['{self._name}'] is read from records, a batch at a time: must be an array where"
      " all of it is needed, as by decomp.sweep, shards='by_label' or tasks.hold_out"
    )

  def __getitem__(self, which: Any) -> np.ndarray:
    return self._records.rows(np.arange(len(self))[which])[self._name]
