"""Signals that would end a run: Ctrl-C, a scheduler's SIGTERM, and SIGHUP of a lost terminal."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def caught(handler: Callable[[int, Any], Any]) -> Iterator[None]:
  """Calls `handler` with their number instead; in the main thread, as signals go to no other."""
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  before = {number: signal.getsignal(number) for number in ENDING}
  if before[signal.SIGHUP] is signal.SIG_IGN:  # as nohup wants it
    del before[signal.SIGHUP]
  for number in before:
    signal.signal(number, handler)
  try:
    yield
  finally:
    for number, was in before.items():
      signal.signal(number, was)


def interrupt(number: int, *_: Any) -> None:
  """Raises KeyboardInterrupt whichever signal it is, and says which."""
  raise KeyboardInterrupt(number)


def number_of(error: KeyboardInterrupt) -> int:
  """The signal that an interrupt was raised for."""
  return int(error.args[0]) if error.args else signal.SIGINT
