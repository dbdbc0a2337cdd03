"""Several processes: the same numbers, one that dies, and going on with another number of them."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import dyadic
import numpy as np
import pytest
from test_experiments import ROOT, TINY, read_rows

from experiments.common import launch

RUN = [*TINY, '--eval_every=5']
ENVIRONMENT = {**os.environ, 'PYTHONPATH': f'{ROOT}:{ROOT / "tests"}'}


def start(*command, cwd=ROOT):
  return subprocess.Popen(
    [sys.executable, *command],
    cwd=cwd,
    env=ENVIRONMENT,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def saved_steps(folder):
  return [int(path.name) for path in folder.glob('checkpoints/*') if path.name.isdigit()]


def test_two_processes_give_the_bits_of_one_device(tmp_path):
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{free.getsockname()[1]}'
  script, output = str(ROOT / 'tests' / 'processes_job.py'), tmp_path / 'found.npz'
  jobs = [start(script, address, str(number), str(output)) for number in (0, 1)]
  try:
    printed = [job.communicate(timeout=300)[0] for job in jobs]
  finally:
    for job in jobs:
      job.kill()
  assert [job.returncode for job in jobs] == [0, 0], printed
  with np.load(output) as found:
    for name, expected in dyadic.on_one_device().items():
      np.testing.assert_array_equal(found[name], expected, name)


def wait_for_step(folder, step, job):
  deadline = time.monotonic() + 200
  while time.monotonic() < deadline and job.poll() is None:
    if max(saved_steps(folder), default=0) >= step:
      return
    time.sleep(0.2)
  raise AssertionError('no checkpoint', job.poll())


def test_a_process_dies_and_others_go_on_with_its_run(tmp_path):
  """Two processes, one killed; then one process with one device; then two again."""
  broken, whole = tmp_path / 'broken', tmp_path / 'whole'
  command = ['-m', 'experiments.distributed', *RUN, f'--output={broken}', '--local_processes=2']
  job = start(*command, '--checkpoint_seconds=0', '--steps=10000000')
  try:
    wait_for_step(broken, 20, job)
    # The processes are the launcher's children.
    children = Path(f'/proc/{job.pid}/task/{job.pid}/children').read_text().split()
    assert len(children) == 2
    os.kill(int(children[1]), signal.SIGKILL)
    printed = job.communicate(timeout=30)[0]
  finally:
    job.kill()
  assert job.returncode == 1
  assert 'error: process 1 was killed by SIGKILL, and the others were stopped' in printed
  assert not any(Path(f'/proc/{child}').exists() for child in children)

  goal = max(saved_steps(broken)) // 5 * 5 + 10
  for program, output, extra in (
    ('train', broken, [f'--steps={goal}', '--resume']),
    ('train', whole, [f'--steps={goal + 10}']),
    ('distributed', broken, [f'--steps={goal + 10}', '--resume', '--local_processes=2']),
  ):
    job = start('-m', f'experiments.{program}', *RUN, f'--output={output}', *extra)
    printed = job.communicate(timeout=300)[0]
    assert job.returncode == 0, printed
    told = 'processes, goes on in' in printed
    assert told == ('--resume' in extra)  # each time in another number of them
  assert f'[0] {broken}' in printed
  assert '[1] error' not in printed

  rows, expected = (read_rows(folder / 'metrics.jsonl') for folder in (broken, whole))
  assert [row['step'] for row in rows] == list(range(0, goal + 11, 5))
  for row, other in zip(rows, expected, strict=True):
    assert set(row) == set(other)
    for name in set(row) - {'seconds'}:
      # 8-bit messages: a rounding that flips on the last bit moves a parameter by a quantum.
      assert row[name] == pytest.approx(other[name], rel=0.05, abs=2e-3), (row['step'], name)


def listening(process):
  """The addresses and ports at which a process listens."""
  files = Path(f'/proc/{process}/fd').iterdir()
  own = {os.readlink(file) for file in files}
  found = set()
  for name, family in (('tcp', socket.AF_INET), ('tcp6', socket.AF_INET6)):
    for line in Path(f'/proc/{process}/net/{name}').read_text().splitlines()[1:]:
      place, state, inode = (line.split()[k] for k in (1, 3, 9))
      if state == '0A' and f'socket:[{inode}]' in own:
        address, _, port = place.partition(':')
        words = [bytes.fromhex(address[k : k + 8])[::-1] for k in range(0, len(address), 8)]
        found.add((socket.inet_ntop(family, b''.join(words)), int(port, 16)))
  return found


def is_alive(process):
  """Whether it runs: one that has ended stays a zombie until somebody asks."""
  try:
    return Path(f'/proc/{process}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
  except FileNotFoundError:
    return False


def test_a_killed_launcher_takes_its_processes_with_it(tmp_path):
  """They listen where only this machine reaches them, and nobody else can take their port."""
  command = ['-m', 'experiments.distributed', *RUN, f'--output={tmp_path}']
  job = start(*command, '--local_processes=2', '--checkpoint_seconds=0', '--steps=10000000')
  children = []
  try:
    wait_for_step(tmp_path, 5, job)
    children = Path(f'/proc/{job.pid}/task/{job.pid}/children').read_text().split()
    arguments = Path(f'/proc/{children[0]}/cmdline').read_text().split('\0')
    (address,) = [one.partition('=')[2] for one in arguments if one.startswith('--coordinator=')]
    host, port = address.split(':')
    found = listening(children[0])
    where = {there.removeprefix('::ffff:') for there, at in found if at == int(port)}
    assert where == {host} == {'127.0.0.1'}
    by_hand = [f'--coordinator={address}', '--num_processes=2', '--process_id=0']
    printed = start(*command, *by_hand).communicate(timeout=100)[0]
    assert f'error: --coordinator={address}: process 0 cannot listen there' in printed
    assert 'Traceback' not in printed
    job.kill()
    deadline = time.monotonic() + 10
    while any(map(is_alive, children)) and time.monotonic() < deadline:
      time.sleep(0.1)
    assert not any(map(is_alive, children))
  finally:
    job.kill()
    job.communicate()
    for child in filter(is_alive, children):
      os.kill(int(child), signal.SIGKILL)


def test_a_folder_that_only_one_process_sees_is_refused(tmp_path):
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{free.getsockname()[1]}'
  jobs = []
  for number in range(2):
    place = tmp_path / str(number)
    place.mkdir()
    by_hand = [f'--coordinator={address}', '--num_processes=2', f'--process_id={number}']
    command = ['-m', 'experiments.distributed', *RUN, '--steps=5', '--output=out', *by_hand]
    jobs.append(start(*command, '--host_devices=1', cwd=place))
  try:
    printed = [job.communicate(timeout=200)[0] for job in jobs]
  finally:
    for job in jobs:
      job.kill()
  assert [job.returncode for job in jobs] == [1, 1], printed
  for text in printed:
    assert 'error: --output=out: process 1 does not see what process 0 writes there' in text
    assert 'Traceback' not in text
  assert not any((tmp_path / '0').glob('**/*.json'))


def test_launcher_ends_all_when_one_fails(capfd, monkeypatch):
  fails = [sys.executable, '-c', 'print("so it is"); raise SystemExit(3)']
  sleeps = [sys.executable, '-c', 'import time; time.sleep(100)']
  began = time.monotonic()
  monkeypatch.setattr(launch, 'GRACE', 0.5)
  assert launch.supervise([sleeps, fails]) == 1
  assert time.monotonic() - began < 50
  out, err = capfd.readouterr()
  assert out == '[1] so it is\n'
  assert err.startswith('error: process 1 ended with exit code 3, and the others were stopped')


def test_launcher_passes_signals_on(capfd):
  """Twice to the launcher, as `timeout` does, and the processes still have time to save."""
  code = """
    import signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: sys.exit('saved'))
    print('ready', flush=True)
    time.sleep(100)
  """
  child = [sys.executable, '-c', textwrap.dedent(code)]
  before = signal.getsignal(signal.SIGTERM)

  def send():
    while capfd.readouterr().out.count('ready') < 1:
      time.sleep(0.05)
    for _ in range(2):
      os.kill(os.getpid(), signal.SIGTERM)

  thread = threading.Thread(target=send)
  thread.start()
  assert launch.supervise([child]) == 128 + signal.SIGTERM
  thread.join()
  assert capfd.readouterr().out == '[0] saved\n'
  assert signal.getsignal(signal.SIGTERM) is before


def test_launcher_succeeds_quietly(capfd):
  assert launch.supervise([[sys.executable, '-c', f'print({n})'] for n in range(3)]) == 0
  out, err = capfd.readouterr()
  assert sorted(out.splitlines()) == ['[0] 0', '[1] 1', '[2] 2']
  assert err == ''


@pytest.mark.parametrize(
  ('flags', 'words'),
  [
    (['--coordinator=127.0.0.1:1'], 'error: --coordinator=127.0.0.1:1: needs --num_processes'),
    (['--num_processes=2'], 'error: --num_processes=2: needs --coordinator=HOST:PORT too'),
    ([], 'give --local_processes=N for this machine, or --coordinator'),
    (['--coordinator=x', '--num_processes=1', '--process_id=0'], 'must be like 10.0.0.1:1234'),
  ],
)
def test_incomplete_flags(flags, words):
  job = start('-m', 'experiments.distributed', *RUN, *flags)
  printed = job.communicate(timeout=100)[0]
  assert job.returncode == 1
  assert words in printed
  assert 'Traceback' not in printed
