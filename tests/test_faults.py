"""What a machine does to a run: damaged checkpoints, folders that won't do, signals, other runs."""

import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from test_experiments import ROOT, TINY, Program, read_rows

from decomp.training import checksums, folders, loop, signals
from decomp.training import program as compiled
from decomp.training.checkpoint import Checkpointer

FLIPS = int(os.environ.get('DECOMP_FLIPS', '12'))
"""Bits to flip; each takes 0.1 s."""

STATE = {
  'params': jax.random.normal(jax.random.key(0), (8, 500)),
  'moment': jnp.zeros((8, 500)).at[:, 0].set(1.0),
  'step': jnp.int32(7),
}
ROWS = [{'step': 0, 'loss': 0.5}, {'step': 7, 'loss': float('nan')}]


def save(directory, seed=0, steps=(10, 20), rows=ROWS):
  with Checkpointer(directory, {'seed': seed}) as checkpointer:
    for step in steps:
      checkpointer.save(step, {**STATE, 'step': jnp.int32(step + seed)}, rows)


def restore(directory):
  with Checkpointer(directory, {'seed': 0}) as checkpointer:
    return checkpointer.restore(STATE)


def outcome(directory):
  """What is restored, or why nothing is."""
  try:
    return restore(directory), None
  except ValueError as error:
    return None, str(error)


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  path = tmp_path_factory.mktemp('saved')
  save(path)
  return path


@pytest.mark.parametrize(
  ('shape', 'axes'), [((8, 3), ('a',)), ((2, 8, 3), (None, 'a')), ((6, 8, 4), ('b', 'a')), ((), ())]
)
def test_a_checksum_does_not_depend_on_devices(shape, axes):
  """The pieces, which processes have for themselves, make that of all bytes by definition."""
  mesh = jax.make_mesh((4, 2), ('a', 'b'), (AxisType.Auto,) * 2)
  values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
  array = jax.device_put(values, NamedSharding(mesh, PartitionSpec(*axes)))
  pieces = [shard for shard in array.addressable_shards if shard.replica_id == 0]
  assert len(pieces) == np.prod([{'a': 4, 'b': 2}[axis] for axis in axes if axis])
  total = 0
  for piece in pieces:
    total ^= checksums._piece(np.asarray(piece.data), piece.index, shape)
  expected = zlib.crc32(values.tobytes(), 0xFFFFFFFF) ^ 0xFFFFFFFF
  assert total == expected
  assert checksums.checksums({'x': array, 'y': values}) == {'x': expected, 'y': expected}


def test_no_flipped_bit_is_believed(saved, tmp_path):
  """In the data of the newest step, of which a part is of no use; the older step is offered."""
  path, chance = tmp_path / 'flipped', random.Random(0)
  shutil.copytree(saved, path)
  files = sorted(file for file in (path / '20' / 'state').rglob('d/*') if file.is_file())
  clean, refused = restore(path), 0
  for _ in range(FLIPS):
    file = chance.choices(files, [file.stat().st_size for file in files])[0]
    before = file.read_bytes()
    after, bit = bytearray(before), chance.randrange(8 * len(before))
    after[bit // 8] ^= 1 << bit % 8
    file.write_bytes(after)
    found, message = outcome(path)
    if message:
      refused += 1
      assert message.startswith(f'{path}/20')
      assert message.endswith(f'): remove {path}/20 to go on from step 10')
    else:
      assert (found.step, repr(found.rows)) == (clean.step, repr(clean.rows))
      jax.tree.map(np.testing.assert_array_equal, found.state, clean.state)
    file.write_bytes(before)
  print(f'{refused} of {FLIPS} flips refused, the others without effect')
  assert refused > FLIPS // 2


def cut(path):
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def replace(path, old, new):
  text = path.read_text()
  assert old in text
  path.write_text(text.replace(old, new))


def empty(path):
  shutil.rmtree(path)
  path.mkdir()


def become_a_file(path):
  shutil.rmtree(path)
  path.write_text('')


def take(other, name, path):
  shutil.rmtree(path / name)
  shutil.copytree(other / name, path / name)


DAMAGES = {
  'state of another run': (lambda path, other: take(other, '20/state', path), r"state\['step'\]"),
  'rows of another run': (lambda path, other: take(other, '20/history', path), 'of another run'),
  'step of another run': (lambda path, other: take(other, '20', path), 'of another run'),
  'altered row': (
    lambda path, _: replace(path / '20/history/metadata', '0.5', '0.4'),
    'metadata is damaged .it is not what was saved',
  ),
  'rows of another kind': (
    lambda path, _: (path / '20/history/metadata').write_text('[1, 2]'),
    'is damaged',
  ),
  'cut rows': (lambda path, _: cut(path / '20/history/metadata'), 'is damaged'),
  'cut manifest': (lambda path, _: cut(path / '20/state/manifest.ocdbt'), 'is damaged'),
  'cut data': (
    lambda path, _: [cut(file) for file in (path / '20/state').rglob('d/*')],
    'is damaged',
  ),
  'no data': (lambda path, _: empty(path / '20/state'), 'is damaged'),
  'an empty step': (
    lambda path, _: empty(path / '20'),
    'metadata is damaged .No such file',
  ),
  'no step': (
    lambda path, _: become_a_file(path / '20'),
    'metadata is damaged .Not a dir',
  ),
}


@pytest.fixture(scope='module')
def other(tmp_path_factory):
  path = tmp_path_factory.mktemp('other')
  save(path, seed=1)
  return path


@pytest.mark.parametrize('name', DAMAGES)
def test_damage_has_one_sentence(name, saved, other, tmp_path, caplog, capfd):
  """It names the folder, what is wrong and the older step; and when that is removed, this is it."""
  damage, words = DAMAGES[name]
  path = tmp_path / 'damaged'
  shutil.copytree(saved, path)
  damage(path, other)
  with pytest.raises(ValueError, match=words) as caught:
    restore(path)
  message = str(caught.value)
  assert message.startswith(f'{path}/20')
  assert message.endswith(f': remove {path}/20 to go on from step 10')
  assert '\n' not in message
  assert (caplog.text, *capfd.readouterr()) == ('', '', '')
  (path / '20').rename(tmp_path / 'removed')
  assert restore(path).step == 10


def test_damage_without_an_older_step(saved, tmp_path):
  path = tmp_path / 'damaged'
  shutil.copytree(saved, path)
  empty(path / '20')
  cut(path / '10/history/metadata')
  message = r'/20/.* is damaged .*; .*/10/.* is damaged .*: no older checkpoint is whole; choose'
  with pytest.raises(ValueError, match=message):
    restore(path)
  for remains in ('{"se', '', '[]', '{"seed": 0, "checksum of the above": 1}'):
    (path / 'config.json').write_text(remains)
    with pytest.raises(ValueError, match=r'/config.json is damaged .*, which tells whose'):
      restore(path)
  (path / 'config.json').unlink()
  with pytest.raises(ValueError, match=r'/config.json is missing, which tells whose checkpoints'):
    restore(path)


@pytest.fixture
def train(monkeypatch, as_users_have_it):
  return Program('train', monkeypatch)


RUN = [*TINY, '--algorithm=d_psgd', '--eval_every=2', '--steps=8']


def full_disk(path):
  """A disk of a megabyte with room for what a run begins with."""
  path.mkdir()
  if subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=1m', 'tmpfs', path]).returncode:
    pytest.skip('only root can mount a small disk')
  (path / 'other').write_bytes(bytes((1 << 20) - (20 << 10)))


def read_only(path):
  path.mkdir()
  if subprocess.run(['mount', '-t', 'tmpfs', '-o', 'ro', 'tmpfs', path]).returncode:
    pytest.skip('only root can mount a disk that is read only')


@pytest.fixture
def disk(tmp_path):
  yield tmp_path / 'disk'
  if os.path.ismount(tmp_path / 'disk'):
    subprocess.run(['umount', tmp_path / 'disk'], check=True)


@pytest.mark.parametrize(
  ('where', 'prepare', 'words'),
  [
    ('/dev/null', None, 'cannot write /dev/null (File exists): choose a folder'),
    ('/dev/null/a', None, 'cannot write /dev/null/a (Not a directory): choose a folder'),
    ('{disk}/' + 300 * 'a', None, 'aaa (File name too long): choose a folder'),
    ('{disk}', Path.touch, '/disk (File exists): choose a folder'),
    ('{disk}/a', read_only, '/disk/a (Read-only file system): choose a folder'),
    ('{disk}/a', full_disk, '(No space left on device): make room there'),
  ],
  ids=['/dev/null', 'in a file', 'long', 'file', 'read-only', 'full'],
)
def test_folders_that_will_not_do(where, prepare, words, disk, train, caplog, capfd):
  if prepare:
    prepare(disk)
  output = where.format(disk=disk)
  error = train.error(*RUN, '--checkpoint_seconds=0', f'--output={output}')
  assert error.startswith('error: cannot ')
  assert words in error
  print(error)
  assert (caplog.text, capfd.readouterr().err) == ('', '')


GONE = textwrap.dedent("""
  import pathlib, sys
  import jax.numpy as jnp
  from decomp.training.checkpoint import Checkpointer

  directory = pathlib.Path(sys.argv[1])
  with Checkpointer(directory, {}) as checkpointer:
    directory.rename(directory.with_name('away'))
    directory.write_text('in its place')
    checkpointer.save(1, jnp.zeros(3), [])
""")


def test_a_process_ends_whose_folder_is_gone(tmp_path):
  """Not after 20 minutes, and with no more than its error."""
  done = subprocess.run(
    [sys.executable, '-c', GONE, tmp_path / 'run'], capture_output=True, text=True, timeout=60
  )
  assert done.returncode == 1
  last = done.stderr.splitlines()[-1]
  assert last.startswith(f'OSError: cannot save step 1 in {tmp_path}/run (Not a directory): make')
  assert 'absl' not in done.stderr


def stop_with(numbers, patch):
  """Signals after the first steps, whose arguments have been given away."""
  advance = compiled.Program.advance

  def stopped(*args):
    carry = advance(*args)
    for number in numbers:
      signal.raise_signal(number)
    return carry

  patch.setattr(compiled.Program, 'advance', stopped)


@pytest.fixture
def hangup_ends():
  """Also where the tests run under nohup, which a program respects."""
  before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
  yield
  signal.signal(signal.SIGHUP, before)


def stopped_by(numbers, program, monkeypatch, *args):
  with monkeypatch.context() as patch:
    stop_with(numbers, patch)
    with pytest.raises(SystemExit) as caught:
      program(*args)
  assert str(caught.value) == '\nstopped; the same command with --resume continues from here'
  return caught.value.code


def numbers_of(path):
  return [{**row, 'seconds': 0} for row in read_rows(path / 'metrics.jsonl')]


def steps_of(path):
  return sorted(int(entry.name) for entry in path.iterdir() if entry.name.isdigit())


@pytest.mark.usefixtures('hangup_ends')
def test_signals_save_and_the_run_goes_on(train, tmp_path, monkeypatch, capsys):
  """Its numbers are those of a run that nothing disturbs. Signals may come twice."""
  path = tmp_path / 'stopped'
  args = [*RUN, f'--output={path}', '--resume']
  done = 0
  for number in (signal.SIGTERM, signal.SIGHUP):
    capsys.readouterr()
    assert stopped_by([number, number], train, monkeypatch, *args) == 128 + number
    assert '--resume continues from here' in capsys.readouterr().err
    assert max(steps_of(path / 'checkpoints')) > done
    done = max(steps_of(path / 'checkpoints'))
  train(*args)
  train(*RUN, f'--output={tmp_path / "whole"}')
  assert numbers_of(path) == numbers_of(tmp_path / 'whole')
  assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_stopped_sweep_goes_on(monkeypatch, tmp_path, as_users_have_it):
  """It says how, and never that it is not for a sweep."""
  sweep = Program('sweep', monkeypatch)
  args = [*TINY, '--algorithm=d_psgd', '--steps=4', '--eval_every=2', '--seeds=0,1']
  args += ['--grid=learning_rate=0.1,0.2']
  path = tmp_path / 'stopped'
  assert stopped_by([signal.SIGTERM], sweep, monkeypatch, *args, f'--output={path}') == 143
  error = sweep.error(*args, f'--output={path}')
  assert error.endswith('add --resume to continue it, or choose another')
  for extra in ('--resume', '--resume'):  # also once it is finished
    sweep(*args, f'--output={path}', extra)
  sweep(*args, f'--output={tmp_path / "whole"}')
  assert numbers_of(path) == numbers_of(tmp_path / 'whole')
  results = [(tmp_path / name / 'results.json').read_text() for name in ('stopped', 'whole')]
  assert results[0] == results[1]
  (noted,) = path.glob('checkpoints/*/sweep.json')
  cut(noted)
  error = sweep.error(*args, f'--output={path}', '--resume')
  assert error.startswith(f'error: {noted.absolute()} is damaged (')


def test_ctrl_c_while_programs_are_imported():
  job = subprocess.Popen(
    [sys.executable, '-m', 'experiments.train', *TINY], cwd=ROOT, stderr=subprocess.PIPE, text=True
  )
  deadline = time.monotonic() + 60
  while 'jaxlib' not in Path(f'/proc/{job.pid}/maps').read_text() and time.monotonic() < deadline:
    time.sleep(0.001)
  job.send_signal(signal.SIGINT)
  assert (job.communicate(timeout=60)[1], job.returncode) == ('', -signal.SIGINT)


def test_a_second_ctrl_c_does_not_wait():
  stop = loop.Stop()
  with signals.caught(stop.note):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
      signal.raise_signal(number)
    assert (stop.number, stop.at_once) == (signal.SIGINT, False)
    with pytest.raises(KeyboardInterrupt):
      signal.raise_signal(signal.SIGINT)
    assert stop.at_once


def test_nohup_is_respected():
  before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
  try:
    with signals.caught(signals.interrupt):
      signal.raise_signal(signal.SIGHUP)
      with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
  finally:
    signal.signal(signal.SIGHUP, before)


def test_two_runs_do_not_share_a_folder(train, tmp_path):
  """The lock of a run that was killed is none: see also `test_a_killed_save_...`."""
  save(tmp_path, steps=[1])
  with Checkpointer(tmp_path, {'seed': 0}):
    message = f'{tmp_path} is in use by process {os.getpid()} on .*: wait until it has ended, or'
    with pytest.raises(ValueError, match=message):
      restore(tmp_path)
  (tmp_path / 'in_use').write_text('process 1, long ago')
  assert restore(tmp_path).step == 1
  output = tmp_path / 'output'
  with folders.locked(output):
    assert train.error(*RUN, f'--output={output}').startswith(
      f'error: {output} is in use by process'
    )
    assert os.listdir(output) == ['in_use']
  assert not output.exists()
