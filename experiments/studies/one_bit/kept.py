"""Finished cells in a file that grows: a study can be stopped, and continued."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.common import output, settings

Row = dict[str, Any]


class Kept:
  """The results of one part: a JSON file with a line for each finished cell.

  A cell that is in the file is not run again.
  """

  def __init__(self, path: Path):
    self._path = path
    self.rows: Row = json.loads(path.read_text()) if path.exists() else {}

  def of(self, name: str, compute: Callable[[], Row]) -> Row:
    """The results of a cell, which is run if need be and then takes `seconds`."""
    if name not in self.rows:
      began = time.monotonic()
      found = output.for_json(compute(), digits=5)
      found['seconds'] = round(time.monotonic() - began, 1)
      self.rows.setdefault('environment', settings.environment())
      self.rows[name] = found
      self._path.parent.mkdir(parents=True, exist_ok=True)
      beside = self._path.with_suffix('.new')  # a program that is killed leaves a whole file
      output.write_rows(beside, self.rows)
      beside.replace(self._path)
    return self.rows[name]


def read(folder: Path, part: str) -> Row:
  """The finished cells of a part by name; none if it has not been run."""
  path = folder / f'{part}.json'
  found = json.loads(path.read_text()) if path.exists() else {}
  return {name: row for name, row in found.items() if name != 'environment'}
