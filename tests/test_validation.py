"""A validation set, the best model, and runs that stop early."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_experiments import TINY, Program

import decomp
from decomp import algorithms, metrics, tasks, topology

RING = topology.ring(2)
RNG = np.random.default_rng(0)
X = RNG.standard_normal((48, 3)).astype(np.float32)
Y = X[:, 0] + RNG.standard_normal(48) > 0  # noise that 24 examples make one learn
HELD = X[40:], Y[40:]


def make(validation=HELD, count=24):
  model = lambda key: 0.1 * jax.random.normal(key, (3, 2)), lambda params, x: x @ params
  data = {'train': (X[:count], Y[:count]), 'test': (X[24:40], Y[24:40])}
  return tasks.from_arrays(model, **data, validation=validation)


def train(task=None, steps=40, rate=0.5, **options):
  options = {'eval_every': 2, 'mapping': 'vmap', **options}
  algorithm = algorithms.d_psgd(optax.sgd(rate))
  return decomp.train(task or make(), algorithm, RING, steps, 4, **options)


def rows_of(history):
  return [{**row, 'seconds': 0} for row in history]


@functools.cache
def whole():
  """A run that no patience ends."""
  return train()


def end_of(rows, patience):
  """How many rows there are once the last `patience` of them are no better than one before."""
  losses = [row['validation_loss'] for row in rows]
  for count in range(patience + 1, len(losses) + 1):
    if min(losses[count - patience : count]) >= min(losses[: count - patience]):
      return count
  return len(losses)


def test_hold_out():
  task = make(None)
  held = tasks.hold_out(task, 0.25)
  assert held.test is task.test
  rows = [part['input'] for part in (held.train, held.validation)]
  assert [len(x) for x in rows] == [18, 6]
  together = np.concatenate(rows)
  np.testing.assert_array_equal(together[np.lexsort(together.T)], X[:24][np.lexsort(X[:24].T)])
  again, other = tasks.hold_out(task, 0.25), tasks.hold_out(task, 0.25, seed=1)
  np.testing.assert_array_equal(held.validation['label'], again.validation['label'])
  assert (held.validation['input'] != other.validation['input']).any()
  by_part = make(0.25)
  np.testing.assert_array_equal(by_part.validation['input'], held.validation['input'])
  np.testing.assert_array_equal(by_part.train['label'], held.train['label'])


@pytest.mark.parametrize(
  ('call', 'message'),
  [
    (lambda: make(0.0), 'validation=0.0: part=0.0: must be a number between 0 and 1 that leaves'),
    (lambda: make(0.99), 'validation=0.99: part=0.99: must be a number between 0 and 1'),
    (lambda: make(True), 'validation=bool: must be a pair of arrays'),
    (lambda: make((X[:, :2], Y)), 'validation: x is float32 with examples of shape (2,)'),
    (lambda: make((X, Y + 1)), 'validation: y holds labels from 1 to 2'),
    (lambda: tasks.hold_out(make()), 'has a validation set already'),
    (lambda: train(make(None), patience=2), 'patience=2: task=arrays/functions must have a'),
    (lambda: train(patience=0), 'patience=0: must be a whole number from 1'),
  ],
)
def test_mistakes(call, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    call()


def test_rows_and_the_best_model():
  task, history = make(), whole()
  losses = history.column('validation_loss')
  assert history.best is history[int(losses.argmin())]
  assert 0 < losses.argmin() < len(losses) - 1  # else this run shows nothing
  assert history.stopped is None

  def measured(params):
    found = task.evaluate(params, (), task.validation)
    return float(found['loss'].mean()), float(found['accuracy'].mean())

  names = 'validation_loss', 'validation_accuracy'
  last = measured(metrics.mean_over_workers(history.params))
  np.testing.assert_allclose([history[-1][name] for name in names], last, rtol=1e-6)
  best = measured(history.best_params)
  np.testing.assert_allclose([history.best[name] for name in names], best, rtol=1e-6)


def test_validation_changes_nothing_else():
  history = train(make(None))
  expected = [{k: v for k, v in row.items() if 'validation' not in k} for row in rows_of(whole())]
  assert rows_of(history) == expected
  np.testing.assert_array_equal(history.params, whole().params)
  assert history.best is None
  assert history.best_params is None


def test_a_run_without_improvement_stops_and_may_go_on(tmp_path):
  count = end_of(whole(), 3)
  assert 5 < count < len(whole())

  def interrupt(row):
    if row['step'] == 2 * (count - 2):  # with two of three rows of its patience used
      raise KeyboardInterrupt

  # All its checkpoints are from after its best row.
  options = {'checkpoint_dir': tmp_path}
  with pytest.raises(KeyboardInterrupt):
    train(patience=3, on_row=interrupt, **options)
  history = train(patience=3, resume=True, **options)
  assert rows_of(history) == rows_of(whole())[:count]
  assert history.stopped.startswith(f'stopped at step {2 * (count - 1)}: validation_loss has not')
  assert history.diverged is None
  again = train(patience=3, resume=True, **options)
  assert again.stopped == history.stopped
  np.testing.assert_array_equal(again.params, history.params)
  np.testing.assert_array_equal(again.best_params, history.best_params)
  rest = train(resume=True, **options)
  assert rows_of(rest) == rows_of(whole())
  assert rest.stopped is None
  np.testing.assert_array_equal(rest.params, whole().params)
  np.testing.assert_array_equal(rest.best_params, whole().best_params)


def test_members_stop_by_themselves(tmp_path):
  rates = (0.01, 0.5)
  options = {'eval_every': 2, 'seeds': (0,), 'rate': rates, 'checkpoint_dir': tmp_path}

  def make_algorithm(rate):
    return algorithms.d_psgd(optax.sgd(rate))

  def sweep(**more):
    return decomp.sweep(make(), make_algorithm, RING, 40, 4, patience=3, **options, **more)

  found = sweep()
  slow, quick = found.histories
  assert quick.stopped
  assert len(quick) == end_of(whole(), 3) < len(slow)
  np.testing.assert_allclose(
    quick.column('validation_loss'),
    whole().column('validation_loss')[: len(quick)],
    rtol=1e-5,
  )
  again = sweep(resume=True)
  for one, other in zip(again.histories, found.histories, strict=True):
    assert list(one) == list(other)
    assert one.stopped == other.stopped
    np.testing.assert_array_equal(one.params, other.params)
    np.testing.assert_array_equal(one.best_params, other.best_params)
  table = found.table()
  assert table[0]['metric'] == 'validation_accuracy'
  assert [row['mean'] for row in table] == [h.best['validation_accuracy'] for h in found.histories]


def test_on_a_mesh(tmp_path):
  options = {'mesh': decomp.worker_mesh(2), 'patience': 3, 'checkpoint_dir': tmp_path}
  history = train(**options)
  assert len(history) == end_of(whole(), 3)
  np.testing.assert_allclose(history.best_params, whole().best_params, atol=1e-6)
  again = train(resume=True, **options)
  np.testing.assert_array_equal(again.best_params, history.best_params)


def test_validation_needs_a_loss():
  task = make()._replace(
    evaluate=lambda params, state, batch: {'norm': jnp.ones(len(batch['label']))}
  )
  with pytest.raises(
    ValueError, match=re.escape("task: evaluate gives ['norm']: must give 'loss'")
  ):
    train(task)


def test_flags(tmp_path, monkeypatch, capsys, as_users_have_it):
  program = Program('sweep', monkeypatch)
  error = program.error(*TINY, '--patience=2')
  assert error == 'error: --patience=2: needs --validation, such as --validation=0.1'
  error = program.error(*TINY, '--validation=0.999', '--patience=2')
  assert error.startswith('error: --validation=0.999: part=0.999: must be a number between 0 and 1')
  args = ['--algorithm=d_psgd', '--grid=learning_rate=1e-9', '--steps=10', '--eval_every=1']
  args += ['--seeds=0', '--validation=0.25', '--patience=2', f'--output={tmp_path}']
  program(*TINY, *args)  # at such a rate no row is better than the first
  printed = capsys.readouterr().out
  assert 'best of d_psgd: learning_rate=1e-09, by validation accuracy\n' in printed
  assert '1 runs, 0 diverged, 1 stopped early' in printed
  assert json.loads((tmp_path / 'results.json').read_text())[0]['metric'] == 'validation_accuracy'
