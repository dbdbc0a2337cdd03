"""Checkpoints as they lie in a folder: which is the newest, its rows and its arrays, checked.

Nothing is written or locked here, and no device is started: a run may be going on.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax

from decomp.base import PyTree
from decomp.training import configuration, folders
from decomp.training.configuration import DamagedError

T = TypeVar('T')
Place = tuple[list[str | int], str]
"""The path of a leaf in its tree, and its name in the saved state."""


def steps(path: Path) -> list[int]:
  """The steps that are complete, the newest first."""
  return sorted((int(entry.name) for entry in path.iterdir() if entry.name.isdigit()), reverse=True)


def newest(path: Path, read: Callable[[int], T]) -> T | None:
  """What `read` makes of the newest step, or None if there is none.

  Raises:
    ValueError: it is damaged; the sentence says which older one is not.
  """
  damaged: dict[str, str] = {}
  for step in steps(path):
    try:
      found = read(step)
    except DamagedError as error:
      damaged[str(path / str(step))] = str(error)
    else:
      if not damaged:
        return found
      advice = f'remove {" and ".join(damaged)} to go on from step {step}'
      raise ValueError(f'{"; ".join(damaged.values())}: {advice}')
  if damaged:
    advice = 'no older checkpoint is whole; choose another folder to begin anew'
    raise ValueError(f'{"; ".join(damaged.values())}: {advice}')
  return None


def history(folder: Path, config: int) -> dict[str, Any]:
  """What was saved beside the state of a step, if by the run of this configuration's checksum."""
  found, _ = configuration.read(folder / 'history' / 'metadata')
  if found['config'] != config:
    raise DamagedError(f'{folder} is of another run than config.json beside it')
  return found


def arrays(folder: Path, like: Mapping[str, T], make: Callable[[Any, T], Any]) -> dict[str, Any]:
  """What `make` makes of the arrays of a step: of each one's store, and of `like`."""
  import tensorstore  # here, because only who reads needs it

  base = {'driver': 'file', 'path': f'{folder / "state"}/'}
  try:
    stores = {
      name: tensorstore.open(
        {'driver': 'zarr', 'kvstore': {'driver': 'ocdbt', 'base': base, 'path': name}},
        open=True,
        read=True,
      )
      for name in like
    }
    return {name: make(stores[name].result(), one) for name, one in like.items()}
  except Exception as error:  # of many kinds
    raise DamagedError(f'{folder} is damaged ({folders.reason(error)})') from error


def check_sums(folder: Path, found: Mapping[str, int], history: Mapping[str, Any]) -> None:
  """Whether arrays have the checksums that were saved with them."""
  if wrong := [name for name in found if found[name] != history['arrays'][name]]:
    raise DamagedError(f'{folder} is damaged ({wrong[0]} is not what was saved)')


def leaves(tree: Any) -> dict[str, Any]:
  """The leaves of a saved state by the names of their paths.

  Orbax itself would take no tree that is a single array, and restore None in place of an array.
  """
  paths = jax.tree.leaves_with_path(tree)
  return {f'state{jax.tree_util.keystr(path)}': leaf for path, leaf in paths}


def places(part: PyTree, saved: Any) -> list[Place] | None:
  """Where a saved state has the leaves of a part of it; None if it does not hold all of them.

  >>> import numpy as np
  >>> x, y = np.zeros(3), np.ones(3)
  >>> places({'a': x}, (y, [x])), places([y], (x,))
  ([(['a'], 'state[1][0]')], None)
  """
  names = {id(leaf): name for name, leaf in leaves(saved).items()}
  own = jax.tree.leaves_with_path(part)
  if any(id(leaf) not in names for _, leaf in own):
    return None
  return [(keys(path), names[id(leaf)]) for path, leaf in own]


def keys(path: tuple[Any, ...]) -> list[str | int]:
  """A path's keys, indices and names of fields, as JSON values."""
  kinds = ('key', 'idx', 'name')  # of dicts, of sequences, of NamedTuples
  plain = [next(getattr(key, kind) for kind in kinds if hasattr(key, kind)) for key in path]
  return [key if isinstance(key, str | int) else str(key) for key in plain]
