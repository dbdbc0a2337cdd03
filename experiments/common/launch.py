"""Starts several processes on this machine, and sees to it that they end together."""

import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO, cast

from decomp.training import signals

GRACE = 10.0
"""Seconds after one has failed in which the others may end by themselves."""

TIME_TO_SAVE = 60.0
"""Seconds that processes have after a signal."""


def supervise(commands: Sequence[Sequence[str]]) -> int:
  """Runs commands side by side until all have ended; if one fails, the others are stopped.

  What they print appears with the number of the process in front; the first one's progress bar as
  it is. Ctrl-C and other signals that end programs reach all of them, and they have time to save
  what they have; a second Ctrl-C kills them.

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
      stdin=subprocess.DEVNULL,
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
  return failed, '' if failed is None else _outcome(running[failed])


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
