"""Who holds which examples: an exact division of a dataset among the workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from decomp import checks

if TYPE_CHECKING:
  from matplotlib.axes import Axes

_ATTEMPTS = 100


class Partition(NamedTuple):
  """A division of N examples in which every example belongs to exactly one worker.

  Attributes:
    indices: int32 [n, longest], row i the examples of worker i, then padding with -1.
    lengths: int32 [n], the number of examples of each worker; all positive.
  """

  indices: np.ndarray
  lengths: np.ndarray

  def shard(self, worker: int) -> np.ndarray:
    """Returns the examples of one worker, without padding."""
    return self.indices[worker, : self.lengths[worker]]

  def histogram(self, labels: np.ndarray) -> np.ndarray:
    """Counts the labels each worker holds: int [n, classes]."""
    labels = np.asarray(labels)
    classes = int(labels.max()) + 1
    shards = [self.shard(worker) for worker in range(len(self.lengths))]
    return np.stack([np.bincount(labels[shard], minlength=classes) for shard in shards])

  def plot(self, labels: np.ndarray, ax: Axes | None = None) -> Axes:
    """Draws who holds what: a bar per worker, a colour per label."""
    import matplotlib.pyplot as plt

    if ax is None:
      _, ax = plt.subplots()
    counts = self.histogram(labels)
    starts = counts.cumsum(axis=1) - counts
    colours = plt.get_cmap('tab10' if counts.shape[1] <= 10 else 'viridis')
    for label, (count, start) in enumerate(zip(counts.T, starts.T, strict=True)):
      shade = label if counts.shape[1] <= 10 else label / (counts.shape[1] - 1)
      ax.barh(range(len(counts)), count, left=start, color=colours(shade), label=str(label))
    ax.invert_yaxis()
    ax.set(xlabel='examples', ylabel='worker', yticks=range(len(counts)))
    if counts.shape[1] <= 10:
      ax.legend(title='label', loc='center left', bbox_to_anchor=(1, 0.5))
    return ax


def iid(labels: np.ndarray, num_workers: int, seed: int = 0) -> Partition:
  """Deals the examples out at random; shard sizes differ by at most one.

  Args:
    labels: [N] or [N, ...]; only their number matters here.
    num_workers: Number of shards.
    seed: Of the random order.

  Returns:
    The `Partition`.

  Example:
    >>> iid(np.zeros(10), num_workers=3).lengths
    array([4, 3, 3], dtype=int32)
  """
  _check_num_workers(num_workers, len(labels))
  order = np.random.default_rng(seed).permutation(len(labels))
  return _pack(np.array_split(order, num_workers))


def by_label(labels: np.ndarray, num_workers: int) -> Partition:
  """Sorts the examples by label and cuts them into contiguous shards: the hardest case.

  Args:
    labels: int [N].
    num_workers: Number of shards; their sizes differ by at most one.

  Returns:
    The `Partition`.

  Example:
    >>> by_label(np.array([1, 0, 1, 0]), num_workers=2).indices
    array([[1, 3],
           [0, 2]], dtype=int32)
  """
  labels = _check_labels(labels, num_workers)
  return _pack(np.array_split(np.argsort(labels, kind='stable'), num_workers))


def dirichlet(labels: np.ndarray, num_workers: int, alpha: float, seed: int = 0) -> Partition:
  """Divides each class among the workers in proportions drawn from Dirichlet(alpha, ...).

  A draw that leaves a worker without examples is repeated.

  Args:
    labels: int [N].
    num_workers: Number of shards, of very different sizes when alpha is small.
    alpha: Positive; towards 0 a class goes to one worker, towards infinity shards are alike.
    seed: Of the random draws.

  Returns:
    The `Partition`.

  References:
    Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution for federated
    visual classification", https://arxiv.org/abs/1909.06335
  """
  labels = _check_labels(labels, num_workers)
  if not checks.is_number(alpha) or not 0 < alpha <= 1e6:
    raise ValueError(f'alpha={alpha!r}: must be positive, and at most 1e6, where shards are alike')
  rng = np.random.default_rng(seed)
  for _ in range(_ATTEMPTS):
    shards = _dirichlet_shards(labels, num_workers, alpha, rng)
    if all(map(len, shards)):
      return _pack(shards)
  raise ValueError(
    f'alpha={alpha}: must be larger, or num_workers={num_workers} smaller; in each of '
    f'{_ATTEMPTS} draws a worker was left without examples'
  )


def _dirichlet_shards(
  labels: np.ndarray, num_workers: int, alpha: float, rng: np.random.Generator
) -> list[np.ndarray]:
  parts: list[list[np.ndarray]] = [[] for _ in range(num_workers)]
  for label in np.unique(labels):
    members = rng.permutation(np.flatnonzero(labels == label))
    shares = rng.dirichlet(np.full(num_workers, alpha))
    cuts = np.rint(shares.cumsum()[:-1] * len(members)).astype(int)
    for part, piece in zip(parts, np.split(members, cuts), strict=True):
      part.append(piece)
  return [np.concatenate(part) for part in parts]


def _pack(shards: Sequence[np.ndarray]) -> Partition:
  lengths = np.array([len(shard) for shard in shards], np.int32)
  indices = np.full((len(shards), lengths.max()), -1, np.int32)
  for row, shard in zip(indices, shards, strict=True):
    row[: len(shard)] = shard
  return Partition(indices, lengths)


def _check_labels(labels: np.ndarray, num_workers: int) -> np.ndarray:
  labels = np.asarray(labels)
  if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
    raise ValueError(
      f'labels is {labels.dtype} of shape {labels.shape}: must be integers of shape [N]'
    )
  _check_num_workers(num_workers, len(labels))
  return labels


def _check_num_workers(num_workers: int, num_examples: int) -> None:
  if not checks.is_whole(num_workers) or not 1 <= num_workers <= num_examples:
    raise ValueError(
      f'num_workers={num_workers!r}: must be from 1 to {num_examples}, the number of examples'
    )
