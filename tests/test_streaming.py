"""Training on examples that devices do not hold."""

import functools

import grain
import jax
import numpy as np
import optax
import pytest

import decomp
from decomp import algorithms, tasks, topology

RING = topology.ring(4)
X = np.random.default_rng(0).standard_normal((40, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)


class Source:
  """Records that are made when they are asked for, and counted."""

  def __init__(self):
    self.asked = 0

  def __len__(self):
    return 40

  def __getitem__(self, number):
    self.asked += 1
    return X[number], Y[number]


MODEL = lambda key: 0.1 * jax.random.normal(key, (3, 2)), lambda params, x: x @ params


def make(train):
  return tasks.from_arrays(MODEL, train, (X, Y))


def train(task, steps=20, **options):
  options = {'mapping': 'vmap', 'eval_every': 10, **options}
  return decomp.train(task, algorithms.d_psgd(optax.sgd(0.1)), RING, steps, 3, **options)


@functools.cache
def on_arrays():
  return train(make((X, Y)))


def assert_same(history, expected):
  for one, other in zip(
    jax.tree.leaves(history.state), jax.tree.leaves(expected.state), strict=True
  ):
    np.testing.assert_array_equal(one, other)
  for row, like in zip(history, expected, strict=True):
    assert {**row, 'seconds': 0} == {**like, 'seconds': 0}


def test_records_give_the_batches_of_arrays():
  source = Source()
  assert_same(train(make(tasks.Records(source)), window=7), on_arrays())
  # Three windows of 7 steps of 4 workers' 3 examples, and a few to see their form.
  assert 3 * 84 <= source.asked <= 3 * 84 + 10


def test_a_run_is_continued_within_a_window(tmp_path):
  task = make(tasks.Records(Source()))
  train(task, 10, window=7, checkpoint_dir=tmp_path)
  rest = train(task, 20, window=4, checkpoint_dir=tmp_path, resume=True)
  assert_same(rest, on_arrays())


def test_on_a_mesh_with_examples_dealt_anew():
  options = {'mesh': decomp.worker_mesh(4), 'reshuffle': True}
  assert_same(train(make((X, Y)), window=6, **options), train(make((X, Y)), **options))


def test_what_a_source_raises_is_heard():
  class Broken(Source):
    def __getitem__(self, number):
      if self.asked > 50:
        raise OSError('the file is gone')
      return super().__getitem__(number)

  with pytest.raises(OSError, match='the file is gone'):
    train(make(tasks.Records(Broken())), window=2)


def test_records_of_another_form_are_named():
  class Flags(Source):
    def __getitem__(self, number):
      return X[number], Y[number] > 0

  with pytest.raises(ValueError, match='train: y of a record is bool of shape'):
    make(tasks.Records(Flags()))


def test_no_records():
  with pytest.raises(ValueError, match='source has no records'):
    tasks.Records([])


def test_what_wants_all_at_once():
  task = make(tasks.Records(Source()))
  with pytest.raises(ValueError, match=r"task: train\['input'\] is read from records"):
    decomp.sweep(task, lambda rate: algorithms.d_psgd(optax.sgd(rate)), RING, 2, 3, rate=(0.1,))
  with pytest.raises(ValueError, match=r"shards='by_label': task: train\['label'\] is read"):
    train(task, shards='by_label')
  with pytest.raises(ValueError, match=r"validation=0\.1: task: train\['input'\] is read"):
    tasks.from_arrays(MODEL, tasks.Records(Source()), (X, Y), validation=0.1)


def test_grain_is_a_source():
  dataset = grain.MapDataset.range(40).map(lambda i: (X[i], Y[i]))
  assert_same(train(make(tasks.Records(dataset)), window=7), on_arrays())
