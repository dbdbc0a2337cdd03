"""The families of graphs, and graphs of one's own.

Undirected ones have Metropolis weights, W_ij = 1 / (1 + max(degree_i, degree_j)) on every edge, and
W_ii takes the rest.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

import numpy as np

from decomp import checks
from decomp.topology.mixing import Topology
from decomp.topology.permutations import off_diagonal

# networkx takes long to import, and only functions that draw or get a graph need it.
if TYPE_CHECKING:
  import networkx as nx

MOST_WORKERS = 4096
"""A matrix of so many workers takes 134 MB, and its spectrum may take minutes."""


def ring(num_workers: int) -> Topology:
  """Every worker with its two neighbours: weights 1/3 (two workers: 1/2).

  λ_k = (1 + 2 cos(2πk/n)) / 3.

  >>> ring(8)
  ring(8): 8 workers, degree 2, spectral gap 0.1953, rho 0.8047, mu 1.333
  """
  n = _workers(num_workers)
  return _metropolis(f'ring({n})', _cycle(n))


def path(num_workers: int) -> Topology:
  """A line: a ring with one link missing. λ_k = 1/3 + (2/3) cos(πk/n)."""
  n = _workers(num_workers)
  return _metropolis(f'path({n})', np.eye(n, k=1) + np.eye(n, k=-1))


def torus(rows: int, columns: int) -> Topology:
  """A rows × columns grid that closes in both directions: weights 1/5 if both are at least 3."""
  rows = checks.whole('rows', rows, 1, MOST_WORKERS)
  columns = checks.whole('columns', columns, 1, MOST_WORKERS // rows)
  edges = np.kron(_cycle(rows), np.eye(columns)) + np.kron(np.eye(rows), _cycle(columns))
  return _metropolis(f'torus({rows}, {columns})', edges)


def hypercube(num_workers: int) -> Topology:
  """n = 2**k workers, linked if their numbers differ in one bit. λ_j = 1 - 2j/(k + 1)."""
  n = _workers(num_workers)
  if n & (n - 1):
    raise ValueError(
      f'num_workers={n}: a hypercube needs a power of two, such as {2 ** n.bit_length()}'
    )
  differ = np.bitwise_count(np.bitwise_xor.outer(np.arange(n), np.arange(n)))
  return _metropolis(f'hypercube({n})', differ == 1)


def star(num_workers: int) -> Topology:
  """Worker 0 with all the others: weights 1/n, spectral gap 1/n."""
  n = _workers(num_workers)
  hub = np.arange(n) == 0
  return _metropolis(f'star({n})', np.not_equal.outer(hub, hub))


def complete(num_workers: int) -> Topology:
  """Everyone with everyone: W = 11ᵀ/n averages exactly in one step."""
  n = _workers(num_workers)
  return Topology(f'complete({n})', np.full((1, n, n), 1 / n))


def exponential(num_workers: int) -> Topology:
  """Directed and fixed: worker i hears i - 1, i - 2, i - 4, ...; weights 1/(1 + ⌈log₂ n⌉).

  Doubly stochastic but not symmetric. The spectral gap is 2/(1 + ⌈log₂ n⌉) for even n.

  Reference: Ying et al., Exponential Graph is Provably Efficient for Decentralized Deep Training,
  arXiv 2110.13363.
  """
  n = _workers(num_workers)
  hops = _hops(n)
  matrix = sum((_shift(n, hop) for hop in hops), np.eye(n)) / (1 + len(hops))
  return Topology(f'exponential({n})', matrix[None])


def one_peer_exponential(num_workers: int) -> Topology:
  """Time-varying: in round t worker i hears only i - 2**(t mod ⌈log₂ n⌉), with weight 1/2.

  With n a power of two, ⌈log₂ n⌉ rounds average exactly.

  Reference: Ying et al., arXiv 2110.13363.
  """
  n = checks.whole('num_workers', num_workers, 2, MOST_WORKERS // 2)
  matrices = np.stack([(np.eye(n) + _shift(n, hop)) / 2 for hop in _hops(n)])
  return Topology(f'one_peer_exponential({n})', matrices)


def erdos_renyi(num_workers: int, p: float, seed: int = 0) -> Topology:
  """Each pair is linked with probability p; drawn again until connected. Metropolis weights."""
  from scipy.sparse import csgraph  # here, because it takes long to import

  n, seed = _workers(num_workers), checks.seed(seed)
  if not checks.is_number(p) or not 0 < p <= 1:
    raise ValueError(f'p={p!r}: the probability of an edge must be above 0 and at most 1')
  rng = np.random.default_rng(seed)
  pairs = np.triu_indices(n, 1)
  draws = min(1000, max(10, 2**26 // n**2))  # some seconds at most
  for _ in range(draws):
    edges = np.zeros((n, n), bool)
    edges[pairs] = _pythons_random(int(rng.integers(2**31)), len(pairs[0])) < p
    if csgraph.connected_components(edges, directed=False)[0] == 1:
      return _metropolis(f'erdos_renyi({n}, p={p}, seed={seed})', edges | edges.T)
  raise ValueError(
    f'p={p}: {draws} draws with num_workers={n} gave no connected graph; '
    f'use p above ln(n)/n = {math.log(n) / n:.3g}'
  )


def from_matrix(matrix: Any) -> Topology:
  """Any doubly stochastic W, receivers as rows; symmetric or not.

  >>> from_matrix([[0.75, 0.25], [0.25, 0.75]]).spectral_gap
  0.5
  """
  try:
    w = np.asarray(matrix, np.float64)
  except (TypeError, ValueError, OverflowError):
    raise ValueError(
      f'matrix={matrix!r}: must be n rows of n numbers, such as [[0.5, 0.5], [0.5, 0.5]]'
    ) from None
  if w.ndim != 2 or w.shape[0] != w.shape[1] or w.size == 0:
    raise ValueError(f'matrix has shape {w.shape}; a mixing matrix is square, (n, n)')
  return Topology(f'from_matrix({len(w)} x {len(w)})', w[None])


def from_graph(graph: nx.Graph) -> Topology:
  """Metropolis weights on an undirected networkx graph; worker k is its k-th node.

  >>> import networkx as nx
  >>> from_graph(nx.petersen_graph()).degree
  3
  """
  import networkx as nx

  if not isinstance(graph, nx.Graph):
    raise ValueError(f'graph is a {type(graph).__name__}; from_graph takes a networkx.Graph')
  if graph.is_directed():
    raise ValueError(
      'graph is directed, and Metropolis weights need an undirected one; pass '
      'graph.to_undirected(), or your own weights to topology.from_matrix'
    )
  if not len(graph):
    raise ValueError('graph has no nodes; from_graph needs one node for each worker')
  return _metropolis(f'from_graph({len(graph)} nodes)', nx.to_numpy_array(graph, weight=None))


def _metropolis(name: str, edges: np.ndarray) -> Topology:
  """Metropolis weights where `edges` (n, n) is not 0 and off the diagonal."""
  linked = off_diagonal(edges) != 0
  degree = linked.sum(1)
  w = linked / (1 + np.maximum.outer(degree, degree))
  np.fill_diagonal(w, 1 - w.sum(1))
  return Topology(name, w[None])


def _cycle(n: int) -> np.ndarray:
  """(n, n): not 0 between neighbours on a circle; on the diagonal if n is 1."""
  return _shift(n, 1) + _shift(n, -1)


def _hops(n: int) -> list[int]:
  return [2**k for k in range(math.ceil(math.log2(n)))]


def _shift(n: int, hop: int) -> np.ndarray:
  """The permutation matrix by which worker i hears i - hop."""
  return np.roll(np.eye(n), hop, axis=0)


def _pythons_random(seed: int, count: int) -> np.ndarray:
  """What `random.Random(seed)` draws, at once: networkx draws its graphs from that.

  >>> _pythons_random(3, 2).tolist() == [(python := random.Random(3)).random(), python.random()]
  True
  """
  *key, position = random.Random(seed).getstate()[1]
  bits = np.random.MT19937()
  bits.state = {'bit_generator': 'MT19937', 'state': {'key': np.array(key), 'pos': position}}
  return np.random.Generator(bits).random(count)


def _workers(value: Any) -> int:
  return checks.whole('num_workers', value, 1, MOST_WORKERS)
