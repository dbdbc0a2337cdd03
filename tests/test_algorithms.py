import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from tables import REPLICAS, make_algorithms

import decomp
from decomp import algorithms, compressors, topology

NAMES = algorithms.__all__
every_algorithm = pytest.mark.parametrize('name', NAMES)

PARAMS = {
  'dense': {'kernel': jnp.ones((3, 2)), 'bias': jnp.zeros(2)},
  'scale': jnp.array(0.5),
  'none': (),
}


def random_grads(params, n):
  stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape), x.dtype), params)
  return optax.tree.random_like(jax.random.key(0), stacked)


def run(sim, params, steps, grad_fn, stacked=False):
  """The state after `steps` steps in one scan; grad_fn(params, key) gives everyone's gradients."""
  key = jax.random.key(0)

  @jax.jit
  def loop(state):
    def body(state, t):
      return sim.step(key, grad_fn(state.params, jax.random.fold_in(key, t)), state)

    return jax.lax.scan(body, state, jnp.arange(steps))[0]

  return loop(sim.init(params, stacked=stacked))


@every_algorithm
def test_protocol(name):
  """Nested pytrees; jit, scan and vmap agree; structure, shapes and dtypes are a fixed point."""
  sim = decomp.simulate(make_algorithms(optax.sgd(0.01, momentum=0.9))[name], topology.ring(4))
  state = sim.init(PARAMS)
  grads = random_grads(PARAMS, 4)
  key = jax.random.key(7)

  traces = []

  @jax.jit
  def step(key, grads, state):
    traces.append(1)
    return sim.step(key, grads, state)

  looped = state
  for _ in range(3):
    new, info = step(key, grads, looped)
    chex.assert_trees_all_equal_structs(new, looped)
    chex.assert_trees_all_equal_shapes_and_dtypes(new, looped)
    looped = new
  assert len(traces) == 1
  scanned, infos = jax.lax.scan(lambda s, _: sim.step(key, grads, s), state, length=3)
  # XLA fuses the two differently, so the last bit may differ.
  chex.assert_trees_all_close(scanned, looped, rtol=1e-5, atol=1e-7)
  assert int(scanned.round) == 3
  assert jax.tree.leaves(infos)[0].shape == (3, 4)
  assert info.compression_error.shape == (4,)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(info))
  many = jax.vmap(lambda k: sim.step(k, grads, state)[0])(jax.random.split(key, 2))
  one = sim.step(jax.random.split(key, 2)[1], grads, state)[0]
  chex.assert_trees_all_close(jax.tree.map(lambda x: x[1], many), one, rtol=1e-5, atol=1e-7)


@every_algorithm
def test_steps_that_nobody_observes_are_the_same(name):
  sim = decomp.simulate(make_algorithms()[name], topology.ring(4))
  arguments = jax.random.key(7), random_grads(PARAMS, 4), sim.init(PARAMS)
  (state, info), (expected, known) = (sim.step(*arguments, seen) for seen in (False, True))
  chex.assert_trees_all_equal(state, expected)
  assert np.isfinite(jax.tree.leaves(known)).all()
  assert np.isnan(jax.tree.leaves(info)).all()


@every_algorithm
def test_bfloat16_params_stay_bfloat16_or_are_refused(name):
  """Sums that are carried from step to step would drift in bfloat16; the others are fine."""
  params = {'a': jnp.ones(5, jnp.bfloat16), 'b': jnp.ones(3)}
  sim = decomp.simulate(make_algorithms(optax.sgd(0.1, momentum=0.9))[name], topology.ring(4))
  if sim.algorithm.needs.fixed:
    with pytest.raises(ValueError, match=r"params\['a'\] is bfloat16"):
      sim.init(params)
    return
  state, _ = sim.step(jax.random.key(0), random_grads(params, 4), sim.init(params))
  assert state.params['a'].dtype == jnp.bfloat16
  assert state.params['b'].dtype == jnp.float32


def test_codes_that_nobody_decoded_are_not_averaged():
  def step(key, grads, state, net):
    return state._replace(params=net.mix(jnp.ones(3, jnp.uint8))), ()

  algorithm = decomp.Algorithm(make_algorithms()['d_psgd'].init, step)
  sim = decomp.simulate(algorithm, topology.ring(4))
  with pytest.raises(ValueError, match='dtype uint8 cannot be averaged'):
    sim.step(jax.random.key(0), jnp.zeros((4, 3)), sim.init(jnp.zeros(3)))


@every_algorithm
def test_odd_leaves(name):
  params = {'empty': jnp.zeros((0, 3)), 'one': jnp.ones(1), 'scalar': jnp.array(2.0)}
  params['prime'] = jnp.ones(13)
  sim = decomp.simulate(make_algorithms()[name], topology.ring(3))
  state, info = sim.step(jax.random.key(0), random_grads(params, 3), sim.init(params))
  assert state.params['empty'].shape == (3, 0, 3)
  assert np.isfinite(info.compression_error).all()


@pytest.mark.parametrize('name', [name for name in NAMES if hasattr(oracle, name)])
@pytest.mark.parametrize(
  'topo',
  [topology.ring(8), topology.star(5), topology.torus(3, 3), topology.erdos_renyi(7, 0.5, seed=2)],
  ids=lambda t: t.name,
)
def test_against_the_paper_with_explicit_replicas(name, topo):
  """In float64, with real quantized messages, momentum left out: equal to 1e-9 over 12 steps."""
  n, d, steps = topo.num_workers, 11, 12
  compressor = compressors.stochastic_quantizer(bits=4)
  with jax.enable_x64(True):
    rng = np.random.default_rng(0)
    start = rng.normal(size=(n, d))
    if name in ('allreduce', 'compressed_allreduce'):
      start = np.repeat(start[:1], n, 0)
    grads = rng.normal(size=(steps, n, d))
    key = jax.random.key(5)
    sim = decomp.simulate(make_algorithms(optax.sgd(0.05), compressor)[name], topo)
    state = sim.init(jnp.array(start), stacked=True)
    for g in grads:
      state, _ = sim.step(key, jnp.array(g), state)

    @jax.jit
    def message(i, t, z):
      leaf_key = jax.random.split(jax.random.fold_in(jax.random.fold_in(key, t), i), 1)[0]
      return compressor.decode(compressor.encode(leaf_key, z), z)

    expected = getattr(oracle, name)(
      topo.matrix, start, grads, lambda i, t, z: np.asarray(message(i, t, z)), lambda g: -0.05 * g
    )
    np.testing.assert_allclose(state.params, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
  'topo', [topology.ring(8), topology.star(6), topology.torus(3, 4)], ids=lambda t: t.name
)
def test_with_the_identity_all_are_d_psgd(topo):
  n = topo.num_workers
  params = jax.random.normal(jax.random.key(1), (n, 20))
  table = make_algorithms(optax.sgd(0.1, momentum=0.9), compressors.identity())

  def final(name):
    sim = decomp.simulate(table[name], topo)
    grads = lambda x, key: x + jax.random.normal(key, x.shape)  # noqa: E731
    return run(sim, params, 30, grads, stacked=True).params

  expected = final('d_psgd')
  for name in ('naive', 'dcd_psgd', 'ecd_psgd'):
    np.testing.assert_allclose(final(name), expected, atol=2e-5)


def test_d_psgd_on_a_complete_graph_has_the_mean_of_allreduce():
  """Plain SGD on a linear model of gradients: means agree, and without noise also every worker."""
  target = jax.random.normal(jax.random.key(0), (6, 4))
  grads = lambda x, key: x - target  # noqa: E731
  table = make_algorithms(optax.sgd(0.2), compressors.identity())
  sims = [decomp.simulate(table[name], topology.complete(6)) for name in ('d_psgd', 'allreduce')]
  means = [run(sim, jnp.zeros(4), 20, grads).params.mean(0) for sim in sims]
  np.testing.assert_allclose(*means, atol=1e-6)


@every_algorithm
def test_one_worker_is_plain_optax(name):
  """With nobody to talk to and nothing lost, every algorithm is its optimizer."""
  optimizer = optax.sgd(0.1, momentum=0.9, nesterov=True)
  params, target = jnp.zeros(5), jnp.arange(5.0)
  algorithm = make_algorithms(optimizer, compressors.identity())[name]
  sim = decomp.simulate(algorithm, topology.complete(1))
  state = run(sim, params, 25, lambda x, key: x - target[None])
  opt_state = optimizer.init(params)
  for _ in range(25):
    updates, opt_state = optimizer.update(params - target, opt_state, params)
    params = optax.apply_updates(params, updates)
  np.testing.assert_allclose(state.params[0], params, rtol=1e-5, atol=1e-6)


def test_optimizers_are_local():
  """Clipping by the global norm sees one worker's gradient, not everyone's."""
  optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1.0))
  sim = decomp.simulate(algorithms.d_psgd(optimizer), topology.from_matrix(np.eye(2) * 0.5 + 0.25))
  grads = jnp.array([[0.5], [100.0]])
  state, _ = sim.step(jax.random.key(0), grads, sim.init(jnp.zeros(1)))
  np.testing.assert_allclose(state.params, [[-0.5], [-0.5]], rtol=1e-6)


@pytest.mark.parametrize('name', REPLICAS)
def test_whether_the_mean_is_preserved(name):
  """Without gradients CHOCO keeps the average exactly; DCD and ECD do not."""
  start = jax.random.normal(jax.random.key(3), (8, 50))
  table = make_algorithms(compressor=compressors.stochastic_quantizer(bits=3))
  sim = decomp.simulate(table[name], topology.ring(8))
  state = run(sim, start, 20, lambda x, key: 0 * x, stacked=True)
  moved = float(jnp.abs(state.params.mean(0) - start.mean(0)).max())
  assert (moved < 1e-6) == (name == 'choco_sgd')


@pytest.mark.parametrize('name', ['d_psgd', 'naive'])
def test_time_varying_graphs_average_exactly_after_a_period(name):
  table = make_algorithms(compressor=compressors.identity())
  sim = decomp.simulate(table[name], topology.one_peer_exponential(8))
  start = jax.random.normal(jax.random.key(0), (8, 5))
  state = run(sim, start, 3, lambda x, key: 0 * x, stacked=True)
  np.testing.assert_allclose(state.params, jnp.broadcast_to(start.mean(0)[None], (8, 5)), atol=1e-6)


@pytest.mark.parametrize(
  'topo',
  [topology.ring(40), topology.torus(8, 8), topology.one_peer_exponential(64), topology.path(50)],
  ids=lambda t: t.name,
)
def test_sparse_graphs_mix_as_their_matrix_says(topo):
  """These are large enough to be mixed by permutations instead of a matrix product."""
  n = topo.num_workers
  sim = decomp.simulate(algorithms.d_psgd(optax.sgd(1.0)), topo)
  x = np.random.default_rng(0).normal(size=(n, 3)).astype(np.float32)
  state = sim.init(jnp.array(x), stacked=True)
  zero = jnp.zeros_like(state.params)
  # As it is lowered for this platform; others prefer the product.
  lowered = jax.jit(lambda s: sim.step(jax.random.key(0), zero, s)).lower(state).as_text()
  assert 'dot_general' not in lowered
  for t in range(topo.period + 1):
    state, _ = sim.step(jax.random.key(0), zero, state)
    x = topo.matrices[t % topo.period] @ x
  np.testing.assert_allclose(state.params, x, atol=1e-5)


def test_a_dense_graph_mixes_as_one_matrix_product():
  sim = decomp.simulate(algorithms.d_psgd(optax.sgd(1.0)), topology.complete(8))
  state = sim.init(jnp.zeros(3))
  jaxpr = str(jax.make_jaxpr(lambda s: sim.step(jax.random.key(0), s.params, s))(state))
  assert jaxpr.count('dot_general') == 1


BYTES = {  # d = 1000, ring of 8: two neighbours
  'allreduce': 7000,  # 2 * 7/8 * 4000
  'choco_sgd': 2 * 1004,
  'compressed_allreduce': 7 * 1004,
  'd_psgd': 8000,
  'dcd_psgd': 2 * 1004,
  'ecd_psgd': 2 * 1004,
  'naive': 2 * 1004,
}


@pytest.mark.parametrize('name', BYTES)
def test_bytes_per_step(name):
  sim = decomp.simulate(make_algorithms()[name], topology.ring(8))
  assert sim.bytes_per_step(jnp.zeros(1000)) == BYTES[name]
  assert sim.bytes_per_step(jax.ShapeDtypeStruct((1000,), jnp.float32)) == BYTES[name]


@pytest.mark.parametrize(
  ('topo', 'sends'),
  [
    (topology.star(8), 7),
    (topology.one_peer_exponential(8), 1),
    (topology.exponential(8), 3),
    (topology.complete(1), 0),
  ],
  ids=lambda p: getattr(p, 'name', p),
)
def test_bytes_follow_the_number_of_neighbours(topo, sends):
  sim = decomp.simulate(algorithms.d_psgd(optax.sgd(0.1)), topo)
  assert sim.bytes_per_step({'a': jnp.zeros(10), 'b': jnp.zeros(5, jnp.bfloat16)}) == sends * 50


def test_workers_draw_different_noise_and_steps_too():
  algorithm = algorithms.naive(optax.sgd(0.1), compressors.stochastic_quantizer(2))
  sim = decomp.simulate(algorithm, topology.ring(4))
  state = sim.init(jnp.array([1.0, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3]))
  key, zero = jax.random.key(0), jnp.zeros((4, 8))
  first, _ = sim.step(key, zero, state)
  again, _ = sim.step(key, zero, state)
  later, _ = sim.step(key, zero, state._replace(round=state.round + 1))
  np.testing.assert_array_equal(first.params, again.params)
  assert not np.array_equal(first.params, later.params)
  assert len(np.unique(np.asarray(first.params), axis=0)) == 4


@every_algorithm
def test_what_is_not_finite_stays_visible(name):
  sim = decomp.simulate(make_algorithms()[name], topology.ring(4))
  grads = jnp.zeros((4, 6)).at[2, 3].set(jnp.nan)
  state = run(sim, jnp.ones(6), 2, lambda x, key: grads)
  assert not np.isfinite(state.params).all()
