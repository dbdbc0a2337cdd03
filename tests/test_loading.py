"""A run's mean model, rows and predictions, from its folder alone."""

import functools
import shutil
import subprocess
import sys
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from test_experiments import TINY, Program

import decomp
from decomp.training import loading, metrics, reading

RING = decomp.topology.ring(2)
STEPS = 4


class Model(nn.Module):
  """With statistics of its own."""

  @nn.compact
  def __call__(self, x, train):
    x = nn.Dense(3)(nn.BatchNorm(use_running_average=not train)(x))
    return nn.Dense(2)(nn.relu(x))


@functools.cache
def make_task():
  x = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
  y = x[:, 0] > 0
  return decomp.tasks.from_arrays(Model(), train=(x[:24], y[:24]), test=(x[24:], y[24:]))


def train(task, algorithm, folder, steps=STEPS, **options):
  options = {'eval_every': 2, 'checkpoint_seconds': 0, 'shards': 'by_label'} | options
  return decomp.train(task, algorithm, RING, steps, 4, checkpoint_dir=str(folder), **options)


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """A run's history and folder."""
  folder = tmp_path_factory.mktemp('run')
  algorithm = decomp.algorithms.dcd_psgd(optax.sgd(0.5), decomp.compressors.stochastic_quantizer(4))
  with jax.numpy_rank_promotion('allow'):
    return train(make_task(), algorithm, folder), folder


def same(found, expected):
  """Bit for bit: the mean of two workers is rounded once, on a device as in NumPy."""
  jax.tree.map(np.testing.assert_array_equal, found, jax.device_get(expected))


def test_the_mean_model_and_the_rows(trained):
  history, folder = trained
  run = decomp.load(folder)
  assert (run.step, run.history) == (STEPS, history)
  assert (run.history.diverged, run.history.steps_per_second) == (None, history.steps_per_second)
  assert (run.config['algorithm'], run.config['seed']) == (
    'dcd_psgd(stochastic_quantizer(bits=4))',
    0,
  )
  with jax.numpy_rank_promotion('allow'):
    expected = metrics.mean_over_workers((history.params, history.model_state))
  same((run.params, run.model_state), expected)


def test_predictions_are_those_of_the_last_row(trained):
  history, folder = trained
  task = make_task()
  with jax.numpy_rank_promotion('allow'):
    logits = decomp.load(folder, task=task).predict(task.test['input'])
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, task.test['label'])
  right = logits.argmax(-1) == task.test['label']
  assert float(losses.mean()) == pytest.approx(history[-1]['test_loss'], rel=1e-5)
  assert float(right.mean()) == pytest.approx(history[-1]['test_accuracy'])


def test_a_task_that_flags_cannot_name_must_be_given(trained):
  with pytest.raises(ValueError, match=r"task='arrays/model' was made in Python: .* task=task"):
    decomp.load(trained[1]).predict(np.zeros((1, 4)))


def test_a_task_of_another_model(trained):
  other = decomp.tasks.logistic_regression(8, 3)
  with pytest.raises(ValueError, match='its model is not that of the run') as caught:
    decomp.load(trained[1], task=other)
  assert '  params: missing there, "float32[3]" here' in str(caught.value).splitlines()
  with pytest.raises(ValueError, match=r"task='digits': must be a decomp.Task"):
    decomp.load(trained[1], task='digits')
  untold = make_task()._replace(predict=None)
  with pytest.raises(ValueError, match='task=arrays/model: has no predict'):
    decomp.load(trained[1], task=untold).predict(np.zeros((1, 4)))


def test_no_device_is_started(trained):
  code = (
    'import decomp, sys; run = decomp.load(sys.argv[1]); run.params, run.history[-1]; '
    'from jax._src import xla_bridge; assert not xla_bridge._backends; '
    'heavy = {"flax", "orbax", "matplotlib"} & set(sys.modules); assert not heavy, heavy'
  )
  subprocess.run([sys.executable, '-c', code, trained[1]], check=True, timeout=120)


class Weighted(NamedTuple):
  """As in push-sum, parameters are a quotient of what is sent."""

  numerator: Any
  weight: Any

  @property
  def params(self):
    return jax.tree.map(lambda x: x / self.weight[..., None], self.numerator)


def weighted(rate):
  def init(params, net):
    return Weighted([2 * x for x in params], jnp.float32(2))

  def step(key, grads, state, net):
    numerator = net.mix(state.numerator)
    return Weighted([x - 2 * rate * g for x, g in zip(numerator, grads, strict=True)], state[1]), ()

  return decomp.Algorithm(init, step, decomp.Needs(connected=True), name='weighted')


def line():
  """A task whose parameters are a list."""
  model = lambda key: [jnp.ones(3), jnp.zeros(1)], lambda p, x: x @ p[0] + p[1][0]
  x = np.random.default_rng(1).normal(size=(12, 3)).astype(np.float32)
  return decomp.tasks.from_arrays(model, train=(x, x[:, 0]), test=(x, x[:, 1]), loss='squared')


def test_parameters_that_are_computed_and_a_run_that_goes_on(tmp_path):
  """While it goes on, and writes in the background, it is read after every row."""
  task, seen = line(), []

  def look(row):
    if row['step'] > 2:
      run = decomp.load(tmp_path, task=task)
      seen.append((row['step'], run.step, run.history[-1]['step']))

  train(task, weighted(0.1), tmp_path, steps=2, shards='iid')
  plain = train(task, weighted(0.1), tmp_path, 8, shards='iid', on_row=look, resume=True)
  assert [step for step, _, _ in seen] == [4, 6, 8]
  assert seen == sorted(seen)
  assert all(2 <= saved <= step and row == saved - saved % 2 for step, saved, row in seen)
  run = decomp.load(tmp_path)
  expected = metrics.mean_over_workers(plain.params)
  same(run.params, dict(enumerate(expected)))
  same(decomp.load(tmp_path, task=task).params, expected)


def test_nothing_in_the_folder_changes(trained, tmp_path):
  path = tmp_path / 'run'
  shutil.copytree(trained[1], path)
  (path / '9.orbax-checkpoint-tmp').mkdir()
  before = {entry: entry.stat().st_mtime_ns for entry in [path, *path.rglob('*')]}
  assert decomp.load(path).step == STEPS
  assert before == {entry: entry.stat().st_mtime_ns for entry in [path, *path.rglob('*')]}


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'int32'])
def test_means_without_a_device(dtype):
  """They are those of the rows of metrics, whose sums are taken in the arrays' own precision."""
  values = np.random.default_rng(0).normal(size=(5, 40)).astype(jnp.dtype(dtype))
  values[:2, 0] = [1, -1] if dtype == 'int32' else [np.inf, -np.inf]
  found, expected = loading._mean(values), metrics.mean_over_workers(jnp.asarray(values))
  assert found.dtype == values.dtype
  error = 0 if dtype == 'int32' else 2 * float(jnp.finfo(dtype).eps)
  np.testing.assert_allclose(
    np.float64(found), np.float64(expected), rtol=error, atol=error, equal_nan=True
  )


def test_a_checkpoint_that_is_removed_meanwhile(trained, tmp_path, monkeypatch):
  path, read = tmp_path / 'run', reading.history
  shutil.copytree(trained[1], path)

  def late(folder, config):
    if folder.name == str(STEPS):
      folder.rename(path / '7')
    return read(folder, config)

  monkeypatch.setattr(reading, 'history', late)
  assert decomp.load(path).step == 7


def flip(path):
  file = max((path / str(STEPS) / 'state').rglob('d/*'), key=lambda file: file.stat().st_size)
  data = bytearray(file.read_bytes())
  for place in range(0, len(data), 50):
    data[place] ^= 1
  file.write_bytes(data)


def alter(path, file, old, new):
  text = (path / file).read_text()
  assert old in text
  (path / file).write_text(text.replace(old, new))


DAMAGES = {
  'arrays': (flip, f'/{STEPS} is damaged .*: remove .*/{STEPS} to go on from step 2'),
  'rows': (
    lambda path: alter(path, f'{STEPS}/history/metadata', '"diverged": null', '"diverged": "a"'),
    'is not what was saved',
  ),
  'configuration': (
    lambda path: alter(path, 'config.json', '"seed": 0', '"seed": 1'),
    'config.json is damaged',
  ),
  'no checkpoint': (
    lambda path: [shutil.rmtree(path / str(step)) for step in reading.steps(path)],
    'holds no checkpoint yet',
  ),
  'no configuration': (lambda path: (path / 'config.json').unlink(), 'holds no run: must be'),
  'no folder': (shutil.rmtree, 'is no folder: must be'),
  'a sweep': (
    lambda path: (path / 'config.json').rename(path / 'sweep.json'),
    'is a sweep, whose runs are saved together',
  ),
}


@pytest.mark.parametrize('name', DAMAGES)
def test_folders_that_will_not_do(name, trained, tmp_path):
  damage, words = DAMAGES[name]
  path = tmp_path / 'run'
  shutil.copytree(trained[1], path)
  damage(path)
  with pytest.raises(ValueError, match=words):
    decomp.load(path)


@pytest.mark.usefixtures('as_users_have_it')
def test_a_folder_of_the_programs(tmp_path, monkeypatch):
  Program('train', monkeypatch)(*TINY, '--steps=2', f'--output={tmp_path / "run"}')
  run = decomp.load(tmp_path / 'run')
  assert (run.config['steps'], run.config['task']) == (2, 'logistic_regression(64, 3)')
  x = np.ones((2, 3))
  np.testing.assert_allclose(run.predict(x), x @ run.params, rtol=1e-6)
  with pytest.raises(ValueError, match=r'holds 1 runs: choose one, such as .*/run'):
    decomp.load(tmp_path)


def test_exports(trained, tmp_path, monkeypatch):
  import orbax.checkpoint as ocp

  run = decomp.load(trained[1])
  run.export(tmp_path / 'new' / 'model')
  with ocp.PyTreeCheckpointer() as checkpointer:
    found = checkpointer.restore(tmp_path / 'new' / 'model')
  same(found, {'params': run.params, 'model_state': run.model_state})
  with pytest.raises(ValueError, match='model is there already'):
    run.export(tmp_path / 'new' / 'model')
  monkeypatch.setitem(sys.modules, 'safetensors.numpy', None)
  with pytest.raises(ImportError, match='not installed: pip install safetensors'):
    run.export(tmp_path / 'model.safetensors')


def test_safetensors(trained, tmp_path):
  run = decomp.load(trained[1])
  run.export(tmp_path / 'model.safetensors')
  found = safetensors.numpy.load_file(tmp_path / 'model.safetensors')
  np.testing.assert_array_equal(found['params.Dense_0.kernel'], run.params['Dense_0']['kernel'])
  assert 'model_state.batch_stats.BatchNorm_0.mean' in found
