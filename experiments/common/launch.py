"""Several processes: those on this machine end together, and all of them see one folder."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, cast

import jax

from decomp.training import processes, signals

GRACE = 10.0
"""Seconds after one has failed in which the others may end by themselves."""

TIME_TO_SAVE = 60.0
"""Seconds that processes have after a signal."""

SEEN_WITHIN = 5.0
"""Seconds that a file may take to be seen elsewhere; network file systems are late at times."""


def supervise(commands: Sequence[Sequence[str]]) -> int:
  """Runs commands side by side until all have ended; if one fails, the others are stopped.

  What they print appears with the number of the process in front; the first one's progress bar as
  it is. Ctrl-C and other signals that end programs reach all of them, and they have time to save
  what they have; a second Ctrl-C kills them. Their standard input is a pipe that closes when this
  process ends, however it does: see `end_with_launcher`.

  Args:
    commands: each with its arguments.

  Returns:
    0 if all went well, 128 + the number of a signal that ended them, else 1.
  """
  received: list[int] = []
  with signals.caught(lambda number, _: received.append(number)):
    failed, outcome = _run(commands, received)
  if received:
    return 128 + received[0]
  if failed is not None:
    print(
      f'error: process {failed} {outcome}, and the others were stopped; the same command with '
      '--resume continues from the last checkpoint',
      file=sys.stderr,
    )
  return 0 if failed is None else 1


def _run(commands: Sequence[Sequence[str]], received: list[int]) -> tuple[int | None, str]:
  """Runs them to their end; returns the first that failed, if any, and how."""
  # Each in a session of its own: the terminal's Ctrl-C would else reach them once from the terminal
  # and once from here.
  running = [
    subprocess.Popen(
      command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=None if number == 0 and sys.stderr.isatty() else subprocess.STDOUT,
      text=True,
      errors='replace',
      start_new_session=True,
    )
    for number, command in enumerate(commands)
  ]
  threads = [_echo(number, cast(IO[str], process.stdout)) for number, process in enumerate(running)]
  try:
    failed = _wait(running, received)
  finally:
    for process, thread in zip(running, threads, strict=True):
      process.kill()
      process.wait()
      thread.join()
      cast(IO[str], process.stdin).close()
  return failed, '' if failed is None else _outcome(running[failed])


def end_with_launcher() -> None:
  """Ends this process, which `supervise` has started, when its launcher is there no more.

  A launcher that is killed cannot end anyone, and the others would wait for each other or train on.
  """

  def watch() -> None:
    while os.read(sys.stdin.fileno(), 1):  # b'' once nobody can write
      pass
    os._exit(1)

  threading.Thread(target=watch, daemon=True).start()


def check_shared(folder: Path) -> None:
  """Whether all processes of a run see the files that the first one writes in its folder.

  Without that the first checkpoint would be waited for in vain.
  """
  if jax.process_count() == 1:
    return
  mark = folder / processes.first_says(f'.seen-by-all-{time.time_ns()}')
  if processes.is_first():
    folder.mkdir(parents=True, exist_ok=True)
    mark.touch()
  processes.agree(0.0)  # it is there now
  deadline = time.monotonic() + SEEN_WITHIN
  while not (seen := mark.exists()) and time.monotonic() < deadline:
    time.sleep(0.1)
  (blind,) = processes.agree(-1.0 if seen else jax.process_index())
  if processes.is_first():
    mark.unlink()
  if blind >= 0:
    raise ValueError(
      f'--output={folder}: process {blind:.0f} does not see what process 0 writes there: give a '
      'folder on a file system that all processes share, by the same path'
    )


def _wait(running: Sequence[subprocess.Popen[str]], received: Sequence[int]) -> int | None:
  """Waits until all have ended or time is up; returns the first that failed, if any."""
  passed_on, failed, deadline = 0, None, math.inf
  while True:
    codes = [process.poll() for process in running]
    if failed is None:
      # A process that a signal killed takes others with it, at times before we look again.
      ended = [(code, number) for number, code in enumerate(codes) if code]
      failed = min(ended)[1] if ended else None
      if failed is not None:
        deadline = time.monotonic() + GRACE
    for number in received[passed_on:]:
      passed_on += 1
      deadline = time.monotonic() + TIME_TO_SAVE
      for process in running:
        process.send_signal(number)
    at_once = passed_on > 1 and received[passed_on - 1] == signal.SIGINT
    if None not in codes or at_once or time.monotonic() > deadline:
      return failed
    time.sleep(0.05)


def _echo(number: int, lines: IO[str]) -> threading.Thread:
  def copy() -> None:
    with lines:
      for line in lines:
        print(f'[{number}] {line}', end='', flush=True)

  thread = threading.Thread(target=copy, daemon=True)
  thread.start()
  return thread


def _outcome(process: subprocess.Popen[str]) -> str:
  code = process.returncode
  if code < 0:
    return f'was killed by {signal.Signals(-code).name}'
  return f'ended with exit code {code}'
