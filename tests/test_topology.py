import math

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import TOPOLOGIES, params

from decomp import topology


def eigenvalues(topo):
  return np.sort(np.linalg.eigvalsh(topo.matrix))[::-1]


@pytest.mark.parametrize('topo', params(TOPOLOGIES))
def test_protocol(topo):
  n = topo.num_workers
  assert topo.matrix.shape == (n, n)
  assert topo.matrix.dtype == np.float64
  assert (topo.matrices >= 0).all()
  np.testing.assert_allclose(topo.matrices.sum(1), 1, atol=1e-12)
  np.testing.assert_allclose(topo.matrices.sum(2), 1, atol=1e-12)
  assert topo.is_connected
  assert topo.spectral_gap == 1 - topo.rho
  assert 0 <= topo.rho < 1
  assert 0 <= topo.mu <= 2
  assert topo.name in repr(topo)
  with pytest.raises(ValueError, match='read-only'):
    topo.matrix[0, 0] = 2


@pytest.mark.parametrize('topo', params(TOPOLOGIES))
def test_decomposition_is_the_matrix_with_as_few_permutations_as_possible(topo):
  for matrix, parts in zip(topo.matrices, topo.decomposition, strict=True):
    rebuilt = np.diag(parts.own)
    for sources, weights in zip(parts.sources, parts.weights, strict=True):
      assert sorted(sources) == list(range(topo.num_workers))
      rebuilt += weights[:, None] * np.eye(topo.num_workers)[sources]
    np.testing.assert_allclose(rebuilt, matrix, atol=1e-15)
    edges = (matrix != 0) & ~np.eye(topo.num_workers, dtype=bool)
    assert len(parts.sources) == max(edges.sum(0).max(), edges.sum(1).max())


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 14), st.floats(0.2, 1), st.integers(0, 10**6))
def test_decomposition_of_random_graphs(n, p, seed):
  topo = topology.from_graph(nx.gnp_random_graph(n, p, seed=seed))
  test_decomposition_is_the_matrix_with_as_few_permutations_as_possible(topo)


@pytest.mark.parametrize('n', [3, 4, 5, 6, 8, 16, 32, 64])
def test_ring_spectrum(n):
  expected = np.sort((1 + 2 * np.cos(2 * np.pi * np.arange(n) / n)) / 3)[::-1]
  np.testing.assert_allclose(eigenvalues(topology.ring(n)), expected, atol=1e-12)
  if n >= 4:
    gap = 2 / 3 * (1 - math.cos(2 * math.pi / n))
    assert topology.ring(n).spectral_gap == pytest.approx(gap, abs=1e-12)
  if n % 2 == 0:
    assert topology.ring(n).mu == pytest.approx(4 / 3)


def test_published_ring_gaps():
  published = {4: 0.666667, 5: 0.460655, 6: 0.333333, 8: 0.195262, 16: 0.050747, 32: 0.012810}
  for n, gap in published.items():
    assert topology.ring(n).spectral_gap == pytest.approx(gap, abs=1e-6)


@pytest.mark.parametrize('n', [2, 3, 5, 9])
def test_path_spectrum(n):
  expected = 1 / 3 + 2 / 3 * np.cos(np.pi * np.arange(n) / n)
  np.testing.assert_allclose(
    eigenvalues(topology.path(n)), expected if n > 2 else [1, 0], atol=1e-12
  )


@pytest.mark.parametrize(
  ('p', 'q', 'gap'), [(3, 3, 0.6), (4, 4, 0.4), (5, 5, 0.276393), (8, 8, 0.117157)]
)
def test_torus_spectrum(p, q, gap):
  topo = topology.torus(p, q)
  a, b = np.meshgrid(np.arange(p), np.arange(q))
  expected = (1 + 2 * np.cos(2 * np.pi * a / p) + 2 * np.cos(2 * np.pi * b / q)) / 5
  np.testing.assert_allclose(eigenvalues(topo), np.sort(expected.ravel())[::-1], atol=1e-12)
  assert topo.spectral_gap == pytest.approx(gap, abs=1e-6)
  if p % 2 == q % 2 == 0:
    assert topo.mu == pytest.approx(1.6)


@pytest.mark.parametrize('k', [1, 2, 3, 4])
def test_hypercube_spectrum(k):
  topo = topology.hypercube(2**k)
  expected = [1 - 2 * j / (k + 1) for j in range(k + 1) for _ in range(math.comb(k, j))]
  np.testing.assert_allclose(eigenvalues(topo), expected, atol=1e-12)
  assert topo.spectral_gap == pytest.approx(2 / (k + 1) if k > 1 else 1)


@pytest.mark.parametrize('n', [3, 8, 20])
def test_star_and_complete_spectra(n):
  np.testing.assert_allclose(
    eigenvalues(topology.star(n)), [1] + [1 - 1 / n] * (n - 2) + [0], atol=1e-12
  )
  assert topology.star(n).spectral_gap == pytest.approx(1 / n)
  assert topology.star(n).degree == n - 1
  assert topology.complete(n).rho == 0
  assert topology.complete(n).mu == pytest.approx(1)


@pytest.mark.parametrize(
  ('n', 'gap'), [(8, 0.5), (6, 0.5), (32, 1 / 3), (5, 0.75), (7, 0.6464), (9, 0.5582), (33, 0.3922)]
)
def test_exponential_gap(n, gap):
  topo = topology.exponential(n)
  assert topo.spectral_gap == pytest.approx(gap, abs=5e-5)
  assert not topo.is_symmetric
  assert topo.degree == math.ceil(math.log2(n))


def test_one_peer_exponential_averages_exactly_after_a_period():
  topo = topology.one_peer_exponential(8)
  assert topo.period == 3
  assert topo.degree == 1
  np.testing.assert_allclose(np.linalg.multi_dot(topo.matrices[::-1]), np.full((8, 8), 1 / 8))
  assert topo.spectral_gap == 1
  six = topology.one_peer_exponential(6)
  product = np.linalg.multi_dot(six.matrices[::-1])
  assert np.abs(product - 1 / 6).max() == pytest.approx(1 / 12)
  first = np.linalg.norm(topo.matrices[0] - 1 / 8, 2)
  assert first == pytest.approx(math.cos(math.pi / 8))


def test_erdos_renyi_is_seeded_and_metropolis():
  a, b = (topology.erdos_renyi(12, p=0.4, seed=seed) for seed in (3, 3))
  assert a == b
  assert hash(a) == hash(b)
  assert a != topology.erdos_renyi(12, p=0.4, seed=4)
  degree = (a.matrix > 0).sum(1) - 1
  i, j = np.argwhere(np.triu(a.matrix, 1))[0]
  assert a.matrix[i, j] == pytest.approx(1 / (1 + max(degree[i], degree[j])))


def test_receivers_are_rows():
  """Worker 1 of an exponential graph of 3 hears worker 0 and worker 2, not the other way round."""
  w = topology.from_matrix([[0.5, 0.5, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]])
  np.testing.assert_array_equal(w.matrix @ [1, 10, 100], [5.5, 55, 50.5])
  one_peer = topology.one_peer_exponential(4).matrices[0]
  np.testing.assert_array_equal(one_peer @ [8, 0, 0, 0], [4, 4, 0, 0])


@pytest.mark.parametrize(
  ('make', 'words'),
  [
    (lambda: topology.ring(0), 'num_workers=0'),
    (lambda: topology.ring(2.5), 'num_workers=2.5'),
    (lambda: topology.torus(4, 0), 'columns=0'),
    (lambda: topology.hypercube(6), 'num_workers=6: a hypercube needs a power of two, such as 8'),
    (lambda: topology.one_peer_exponential(1), 'from 2 to 2048'),
    (lambda: topology.erdos_renyi(8, p=0), 'p=0'),
    (lambda: topology.erdos_renyi(50, p=0.001), r'use p above ln\(n\)/n = 0.0782'),
    (lambda: topology.from_matrix([[1, 0]]), r'shape \(1, 2\)'),
    (lambda: topology.from_matrix([[0.5, 0.4], [0.5, 0.5]]), 'row 0 sums to 0.9'),
    (lambda: topology.from_matrix([[0.5, 0.5], [0.4, 0.6]]), 'column 1 sums to 1.1'),
    (lambda: topology.from_matrix([[1.5, -0.5], [-0.5, 1.5]]), r'matrix\[0, 1\] = -0.5'),
    (lambda: topology.from_matrix([[np.nan]]), 'not finite'),
    (lambda: topology.Topology('own', np.eye(3)), r'matrices has shape \(3, 3\): must be'),
    (lambda: topology.Topology('own', [np.eye(3), 2 * np.eye(3)]), 'row 0 sums to 2'),
    (lambda: topology.from_graph(nx.DiGraph([(0, 1)])), 'directed'),
    (lambda: topology.from_graph(nx.Graph()), 'no nodes'),
    (lambda: topology.from_graph([(0, 1)]), 'is a list'),
  ],
)
def test_bad_input_is_named(make, words):
  with pytest.raises(ValueError, match=words):
    make()


@pytest.mark.parametrize('topo', params(t for t in TOPOLOGIES if t.num_workers > 2))
def test_plot_draws_every_worker_and_edge(topo):
  ax = topo.plot()
  assert {text.get_text() for text in ax.texts} == {str(i) for i in range(topo.num_workers)}
  assert topo.name in ax.get_title()


def test_roundings_below_zero_are_taken_for_zero():
  matrix = np.array([[1 + 1e-17, -1e-17], [-1e-17, 1 + 1e-17]])
  np.testing.assert_array_equal(topology.from_matrix(matrix).matrix, np.eye(2))


@pytest.mark.parametrize(('n', 'p', 'seed'), [(1, 0.5, 0), (30, 0.2, 3), (40, 1.0, 1)])
def test_random_graphs_are_those_of_networkx(n, p, seed):
  """The first of networkx's that is connected, drawn from the same seeds."""
  seeds = np.random.default_rng(seed)
  draws = (nx.gnp_random_graph(n, p, seed=int(seeds.integers(2**31))) for _ in range(1000))
  expected = topology.from_graph(next(filter(nx.is_connected, draws)))
  np.testing.assert_array_equal(topology.erdos_renyi(n, p, seed).matrix, expected.matrix)
