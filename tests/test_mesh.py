import re

import dyadic
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import REPLICAS, TOPOLOGIES, make_algorithms, params

import decomp
from decomp import algorithms, compressors, topology
from decomp.engine import sharded

every_algorithm = pytest.mark.parametrize('name', algorithms.__all__)


def devices(count):
  return decomp.worker_mesh(8, jax.devices()[:count])


@every_algorithm
@pytest.mark.parametrize('count', [8, 4])
def test_bit_identical_with_dyadic_weights_and_scales(name, count):
  _, algorithm, topo, start, grads = next(case for case in dyadic.cases() if case[0] == name)
  found = dyadic.final(algorithm, topo, devices(count), start, grads)
  np.testing.assert_array_equal(found, dyadic.on_one_device()[name])


SPREADS = [
  *((name, topology.star(8), 8) for name in algorithms.__all__),
  *((name, topology.erdos_renyi(8, 0.4, seed=1), 2) for name in algorithms.__all__),
  *(
    (name, topology.one_peer_exponential(8), 4)
    for name in algorithms.__all__
    if name not in REPLICAS
  ),
]


@pytest.mark.parametrize(('name', 'topo', 'count'), SPREADS, ids=lambda p: getattr(p, 'name', p))
def test_agrees_with_one_device(name, topo, count):
  """Unbiased rounding flips at most where a sum differs in its last bit: within one quantum."""
  rng = np.random.default_rng(1)
  start = np.repeat(rng.normal(size=(1, 33)), 8, 0).astype(np.float32)
  grads = rng.normal(size=(4, 8, 33)).astype(np.float32)
  algorithm = make_algorithms(optax.sgd(0.1, momentum=0.9))[name]
  found, alone = (dyadic.final(algorithm, topo, on, start, grads) for on in (devices(count), None))
  off = np.abs(np.asarray(found) - np.asarray(alone))
  assert np.median(off) < 1e-6
  assert off.max() < 8 / 127  # a quantum of a message of this size


COLLECTIVE = (
  r'= (\S+?)(?:\{[\d,]*\})? (collective-permute|all-gather|all-reduce|all-to-all)(?:-start)?\('
)


def collectives(name, topo, on, size, compressor):
  sim = decomp.simulate(make_algorithms(compressor=compressor)[name], topo, mesh=on)
  state = sim.init(jnp.zeros(size))
  text = jax.jit(sim.step).lower(jax.random.key(0), jnp.zeros((8, size)), state).compile().as_text()
  return re.findall(COLLECTIVE, text), sim.bytes_per_step(jnp.zeros(size))


@pytest.mark.parametrize('name', [*REPLICAS, 'naive'])
@pytest.mark.parametrize('bits', [8, 3])
def test_the_compiled_program_sends_the_reported_bytes_and_nothing_else(name, bits):
  compressor = compressors.stochastic_quantizer(bits)
  found, reported = collectives(name, topology.ring(8), devices(8), 1000, compressor)
  message = 1000 * bits // 8 + 4
  assert found == [(f'u8[{message}]', 'collective-permute')] * 2
  assert reported == 2 * message


def test_full_precision_sends_four_bytes_an_element():
  found, reported = collectives('d_psgd', topology.torus(2, 4), devices(8), 1000, None)
  assert found == [('u8[4000]', 'collective-permute')] * 3
  assert reported == 12_000


def test_a_device_sends_only_its_border():
  """Two devices with four workers of a ring each: one message each way, not four."""
  found, _ = collectives('dcd_psgd', topology.ring(8), devices(2), 1000, None)
  assert found == [('u8[1004]', 'collective-permute')] * 2


def rebuilt(route, n, num_devices):
  """The matrix that a route amounts to, by following every message."""
  k = n // num_devices
  matrix = np.zeros((n, n))
  for device in range(num_devices):
    held = [np.eye(n)[device * k + slot] for slot in range(k)]
    for number, pairs in enumerate(route.pairs):
      senders = [a for a, b in pairs if b == device]
      assert len(senders) <= 1
      held.append(sum((np.eye(n)[a * k + route.send[a, number]] for a in senders), np.zeros(n)))
    for slot in range(k):
      matrix[device * k + slot] = route.weights[device * k + slot] @ np.array(held)
  return matrix


@pytest.mark.parametrize('topo', params(TOPOLOGIES))
def test_routes_carry_the_matrix(topo):
  n = topo.num_workers
  for count in (d for d in range(1, n + 1) if n % d == 0):
    for matrix, route in zip(topo.matrices, sharded.routes(topo, count), strict=True):
      np.testing.assert_allclose(rebuilt(route, n, count), matrix, atol=1e-15)
      if count == n:
        assert len(route.pairs) <= topo.degree


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 5), st.integers(1, 4), st.floats(0.1, 1), st.integers(0, 10**6))
def test_routes_of_random_graphs(num_devices, k, p, seed):
  import networkx as nx

  topo = topology.from_graph(nx.gnp_random_graph(num_devices * k, p, seed=seed))
  test_routes_carry_the_matrix(topo)


def test_state_lies_where_it_belongs():
  """What workers share is carried along between devices only; `follow` makes one of the other."""
  sim = decomp.simulate(make_algorithms()['dcd_psgd'], topology.ring(8), mesh=devices(4))
  alone = decomp.simulate(make_algorithms()['dcd_psgd'], topology.ring(8))
  state, other = sim.init({'w': jnp.zeros(6)}), alone.init({'w': jnp.zeros(6)})
  for ours, theirs, on in ((state, other, sim), (other, state, alone)):
    assert jax.tree.structure(jax.jit(on.follow)(theirs)) == jax.tree.structure(ours)
  assert state.params['w'].shape == other.params['w'].shape == (8, 6)
  assert {s.data.shape for s in state.params['w'].addressable_shards} == {(2, 6)}


def test_worker_mesh_takes_as_many_devices_as_divide_the_workers():
  assert [decomp.worker_mesh(n).size for n in (8, 12, 5, 7, 1, 16)] == [8, 6, 5, 7, 1, 8]


def test_whole_numbers_are_not_averaged():
  """By no executor: what a message means is for its `decode` to say."""

  def step(key, grads, state, net):
    return state, net.mean(jnp.arange(3))

  algorithm = make_algorithms()['allreduce']._replace(step=step)
  for on in (None, decomp.worker_mesh(8)):
    sim = decomp.simulate(algorithm, topology.ring(8), on)
    with pytest.raises(ValueError, match='dtype int32 cannot be averaged'):
      sim.step(jax.random.key(0), jnp.zeros((8, 2)), sim.init(jnp.zeros(2)))


def test_a_mesh_for_nobody():
  with pytest.raises(ValueError, match='num_workers=0: must be at least 1'):
    decomp.worker_mesh(0)


@pytest.mark.parametrize(
  ('on', 'words'),
  [
    (3, 'mesh=3'),
    (jax.sharding.Mesh(np.array(jax.devices()[:2]), ('x',)), "one axis 'worker'"),
    (jax.sharding.Mesh(np.array(jax.devices()[:3]), ('worker',)), '3 devices, which do not divide'),
  ],
)
def test_meshes_that_do_not_fit(on, words):
  with pytest.raises(ValueError, match=words):
    decomp.simulate(make_algorithms()['d_psgd'], topology.ring(8), mesh=on)
