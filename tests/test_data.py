"""Datasets: shapes, determinism, known optima, TFDS without TensorFlow, clear errors."""

import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decomp import data
from decomp.tasks.data import corpus, images
from experiments import prepare_data


def test_import_is_light():
  """Importing decomp.data and decomp.cost, as training does, loads none of the heavy packages."""
  heavy = ['sklearn', 'tensorflow', 'tensorflow_datasets', 'scipy.optimize', 'matplotlib']
  modules = 'sys, decomp.cost, decomp.tasks.data'
  code = f'import {modules}; print([m for m in {heavy} if m in sys.modules])'
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
  assert done.stdout.strip() == '[]'


def test_digits():
  found = data.digits()
  train, test = found.train, found.test
  assert train['input'].shape == (1438, 8, 8, 1)
  assert test['input'].shape == (359, 8, 8, 1)
  assert train['input'].dtype == np.float32
  assert train['label'].dtype == np.int32
  assert (train['input'].min(), train['input'].max()) == (0, 1)
  assert set(test['label']) == set(range(found.num_classes))
  both = np.concatenate([train['input'], test['input']]).sum()
  other = data.digits(test_fraction=0.5, seed=1)
  np.testing.assert_allclose(both, other.train['input'].sum() + other.test['input'].sum())


def test_digits_split_is_decided_by_the_seed():
  first, again, other = (data.digits(seed=seed).test['input'] for seed in (3, 3, 4))
  np.testing.assert_array_equal(first, again)
  assert not np.array_equal(first, other)
  with pytest.raises(ValueError, match='test_fraction=1'):
    data.digits(test_fraction=1)


def test_text_labels_are_the_next_characters():
  found = data.text(length=32)
  for split in (found.train, found.test):
    assert split['input'].shape == split['label'].shape
    assert split['input'].dtype == split['label'].dtype == np.int32
    np.testing.assert_array_equal(split['input'].ravel()[1:], split['label'].ravel()[:-1])
    assert split['input'].min() >= 0
    assert split['input'].max() < found.num_classes
  assert len(found.train['input']) + len(found.test['input']) > 10_000
  assert len(found.test['input']) == pytest.approx(0.1 * len(found.train['input']) / 0.9, rel=0.01)
  assert 'The "assert" statement' in corpus.decode(found.train['input'].ravel()[:100])
  with pytest.raises(ValueError, match='length=0'):
    data.text(length=0)


def test_text_round_trip():
  assert corpus.decode(corpus.encode(corpus.VOCABULARY)) == corpus.VOCABULARY
  assert corpus.decode(corpus.encode('“it’s” – 20°')) == '"it\'s" - 20?'


def test_quadratic_optimum_and_heterogeneity():
  problem = data.quadratic(num_workers=6, dimension=10, heterogeneity=2.0, condition=30, seed=3)
  gradients = jax.vmap(jax.grad(problem.loss), in_axes=(None, 0))(
    jnp.asarray(problem.optimum), jnp.arange(6)
  )
  np.testing.assert_allclose(gradients.mean(axis=0), 0, atol=1e-5)
  np.testing.assert_allclose(jnp.mean(jnp.sum(gradients**2, axis=1)), 2.0**2, rtol=1e-4)
  for eigenvalues in np.linalg.eigvalsh(problem.hessians):
    np.testing.assert_allclose([eigenvalues[0], eigenvalues[-1]], [1 / 30, 1], rtol=1e-4)
  assert not np.allclose(problem.hessians[0], problem.hessians[1])


def test_quadratic_suboptimality_is_the_difference_of_losses():
  problem = data.quadratic(num_workers=4, dimension=5, seed=1)

  def total(x):
    return jnp.mean(jax.vmap(problem.loss, in_axes=(None, 0))(x, jnp.arange(4)))

  x, optimum = jnp.ones(5), jnp.asarray(problem.optimum)
  np.testing.assert_allclose(problem.suboptimality(x), total(x) - total(optimum), rtol=1e-4)
  assert problem.suboptimality(optimum) == 0
  for direction in np.eye(5, dtype=np.float32):
    assert problem.suboptimality(optimum + 1e-3 * direction) > 0


def test_quadratic_without_heterogeneity_shares_one_minimiser():
  problem = data.quadratic(num_workers=3, dimension=4, heterogeneity=0)
  np.testing.assert_allclose(problem.centers, np.tile(problem.optimum, (3, 1)), rtol=1e-5)


def test_quadratic_gradient_noise():
  problem = data.quadratic(num_workers=2, dimension=8, noise=3.0)
  keys, x = jax.random.split(jax.random.key(0), 10_000), jnp.ones(8)
  found = jax.vmap(problem.gradient, in_axes=(0, None, None))(keys, x, 1)
  noise = np.asarray(found - jax.grad(problem.loss)(x, 1)[None])
  deviation = 3 / np.sqrt(8)
  assert np.abs(noise.mean(axis=0)).max() < 4.5 * deviation / 100
  squares = (noise**2).sum(axis=1)
  assert abs(squares.mean() - 9) < 4.5 * 9 * np.sqrt(2 / 8) / 100


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'num_workers': 1, 'dimension': 2}, 'must be 0 for num_workers=1'),
    ({'num_workers': 2, 'dimension': 0}, 'dimension=0'),
    ({'num_workers': 0, 'dimension': 2}, 'num_workers=0'),
    ({'num_workers': 2, 'dimension': 2, 'condition': 0.5}, r'condition=0\.5'),
  ],
)
def test_quadratic_errors(options, message):
  with pytest.raises(ValueError, match=message):
    data.quadratic(**options)


@pytest.mark.parametrize('regularization', [1e-4, 1e-2, 1.0])
def test_logistic_optimum(regularization):
  problem = data.logistic_regression(300, 12, regularization, seed=2)
  assert problem.suboptimality(problem.optimum) == 0
  x, y = problem.dataset.train['input'].astype(np.float64), problem.dataset.train['label']
  predicted = 1 / (1 + np.exp(-x @ problem.optimum))
  gradient = (predicted - y) @ x / len(y) + regularization * problem.optimum
  assert np.linalg.norm(gradient) / regularization < 1e-8
  for direction in np.eye(12):
    above = problem.suboptimality(problem.optimum + 1e-3 * direction)
    assert above >= 0.5 * regularization * 1e-6 * (1 - 1e-6)  # strong convexity


def test_logistic_loss_agrees_with_suboptimality():
  problem = data.logistic_regression(200, 5)
  weights = np.random.default_rng(0).standard_normal(5).astype(np.float32)
  loss = jax.jit(problem.loss)(weights, problem.dataset.train)
  expected = problem.suboptimality(weights) + problem.optimal_value
  np.testing.assert_allclose(loss, expected, rtol=1e-6)
  assert problem.dataset.test['input'].shape == (50, 5)
  with pytest.raises(ValueError, match='regularization=0'):
    data.logistic_regression(regularization=0)


def test_tfds_images_from_mock_data_need_no_tensorflow():
  import tensorflow_datasets as tfds

  with tfds.testing.mock_data(num_examples=5):
    found = data.tfds_images('cifar10')
  for split in (found.train, found.test):
    assert split['input'].shape == (5, 32, 32, 3)
    assert split['input'].dtype == np.uint8
    assert split['label'].dtype == np.int32
  assert (found.name, found.num_classes) == ('cifar10', 10)
  assert 'tensorflow' not in sys.modules


def test_tfds_images_says_at_once_how_to_get_missing_data(tmp_path, monkeypatch):
  monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path))
  start = time.monotonic()
  with pytest.raises(FileNotFoundError) as caught:
    data.tfds_images('mnist', data_dir=str(tmp_path))
  assert time.monotonic() - start < 10
  for part in ('mnist', str(tmp_path), 'prepare_data --dataset=mnist', 'TFDS_DATA_DIR'):
    assert part in str(caught.value)


class _Source(list):
  """A data source that reads many examples at once, as those of TFDS do."""

  def __getitems__(self, keys):
    return [self[key] for key in keys]


def test_decoded_images_are_kept_and_read_back(tmp_path, monkeypatch):
  source = _Source({'image': np.full((2, 2, 1), i, np.uint8), 'label': i} for i in range(3))
  monkeypatch.setattr(images, 'tfds_source', lambda builder, split: source)
  builder = types.SimpleNamespace(data_dir=tmp_path)
  first = images._load(builder, 'train')
  names = ['decomp-train-3-input.npy', 'decomp-train-3-label.npy']
  assert sorted(path.name for path in tmp_path.iterdir()) == names
  monkeypatch.setattr(images, '_decode', None)  # would fail if it were needed again
  again = images._load(builder, 'train')
  np.testing.assert_array_equal(first['label'], [0, 1, 2])
  for name, values in first.items():
    np.testing.assert_array_equal(values, again[name])
    assert values.dtype == again[name].dtype


def test_a_place_that_cannot_be_written_is_no_error(tmp_path):
  images._write(tmp_path / 'missing' / 'input.npy', np.zeros(1))
  (tmp_path / 'input.npy').mkdir()  # not to be replaced by a file
  images._write(tmp_path / 'input.npy', np.zeros(1))
  assert [path.name for path in tmp_path.iterdir()] == ['input.npy']


def test_prepare_data_answers_in_one_sentence(tmp_path, monkeypatch):
  assert 'no dataset' in prepare_data.prepare('no_such_set', str(tmp_path))
  monkeypatch.setattr(prepare_data.importlib.util, 'find_spec', lambda name: None)
  assert "pip install 'decomp[prepare]'" in prepare_data.prepare('mnist', str(tmp_path))
  monkeypatch.setattr(prepare_data.importlib.util, 'find_spec', lambda name: True)

  def offline(url, timeout):
    raise OSError('no network')

  monkeypatch.setattr(prepare_data.urllib.request, 'urlopen', offline)
  assert 'cannot be downloaded' in prepare_data.prepare('mnist', str(tmp_path))


def test_prepare_data_leaves_prepared_data_alone(capsys):
  import tensorflow_datasets as tfds

  with tfds.testing.mock_data():
    assert prepare_data.prepare('mnist', None) is None
  assert 'already prepared' in capsys.readouterr().out
