"""Several processes: those on this machine end together, and all of them see one folder."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, cast

import jax

from decomp.training import processes

GRACE = 10.0
"""Seconds after one has failed in which the others may end by themselves."""

TIME_TO_SAVE = 60.0
"""Seconds that processes have after Ctrl-C."""

SEEN_WITHIN = 5.0
"""Seconds that a file may take to be seen elsewhere; network file systems are late at times."""


def supervise(commands: Sequence[Sequence[str]]) -> int:
  """Runs commands side by side until all have ended; if one fails, the others are stopped.

  What they print appears with the number of the process in front; the first one's progress bar as
  it is. Ctrl-C reaches all of them, and they have time to save what they have; a second one kills
  them. Their standard input is a pipe that closes when this process ends, however it does: see
  `end_with_launcher`.

  Args:
    commands: each with its arguments.

  Returns:
    0 if all went well, else 1.
  """
  interrupts = 0

  def interrupt(*_: Any) -> None:
    nonlocal interrupts
    interrupts += 1

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
  before = {s: signal.signal(s, interrupt) for s in (signal.SIGINT, signal.SIGTERM)}
  try:
    failed = _wait(running, lambda: interrupts)
  finally:
    for process, thread in zip(running, threads, strict=True):
      process.kill()
      process.wait()
      thread.join()
      cast(IO[str], process.stdin).close()
    for number, handler in before.items():
      signal.signal(number, handler)
  if failed is not None and not interrupts:
    print(
      f'error: process {failed} {_outcome(running[failed])}, and the others were stopped; the same '
      'command with --resume continues from the last checkpoint',
      file=sys.stderr,
    )
  return 1 if failed is not None or interrupts else 0


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


def _wait(running: Sequence[subprocess.Popen[str]], interrupts: Callable[[], int]) -> int | None:
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
    if interrupts() > passed_on:
      passed_on = interrupts()
      deadline = time.monotonic() + TIME_TO_SAVE
      for process in running:
        process.send_signal(signal.SIGINT)
    if None not in codes or passed_on > 1 or time.monotonic() > deadline:
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
