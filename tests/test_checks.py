import math
import warnings

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import REPLICAS, make_algorithms

import decomp
from decomp import algorithms, compressors, topology

DISCONNECTED = topology.from_matrix(np.eye(4))
TASK = decomp.tasks.logistic_regression(num_examples=32, dimension=3)
UNTESTED = TASK._replace(test={k: v[:0] for k, v in TASK.test.items()})


def gossip(rate):
  return algorithms.d_psgd(optax.sgd(rate))


def train(task=TASK, **options):
  decomp.train(task, make_algorithms()['d_psgd'], topology.ring(4), 1, 1, **options)


@pytest.mark.parametrize('name', REPLICAS)
@pytest.mark.parametrize(
  ('topo', 'words'),
  [
    (topology.one_peer_exponential(8), r'one_peer_exponential\(8\) .* varies in time'),
    (topology.exponential(8), r'exponential\(8\) .* not symmetric'),
    (DISCONNECTED, 'not connected'),
  ],
)
def test_replicas_need_a_fixed_symmetric_connected_graph(name, topo, words):
  with pytest.raises(ValueError, match=words) as error:
    decomp.simulate(make_algorithms()[name], topo)
  assert name in str(error.value)


def test_the_others_take_what_they_can_use():
  table = make_algorithms()
  for topo in (topology.exponential(8), topology.one_peer_exponential(8)):
    decomp.simulate(table['d_psgd'], topo)
    decomp.simulate(table['naive'], topo)
  decomp.simulate(table['allreduce'], DISCONNECTED)
  with pytest.raises(ValueError, match='not connected'):
    decomp.simulate(table['d_psgd'], DISCONNECTED)


def test_a_researcher_may_lift_the_needs():
  algorithm = make_algorithms()['dcd_psgd']._replace(needs=decomp.Needs())
  sim = decomp.simulate(algorithm, topology.exponential(8))
  state = sim.init(jnp.ones(3))
  sim.step(jax.random.key(0), jnp.zeros((8, 3)), state)


@pytest.mark.parametrize(
  ('params', 'stacked', 'words'),
  [
    ({}, False, 'params holds no numbers'),
    ({'a': jnp.zeros(0)}, False, 'params holds no numbers'),
    ({'a': jnp.zeros(2), 'steps': jnp.array(1)}, False, r"params\['steps'\] has dtype int32"),
    ({'a': jnp.zeros((3, 2))}, True, r"params\['a'\] has shape \(3, 2\): .* 8 workers"),
    (jnp.array(1.0), True, 'first axis must be the 8 workers'),
  ],
)
def test_bad_params(params, stacked, words):
  sim = decomp.simulate(make_algorithms()['d_psgd'], topology.ring(8))
  with pytest.raises(ValueError, match=words):
    sim.init(params, stacked=stacked)


@pytest.mark.parametrize(
  ('grads', 'words'),
  [
    ({'a': jnp.zeros((8, 2)), 'b': jnp.zeros(8)}, 'one structure'),
    ({'a': jnp.zeros((4, 2))}, r"grads\['a'\] has shape \(4, 2\): .* 8 workers"),
    ({'a': jnp.zeros((8, 3))}, r"grads\['a'\] is float32\[8, 3\], but .* float32\[8, 2\]"),
    ({'a': jnp.zeros((8, 2), jnp.bfloat16)}, 'bfloat16'),
  ],
)
def test_grads_that_do_not_match(grads, words):
  sim = decomp.simulate(make_algorithms()['dcd_psgd'], topology.ring(8))
  state = sim.init({'a': jnp.zeros(2)})
  with pytest.raises(ValueError, match=words):
    sim.step(jax.random.key(0), grads, state)


@pytest.mark.parametrize('name', ['dcd_psgd', 'ecd_psgd'])
def test_a_biased_compressor_is_a_warning(name):
  with pytest.warns(UserWarning, match=rf'{name} with compressor=top_k\(0.1\), which is biased'):
    getattr(algorithms, name)(optax.sgd(0.1), compressors.top_k(0.1))
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    getattr(algorithms, name)(optax.sgd(0.1), compressors.random_k(0.1))


@pytest.mark.parametrize(
  ('make', 'words'),
  [
    (lambda: decomp.simulate('dcd_psgd', topology.ring(4)), "algorithm='dcd_psgd'"),
    (lambda: decomp.simulate(make_algorithms()['d_psgd'], 'ring'), "topology='ring'"),
    (lambda: decomp.simulate(make_algorithms()['d_psgd'], topology.ring(4), mesh=3), 'mesh=3'),
    (lambda: algorithms.dcd_psgd(0.1, compressors.natural()), 'optimizer=0.1'),
    (lambda: algorithms.naive(optax.sgd(1), 'natural'), "compressor='natural'"),
    (lambda: decomp.train('digits', None, None, 1, 1), "task='digits'"),
    (lambda: algorithms.choco_sgd(optax.sgd(1), compressors.sign_norm(), 0), 'consensus_rate=0'),
    (lambda: algorithms.choco_sgd(optax.sgd(1), compressors.sign_norm(), '1'), "rate='1'"),
    (lambda: algorithms.choco_sgd(optax.sgd(1), compressors.sign_norm(), np.float32(2)), 'rate='),
    (lambda: algorithms.choco_sgd(optax.sgd(1), None, 0.5), 'compressor=None'),
    (lambda: algorithms.dcd_psgd(optax.sgd(1), None), 'compressor=None'),
    (lambda: algorithms.d_psgd({}), 'optimizer={}'),
    (lambda: compressors.fixed_grid(4, '1'), "limit='1'"),
    (lambda: compressors.fixed_grid(4, 1e39), r'limit=1e\+39'),
    (lambda: train(shards='by_lable'), "shards='by_lable': unknown partition 'by_lable'; did"),
    (lambda: train(shards='dirichlet'), "missing a required argument: 'alpha'"),
    (lambda: train(shards=[[0], [1]]), r"'dirichlet\(0.1\)', or a Partition"),
    (lambda: train(seed=2**32), 'seed=4294967296: must be a whole number from 0 to 2147483647'),
    (lambda: train(checkpoint_seconds=math.nan), 'checkpoint_seconds=nan: must be a number'),
    (lambda: train(network='lan'), "network='lan': must be such as decomp.cost.lan"),
    (lambda: train(network=decomp.cost.lan([1e6, 1e7])), 'must have one bandwidth and one latency'),
    (lambda: decomp.tasks.digits(model=0), 'model=0: must be a flax linen module'),
    (lambda: decomp.tasks.digits(flax.linen.Dense), 'must be a flax linen module'),
    (lambda: train(decomp.tasks.digits(decomp.models.mlp(5))), r'shape \(1, 5\): digits needs'),
    (lambda: compressors.fixed_grid(4, 1e-300), 'limit=1e-300: must be a positive number'),
    (lambda: compressors.stochastic_quantizer(4, 10**20), 'bucket=100000000000000000000: must be'),
    (
      lambda: train(shards=decomp.data.partition.iid(np.zeros(1000), 4)),
      r'shards divides 1000 examples, but .* has 32',
    ),
    (lambda: train(UNTESTED), 'has no test examples'),
    (
      lambda: decomp.sweep(UNTESTED, gossip, topology.ring(4), 1, 1, seeds=(0,), rate=(0.1,)),
      'has no test examples',
    ),
  ],
)
def test_arguments_of_the_wrong_kind(make, words):
  with pytest.raises(ValueError, match=words):
    make()


def test_import_is_quiet_and_starts_nothing():
  import subprocess
  import sys

  code = (
    'import decomp, sys; from jax._src import xla_bridge; '
    'assert not xla_bridge._backends, "a backend was started"; '
    'decomp.topology.ring(8), decomp.topology.torus(4, 4); '
    'heavy = {"tensorflow", "matplotlib", "flax", "networkx", "orbax", "sklearn", '
    '"tensorflow_datasets"}; '
    'assert not heavy & set(sys.modules), heavy & set(sys.modules)'
  )
  subprocess.run([sys.executable, '-W', 'error', '-c', code], check=True, timeout=120)


def test_training_in_float64():
  """Everything that the compiled loop carries keeps its dtype there too."""
  for name in ('dcd_psgd', 'd_psgd'):
    with jax.enable_x64(True), jax.numpy_dtype_promotion('standard'):
      history = decomp.train(TASK, make_algorithms()[name], topology.ring(4), steps=4, batch_size=2)
    assert history[-1]['step'] == 4


def test_sums_in_half_precision_are_refused_before_bytes_are_counted():
  sim = decomp.simulate(make_algorithms()['dcd_psgd'], topology.ring(4))
  with pytest.raises(ValueError, match='is bfloat16'):
    sim.bytes_per_step(jnp.zeros(3, jnp.bfloat16))


def test_a_task_without_labels_can_be_dealt_out():
  def loss(params, state, batch, key):
    return ((batch['x'] - params) ** 2).mean(), state

  def evaluate(params, state, batch):
    return {'loss': (batch['x'] - params) ** 2}

  data = {'x': np.arange(8, dtype=np.float32)}
  task = decomp.Task('mean', lambda key: (jnp.zeros(()), ()), loss, evaluate, data, data)
  algorithm = make_algorithms(optax.sgd(0.2))['d_psgd']
  history = decomp.train(task, algorithm, topology.ring(2), steps=40, batch_size=4)
  assert history.params.mean() == pytest.approx(3.5, abs=0.5)
  with pytest.raises(ValueError, match=r"no train\['label'\]"):
    decomp.train(task, algorithm, topology.ring(2), 1, 1, shards='by_label')
