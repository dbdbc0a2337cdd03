"""Folders that a run writes to: who may, and one sentence where the system will not."""

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from decomp.training import processes

_LOCK = 'in_use'
"""A file that is locked as long as a run writes to its folder."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def written(path: Path) -> Iterator[None]:
  """Says in one sentence which file or folder cannot be written, and what to do about it."""
  try:
    yield
  except OSError as error:
    if error.errno is None:
      raise  # a sentence of this kind
    advice = 'make room there' if error.errno in _FULL else 'choose a folder that can be written to'
    raise OSError(f'cannot write {path} ({reason(error)}): {advice}') from error


def reason(error: BaseException) -> str:
  """What the system says within an error of whichever library, else how the error begins."""
  text = str(error)
  known = [said for code in errno.errorcode if (said := os.strerror(code)) in text]
  begin = ' '.join(text.split()) or type(error).__name__
  return max(known, key=len, default=begin if len(begin) < 200 else f'{begin[:200]} ...')


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
  """Makes a folder, and keeps other runs out of it: the lock ends with the process at the latest.

  Of several processes of one run the first one has it. A folder that stays empty is removed.

  Raises:
    ValueError: the folder is in use.
  """
  with written(path):
    is_new = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
  if not processes.is_first():
    yield
    return
  with _lock(path / _LOCK) as file:
    with written(path / _LOCK):
      file.truncate(0)
      file.write(f'process {os.getpid()} on {socket.gethostname()}\n'.encode())
    try:
      yield
    finally:
      with contextlib.suppress(OSError):
        os.unlink(file.name)
        if is_new:
          path.rmdir()


def _lock(path: Path) -> IO[bytes]:
  while True:
    with written(path):
      file = path.open('ab+', buffering=0)
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      file.seek(0)
      who = file.read().decode().strip() or 'another process'
      file.close()
      raise ValueError(
        f'{path.parent} is in use by {who}: wait until it has ended, or choose another folder'
      ) from None
    except OSError:
      return file  # a file system without locks: nobody can be kept out
    if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
      return file
    file.close()  # whoever had it has removed it just now
