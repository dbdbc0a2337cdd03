"""The study one_bit: its formulas against simulations and theorems, and what it writes."""

import doctest
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
import pytest
from test_experiments import Program

import decomp
from decomp import algorithms, compressors, topology
from decomp.theory.rules.common import noise_gain
from experiments.studies.one_bit import gossip, kept, theory

pytestmark = pytest.mark.usefixtures('as_users_have_it')


def test_examples():
  assert not any(doctest.testmod(module).failed for module in (theory, gossip))


@pytest.mark.parametrize('text', ['star(8)', 'path(6)', 'lazy_ring(16, 0.1)', 'bipartite(8)'])
def test_rates_cross_one_at_the_limit(text):
  """The recursion and the library's limit are two ways to the same number."""
  graph = theory.graph_of(text)
  limit = 1 / noise_gain(graph)
  assert theory.rate(graph, 0.999 * limit) < 1 < theory.rate(graph, 1.001 * limit)


def test_bounds_of_the_gain():
  """On graphs of up to 7 workers and on regular ones; equal where all workers are alike."""
  connected = [g for g in nx.graph_atlas_g()[2::20] if nx.is_connected(g)]
  regular = [nx.random_regular_graph(k, 24, seed=0) for k in (3, 6, 12)]
  for graph in map(topology.from_graph, [*connected, *regular]):
    assert noise_gain(graph) <= theory.largest_gain(graph) * (1 + 1e-6)
  for graph in [*regular, nx.complete_bipartite_graph(9, 9)]:
    mixing = topology.from_graph(graph)
    assert theory.largest_gain(mixing) <= theory.regular_gain(mixing.degree)
  assert theory.largest_gain(topology.ring(8)) == pytest.approx(noise_gain(topology.ring(8)))


def test_the_ring_without_end():
  for own in (0.05, 0.132, 0.5):
    exact = 1 / noise_gain(theory.lazy_ring(64, own))
    assert theory.ring_limit(own) == pytest.approx(exact, rel=1e-6)


def test_moments_agree_with_runs():
  """On a star, where workers are not alike: α² of `random_k` is exact, so is the recursion."""
  graph, rounds = topology.star(8), 30
  logs, _ = gossip.simulate(
    graph, compressors.random_k(0.5), rounds, jax.random.split(jax.random.key(0), 8)
  )
  factors = np.array(list(itertools.islice(theory.moments(graph, 1.0), rounds)))
  expected = np.log(factors).sum()
  plain = rounds * np.log(graph.rho**2)
  assert abs(expected - plain) > 0.5  # the noise is seen
  assert np.asarray(logs).sum(1).mean() == pytest.approx(expected, abs=0.1)


def test_gossip_is_dcd_without_gradients():
  graph, codec = topology.ring(4), compressors.identity()
  sim = decomp.simulate(algorithms.dcd_psgd(optax.sgd(0.1), codec), graph)
  start = jax.random.normal(jax.random.key(0), (4, gossip.SIZE))
  state = sim.init(start, stacked=True)
  state, _ = sim.step(jax.random.key(0), jnp.zeros_like(start), state)
  energies = [float(((x - x.mean(0)) ** 2).sum()) for x in (start, state.params)]
  logs, _ = gossip.simulate(graph, codec, 1, jax.random.split(jax.random.key(0), 1), start)
  assert float(logs[0, 0]) == pytest.approx(np.log(energies[1] / energies[0]), rel=1e-4)


def test_less_than_a_bit():
  """Unbiased, with the α² of the product, and half a bit per element."""
  codec, x = gossip.sampled(0.5, compressors.eden(1)), jnp.ones(2048)
  found = compressors.measure(codec, x, jax.random.key(0), samples=200)
  expected = theory.sampled_alpha2(0.5, theory.eden_alpha2(1))
  assert found.alpha2 == pytest.approx(expected, rel=0.02)
  assert found.bias == pytest.approx(np.sqrt(expected / 200), rel=0.15)
  assert found.bytes_per_element == pytest.approx(0.5 / 8, rel=0.15)


def test_finished_cells_are_not_run_again(tmp_path):
  found = kept.Kept(tmp_path / 'a' / 'part.json')
  first = found.of('cell', lambda: {'value': np.nan, 'other': 1 / 3})
  assert (first['value'], first['other']) == (None, 0.33333)
  again = kept.Kept(tmp_path / 'a' / 'part.json')
  assert again.of('cell', pytest.fail) == first
  assert kept.read(tmp_path / 'a', 'part') == {'cell': first}
  assert kept.read(tmp_path, 'part') == {}


def test_smoke(tmp_path, monkeypatch, capsys):
  """Figures and tables come from what was written."""
  program = Program('studies.one_bit.__main__', monkeypatch)
  parts = [f'--part={part}' for part in ('theory', 'gossip', 'digits', 'codec')]
  program('--smoke', *parts, f'--output={tmp_path}')
  said = capsys.readouterr().out
  assert 'gossip [1/1] ring(8), eden(1): expected 0.65' in said
  for part in ('limits', 'training', 'codec'):
    assert (tmp_path / f'{part}.png').stat().st_size > 10_000
  text = (tmp_path / 'tables.md').read_text()
  assert '| ring(4) | 1.33 |' in text
  assert 'digits, sgd(0.2), iid, ring(8)' in text
  found = json.loads((tmp_path / 'digits.json').read_text(), parse_constant=pytest.fail)
  assert len(found) == 4  # a cell with three seeds, and the machine


def test_results_of_the_page():
  """Rates of agreement are as expected, on both sides of 1/K."""
  rows = kept.read(Path(kept.__file__).parent / 'results', 'gossip')
  expected = {name: row for name, row in rows.items() if row['expected']}
  assert len(expected) == 42
  for name, row in expected.items():
    assert row['measured'] == pytest.approx(row['expected'], rel=0.003), name
    if abs(row['expected'] - 1) > 0.003:  # nearer to the limit than chance lets one see
      assert (row['measured'] < 1) == (row['alpha2'] < row['limit']), name
