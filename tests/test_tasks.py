"""Tasks: shapes, gradients and learning; exact evaluation; schedules; tasks of one's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import decomp
from decomp import algorithms, models, schedules, tasks, topology
from decomp.tasks.data.corpus import VOCABULARY
from decomp.training.evaluation import Batched

KEY = jax.random.key(0)


def mocked_images(name, model, **options):
  import tensorflow_datasets as tfds

  with tfds.testing.mock_data(num_examples=40):
    return tasks.images(name, model, **options)


# Name -> (task, learning rate); models as small as they come.
TASKS = {
  'digits': lambda: (tasks.digits(models.mlp(10, hidden=(8,))), 0.5),
  'images': lambda: (mocked_images('mnist', models.softmax_regression(10)), 0.01),
  'logistic_regression': lambda: (tasks.logistic_regression(num_examples=64, dimension=3), 1.0),
  'quadratic': lambda: (tasks.quadratic(num_workers=4, dimension=3), 0.5),
  'text': lambda: (
    tasks.text(models.char_transformer(len(VOCABULARY), width=8, heads=1, layers=1, length=8), 8),
    0.1,
  ),
}


@functools.cache
def make(name):
  task, learning_rate = TASKS[name]()
  return task, learning_rate, *jax.jit(task.init)(KEY)


def first_batch(task, size=8):
  return {name: jnp.asarray(values[:size]) for name, values in task.train.items()}


def test_table_is_complete():
  assert set(TASKS) == set(tasks.__all__)


@pytest.mark.parametrize('name', TASKS)
def test_shapes_and_gradients(name):
  task, _, params, state = make(name)
  assert {len(values) for values in task.train.values()} == {len(task.train['label'])}
  assert task.train.keys() == task.test.keys()
  batch = first_batch(task)

  def loss(params):
    return task.loss(params, state, batch, KEY)

  (value, new_state), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
  assert value.shape == ()
  assert jax.tree.structure(new_state) == jax.tree.structure(state)
  for grad, param in zip(jax.tree.leaves(grads), jax.tree.leaves(params), strict=True):
    assert (grad.shape, grad.dtype) == (param.shape, param.dtype)
    assert np.isfinite(grad).all()
  assert any(np.abs(grad).max() > 0 for grad in jax.tree.leaves(grads))
  metrics = jax.jit(task.evaluate)(params, state, batch)
  assert 'loss' in metrics
  for values in metrics.values():
    assert (values.shape, values.dtype) == ((len(batch['label']),), jnp.float32)


@pytest.mark.parametrize('name', TASKS)
def test_gradient_descent_learns(name):
  task, learning_rate, params, state = make(name)
  batch = first_batch(task)

  @jax.jit
  def descend(params):
    (loss, _), grads = jax.value_and_grad(task.loss, has_aux=True)(params, state, batch, KEY)
    return jax.tree.map(lambda p, g: p - learning_rate * g, params, grads), loss

  losses = []
  for _ in range(10):
    params, loss = descend(params)
    losses.append(float(loss))
  assert losses[-1] < 0.98 * losses[0]


@pytest.mark.parametrize('name', ['digits', 'logistic_regression'])
def test_evaluation_agrees_with_the_loss(name):
  """Where a batch has no state and no noise, the loss is the mean of its examples' losses."""
  task, _, params, state = make(name)
  params = jax.tree.map(lambda p: p + 0.1, params)
  batch = first_batch(task)
  loss, _ = task.loss(params, state, batch, KEY)
  np.testing.assert_allclose(task.evaluate(params, state, batch)['loss'].mean(), loss, rtol=1e-5)


def test_logistic_regression_knows_its_optimum():
  """The loss at the optimum is f*, and suboptimality is the loss above it, everywhere."""
  task = make('logistic_regression')[0]
  problem = decomp.data.logistic_regression(num_examples=64, dimension=3)
  optimum = jnp.asarray(problem.optimum, jnp.float32)
  for weights, expected in [(optimum, 0.0), (optimum + 1, problem.suboptimality(optimum + 1))]:
    metrics = task.evaluate(weights, (), task.train)
    np.testing.assert_allclose(metrics['suboptimality'].mean(), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
      metrics['loss'].mean(), expected + problem.optimal_value, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize('batch_size', [1, 4])
def test_quadratic_gradient_noise(batch_size):
  """σ² is the mean squared norm of the noise of one example; a batch of b has σ²/b."""
  sigma, dimension, draws = 3.0, 5, 4000
  task = tasks.quadratic(num_workers=2, dimension=dimension, noise=sigma)
  exact = tasks.quadratic(num_workers=2, dimension=dimension)
  batch = {'label': jnp.zeros(batch_size, jnp.int32)}
  point = jnp.ones(dimension)

  def gradient(task, key):
    return jax.grad(lambda x: task.loss(x, (), batch, key)[0])(point)

  noisy = jax.jit(jax.vmap(lambda key: gradient(task, key)))(jax.random.split(KEY, draws))
  noise = np.asarray(noisy - gradient(exact, KEY)[None], np.float64)
  squares = (noise**2).sum(1)
  z = (squares.mean() - sigma**2 / batch_size) / (squares.std() / draws**0.5)
  assert abs(z) < 4
  assert np.all(np.abs(noise.mean(0)) < 4 * noise.std(0) / draws**0.5)


def test_quadratic_is_solved_by_workers_that_hold_one_function_each():
  """By label worker i draws from f_i, and all-reduce then descends on the mean of all f_i."""
  task = tasks.quadratic(num_workers=4, dimension=3, heterogeneity=2.0)
  history = decomp.train(
    task, algorithms.allreduce(optax.sgd(1.0)), topology.ring(4), 60, 1, shards='by_label'
  )
  assert history[0]['test_loss'] > 0.1
  assert history[-1]['test_loss'] < 1e-6


def test_a_task_of_ones_own():
  """Three functions on a linear model: no flax, any metric, no model state."""
  inputs = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
  truth = np.array([1, -2, 3, 0.5], np.float32)
  examples = {'x': inputs, 'label': (inputs @ truth + 1).astype(np.float32)}

  def error(params, batch):
    return batch['x'] @ params['w'] + params['b'][None] - batch['label']

  task = decomp.Task(
    name='least squares',
    init=lambda key: ({'w': jnp.zeros(4), 'b': jnp.zeros(())}, ()),
    loss=lambda params, state, batch, key: (0.5 * jnp.mean(error(params, batch) ** 2), state),
    evaluate=lambda params, state, batch: {'absolute_error': jnp.abs(error(params, batch))},
    train=examples,
    test=examples,
  )
  history = decomp.train(task, algorithms.d_psgd(optax.sgd(0.3)), topology.ring(3), 100, 8)
  assert history[-1]['test_absolute_error'] < 1e-3 < history[0]['test_absolute_error']
  np.testing.assert_allclose(history.params['w'], np.tile(truth, (3, 1)), atol=1e-3)


@pytest.mark.parametrize('total', [1, 4, 7, 8])
def test_every_test_example_counts_once(total):
  """Batches of 4 with the last one filled up give the plain mean over all examples."""
  values = np.random.default_rng(total).standard_normal((total, 2)).astype(np.float32)
  batched = Batched.of({'x': values}, size=4)
  found = batched.mean(lambda batch: {'sum': batch['x'].sum(1), 'square': batch['x'][:, 0] ** 2})
  expected = {'sum': values.sum(1).mean(), 'square': (values[:, 0] ** 2).mean()}
  for name, value in expected.items():
    np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-7)


def test_images_are_normalised_and_only_training_is_augmented():
  """Constant images, whose mirror is the same: augmentation only shifts zeros into them."""
  task = mocked_images('cifar10', models.softmax_regression(10))
  plain = mocked_images('cifar10', models.softmax_regression(10), augment=False)
  params, state = jax.jit(task.init)(KEY)
  batch = {'input': jnp.full((4, 32, 32, 3), 255, jnp.uint8), 'label': jnp.arange(4)}
  with_shifts, _ = task.loss(params, state, batch, KEY)
  without, _ = plain.loss(params, state, batch, KEY)
  evaluated = task.evaluate(params, state, batch)['loss'].mean()
  np.testing.assert_allclose(without, evaluated, rtol=1e-5)
  assert abs(with_shifts - without) > 1e-3
  pixels = (1 - np.array([0.4914, 0.4822, 0.4465])) / np.array([0.2470, 0.2435, 0.2616])
  logits = np.tile(pixels, 32 * 32) @ params['Dense_0']['kernel'] + params['Dense_0']['bias']
  expected = np.log(np.exp(logits).sum()) - logits[:4]
  np.testing.assert_allclose(evaluated, expected.mean(), rtol=1e-4)


def test_warmup_step_decay():
  schedule = schedules.warmup_step_decay(2.0, steps=1000, warmup=0.1, decay_at=(0.5, 0.8))
  expected = {0: 0.2, 50: 1.1, 100: 2.0, 499: 2.0, 500: 0.2, 799: 0.2, 800: 0.02, 5000: 0.02}
  found = [schedule(jnp.int32(step)) for step in expected]
  np.testing.assert_allclose(found, list(expected.values()), rtol=1e-5)
  from_zero = schedules.warmup_step_decay(2.0, steps=1000, warmup=0.1, start=0.0, factor=0.5)
  np.testing.assert_allclose([from_zero(0), from_zero(50), from_zero(750)], [0, 1, 0.5], rtol=1e-5)


def test_warmup_step_decay_drives_an_optimizer():
  optimizer = optax.sgd(schedules.warmup_step_decay(1.0, steps=10, warmup=0.2))
  state = optimizer.init(jnp.zeros(()))
  rates = []
  for _ in range(10):
    update, state = optimizer.update(jnp.ones(()), state)
    rates.append(-float(update))
  np.testing.assert_allclose(rates, [0.1, 0.55, 1, 1, 1, 0.1, 0.1, 0.1, 0.01, 0.01], rtol=1e-5)
