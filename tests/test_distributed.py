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


def start(*command):
  return subprocess.Popen(
    [sys.executable, *command],
    cwd=ROOT,
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
  assert f'[0] {broken}' in printed
  assert '[1] error' not in printed

  rows, expected = (read_rows(folder / 'metrics.jsonl') for folder in (broken, whole))
  assert [row['step'] for row in rows] == list(range(0, goal + 11, 5))
  for row, other in zip(rows, expected, strict=True):
    assert set(row) == set(other)
    for name in set(row) - {'seconds'}:
      # 8-bit messages: a rounding that flips on the last bit moves a parameter by a quantum.
      assert row[name] == pytest.approx(other[name], rel=0.05, abs=2e-3), (row['step'], name)


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
  ],
)
def test_incomplete_flags(flags, words):
  job = start('-m', 'experiments.distributed', *RUN, *flags)
  printed = job.communicate(timeout=100)[0]
  assert job.returncode == 1
  assert words in printed
  assert 'Traceback' not in printed
