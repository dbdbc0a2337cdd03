"""Workers that share their dithers: the mean of their messages has less noise."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import decomp
from decomp import algorithms, compressors, topology
from decomp.base import SharedKey

PLAIN = compressors.stochastic_quantizer(2)  # -1, 0 and 1 times the largest element
CORRELATED = compressors.correlated(PLAIN)


def everyones_errors(compressor, x, graph, count=4000):
  """sum_j W_ij C(x_j) - W x of `count` steps."""
  sim = decomp.simulate(algorithms.naive(optax.sgd(1.0), compressor), graph)
  state = sim.init(x, stacked=True)

  def mixed(key):  # u = 0: naive sends x itself
    return sim.step(key, jnp.zeros_like(x), state, False)[0].params

  keys = jax.random.split(jax.random.key(0), count)
  found = np.asarray(jax.jit(jax.vmap(mixed))(keys), np.float64)
  return found - graph.matrix @ np.asarray(x, np.float64)


@pytest.mark.parametrize('n', [5, 8])
def test_variance_of_the_mean_of_equal_inputs(n):
  """f (1 - f) / n² with f = frac(n x), instead of x (1 - x) / n."""
  values = np.array([0.1, 0.3, 0.5, 0.77])
  x = jnp.tile(jnp.array([*values, 1.0], jnp.float32), (n, 1))  # the largest is 1
  graph = topology.complete(n)
  for compressor, f, parts in (
    (PLAIN, values, n),
    (CORRELATED, np.mod(n * values, 1), n * n),
  ):
    errors = everyones_errors(compressor, x, graph)[:, 0, :-1]
    expected = f * (1 - f) / parts
    fourth = ((errors - errors.mean(0)) ** 4).mean(0) - errors.var(0) ** 2
    assert (np.abs(errors.var(0) - expected) <= 5 * np.sqrt(fourth / len(errors)) + 1e-6).all()
    assert (np.abs(errors.mean(0)) <= 5 * np.sqrt(expected / len(errors)) + 2.0**-16).all()


def test_neighbours_on_a_ring_gain_as_well():
  x = jnp.tile(jnp.array(np.random.default_rng(0).uniform(-1, 1, 50), jnp.float32), (8, 1))
  squares = [
    (everyones_errors(c, x, topology.ring(8), 300) ** 2).mean() for c in (PLAIN, CORRELATED)
  ]
  assert squares[1] < 0.5 * squares[0]


def test_workers_that_differ_lose_nothing():
  x = jnp.array(np.random.default_rng(0).normal(size=(8, 50)), jnp.float32)
  plain, together = (
    (everyones_errors(c, x, topology.complete(8), 300) ** 2).sum((1, 2))
    for c in (PLAIN, CORRELATED)
  )
  noise = math.sqrt((plain.var() + together.var()) / 300)
  assert together.mean() <= plain.mean() + 4 * noise


def test_on_a_mesh_the_messages_are_the_same():
  x = jnp.array(np.random.default_rng(0).normal(size=(8, 40)), jnp.float32)
  algorithm = algorithms.naive(optax.sgd(1.0), CORRELATED)
  found = []
  for mesh in (None, decomp.worker_mesh(8)):
    sim = decomp.simulate(algorithm, topology.ring(8), mesh)
    state, _ = sim.step(jax.random.key(1), jnp.zeros_like(x), sim.init(x, stacked=True))
    found.append(state.params)
  np.testing.assert_allclose(*found, atol=1e-6)
  assert sim.bytes_per_step(x[0]) == 2 * (10 + 4)


@pytest.mark.parametrize(
  'compressor',
  [
    compressors.eden(1),
    compressors.top_k(0.1),
    compressors.random_k(0.1),
    compressors.block_float('mxfp4'),
  ],
)
def test_only_what_rounds_at_random(compressor):
  with pytest.raises(ValueError, match='must be unbiased and round at random'):
    compressors.correlated(compressor)


@pytest.mark.parametrize(
  'make',
  [
    compressors.stochastic_quantizer,
    compressors.qsgd,
    lambda bits: compressors.fixed_grid(bits, 2.0),
    lambda bits: compressors.natural(),
    lambda bits: compressors.block_float('mxfp4', stochastic=True),
    lambda bits: compressors.ternary(),
    compressors.affine,
  ],
)
def test_each_worker_alone_is_unbiased(make):
  compressor = compressors.correlated(make(3))
  # No other is so close to the largest that it is hardly ever rounded to another point.
  x = jnp.array([1.0, *np.random.default_rng(0).uniform(-0.95, 0.95, 30)], jnp.float32)

  def draw(key):
    return compressor.decode(compressor.encode(SharedKey(key, jnp.int32(3 * 2**13)), x), x)

  values = np.asarray(jax.vmap(draw)(jax.random.split(jax.random.key(0), 4000)), np.float64)
  spread = values.std(0) / math.sqrt(4000)
  assert (np.abs(values.mean(0) - np.asarray(x)) <= 5 * spread + 1e-4).all()
