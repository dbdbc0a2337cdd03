"""Who talks to whom, and with which weights.

A `Topology` is a doubly stochastic mixing matrix W with receivers as rows: one gossip step replaces
x_i by sum_j W_ij x_j. Undirected families use Metropolis weights,
W_ij = 1 / (1 + max(degree_i, degree_j)) on every edge, and W_ii takes the rest.

A time-varying topology has several matrices and uses number `round % period` in each round.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

# networkx takes long to import, and only functions that draw or get a graph need it.
if TYPE_CHECKING:
  import networkx as nx

__all__ = [
  'complete',
  'erdos_renyi',
  'exponential',
  'from_graph',
  'from_matrix',
  'hypercube',
  'one_peer_exponential',
  'path',
  'ring',
  'star',
  'torus',
]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Topology:
  """A frozen mixing matrix, or a periodic sequence of them.

  Attributes:
    name: the call that made it.
    matrices: (period, n, n) float64, read-only; the period is 1 unless the graph varies in time.
  """

  name: str
  matrices: np.ndarray

  def __post_init__(self) -> None:
    matrices = np.array(self.matrices, np.float64)
    if matrices.ndim != 3 or matrices.shape[1] != matrices.shape[2] or not matrices.size:
      raise ValueError(f'matrices has shape {matrices.shape}: must be (period, n, n)')
    for matrix in matrices:
      _check_doubly_stochastic(matrix)
    matrices = np.maximum(matrices, 0)  # there may be roundings below
    matrices.setflags(write=False)
    object.__setattr__(self, 'matrices', matrices)

  @property
  def num_workers(self) -> int:
    """The number n of workers."""
    return self.matrices.shape[1]

  @property
  def period(self) -> int:
    """The number of rounds after which the matrices repeat; 1 for a fixed graph."""
    return self.matrices.shape[0]

  @functools.cached_property
  def matrix(self) -> np.ndarray:
    """W, (n, n) float64; for a time-varying topology the average over one period."""
    matrix = self.matrices.mean(0)
    matrix.setflags(write=False)
    return matrix

  @functools.cached_property
  def degrees(self) -> np.ndarray:
    """(period, n): to how many others each worker sends in each round."""
    return (_off_diagonal(self.matrices) != 0).sum(1)

  @property
  def degree(self) -> int:
    """To how many others a worker sends in one round, at most."""
    return int(self.degrees.max())

  @functools.cached_property
  def rho(self) -> float:
    """|W - 11ᵀ/n|₂: the factor by which one step shrinks disagreement, at worst.

    For a time-varying topology the geometric mean over one period.
    """
    product = functools.reduce(lambda done, w: w @ done, self.matrices)
    norm = np.linalg.norm(product - 1 / self.num_workers, 2)
    return float(_clean(norm) ** (1 / self.period))

  @property
  def spectral_gap(self) -> float:
    """1 - rho."""
    return 1.0 - self.rho

  @functools.cached_property
  def mu(self) -> float:
    """The largest |λ - 1| over the eigenvalues λ of W (of all matrices, if it varies)."""
    return float(np.abs(np.linalg.eigvals(self.matrices) - 1).max())

  @functools.cached_property
  def is_symmetric(self) -> bool:
    """Whether W equals its transpose in every round."""
    return bool(np.allclose(self.matrices, self.matrices.transpose(0, 2, 1), rtol=0, atol=1e-9))

  @functools.cached_property
  def is_connected(self) -> bool:
    """Whether every worker reaches every other one over a period."""
    from scipy.sparse import csgraph  # here, because it takes long to import

    return csgraph.connected_components(self.matrix, connection='strong')[0] == 1

  @functools.cached_property
  def decomposition(self) -> tuple[Decomposition, ...]:
    """Each round's W as diag(own) + sum_k diag(weights_k) P_k with permutations P_k."""
    return tuple(_decompose(matrix) for matrix in self.matrices)

  def plot(self, ax: Any = None) -> Any:
    """Draws the graph (of a whole period) with matplotlib; returns the axes."""
    import matplotlib.pyplot as plt
    import networkx as nx

    ax = ax or plt.subplots(figsize=(4, 4))[1]
    weights = _off_diagonal(self.matrix).T
    graph = nx.from_numpy_array(weights, create_using=nx.Graph if self.is_symmetric else nx.DiGraph)
    widths = [2 * data['weight'] / weights.max() for *_, data in graph.edges(data=True)]
    style = {'node_color': '#d7e8f7', 'edgecolors': '#1f5f99', 'edge_color': '#7f9fbf'}
    place = _layout(graph, self.matrix)
    nx.draw_networkx(graph, place, ax=ax, width=widths, font_size=9, **style)
    ax.set_title(f'{self.name}: gap {self.spectral_gap:.3g}')
    ax.set_axis_off()
    ax.set_aspect('equal', adjustable='datalim')
    return ax

  def __repr__(self) -> str:
    varies = f', period {self.period}' if self.period > 1 else ''
    return (
      f'{self.name}: {self.num_workers} workers, degree {self.degree}{varies}, '
      f'spectral gap {self.spectral_gap:.4g}, rho {self.rho:.4g}, mu {self.mu:.4g}'
    )

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, Topology):
      return NotImplemented
    return self.name == other.name and np.array_equal(self.matrices, other.matrices)

  def __hash__(self) -> int:
    return hash((self.name, self.matrices.tobytes()))


@dataclasses.dataclass(frozen=True)
class Decomposition:
  """W = diag(own) + sum_k diag(weights[k]) P_k, where worker i receives from sources[k][i].

  A worker without a k-th neighbour has weight 0 there: its source is then no real edge.
  """

  own: np.ndarray
  sources: np.ndarray
  weights: np.ndarray


def ring(num_workers: int) -> Topology:
  """Every worker with its two neighbours: weights 1/3 (two workers: 1/2).

  λ_k = (1 + 2 cos(2πk/n)) / 3.

  >>> ring(8)
  ring(8): 8 workers, degree 2, spectral gap 0.1953, rho 0.8047, mu 1.333
  """
  n = _at_least('num_workers', num_workers, 1)
  return _metropolis(f'ring({n})', _cycle(n))


def path(num_workers: int) -> Topology:
  """A line: a ring with one link missing. λ_k = 1/3 + (2/3) cos(πk/n)."""
  n = _at_least('num_workers', num_workers, 1)
  return _metropolis(f'path({n})', np.eye(n, k=1) + np.eye(n, k=-1))


def torus(rows: int, columns: int) -> Topology:
  """A rows × columns grid that closes in both directions: weights 1/5 if both are at least 3."""
  rows, columns = _at_least('rows', rows, 1), _at_least('columns', columns, 1)
  edges = np.kron(_cycle(rows), np.eye(columns)) + np.kron(np.eye(rows), _cycle(columns))
  return _metropolis(f'torus({rows}, {columns})', edges)


def hypercube(num_workers: int) -> Topology:
  """n = 2**k workers, linked if their numbers differ in one bit. λ_j = 1 - 2j/(k + 1)."""
  n = _at_least('num_workers', num_workers, 1)
  if n & (n - 1):
    raise ValueError(
      f'num_workers={n}: a hypercube needs a power of two, such as {2 ** n.bit_length()}'
    )
  differ = np.bitwise_count(np.bitwise_xor.outer(np.arange(n), np.arange(n)))
  return _metropolis(f'hypercube({n})', differ == 1)


def star(num_workers: int) -> Topology:
  """Worker 0 with all the others: weights 1/n, spectral gap 1/n."""
  n = _at_least('num_workers', num_workers, 1)
  hub = np.arange(n) == 0
  return _metropolis(f'star({n})', np.not_equal.outer(hub, hub))


def complete(num_workers: int) -> Topology:
  """Everyone with everyone: W = 11ᵀ/n averages exactly in one step."""
  n = _at_least('num_workers', num_workers, 1)
  return Topology(f'complete({n})', np.full((1, n, n), 1 / n))


def exponential(num_workers: int) -> Topology:
  """Directed and fixed: worker i hears i - 1, i - 2, i - 4, ...; weights 1/(1 + ⌈log₂ n⌉).

  Doubly stochastic but not symmetric. The spectral gap is 2/(1 + ⌈log₂ n⌉) for even n.

  Reference: Ying et al., Exponential Graph is Provably Efficient for Decentralized Deep Training,
  arXiv 2110.13363.
  """
  n = _at_least('num_workers', num_workers, 1)
  hops = _hops(n)
  matrix = sum((_shift(n, hop) for hop in hops), np.eye(n)) / (1 + len(hops))
  return Topology(f'exponential({n})', matrix[None])


def one_peer_exponential(num_workers: int) -> Topology:
  """Time-varying: in round t worker i hears only i - 2**(t mod ⌈log₂ n⌉), with weight 1/2.

  With n a power of two, ⌈log₂ n⌉ rounds average exactly.

  Reference: Ying et al., arXiv 2110.13363.
  """
  n = _at_least('num_workers', num_workers, 2)
  matrices = np.stack([(np.eye(n) + _shift(n, hop)) / 2 for hop in _hops(n)])
  return Topology(f'one_peer_exponential({n})', matrices)


def erdos_renyi(num_workers: int, p: float, seed: int = 0) -> Topology:
  """Each pair is linked with probability p; drawn again until connected. Metropolis weights."""
  import networkx as nx

  n = _at_least('num_workers', num_workers, 1)
  if not 0 < p <= 1:
    raise ValueError(f'p={p}: the probability of an edge must be above 0 and at most 1')
  rng = np.random.default_rng(seed)
  for _ in range(1000):
    graph = nx.gnp_random_graph(n, p, seed=int(rng.integers(2**31)))
    if nx.is_connected(graph):
      return _metropolis(f'erdos_renyi({n}, p={p}, seed={seed})', nx.to_numpy_array(graph))
  raise ValueError(
    f'p={p}: 1000 draws with num_workers={n} gave no connected graph; '
    f'use p above ln(n)/n = {math.log(n) / n:.3g}'
  )


def from_matrix(matrix: Any) -> Topology:
  """Any doubly stochastic W, receivers as rows; symmetric or not.

  >>> from_matrix([[0.75, 0.25], [0.25, 0.75]]).spectral_gap
  0.5
  """
  w = np.asarray(matrix, np.float64)
  if w.ndim != 2 or w.shape[0] != w.shape[1] or w.size == 0:
    raise ValueError(f'matrix has shape {w.shape}; a mixing matrix is square, (n, n)')
  return Topology(f'from_matrix({len(w)} x {len(w)})', w[None])


def _check_doubly_stochastic(w: np.ndarray) -> None:
  if not np.isfinite(w).all():
    raise ValueError('matrix has entries that are not finite')
  if w.min() < -1e-12:
    i, j = np.unravel_index(w.argmin(), w.shape)
    raise ValueError(f'matrix[{i}, {j}] = {w.min():.6g}; the weights of a mixing matrix are >= 0')
  for axis, word in ((1, 'row'), (0, 'column')):
    off = np.abs(w.sum(axis) - 1)
    if off.max() > 1e-6:
      at = off.argmax()
      raise ValueError(
        f'matrix is not doubly stochastic: {word} {at} sums to {w.sum(axis)[at]:.6g}, not 1; '
        'topology.from_graph makes Metropolis weights for any graph'
      )


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
  linked = _off_diagonal(edges) != 0
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


def _at_least(argument: str, value: Any, least: int) -> int:
  if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
    raise ValueError(f'{argument}={value!r}: must be a whole number of at least {least}')
  return int(value)


def _off_diagonal(matrices: np.ndarray) -> np.ndarray:
  return matrices * (1 - np.eye(matrices.shape[-1]))


def _clean(value: Any) -> float:
  """Rounding noise of an exact 0 would survive the root of a period as something like 1e-6."""
  return 0.0 if value < 1e-12 else float(value)


def _decompose(matrix: np.ndarray) -> Decomposition:
  edges = (_off_diagonal(matrix) != 0).astype(int)
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
  hops = _circulant_hops(counts)
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


def _circulant_hops(counts: np.ndarray) -> list[int] | None:
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


def _layout(graph: nx.Graph, matrix: np.ndarray) -> dict[int, np.ndarray]:
  """A circle where everyone's neighbourhood looks the same, else by distances in the graph."""
  import networkx as nx

  if _circulant_hops((matrix != 0).astype(int)) is not None:
    return nx.circular_layout(graph)
  return nx.kamada_kawai_layout(graph.to_undirected(), weight=None)
