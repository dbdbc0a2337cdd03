"""Checkpoints of a training run, through Orbax: asynchronous, atomic, the last few kept.

A directory belongs to one run. It holds the run's configuration (``config.json``) and a directory
per step, which appears only once it is complete. Checksums of all arrays, of the metrics and of the
configuration are kept with each step: what is damaged or of another run is never restored.
"""

import contextlib
import functools
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from decomp.training import configuration, folders, processes, reading
from decomp.training.checksums import checksums
from decomp.training.configuration import DamagedError

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
    self._path = Path(directory).absolute()
    self._saving: int | None = None
    with contextlib.ExitStack() as stack:
      stack.enter_context(folders.locked(self._path))
      self._config = configuration.check(self._path / 'config.json', config, ignore)
      _quieten_orbax()
      options = ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        cleanup_tmp_directories=True,
        # Threads that wait for a folder which can't be made would wait for 20 minutes.
        async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
      )
      # The form that is read below, also if it should be another by default one day.
      arrays = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False)
      registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
      registry.add('state', ocp.args.PyTreeSave, arrays)
      with folders.written(self._path):
        self._manager = ocp.CheckpointManager(
          self._path, options=options, handler_registry=registry
        )
      self._lock = stack.pop_all()

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
    stored = _stored(state)
    history = {
      'rows': json.loads(json.dumps(history_rows)),
      'form': _form(state),
      'arrays': checksums(stored),
      'config': self._config,
    }
    history = configuration.signed(history)
    with self._told():
      self._saving = step
      self._manager.save(
        step,
        args=ocp.args.Composite(
          state=ocp.args.PyTreeSave(stored), history=ocp.args.JsonSave(history)
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

    Raises:
      ValueError: It is damaged, of another run, or of another form than `like`. Where it is
        damaged, the sentence says which older one is not.
    """
    self.wait()
    return reading.newest(self._path, lambda step: self._read(step, like, complete))

  def wait(self) -> None:
    """Waits for pending saves, and raises what went wrong in them."""
    with self._told():
      self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits for pending saves, raises what went wrong in them, and lets other runs in."""
    with self._lock, self._told():
      self._manager.close()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def _read(self, step: int, like: Any, complete: Callable[[Any], Any]) -> Checkpoint:
    folder = self._path / str(step)
    history = reading.history(folder, self._config)
    like = like(history['rows']) if callable(like) else like
    there, here = history['form'], _form(like)
    lines = [
      line for name, line in configuration.differences(there, here).items() if not _is_carried(name)
    ]
    if lines:
      raise ValueError('\n  '.join([f'the state saved at step {step} is of another form:', *lines]))
    saved = _arrays(folder, {name: leaf for name, leaf in _stored(like).items() if name in there})
    reading.check_sums(folder, checksums(saved), history)

    # Where the network carried nothing, there is nothing yet; and nothing is in an empty array.
    leaves = [
      saved[name]
      if name in saved
      else jnp.zeros(leaf.shape, leaf.dtype, device=getattr(leaf, 'sharding', None))
      for name, leaf in reading.leaves(like).items()
    ]
    state = jax.tree.unflatten(jax.tree.structure(like), leaves)
    whole = here.keys() <= there.keys()
    return Checkpoint(step, state if whole else complete(state), history['rows'])

  @contextlib.contextmanager
  def _told(self) -> Iterator[None]:
    """Says in one sentence why a checkpoint could not be written."""
    try:
      yield
    except Exception as error:  # of many kinds, from all the libraries that write
      raise OSError(
        f'cannot save step {self._saving} in {self._path} ({folders.reason(error)}): make room '
        'there or let it be written to, and continue the run from its last checkpoint'
      ) from error


def _arrays(folder: Path, like: Mapping[str, Any]) -> dict[str, Any]:
  """The arrays of a step, each where `like` has one of its name.

  Not through Orbax: an array that cannot be read leaves its other reads behind, which end with
  tracebacks; and its processes wait for each other, also where one has failed.
  """
  problem, arrays = '', {}
  try:
    arrays = reading.arrays(folder, like, _array)
  except DamagedError as error:
    problem = str(error)
  if any(processes.agree(bool(problem))):
    raise DamagedError(problem or f'{folder} is damaged (another process has failed)')
  return arrays


def _stored(tree: Any) -> dict[str, Any]:
  """The leaves that hold anything: Orbax cannot save arrays of size zero."""
  return {name: leaf for name, leaf in reading.leaves(tree).items() if leaf.size}


def _form(tree: Any) -> dict[str, str]:
  return {name: f'{leaf.dtype}{list(leaf.shape)}' for name, leaf in reading.leaves(tree).items()}


def _array(store: Any, like: Any) -> Any:
  """The array of a store where `like` has its own: not committed to a device if that is not."""
  if isinstance(like, jax.Array | jax.ShapeDtypeStruct) and not _is_unplaced(like):
    return jax.make_array_from_callback(
      like.shape, like.sharding, lambda i: np.asarray(store[i].read().result(), like.dtype)
    )
  whole = np.asarray(store.read().result(), like.dtype)
  return jnp.array(whole) if _is_unplaced(like) else whole


def _is_carried(name: str) -> bool:
  """Whether a leaf is what a network carries to know its workers' shared values."""
  return '.pull' in name


@functools.cache
def _quieten_orbax() -> None:
  """Drops what Orbax tells of its progress, and of what goes wrong: it raises that, too.

  A write that fails leaves others behind, which then find the loop closed that was to hear of them.
  """
  told = sys.unraisablehook

  def tell(unraisable: Any) -> None:
    if str(unraisable.exc_value) != 'Event loop is closed':
      told(unraisable)

  sys.unraisablehook = tell
  logging.getLogger('absl').addFilter(lambda record: 'orbax' not in Path(record.pathname).parts)


def _is_unplaced(like: Any) -> bool:
  if isinstance(like, jax.Array):
    return not like.committed
  return isinstance(like, jax.ShapeDtypeStruct) and like.sharding is None
