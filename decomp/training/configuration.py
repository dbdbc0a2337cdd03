"""What defines a run, as JSON in a file that its checkpoints lie beside."""

import json
import uuid
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from decomp.training import folders, processes

_RUN = 'name of the run'
_CHECKSUM = 'checksum of the above'
_PUT_BACK = 'which tells whose checkpoints are there: put it back, or choose another folder'


class DamagedError(ValueError):
  """Something is not what was saved: which file or folder, and how it is not."""


def check(path: Path, config: Mapping[str, Any], ignore: Sequence[str] = ()) -> int:
  """Compares `config` with that of the file, or writes the file if there is none.

  Args:
    path: of the file.
    config: JSON values.
    ignore: the keys whose values may differ.

  Returns:
    The file's checksum. No two runs have the same, as each is given a name.
  """
  here = json.loads(json.dumps(config))
  if not path.exists():
    return _write(path, here)
  there, checksum = begun(path)
  ignore = (*ignore, _RUN)
  lines = [line for key, line in differences(there, here).items() if key not in ignore]
  if lines:
    message = f'{path.parent} belongs to a run with another configuration:'
    raise ValueError('\n  '.join([message, *lines]))
  return checksum


def begun(path: Path) -> tuple[dict[str, Any], int]:
  """What `check` has written, and its checksum."""
  try:
    return read(path)
  except DamagedError as error:
    raise ValueError(f'{error}, {_PUT_BACK}') from error


def _write(path: Path, config: dict[str, Any]) -> int:
  if any(entry.name.isdigit() for entry in path.parent.iterdir()):
    raise ValueError(f'{path} is missing, {_PUT_BACK}')
  found = signed({**config, _RUN: uuid.uuid4().hex})
  if processes.is_first():
    # In two moves, so that no half-written file can be left behind.
    with folders.written(path):
      path.with_suffix('.tmp').write_text(json.dumps(found, indent=2))
      path.with_suffix('.tmp').replace(path)
  return found[_CHECKSUM]


def signed(found: Mapping[str, Any]) -> dict[str, Any]:
  """A JSON object with a checksum, which `read` compares."""
  return {**found, _CHECKSUM: _checksum(found)}


def read(path: Path) -> tuple[dict[str, Any], int]:
  """What was `signed`, and its checksum."""
  try:
    found = dict(json.loads(path.read_text()))
  except (OSError, ValueError, TypeError) as error:
    raise DamagedError(f'{path} is damaged ({folders.reason(error)})') from error
  if _CHECKSUM not in found:
    raise DamagedError(f'{path} is damaged or of an earlier version (it has no checksum)')
  checksum = found.pop(_CHECKSUM)
  if checksum != _checksum(found):
    raise DamagedError(f'{path} is damaged (it is not what was saved)')
  return found, checksum


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, str]:
  """A line of text for every key whose value is not the same."""

  def shown(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key], sort_keys=True) if key in values else 'missing'

  return {
    key: f'{key}: {shown(there, key)} there, {shown(here, key)} here'
    for key in {**there, **here}
    if shown(there, key) != shown(here, key)
  }


def _checksum(found: Mapping[str, Any]) -> int:
  """However the JSON is written."""
  return zlib.crc32(json.dumps(found, sort_keys=True).encode())
