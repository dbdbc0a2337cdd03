"""A graph as permutations: what one exchange of messages can do.

In a permutation every worker sends one message and receives one, which is what `ppermute` does on
one device or on many.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Decomposition:
  """W = diag(own) + sum_k diag(weights[k]) P_k, where worker i receives from sources[k][i].

  A worker without a k-th neighbour has weight 0 there: its source is then no real edge.
  """

  own: np.ndarray
  sources: np.ndarray
  weights: np.ndarray


def decompose(matrix: np.ndarray) -> Decomposition:
  """The permutations of the edges of W, each with its weights."""
  edges = (off_diagonal(matrix) != 0).astype(int)
  sources = permutations(edges)
  weights = np.zeros(sources.shape)
  for k, i in np.ndindex(*sources.shape):
    j = sources[k, i]
    weights[k, i] = matrix[i, j] * edges[i, j]
    edges[i, j] = 0  # where an edge was used to fill up, it counts once
  return Decomposition(np.diag(matrix).copy(), sources, weights)


def permutations(counts: np.ndarray) -> np.ndarray:
  """Splits the edges of a graph into as few permutations as its largest degree allows.

  The edges sender -> receiver form a bipartite graph. Filled up with more edges to a regular one,
  it is a union of perfect matchings (König): take them out one after another.

  Args:
    counts: (n, n), how many edges lead to each receiver (row) from each sender (column).

  Returns:
    (degree, n): in permutation k, receiver i hears `[k, i]`. Every edge is in one of them.
  """
  n = len(counts)
  hops = circulant_hops(counts)
  if hops is not None:
    return np.array([(np.arange(n) - hop) % n for hop in hops], int).reshape(-1, n)
  from scipy import sparse
  from scipy.sparse import csgraph

  counts = _regular(counts)
  sources = []
  while counts.any():
    match = csgraph.maximum_bipartite_matching(sparse.csr_array(counts), perm_type='column')
    counts[np.arange(n), match] -= 1
    sources.append(match)
  return np.array(sources)


def circulant_hops(counts: np.ndarray) -> list[int] | None:
  """The hops of a graph in which everyone hears the same hops; None for other graphs."""
  first, n = counts[0], len(counts)
  same = all(np.array_equal(np.roll(first, i), counts[i]) for i in range(n))
  return [int(-j % n) for j in np.repeat(np.arange(n), first)] if same else None


def _regular(counts: np.ndarray) -> np.ndarray:
  """Adds edges until everyone sends and receives equally many."""
  counts = counts.copy()
  degree = max(counts.sum(0).max(), counts.sum(1).max())
  receivers = np.repeat(np.arange(len(counts)), degree - counts.sum(1))
  senders = np.repeat(np.arange(len(counts)), degree - counts.sum(0))
  np.add.at(counts, (receivers, senders), 1)
  return counts


def off_diagonal(matrices: np.ndarray) -> np.ndarray:
  """Matrices without what workers give themselves."""
  return matrices * (1 - np.eye(matrices.shape[-1]))
