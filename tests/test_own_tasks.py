"""Tasks from models and arrays of one's own, whatever the model's library."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import decomp
from decomp import algorithms, cost, models, tasks, theory, topology
from decomp.tasks.functional import functional
from decomp.training.ahead import compile_for
from decomp.training.evaluation import Batched

KEY = jax.random.key(0)
RING = topology.ring(2)
WIDTH = 6

X = np.random.default_rng(0).standard_normal((36, 4)).astype(np.float32)
Y = (X[:, 0] > 0) + (X[:, 1] > 0).astype(np.int32)  # labels from 0 to 2

pytestmark = pytest.mark.usefixtures('as_users_have_it')


class Linen(nn.Module):
  @nn.compact
  def __call__(self, x, train):
    x = nn.BatchNorm(use_running_average=not train)(nn.Dense(WIDTH)(x))
    x = nn.Dropout(0.5, deterministic=not train)(nn.relu(x))
    return nn.Dense(3)(x)


class Nnx(nnx.Module):
  def __init__(self, rngs):
    self.layers = nnx.List([nnx.Linear(4, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 3, rngs=rngs)])
    self.norm = nnx.BatchNorm(WIDTH, momentum=0.99, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, x):
    x = self.norm(self.layers[0](x))
    return self.layers[1](self.dropout(nnx.relu(x)))


def linear(*shape):
  """A pair of functions: outputs [batch, *shape], or a row of outputs for each position."""

  def init(key):
    return {'w': 0.1 * jax.random.normal(key, (X.shape[1], *shape)), 'b': jnp.zeros(shape)}

  return init, lambda params, x: jnp.tensordot(x, params['w'], 1) + params['b']


def split(x, y):
  """24 examples for training, and 12 for tests."""
  return {'train': (x[:24], y[:24]), 'test': (x[24:], y[24:])}


def huber(outputs, targets):
  return optax.huber_loss(outputs, targets).mean(1)


SEQUENCES = np.stack([X, X[::-1], X], 1)  # 3 positions each

# Name -> the task, and whether labels are predicted.
TASKS = {
  'linen': lambda: (tasks.from_arrays(Linen(), **split(X, Y)), True),
  'nnx': lambda: (tasks.from_arrays(Nnx, **split(X, Y)), True),
  'sequence': lambda: (
    tasks.from_arrays(linear(3), **split(SEQUENCES, np.stack([Y, Y[::-1], Y], 1))),
    True,
  ),
  'regression': lambda: (tasks.from_arrays(linear(), **split(X, X @ X[0]), loss='squared'), False),
  'own loss': lambda: (tasks.from_arrays(linear(2), **split(X, X[:, :2]), loss=huber), False),
}


@functools.cache
def make(name):
  return TASKS[name]()


def train(task, **options):
  algorithm = algorithms.d_psgd(optax.sgd(0.3))
  return decomp.train(task, algorithm, RING, steps=3, batch_size=4, eval_every=3, **options)


@functools.cache
def trained(name):
  return train(make(name)[0])


def batch_of(task):
  return {name: jnp.asarray(values[:8]) for name, values in task.train.items()}


@pytest.mark.parametrize('name', TASKS)
def test_it_trains(name):
  history, labels = trained(name), make(name)[1]
  assert history[-1]['test_loss'] < 0.98 * history[0]['test_loss']
  assert ('test_accuracy' in history[-1]) == labels
  if state := jax.tree.leaves(history.model_state):
    assert name in ('linen', 'nnx')
    for leaf in state:  # the statistics of each worker's own examples
      assert leaf.shape == (2, WIDTH)
      assert np.abs(leaf[0] - leaf[1]).max() > 1e-4


@functools.cache
def both():
  """The same parameters in linen and nnx: loss with two keys, model state, and evaluation."""
  linen, own = make('linen')[0], make('nnx')[0]
  params, state = jax.jit(own.init)(KEY)
  first, second = params['layers'][0], params['layers'][1]
  same = {'Dense_0': first, 'BatchNorm_0': params['norm'], 'Dense_1': second}

  def look(task, params, state):
    batch, run = batch_of(task), jax.jit(task.loss)
    found = [run(params, state, batch, jax.random.key(seed)) for seed in (1, 1, 2)]
    return [loss for loss, _ in found], found[0][1], jax.jit(task.evaluate)(params, state, batch)

  stats = {'batch_stats': {'BatchNorm_0': state['norm']}}
  return look(linen, same, stats), look(own, params, state)


def test_linen_and_nnx_give_the_same_numbers():
  (_, linen_state, linen_found), (_, own_state, own_found) = both()
  for name in ('loss', 'accuracy'):
    np.testing.assert_allclose(linen_found[name], own_found[name], rtol=1e-5)
  statistics = linen_state['batch_stats']['BatchNorm_0'], own_state['norm']
  for name in ('mean', 'var'):
    np.testing.assert_allclose(*[part[name] for part in statistics], rtol=1e-5, atol=1e-6)
  assert np.abs(own_state['norm']['mean']).max() > 1e-3


def test_dropout_goes_by_the_key_of_the_step():
  for losses, _, _ in both():
    once, again, other = losses
    assert once == again != other


def test_a_module_of_nnx_begins_as_it_is_and_its_class_by_the_seed():
  module = Nnx(nnx.Rngs(5))
  fixed, fresh = tasks.from_arrays(module, **split(X, Y)), make('nnx')[0]

  def kernels(task):
    init = jax.jit(task.init)
    return [init(jax.random.key(seed))[0]['layers'][0]['kernel'] for seed in (0, 1)]

  for kernel in kernels(fixed):
    np.testing.assert_array_equal(kernel, module.layers[0].kernel[...])
  one, other = kernels(fresh)
  assert np.abs(one - other).max() > 0.1


MODES = {
  'train': lambda self, x, train: x if train else -x,
  'training': lambda self, x, training=False: x if training else -x,
  'deterministic': lambda self, x, *, deterministic=True: -x if deterministic else x,
}


@pytest.mark.parametrize('argument', MODES)
def test_modules_are_told_in_their_own_words(argument):
  model = functional(type('Mode', (nn.Module,), {'__call__': MODES[argument]})())
  assert model.init(KEY, jnp.ones(1)) == ({}, {})
  found = [float(model.apply({}, {}, jnp.ones(()), train, KEY)[0]) for train in (True, False)]
  assert found == [1, -1]


def test_arrays_of_any_kind_are_the_same_task():
  """Lists, device arrays, float64, whole numbers as floats, bytes, columns."""
  expected = tasks.from_arrays(linear(3), **split(X, Y))
  for x, y in [
    (X.tolist(), Y.tolist()),
    (jnp.asarray(X), jnp.asarray(Y)),
    (X.astype(np.float64), Y.astype(np.int64)),
    (X, Y.astype(np.float64)),
    (X, Y.astype(np.uint8)),
    (X, Y[:, None]),
  ]:
    task = tasks.from_arrays(linear(3), **split(x, y))
    for name, values in expected.train.items():
      np.testing.assert_array_equal(task.train[name], values)
      assert task.train[name].dtype == values.dtype


def test_predictions_do_not_broadcast_against_a_column():
  """Outputs [batch, 1] and y [batch] would make a loss of all pairs."""
  y = X @ X[0]
  column, flat = (
    tasks.from_arrays(linear(*shape), **split(X, y), loss='squared') for shape in [(1,), ()]
  )
  params = {'w': jnp.asarray(X[1]), 'b': jnp.zeros(())}
  one_column = {'w': params['w'][:, None], 'b': jnp.zeros(1)}
  expected = (X[:8] @ X[1] - y[:8]) ** 2
  for task, point in [(column, one_column), (flat, params)]:
    found = task.evaluate(point, (), batch_of(task))
    assert found.keys() == {'loss'}
    np.testing.assert_allclose(found['loss'], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(task.loss(point, (), batch_of(task), KEY)[0], expected.mean(), 1e-5)


def test_inputs_may_be_a_dict_and_only_training_is_augmented():

  def apply(scale, x):
    return scale * (x['a'] + x['b'][:, None])

  def augment(key, x):
    return {**x, 'b': x['b'] + 10}

  init, x = lambda key: jnp.ones(()), {'a': X, 'b': X[:, 0]}
  train, test = ({k: v[rows] for k, v in x.items()} for rows in (slice(24), slice(24, 36)))
  task = tasks.from_arrays(
    (init, apply), (train, 0 * X[:24]), (test, 0 * X[24:]), 'squared', augment=augment
  )
  batch, plain = batch_of(task), (X + X[:, :1])[:8]
  np.testing.assert_allclose(
    task.evaluate(jnp.ones(()), (), batch)['loss'], (plain**2).mean(1), rtol=1e-5
  )
  loss, _ = task.loss(jnp.ones(()), (), batch, KEY)
  np.testing.assert_allclose(loss, ((plain + 10) ** 2).mean(), rtol=1e-5)


def with_nan():
  x = X[:24].copy()
  x[5, 1] = np.nan
  return x


# A part of the sentence -> what is wrong: arguments other than those of a task that is well.
GOOD = {'model': linear(3), **split(X, Y)}
TEST = X[24:], Y[24:]
MISTAKES = {
  "model='resnet': must be a flax linen module": {'model': 'resnet'},
  'must be a flax linen module': {'model': Linen},
  'must be a flax linen module, an nnx': {'model': linear(3)[1]},
  "loss='hinge': must be 'cross_entropy', 'squared', or a function": {'loss': 'hinge'},
  'train=ndarray: must be a pair of arrays, (x, y)': {'train': X},
  'train=(x, None): must have targets': {'train': (X, None)},
  'train: x has 24 examples, but y has 23': {'train': (X[:24], Y[:23])},
  'train: x has shape (0, 4): must not be empty': {'train': (X[:0], Y[:0])},
  'test: y has shape (0,)': {'test': (X[:3], Y[:0])},
  'train: x is <U1 of shape (2,): must be numbers': {'train': (['a', 'b'], [0, 1])},
  'train: y is int64 of shape ()': {'train': (X, 1)},
  'train: x must be an array': {'train': ([[1.0], [1.0, 2.0]], [0, 1])},
  'train: x holds NaN or infinite values in 1 of 24 examples, number 5 the first': {
    'train': (with_nan(), Y[:24])
  },
  "test: x['a'] holds NaN or infinite values": {'test': ({'a': [[1e300] * 4]}, [0])},
  'train: y holds whole numbers from 0 to 8589934592: must fit int32': {
    'train': (X[:2], [0, 2**33])
  },
  'train: y holds labels from 0 to 3: must be from 0 to 2, since the model gives 3 logits': {
    'train': (X[:24], Y[:24] + (X[:24, 0] > 0))
  },
  'test: y holds labels from -1 to 1': {'test': (X[24:], Y[24:] - 1)},
  'train: y holds 0.5: labels must be whole numbers': {'train': (X[:2], [0.5, 1])},
  'train: y has shape (24, 3), that of the outputs': {'train': (X[:24], np.eye(3)[Y[:24]])},
  'train: y has shape (24, 2): must be (24,), since the model gives float32[3, 3] for 3': {
    'train': (X[:24], X[:24, :2])
  },
  'test: y has shape (12,): must be (12, 3)': {
    'train': (X[:24], X[:24, :3]), 'loss': 'squared', 'test': TEST
  },
  'test: x is float32 with examples of shape (3,): must be float32 with (4,), as in train': {
    'test': (X[24:, :3], Y[24:])
  },
  'test: x is uint8 with examples of shape (4,): must be float32': {
    'test': (X[24:].astype(np.uint8), Y[24:])
  },
  'test: x has input/a, label: must have the arrays of train, input, label': {
    'test': ({'a': X[24:]}, Y[24:])
  },
  "model gives float32[3] for 3 examples: loss='cross_entropy' needs logits": {'model': linear()},
  "model gives float32[] for 3 examples: loss='squared' needs one array": {
    'model': (linear()[0], lambda params, x: (x @ params['w']).mean()), 'loss': 'squared'
  },
  'loss gives float32[] for 3 examples: must give a loss for each, of shape (3,)': {
    'loss': lambda outputs, targets: outputs.mean()
  },
}  # fmt: skip


@pytest.mark.parametrize('sentence', MISTAKES)
def test_mistakes_are_named(sentence):
  with pytest.raises(ValueError, match=re.escape(sentence)):
    tasks.from_arrays(**(GOOD | MISTAKES[sentence]))


def test_a_model_must_know_all_classes_of_a_dataset():
  task = tasks.digits(models.mlp(5))
  start = task.init(KEY)
  with pytest.raises(ValueError, match=r'model gives outputs of shape \(8, 5\): digits needs'):
    task.evaluate(*start, batch_of(task))


@pytest.mark.parametrize('shape', [(), (4, 1)])
def test_an_evaluation_must_be_of_each_example(shape):
  batched = Batched.of({'x': X}, size=4)
  with pytest.raises(ValueError, match=r"evaluate gives 'loss' of shape .* for 4 examples"):
    batched.mean(lambda batch: {'loss': jnp.zeros(shape)})


def test_workers_on_a_mesh_do_the_same():
  history, expected = train(make('linen')[0], mesh=decomp.worker_mesh(2)), trained('linen')
  for name, value in expected[-1].items():
    if name != 'seconds':
      np.testing.assert_allclose(history[-1][name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_sweep_starts_each_seed_anew_as_train_does():
  found = decomp.sweep(
    make('nnx')[0], lambda rate: algorithms.d_psgd(optax.sgd(rate)), RING, 3, 4, (0, 1),
    rate=(0.3,), eval_every=3,
  )  # fmt: skip
  one, other = (history[0]['test_loss'] for history in found.histories)
  assert one != other
  for row, expected in zip(found.histories[0], trained('nnx'), strict=True):
    np.testing.assert_allclose(row['test_loss'], expected['test_loss'], rtol=1e-4)


def test_what_looks_ahead_takes_it():
  """The theory's estimates and verdict, and the step compiled for other devices."""
  task = make('regression')[0]
  optimizer, shards = optax.sgd(0.1), decomp.data.partition.iid(task.train['label'], 2)
  params, state = task.init(KEY)
  gradients = theory.task_gradients(task, state, shards, batch_size=4)
  problem = theory.estimate(gradients, params, 2, optimizer, KEY)
  # The Hessian is 2 E (x, 1)(x, 1)', five-dimensional with a trace of about 10.
  assert 2 < problem.smoothness < 10
  algorithm = algorithms.d_psgd(optimizer)
  found = theory.preflight(algorithm, RING, params, problem=problem)
  assert found.verdict == 'converges'
  ahead = compile_for(cost.machine('cpu x2'), task, algorithm, RING, shards, 4)
  assert ahead.step.sends['collective-permute'] == [ahead.bytes]
  assert ahead.bytes == decomp.simulate(algorithm, RING).bytes_per_step(params)
