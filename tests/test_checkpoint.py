import logging
import os
import signal
import subprocess
import sys
import textwrap
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from decomp.training.checkpoint import Checkpointer

ROWS = [{'step': 1, 'loss': 0.5, 'note': None}, {'step': 2, 'loss': float('inf')}]


class State(NamedTuple):
  params: Any
  opt_state: Any
  mixed: Any = None


@pytest.fixture
def state():
  params = {'dense': {'w': jnp.arange(12.0).reshape(4, 3), 'b': jnp.zeros(4)}, 'empty': {}}
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
  return State(params, optimizer.init(params))


def save(directory, state, step=1, config=None):
  with Checkpointer(directory, config or {}) as checkpointer:
    checkpointer.save(step, state, ROWS)


def restore(directory, like, config=None):
  with Checkpointer(directory, config or {}) as checkpointer:
    return checkpointer.restore(like)


def assert_same(restored, state):
  """Compares structures, types, dtypes, shardings, and values bit by bit."""
  chex.assert_trees_all_equal_structs(restored, state)
  chex.assert_trees_all_equal_shapes_and_dtypes(restored, state)
  for got, want in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
    assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
    if isinstance(want, jax.Array):
      assert (got.sharding, got.committed) == (want.sharding, want.committed)


def test_nothing_to_restore(tmp_path, state):
  assert restore(tmp_path, state) is None


def test_round_trip(tmp_path, state):
  save(tmp_path / 'new' / 'directory', state, step=7)
  step, restored, rows = restore(tmp_path / 'new' / 'directory', state)
  assert (step, rows) == (7, ROWS)
  assert_same(restored, state)


def test_relative_directory(tmp_path, state, monkeypatch):
  monkeypatch.chdir(tmp_path)
  save('run', state)
  assert_same(restore('run', state).state, state)


DTYPES = ['bool', 'int4', 'uint8', 'int32', 'float16', 'bfloat16', 'float8_e4m3fn', 'complex64']
VALUES = np.random.default_rng(0).integers(0, 2, size=(4, 5))
BITS = np.array([0, 1 << 31, 1, 0x7F800000, 0x7FC00001, 0xFFC00000, 0x00800000], np.uint32)
STATES = {
  **{d: {'vector': jnp.asarray(VALUES, d), 'scalar': jnp.ones((), d)} for d in DTYPES},
  'special floats': [jnp.asarray(BITS.view(np.float32)), np.float64(BITS) + 1e-12],
  'names with separators': {
    'a/b': jnp.zeros(2),
    'a.b': {'': jnp.ones(2)},
    "['a']": [jnp.int32(2)],
    '..': jnp.ones(1),
  },
}


@pytest.mark.parametrize('name', STATES)
def test_odd_states(tmp_path, name):
  save(tmp_path, STATES[name])
  assert_same(restore(tmp_path, STATES[name]).state, STATES[name])


def test_float64(tmp_path):
  with jax.enable_x64(True):
    state = jnp.linspace(0.0, 1.0, 7, dtype=jnp.float64)
    save(tmp_path, state)
    assert_same(restore(tmp_path, state).state, state)


def test_shape_dtype_structs(tmp_path, state):
  save(tmp_path, state)
  assert_same(restore(tmp_path, jax.eval_shape(lambda: state)).state, state)


def sharding(num_devices):
  devices = jax.devices()[:num_devices]
  mesh = jax.make_mesh((num_devices,), ('worker',), (AxisType.Auto,), devices=devices)
  return NamedSharding(mesh, PartitionSpec('worker'))


@pytest.mark.parametrize('num_devices', [2, 4])
def test_sharded_arrays(tmp_path, num_devices):
  values = jnp.arange(24.0).reshape(8, 3)
  saved = {'sharded': jax.device_put(values, sharding(4)), 'step': jnp.int32(3)}
  save(tmp_path, saved)
  like = {'sharded': jax.device_put(values, sharding(num_devices)), 'step': jnp.int32(0)}
  restored = restore(tmp_path, like).state
  assert_same(restored, {'sharded': like['sharded'], 'step': jnp.int32(3)})
  # What was committed to no device can still be combined with what is.
  jax.jit(lambda tree: tree['sharded'][tree['step']])(restored)
  structs = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(num_devices)),
    {'sharded': values},
  )
  save(tmp_path, {'sharded': values}, step=2)
  assert_same(restore(tmp_path, structs).state, {'sharded': like['sharded']})


@pytest.mark.parametrize(
  ('like', 'line'),
  [
    ({'a': np.zeros(3), 'b': None}, """  state['a']: "float32[3]" there, "float64[3]" here"""),
    ({'a': jnp.zeros((1, 3))}, """  state['a']: "float32[3]" there, "float32[1, 3]" here"""),
    ({'a': jnp.zeros(3), 'b': jnp.int32(0)}, """  state['b']: missing there, "int32[]" here"""),
    ({'b': None}, """  state['a']: "float32[3]" there, missing here"""),
  ],
)
def test_another_form_of_state_is_refused(tmp_path, like, line):
  save(tmp_path, {'a': jnp.zeros(3), 'b': None})
  with pytest.raises(ValueError, match='step 1 is of another form') as caught:
    restore(tmp_path, like)
  assert str(caught.value).splitlines()[1:] == [line]


def test_the_state_may_be_donated(tmp_path):
  step = jax.jit(lambda x: x * 0, donate_argnums=0)
  state = jnp.ones((1000, 1000))
  with Checkpointer(tmp_path, {}) as checkpointer:
    checkpointer.save(1, state, [])
    state = jax.block_until_ready(step(state))
    np.testing.assert_array_equal(checkpointer.restore(state).state, 1.0)


def test_rows_are_those_of_the_call(tmp_path):
  rows = [{'step': 1}]
  with Checkpointer(tmp_path, {}) as checkpointer:
    checkpointer.save(1, jnp.zeros(3), rows)
    rows[0]['step'] = 2
    rows.append({'step': 2})
    assert checkpointer.restore(jnp.zeros(3)).rows == [{'step': 1}]


def test_the_last_are_kept(tmp_path):
  with Checkpointer(tmp_path, {}, keep=2) as checkpointer:
    for step in range(5):
      checkpointer.save(step, jnp.full(3, step), [])
  assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {'3', '4'}
  step, state, rows = restore(tmp_path, jnp.zeros(3, jnp.int32))
  assert (step, rows) == (4, [])
  assert_same(state, jnp.full(3, 4))


def test_saving_a_step_again_does_nothing(tmp_path):
  save(tmp_path, jnp.zeros(3))
  with Checkpointer(tmp_path, {}) as checkpointer:
    checkpointer.save(1, jnp.ones(3), [])
    checkpointer.save(2, jnp.ones(3), [])
    checkpointer.save(2, jnp.zeros(3), [])
    checkpointer.save(1, jnp.zeros(3), [])
    assert_same(checkpointer.restore(jnp.zeros(3)).state, jnp.ones(3))


def test_a_run_cannot_go_back(tmp_path):
  save(tmp_path, jnp.zeros(3), step=5)
  message = r'cannot save step 4: .* already holds step 5'
  with Checkpointer(tmp_path, {}) as checkpointer, pytest.raises(ValueError, match=message):
    checkpointer.save(4, jnp.zeros(3), [])


def test_rows_must_be_json(tmp_path):
  message = 'not JSON serializable'
  with Checkpointer(tmp_path, {}) as checkpointer, pytest.raises(TypeError, match=message):
    checkpointer.save(1, jnp.zeros(3), [{'loss': np.float32(1)}])
  assert restore(tmp_path, jnp.zeros(3)) is None


def test_config_differences_are_shown(tmp_path):
  there = {'rate': 0.1, 'seed': 0, 'steps': 10, 'layers': (1, 2), 'old': {'a': 1, 'b': 2}}
  save(tmp_path, jnp.zeros(3), config=there)
  here = {'rate': 0.2, 'seed': 0, 'steps': 20, 'layers': [1, 2], 'new': 'text'}
  with pytest.raises(ValueError, match='another configuration') as caught:
    Checkpointer(tmp_path, here, ignore=('steps',))
  assert str(caught.value).splitlines()[1:] == [
    '  rate: 0.1 there, 0.2 here',
    '  old: {"a": 1, "b": 2} there, missing here',
    '  new: missing there, "text" here',
  ]


def test_config_of_the_first_run_stays(tmp_path):
  for steps in (10, 20):
    Checkpointer(tmp_path, {'steps': steps}, ignore=('steps',)).close()
  with pytest.raises(ValueError, match='steps: 10 there, 30 here'):
    Checkpointer(tmp_path, {'steps': 30})


def test_orbax_is_quiet_and_others_are_not(tmp_path, caplog):
  with caplog.at_level(logging.DEBUG, logger='absl'):
    save(tmp_path, jnp.zeros(3))
    restore(tmp_path, jnp.zeros(3))
    assert not [record for record in caplog.records if record.name == 'absl']
    logging.getLogger('absl').info('progress')
    assert 'progress' in caplog.text


KILLED = textwrap.dedent("""
  import os, pathlib, signal, sys, time
  import jax.numpy as jnp
  from decomp.training.checkpoint import Checkpointer

  directory = pathlib.Path(sys.argv[1])
  with Checkpointer(directory, {'seed': 0}) as checkpointer:
    checkpointer.save(1, jnp.full(5_000_000, 1.0), [{'step': 1}])
    checkpointer.save(2, jnp.full(5_000_000, 2.0), [{'step': 1}, {'step': 2}])
    while not list(directory.glob('2*')):
      time.sleep(0.0001)
    os.kill(os.getpid(), signal.SIGKILL)
""")


def test_a_killed_save_is_ignored_and_removed(tmp_path):
  result = subprocess.run([sys.executable, '-c', KILLED, tmp_path], check=False)
  assert result.returncode == -signal.SIGKILL
  assert [name for name in os.listdir(tmp_path) if name.startswith('2.')], 'the save was too quick'
  like = jax.ShapeDtypeStruct((5_000_000,), jnp.float32)
  with Checkpointer(tmp_path, {'seed': 0}) as checkpointer:
    step, state, rows = checkpointer.restore(like)
    assert (step, rows) == (1, [{'step': 1}])
    np.testing.assert_array_equal(state, 1.0)
    checkpointer.save(2, state, rows)
  assert sorted(os.listdir(tmp_path)) == ['1', '2', 'config.json']
