"""A mixing matrix W, or a periodic sequence of them, with its spectrum and its picture."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from decomp.topology.permutations import Decomposition, circulant_hops, decompose, off_diagonal


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
    return (off_diagonal(self.matrices) != 0).sum(1)

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
    rest = product - 1 / self.num_workers
    values = _normal_eigenvalues(rest)
    norm = float(np.linalg.norm(rest, 2) if values is None else np.abs(values).max())
    # Rounding noise of an exact 0 would survive the root of a period as something like 1e-6.
    return 0.0 if norm < 1e-12 else norm ** (1 / self.period)

  @property
  def spectral_gap(self) -> float:
    """1 - rho."""
    return 1.0 - self.rho

  @functools.cached_property
  def mu(self) -> float:
    """The largest |λ - 1| over the eigenvalues λ of W (of all matrices, if it varies)."""
    found = [_normal_eigenvalues(matrix) for matrix in self.matrices]
    pairs = zip(found, self.matrices, strict=True)
    every = [np.linalg.eigvals(matrix) if values is None else values for values, matrix in pairs]
    return float(np.abs(np.array(every) - 1).max())

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
    return tuple(decompose(matrix) for matrix in self.matrices)

  def plot(self, ax: Any = None) -> Any:
    """Draws the graph (of a whole period) with matplotlib; returns the axes."""
    import matplotlib.pyplot as plt
    import networkx as nx  # which takes long to import, and only a picture needs it

    ax = ax or plt.subplots(figsize=(4, 4))[1]
    weights = off_diagonal(self.matrix).T
    graph = nx.from_numpy_array(weights, create_using=nx.Graph if self.is_symmetric else nx.DiGraph)
    widths = [2 * data['weight'] / weights.max() for *_, data in graph.edges(data=True)]
    style = {'node_color': '#d7e8f7', 'edgecolors': '#1f5f99', 'edge_color': '#7f9fbf'}
    # A circle where everyone's neighbourhood looks the same, else by distances in the graph.
    if circulant_hops((self.matrix != 0).astype(int)) is not None:
      place = nx.circular_layout(graph)
    else:
      place = nx.kamada_kawai_layout(graph.to_undirected(), weight=None)
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


def _normal_eigenvalues(matrix: np.ndarray) -> np.ndarray | None:
  """The eigenvalues where they are quick to find, and their largest |λ| is the norm; else None.

  For 1438 workers the norm of any matrix takes 6 s and the eigenvalues 14 s.
  """
  first, n = matrix[:, 0], len(matrix)
  if all(np.array_equal(np.roll(first, j), matrix[:, j]) for j in range(n)):
    return np.fft.fft(first)
  return np.linalg.eigvalsh(matrix) if np.array_equal(matrix, matrix.T) else None


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
