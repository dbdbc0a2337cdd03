"""Checkpoints of a training run, through Orbax: asynchronous, atomic, the last few kept.

A directory belongs to one run. It holds the run's configuration (``config.json``) and a directory
per step, which appears only once it is complete.
"""

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

__all__ = ['Checkpoint', 'Checkpointer']


class Checkpoint(NamedTuple):
  """What `Checkpointer.restore` returns.

  Attributes:
    step: The step it was saved at.
    state: The training state.
    rows: What was saved beside it as JSON: the metrics up to that step.
  """

  step: int
  state: Any
  rows: list[Any]


class Checkpointer:
  """Saves and restores the state and the metrics of one run.

  Example:
    >>> import tempfile
    >>> state = {'params': jnp.arange(3.0)}
    >>> with tempfile.TemporaryDirectory() as directory:
    ...   with Checkpointer(directory, {'seed': 0}) as checkpointer:
    ...     checkpointer.save(10, state, [{'step': 10, 'loss': 0.5}])
    ...   with Checkpointer(directory, {'seed': 0}) as checkpointer:
    ...     step, state, rows = checkpointer.restore(like=state)
    >>> step, state, rows
    (10, {'params': Array([0., 1., 2.], dtype=float32)}, [{'step': 10, 'loss': 0.5}])
  """

  def __init__(
    self,
    directory: str | os.PathLike[str],
    config: Mapping[str, Any],
    keep: int = 3,
    ignore: Sequence[str] = (),
  ):
    """Opens a directory, and removes what an interrupted save left there.

    Args:
      directory: Where the run's checkpoints are; created if need be.
      config: What defines the run, as JSON values. Written once; every later opening must give
        the same, or is refused.
      keep: How many checkpoints to keep, the latest ones.
      ignore: Keys of `config` that may differ from those the run was started with.
    """
    path = Path(directory).absolute()
    path.mkdir(parents=True, exist_ok=True)
    check_config(path / 'config.json', config, ignore)
    logging.getLogger('absl').addFilter(_is_not_chatter)
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
    self._manager = ocp.CheckpointManager(path, options=options)

  def save(self, step: int, state: Any, history_rows: Sequence[Any]) -> None:
    """Starts to save in the background; a step that is already there is left as it is.

    Args:
      step: The number of steps done.
      state: A pytree of arrays. It may be donated once this returns.
      history_rows: The metrics so far, as JSON values.
    """
    steps = self._manager.all_steps()
    if step in steps:
      return
    latest = max(steps, default=step)
    if step < latest:
      raise ValueError(
        f'cannot save step {step}: {self._manager.directory} already holds step {latest}; '
        'restore it first, or choose another directory'
      )
    # Written out later, while the run goes on to append: hence a copy, which also shows at once
    # whether the rows are JSON.
    history = {'rows': json.loads(json.dumps(history_rows)), 'form': _form(state)}
    self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(_stored(state)), history=ocp.args.JsonSave(history)
      ),
    )

  def restore(
    self, like: Any, complete: Callable[[Any], Any] = lambda state: state
  ) -> Checkpoint | None:
    """Reads the latest complete checkpoint.

    Args:
      like: A pytree of arrays or `jax.ShapeDtypeStruct` of the saved state's form; or a function
        that makes one of the saved rows. Arrays are restored onto its shardings, and onto the
        default device, uncommitted, where it has none.
      complete: Called with the state where it was saved without what its network carries
        (`decomp.Shared.pull`), because all workers were on one device: zeros stand there.

    Returns:
      The checkpoint, or None if there is none.
    """
    self._manager.wait_until_finished()
    step = self._manager.latest_step()
    if step is None:
      return None
    history = self._read(step, history=ocp.args.JsonRestore()).history
    like = like(history['rows']) if callable(like) else like
    there, here = history['form'], _form(like)
    lines = [line for name, line in _differences(there, here).items() if not _is_carried(name)]
    if lines:
      raise ValueError('\n  '.join([f'the state saved at step {step} is of another form:', *lines]))
    # Orbax commits every jax.Array to devices, after which jit refuses to combine it with arrays
    # elsewhere: what is not committed is read through NumPy.
    target = {
      name: np.empty(leaf.shape, leaf.dtype) if _is_unplaced(leaf) else leaf
      for name, leaf in _stored(like).items()
      if name in there
    }
    unused = {name: _array(form) for name, form in there.items() if name not in here}
    target |= {name: array for name, array in unused.items() if array.size}
    saved = self._read(step, state=ocp.args.StandardRestore(target)).state

    def restored(name: str, leaf: Any) -> Any:
      if name not in saved:
        return jnp.zeros(leaf.shape, leaf.dtype, device=getattr(leaf, 'sharding', None))
      return jnp.array(saved[name]) if _is_unplaced(leaf) else saved[name]

    leaves = [restored(name, leaf) for name, leaf in _leaves(like).items()]
    state = jax.tree.unflatten(jax.tree.structure(like), leaves)
    whole = here.keys() <= there.keys()
    return Checkpoint(step, state if whole else complete(state), history['rows'])

  def close(self) -> None:
    """Waits for pending saves, and raises what went wrong in them."""
    self._manager.close()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def _read(self, step: int, **items: Any) -> Any:
    return self._manager.restore(step, args=ocp.args.Composite(**items))


def check_config(path: Path, config: Mapping[str, Any], ignore: Sequence[str] = ()) -> None:
  """Compares `config` with that of the file, or writes the file if there is none."""
  text = json.dumps(config, indent=2)
  if not path.exists():
    if jax.process_index() == 0:
      # In two moves, so that no half-written file can be left behind.
      path.with_suffix('.tmp').write_text(text)
      path.with_suffix('.tmp').replace(path)
    return
  there, here = json.loads(path.read_text()), json.loads(text)
  lines = [line for key, line in _differences(there, here).items() if key not in ignore]
  if lines:
    message = f'{path.parent} belongs to a run with another configuration:'
    raise ValueError('\n  '.join([message, *lines]))


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, str]:
  """Returns a line of text for every key whose value is not the same."""

  def shown(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key], sort_keys=True) if key in values else 'missing'

  return {
    key: f'{key}: {shown(there, key)} there, {shown(here, key)} here'
    for key in {**there, **here}
    if shown(there, key) != shown(here, key)
  }


def _leaves(tree: Any) -> dict[str, Any]:
  """Returns the leaves by the names of their paths.

  Orbax itself would take no tree that is a single array, and restore None in place of an array.
  """
  paths = jax.tree.leaves_with_path(tree)
  return {f'state{jax.tree_util.keystr(path)}': leaf for path, leaf in paths}


def _stored(tree: Any) -> dict[str, Any]:
  """The leaves that hold anything: Orbax cannot save arrays of size zero."""
  return {name: leaf for name, leaf in _leaves(tree).items() if leaf.size}


def _form(tree: Any) -> dict[str, str]:
  return {name: f'{leaf.dtype}{list(leaf.shape)}' for name, leaf in _leaves(tree).items()}


def _array(form: str) -> np.ndarray:
  """An array of the dtype and shape that `_form` has written."""
  dtype, _, shape = form.partition('[')
  return np.empty(json.loads(f'[{shape}'), jnp.dtype(dtype))


def _is_carried(name: str) -> bool:
  """Whether a leaf is what a network carries to know its workers' shared values."""
  return '.pull' in name


def _is_not_chatter(record: logging.LogRecord) -> bool:
  """Drops what Orbax tells about its progress, and keeps its warnings."""
  return record.levelno >= logging.WARNING or 'orbax' not in Path(record.pathname).parts


def _is_unplaced(like: Any) -> bool:
  if isinstance(like, jax.Array):
    return not like.committed
  return isinstance(like, jax.ShapeDtypeStruct) and like.sharding is None
