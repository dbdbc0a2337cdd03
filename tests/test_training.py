"""The train loop: its numbers by hand, runs repeated and resumed to the bit, divergence."""

import concurrent.futures
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import make_algorithms

import decomp
from decomp import algorithms, compressors, metrics, topology
from decomp.tasks.data import batches, partition
from decomp.training import steps as arithmetic
from decomp.training.program import Program

WORKERS, STEPS, EVAL_EVERY, BATCH, WORKER_EXAMPLES = 8, 10, 4, 4, 7
D_PSGD = algorithms.d_psgd(optax.sgd(0.3, momentum=0.9))
DCD = algorithms.dcd_psgd(optax.sgd(0.3), compressors.stochastic_quantizer(4))


def make_task():
  """Logistic regression with a running mean of the inputs in its model state, like BatchNorm's."""
  rng = np.random.default_rng(0)
  inputs = rng.standard_normal((61, 3)).astype(np.float32) + 1
  labels = (inputs.sum(1) + rng.standard_normal(61) > 3).astype(np.int32)
  train, test = (
    {'x': inputs[part], 'label': labels[part]} for part in np.split(np.arange(61), [48])
  )

  def scores(params, mean, batch):
    return (batch['x'] - mean[None]) @ params['w'] + params['b'][None]

  def losses(scores, labels):
    return jax.nn.softplus(jnp.where(labels == 1, -scores, scores))

  def init(key):
    return {'w': jax.random.normal(key, (3,)), 'b': jnp.zeros(())}, {'mean': jnp.zeros(3)}

  def loss(params, state, batch, key):
    state = {'mean': 0.9 * state['mean'] + 0.1 * batch['x'].mean(0)}
    noise = 0.1 * jax.random.normal(key)
    found = losses(scores(params, state['mean'], batch), batch['label'])
    return found.mean() + noise * params['b'], state

  def evaluate(params, state, batch):
    found = scores(params, state['mean'], batch)
    right = (found > 0) == (batch['label'] == 1)
    return {'loss': losses(found, batch['label']), 'accuracy': right.astype(jnp.float32)}

  return decomp.Task('centred', init, loss, evaluate, train, test)


TASK = make_task()
UNEVEN = partition.dirichlet(TASK.train['label'], WORKERS, alpha=2.0, seed=1)


def train(algorithm=D_PSGD, steps=STEPS, seed=0, **options):
  options = {'eval_every': EVAL_EVERY, 'worker_examples': WORKER_EXAMPLES, **options}
  return decomp.train(TASK, algorithm, topology.ring(WORKERS), steps, BATCH, seed, **options)


@functools.cache
def reference():
  return train()


def numbers(rows):
  """The rows without the one column that no two runs share."""
  return [{name: value for name, value in row.items() if name != 'seconds'} for row in rows]


def test_rows():
  rows = reference()
  always = {'step', 'epoch', 'consensus_distance', 'bytes_sent', 'seconds'}
  always |= {'test_loss', 'test_accuracy', 'worst_loss', 'worst_accuracy'}
  since = {'train_loss', 'gradient_norm', 'compression_error', 'clipped'}
  assert [row['step'] for row in rows] == [0, 4, 8, 10]
  assert [row['epoch'] for row in rows] == [0, 4 / 1.5, 8 / 1.5, 10 / 1.5]
  assert [set(row) for row in rows] == [always, *[always | since] * 3]
  assert all(type(value) in (int, float) for row in rows for value in row.values())
  assert np.all(np.diff(rows.column('seconds')) > 0)
  assert np.isnan(rows.column('train_loss')[0])
  assert rows.diverged is None
  assert rows.steps_per_second > 0


def test_default_is_twenty_rows():
  calls = []
  train(steps=43, eval_every=None, on_row=calls.append)
  assert [row['step'] for row in calls] == [*range(0, 43, 2), 43]


@pytest.mark.parametrize(('steps', 'rows'), [(21, [0, 10, 21]), (22, [0, 10, 20, 22])])
def test_last_row_takes_in_what_is_left_over(steps, rows):
  assert train(steps=steps, eval_every=10).column('step').tolist() == rows


def test_metrics_by_hand():
  """The last row from the final parameters, in NumPy."""
  history = reference()
  row = history[-1]
  params, mean = jax.tree.map(
    lambda x: np.asarray(x, np.float64), (history.params, history.model_state['mean'])
  )
  flat = np.concatenate([params['w'], params['b'][:, None]], axis=1)
  apart = np.sqrt(((flat - flat.mean(0)) ** 2).sum(1).mean())
  assert row['consensus_distance'] == pytest.approx(apart, rel=1e-5)

  def evaluate(flat, mean, count):
    scores = (TASK.test['x'][:count] - mean) @ flat[:3] + flat[3]
    signs = 2 * TASK.test['label'][:count] - 1
    return np.logaddexp(0, -signs * scores).mean(), ((scores > 0) == (signs > 0)).mean()

  loss, accuracy = evaluate(flat.mean(0), mean.mean(0), count=None)
  assert row['test_loss'] == pytest.approx(loss, rel=1e-5)
  assert row['test_accuracy'] == pytest.approx(accuracy)
  each = [evaluate(*worker, WORKER_EXAMPLES) for worker in zip(flat, mean, strict=True)]
  assert row['worst_loss'] == pytest.approx(max(loss for loss, _ in each), rel=1e-5)
  assert row['worst_accuracy'] == pytest.approx(min(accuracy for _, accuracy in each))
  sim = decomp.simulate(D_PSGD, topology.ring(WORKERS))
  one = jax.tree.map(lambda x: x[0], history.params)
  assert list(history.column('bytes_sent')) == [s * sim.bytes_per_step(one) for s in (0, 4, 8, 10)]


# Linear in its input, so that a last bit that differs does not flip a rounding.
DCD_LINEAR = algorithms.dcd_psgd(optax.sgd(0.1), compressors.random_k(0.8))


@pytest.mark.parametrize(
  ('algorithm', 'shards', 'replacement'),
  [(D_PSGD, 'iid', False), (D_PSGD, 'by_label', True), (DCD_LINEAR, UNEVEN, False)],
  ids=['iid', 'by_label', 'uneven'],
)
def test_against_a_loop_by_hand(algorithm, shards, replacement):
  """Batches from the worker's shard, one gradient each, then `sim.step`."""
  history = train(algorithm, shards=shards, replacement=replacement)
  labels = TASK.train['label']
  named = {'iid': partition.iid(labels, WORKERS), 'by_label': partition.by_label(labels, WORKERS)}
  shards = named[shards] if isinstance(shards, str) else shards
  sim = decomp.simulate(algorithm, topology.ring(WORKERS))
  init_key, data_key, loss_key, step_key = jax.random.split(jax.random.key(0), 4)
  params, start = TASK.init(init_key)
  state, models = sim.init(params), [start] * WORKERS
  gradient = jax.jit(jax.value_and_grad(TASK.loss, has_aux=True))
  sample = functools.partial(batches.sample, batch_size=BATCH, replacement=replacement)
  draw = jax.jit(jax.vmap(sample, in_axes=(None, None, 0, None)))
  everyone, found = jnp.arange(WORKERS), []
  for step in range(STEPS):
    losses, grads = [], []
    for worker, chosen in enumerate(np.asarray(draw(data_key, step, everyone, shards))):
      assert set(chosen) <= set(shards.shard(worker))
      batch = {name: values[chosen] for name, values in TASK.train.items()}
      own = jax.tree.map(lambda x: x[worker], state.params)  # noqa: B023
      key = jax.random.fold_in(jax.random.fold_in(loss_key, step), worker)
      (loss, models[worker]), grad = gradient(own, models[worker], batch, key)
      losses.append(float(loss))
      grads.append(grad)
    grads = jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads)
    norm = np.sqrt(sum((np.mean(g, 0) ** 2).sum() for g in jax.tree.leaves(grads)))
    state, info = sim.step(step_key, grads, state)
    found.append((np.mean(losses), norm, np.mean(info.compression_error)))

  for before, row in itertools.pairwise(history):
    means = np.mean(found[before['step'] : row['step']], axis=0)
    means[1] = found[row['step'] - 1][1]  # the gradient norm is the last step's
    last = row['step'] - 1  # and messages are observed there and in every eighth
    means[2] = np.mean(
      [found[s][2] for s in range(before['step'], row['step']) if s % 8 == 0 or s == last]
    )
    recorded = [row['train_loss'], row['gradient_norm'], row['compression_error']]
    np.testing.assert_allclose(recorded, means, rtol=1e-4, atol=1e-6)
  chex.assert_trees_all_close(history.params, state.params, rtol=1e-4, atol=1e-5)


def test_training_twice_gives_the_same_rows():
  """Also in a thread that no Ctrl-C reaches."""
  with concurrent.futures.ThreadPoolExecutor() as pool:
    again = pool.submit(train).result()
  assert numbers(again) == numbers(reference())
  other = train(seed=1)
  for name in ('train_loss', 'test_loss', 'consensus_distance'):
    assert other[-1][name] != again[-1][name]


def test_evaluation_changes_nothing():
  often = {row['step']: row for row in train(eval_every=2)}
  for row in reference():
    for name in ('test_loss', 'test_accuracy', 'worst_loss', 'consensus_distance', 'bytes_sent'):
      assert often[row['step']][name] == row[name]
  means = [np.mean([often[s]['train_loss'] for s in steps]) for steps in ((2, 4), (6, 8), (10,))]
  np.testing.assert_allclose(reference().column('train_loss')[1:], means, rtol=1e-6)


@pytest.mark.parametrize('mapping', ['scan', 'devices'])
def test_mappings_agree(mapping):
  """'devices' has one worker on each of the 8 devices."""
  history = train(mapping=mapping)
  if mapping == 'devices':
    assert len(history.params['w'].sharding.device_set) == WORKERS
  for row, expected in zip(numbers(history), numbers(reference()), strict=True):
    assert row == pytest.approx(expected, rel=1e-4, abs=1e-6)


def failing_task(value, size=2):
  """The loss of the worker that holds label 2 is `value` in the fifth step."""
  labels = np.arange(4, dtype=np.int32)

  def loss(params, count, batch, key):
    failed = (count == 4) & (batch['label'][0] == 2)
    return jnp.where(failed, value, params @ params), count + 1

  return decomp.Task(
    'failing',
    lambda key: (jnp.ones(size), jnp.int32(0)),
    loss,
    lambda params, count, batch: {'loss': (params @ params)[None]},
    {'label': labels},
    {'label': labels[:1]},
  )


@pytest.mark.parametrize('value', [np.nan, 1e6, -np.inf])
def test_divergence_stops_the_run_at_that_step(value):
  task, algorithm = failing_task(value), algorithms.d_psgd(optax.sgd(0.1))
  with pytest.warns(RuntimeWarning, match='diverged at step 5: the loss of worker 2 is') as caught:
    history = decomp.train(
      task, algorithm, topology.ring(4), 100, 1, shards='by_label', eval_every=3
    )
  assert caught[0].filename == __file__
  assert str(caught[0].message) == history.diverged
  assert 'd_psgd on ring(4)' in history.diverged
  assert [row['step'] for row in history] == [0, 3, 5]
  assert np.isfinite(history.column('train_loss')[1])
  assert int(history.state.round) == 5
  np.testing.assert_array_equal(history.model_state, np.full(4, 5))


@pytest.mark.parametrize(
  ('make', 'advice'),
  [
    (lambda: D_PSGD, 'Try a smaller learning rate.'),
    (
      lambda: algorithms.choco_sgd(optax.sgd(0.1), compressors.random_k(0.1, unbiased=False), 1.0),
      r'Its theory says "will diverge": with the contraction .*; use consensus_rate=0.\d+.',
    ),
    (lambda: decomp.Algorithm(*D_PSGD[:2], name='own'), 'Try a smaller learning rate.'),
  ],
  ids=['nothing against it', 'its own rule', 'no theory'],
)
def test_advice_after_divergence(make, advice):
  """That of the algorithm's own theory, if it has an objection."""
  with pytest.warns(RuntimeWarning, match=advice + '$'):
    decomp.train(failing_task(np.nan, 10), make(), topology.ring(4), 9, 1, shards='by_label')


def test_all_fail_at_once():
  """A model that is not finite reaches everyone by all-reduce, before anyone's loss shows it."""
  task = failing_task(0.0)._replace(loss=lambda params, count, batch, key: (params @ params, count))
  allreduce = algorithms.allreduce(optax.sgd(1e30))
  with pytest.warns(RuntimeWarning, match=r'step \d: .* is (nan|inf).*\(4 of 4 at once: a grad'):
    decomp.train(task, allreduce, topology.ring(4), 9, 1, shards='by_label', eval_every=9)


def spoilt_task(step, worker):
  """The gradient of one worker is NaN in one step, from 1, while its loss is finite."""
  labels = np.arange(8, dtype=np.int32)

  def loss(params, count, batch, key):
    bad = ((batch['label'][0] == worker) & (count == step - 1)).astype(jnp.float32)
    change = params - jax.lax.stop_gradient(params)
    return params @ params + jnp.sqrt(bad * (change @ change)), count + 1

  return decomp.Task(
    'spoilt',
    lambda key: (jnp.ones(2), jnp.int32(0)),
    loss,
    lambda params, count, batch: {'loss': (params @ params)[None]},
    {'label': labels},
    {'label': labels[:1]},
  )


@pytest.mark.parametrize('name', algorithms.__all__)
def test_a_gradient_that_is_not_finite_is_reported_at_once(name):
  """Though the loss of its worker is finite, and others have no finite loss either a step later."""
  algorithm = make_algorithms(optax.sgd(0.1))[name]
  said = 'diverged at step 7: the gradient of worker 3 is not finite, and its loss is '
  with pytest.warns(RuntimeWarning, match=said):
    history = decomp.train(
      spoilt_task(7, 3), algorithm, topology.ring(8), 20, 1, shards='by_label', eval_every=20
    )
  assert int(history.state.round) == 7


def test_an_optimizer_may_leave_out_what_is_not_finite():
  optimizer = optax.apply_if_finite(optax.sgd(0.1), 3)
  algorithm = algorithms.d_psgd(optimizer)
  history = decomp.train(spoilt_task(7, 3), algorithm, topology.ring(8), 20, 1, shards='by_label')
  assert history.diverged is None


def test_whose_leaves_are_finite():
  """As far as one looks: at small leaves, or at the smallest."""
  small, big = np.zeros((3, 2, 5)), np.zeros((3, arithmetic.CHECKED + 1))
  small[1, 0, 3], big[2, 7] = np.nan, np.inf
  assert arithmetic.finite({'a': small, 'b': big}).tolist() == [True, False, True]
  assert arithmetic.finite([big]).tolist() == [True, True, False]
  assert arithmetic.finite(np.array([1, -np.inf, 2])).tolist() == [True, False, True]


def test_models_that_scatter_stop_the_run_at_the_next_row():
  """Though the loss of each is 0 all the time, as that of a network whose units are all off."""
  labels = np.arange(4, dtype=np.int32)

  def loss(params, state, batch, key):
    away = 3e37 * batch['label'][0].astype(jnp.float32)
    return away * (params - jax.lax.stop_gradient(params)).sum(), state

  def evaluate(params, state, batch):
    return {'loss': jnp.zeros(1)}

  task = decomp.Task(
    'away',
    lambda key: (jnp.ones(100), ()),
    loss,
    evaluate,
    {'label': labels},
    {'label': labels[:1]},
  )

  def make(learning_rate):
    return algorithms.d_psgd(optax.sgd(learning_rate))

  options = {'steps': 9, 'batch_size': 1, 'shards': 'by_label', 'eval_every': 3}
  with pytest.warns(RuntimeWarning, match='diverged at step 3: models are no longer finite'):
    alone = decomp.train(task, make(1.0), topology.ring(4), **options)
  assert [row['step'] for row in alone] == [0, 3]
  swept = decomp.sweep(
    task, make, topology.ring(4), seeds=(0,), learning_rate=(0.0, 1.0), **options
  )
  assert [len(history) for history in swept.histories] == [4, 2]
  assert [history.diverged for history in swept.histories] == [None, alone.diverged]


def test_a_clock_on_a_simulated_network():
  """A share of the work, and for each step 8 bits of 3 + 1 floats to two neighbours."""
  task = decomp.tasks.logistic_regression(64, 3)
  algorithm = algorithms.dcd_psgd(optax.sgd(0.1), compressors.stochastic_quantizer(8))
  network = decomp.cost.lan(bandwidth='1kbps', latency='1s')
  history = decomp.train(task, algorithm, topology.ring(4), 4, 2, eval_every=2, network=network)
  for row in history:
    waited = row['simulated_seconds'] - row['seconds'] / 4
    assert waited == pytest.approx(row['step'] * (1 + 2 * 8 * (3 + 4) / 1000))


def test_losses_below_the_limit():
  losses = np.array([1, -1e9, 3, np.nan, -np.inf, np.inf], np.float32)
  assert arithmetic.below(losses, 3.0).tolist() == [True, True, False, False, False, False]
  assert not arithmetic.below(losses, np.inf)[3:].any()


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'steps': 0}, 'steps=0: must be'),
    ({'steps': 2.5}, 'steps=2.5: must be'),
    ({'eval_every': -1}, 'eval_every=-1: must be'),
    ({'worker_examples': 0}, 'worker_examples=0: must be'),
    ({'shards': 'sorted'}, "shards='sorted': unknown partition 'sorted'"),
    ({'shards': partition.iid(TASK.train['label'], 3)}, 'shards has 3 workers, but .* has 8'),
    ({'mapping': 'magic'}, "mapping='magic'"),
    ({'resume': True}, 'resume=True: needs the checkpoint_dir'),
    ({'reshuffle': True, 'replacement': True}, 'reshuffle=True, replacement=True'),
  ],
)
def test_bad_arguments(options, message):
  with pytest.raises(ValueError, match=message):
    train(**options)


def test_bad_batch_size_and_devices():
  with pytest.raises(ValueError, match='batch_size=0: must be'):
    decomp.train(TASK, D_PSGD, topology.ring(4), 1, 0)
  with pytest.raises(ValueError, match="mapping='devices': 6 workers cannot"):
    decomp.train(TASK, D_PSGD, topology.ring(6), 1, 1, mapping='devices')


def stop_early(directory, monkeypatch):
  train(steps=EVAL_EVERY, checkpoint_dir=directory)


def raise_in_a_row(directory, monkeypatch):
  def on_row(row):
    if row['step'] == 4:
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    train(checkpoint_dir=directory, on_row=on_row)


def press_ctrl_c_in_a_step(directory, monkeypatch):
  """In the first chunk of steps, after its arguments have been given away."""
  advance = Program.advance

  def interrupted(*args):
    carry = advance(*args)
    signal.raise_signal(signal.SIGINT)
    return carry

  before = signal.getsignal(signal.SIGINT)
  with monkeypatch.context() as patch:
    patch.setattr(Program, 'advance', interrupted)
    with pytest.raises(KeyboardInterrupt):
      train(checkpoint_dir=directory)
  assert signal.getsignal(signal.SIGINT) is before


def train_and_die(directory):
  """Saves after every few steps, and is killed in the middle: for a process of its own."""

  def on_row(row):
    if row['step'] == 8:
      os.kill(os.getpid(), signal.SIGKILL)

  train(checkpoint_dir=directory, checkpoint_seconds=0.0, on_row=on_row)


def kill_the_process(directory, monkeypatch):
  code = f'import conftest, test_training; test_training.train_and_die({str(directory)!r})'
  done = subprocess.run([sys.executable, '-c', code], cwd=Path(__file__).parent, timeout=300)
  assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
  'interrupt', [stop_early, raise_in_a_row, press_ctrl_c_in_a_step, kill_the_process]
)
def test_resumed_run_is_the_uninterrupted_one(interrupt, tmp_path, monkeypatch):
  """Bit by bit, with momentum and model state; every row is handed out again."""
  interrupt(tmp_path, monkeypatch)
  saved = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
  assert saved
  assert 0 < max(saved) < STEPS
  rows = []
  history = train(checkpoint_dir=tmp_path, resume=True, on_row=rows.append)
  assert numbers(history) == numbers(reference()) == numbers(rows)
  ends = [(found.state, found.model_state) for found in (history, reference())]
  jax.tree.map(np.testing.assert_array_equal, *ends)


CHOCO = algorithms.choco_sgd(optax.sgd(0.3), compressors.identity(), consensus_rate=0.7)


@pytest.mark.parametrize(('before', 'after'), [(1, 2), (2, 1), (2, 2)])
def test_a_run_goes_on_with_another_number_of_devices(before, after, tmp_path):
  """Where workers are on one device, nothing is carried along; between devices sums are."""
  meshes = {1: None, 2: decomp.worker_mesh(WORKERS, jax.devices()[:2])}
  train(CHOCO, steps=4, mesh=meshes[before], checkpoint_dir=tmp_path, eval_every=4)
  found = train(
    CHOCO, mesh=meshes[after], checkpoint_dir=tmp_path, resume=True, eval_every=4
  ).state.params
  expected = train(CHOCO, mesh=meshes[after], eval_every=4).state.params
  chex.assert_trees_all_close(found, expected, rtol=0, atol=0 if before == after else 1e-6)


def test_finished_run(tmp_path, monkeypatch):
  """Resumed it is there at once, anew it is refused, and so is a run with other settings."""
  train(steps=EVAL_EVERY, checkpoint_dir=tmp_path)
  resume = functools.partial(train, steps=EVAL_EVERY, checkpoint_dir=tmp_path, resume=True)
  with monkeypatch.context() as patch:
    patch.setattr(Program, 'compile', None)
    history = resume()
  assert numbers(history) == numbers(reference())[:2]
  with pytest.raises(ValueError, match='up to step 4 already: pass resume=True'):
    resume(resume=False)
  with pytest.raises(ValueError, match='seed: 0 there, 1 here'):
    resume(seed=1)
  with pytest.raises(ValueError, match=r'algorithm: "d_psgd" there, "dcd_psgd\(.*\)" here'):
    resume(algorithm=DCD)
  with pytest.raises(ValueError, match='checksum of the shards'):
    resume(shards='by_label')
  with pytest.raises(ValueError, match='eval_every: 4 there, 2 here'):
    resume(eval_every=2)
  with pytest.raises(ValueError, match='learning rate: missing there'):
    resume(config={'learning rate': 0.3})


def test_a_run_that_is_made_longer(tmp_path):
  """With the default `eval_every`, which is another for more steps; a shorter one is refused."""
  task = decomp.tasks.logistic_regression(num_examples=32, dimension=3)
  resume = functools.partial(
    decomp.train, task, D_PSGD, topology.ring(4), batch_size=2, checkpoint_dir=tmp_path
  )
  resume(steps=40)
  history = resume(steps=60, resume=True)
  alone = decomp.train(task, D_PSGD, topology.ring(4), steps=60, batch_size=2)
  np.testing.assert_array_equal(history.state.params, alone.state.params)
  assert [row['step'] for row in history][-3:] == [54, 57, 60]
  with pytest.raises(ValueError, match='steps=20: checkpoint_dir holds a run up to step 60'):
    resume(steps=20, resume=True)


def test_metrics_over_workers():
  params = {'a': jnp.array([[1.0, 2.0], [3.0, 6.0]]), 'b': jnp.array([0.0, 4.0])}
  assert metrics.mean_over_workers({'counter': jnp.array([7, 7])})['counter'] == 7
  mean = metrics.mean_over_workers(params)
  np.testing.assert_allclose(mean['a'], [2, 4])
  np.testing.assert_allclose(mean['b'], 2)
  np.testing.assert_allclose(metrics.consensus_distance(params), 3.0)  # both are (1, 2, 2) away
  np.testing.assert_allclose(metrics.gradient_norm(params), np.sqrt(4 + 16 + 4), rtol=1e-6)


@pytest.mark.parametrize('size', [1e30, 1e-30])
def test_distances_that_have_no_squares_in_float32(size):
  params = size * jnp.array([[1.0, 2.0, 0.0], [3.0, 6.0, 4.0]])
  np.testing.assert_allclose(metrics.consensus_distance(params), 3 * size, rtol=1e-6)
  np.testing.assert_allclose(metrics.gradient_norm(params), 24**0.5 * size, rtol=1e-6)
  for spoilt in (jnp.inf, jnp.nan):
    assert not jnp.isfinite(metrics.consensus_distance(params.at[0, 1].set(spoilt)))
  assert metrics.consensus_distance(0 * params) == 0


def test_a_checkpoint_of_an_earlier_version_is_refused(tmp_path):
  train(steps=EVAL_EVERY, checkpoint_dir=tmp_path)
  config = json.loads((tmp_path / 'config.json').read_text())
  del config['checksum of the above']
  (tmp_path / 'config.json').write_text(json.dumps(config))
  with pytest.raises(ValueError, match='or of an earlier version'):
    train(checkpoint_dir=tmp_path, resume=True)
