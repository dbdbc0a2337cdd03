"""`decomp.load`: what a run has left in its folder, or has got to so far."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from decomp.base import PyTree
from decomp.training import checksums, configuration, folders, reading
from decomp.training.history import History

if TYPE_CHECKING:
  from decomp.tasks import Task

_CHECKPOINTS = 'checkpoints'
"""Where the programs keep them within a run's folder."""


def load(folder: str | os.PathLike[str], task: Task | None = None) -> SavedRun:
  """The newest checkpoint of a run, which may be finished or still going on.

  Args:
    folder: the `checkpoint_dir` of `decomp.train`, or a folder of `experiments.train`.
    task: what was trained. Only `predict` needs it, and only where it was no task that --task can
      name; and params then have its structure.

  Returns:
    The `SavedRun`. No data is read, no device is started, and nothing in the folder is changed.

  Raises:
    ValueError: the folder holds no run, or it is damaged.

  >>> import decomp, optax, tempfile
  >>> task = decomp.tasks.logistic_regression(num_examples=64, dimension=3)
  >>> algorithm = decomp.algorithms.d_psgd(optax.sgd(0.5))
  >>> with tempfile.TemporaryDirectory() as folder:
  ...   ring = decomp.topology.ring(4)
  ...   history = decomp.train(task, algorithm, ring, 40, batch_size=4, checkpoint_dir=folder)
  ...   run = decomp.load(folder, task=task)
  >>> run.step, run.params.shape, run.history[-1] == history[-1]
  (40, (3,), True)
  >>> run.predict(task.test['input']).shape
  (64,)
  """
  if task is not None:
    from decomp.training import arguments  # here, because tasks need libraries for models

    arguments.check_task(task)
  path = _folder(Path(folder))
  while True:
    seen = reading.steps(path)
    try:
      found = reading.newest(path, functools.partial(_read, path))
    except ValueError:
      # A run that goes on removes old checkpoints, maybe the one that was being read.
      if reading.steps(path)[:1] == seen[:1]:
        raise
    else:
      if found is None:
        raise ValueError(
          f'{path} holds no checkpoint yet: a run writes one every checkpoint_seconds, and at its '
          'end'
        )
      return SavedRun(*found, _settings(path), task)


class SavedRun:
  """What `load` returns.

  Attributes:
    step: the steps that were done.
    params: the mean model over all workers, in NumPy; a dict in place of each tuple, list or
      NamedTuple, with numbers or names as its keys, where `load` was given no task.
    model_state: that of the mean model, likewise: as rows of metrics take it for `test_*`.
    history: the rows so far, as a `decomp.History` without the states of single workers.
    config: what defines the run: for a folder of the programs, every flag.
  """

  def __init__(
    self,
    step: int,
    history: History,
    model: Mapping[str, list[tuple[list[Any], np.ndarray]]],
    config: Mapping[str, Any],
    task: Task | None,
  ):
    self.step, self.history, self.config = step, history, dict(config)
    self._model, self._task = model, task
    self.params, self.model_state = (_nested(model[part]) for part in ('params', 'model_state'))
    if task is not None:
      self.params, self.model_state = self._as_in(task)

  def predict(self, inputs: Any) -> PyTree:
    """The outputs of the mean model, such as logits, for raw inputs as the task has them.

    Args:
      inputs: [examples, ...], or a dict of such arrays if the model takes that.
    """
    return self._predict(jax.tree.map(jnp.asarray, inputs))

  def export(self, path: str | os.PathLike[str]) -> None:
    """Writes the mean model for other programs.

    Args:
      path: of a new .safetensors file, whose arrays have the names of params and model state, such
        as 'params.Dense_0.kernel'; or of a new folder, in which Orbax writes a checkpoint of
        `{'params': ..., 'model_state': ...}`.
    """
    path = Path(path).absolute()
    if path.exists():
      raise ValueError(f'path={path} is there already: choose another')
    with folders.written(path):
      path.parent.mkdir(parents=True, exist_ok=True)
      if path.suffix == '.safetensors':
        self._export_safetensors(path)
      else:
        import orbax.checkpoint as ocp  # here, because Orbax takes long to import

        with ocp.PyTreeCheckpointer() as checkpointer:
          checkpointer.save(path, {'params': self.params, 'model_state': self.model_state})

  def __repr__(self) -> str:
    return f'SavedRun(step={self.step}, {self.config["algorithm"]}, task={self.config["task"]})'

  def _export_safetensors(self, path: Path) -> None:
    try:
      from safetensors.numpy import save_file
    except ImportError:
      raise ImportError(
        f'path={path}: needs safetensors, which is not installed: pip install safetensors'
      ) from None
    named = {
      '.'.join(map(str, [part, *keys])): np.ascontiguousarray(array)
      for part, leaves in self._model.items()
      for keys, array in leaves
    }
    save_file(named, path)

  @functools.cached_property
  def _predict(self) -> Any:
    task = self._task or self._made_again()
    if task.predict is None:
      raise ValueError(f'task={task.name}: has no predict(params, model_state, inputs)')
    params, model_state = self._as_in(task)
    predict = jax.jit(task.predict)
    return lambda inputs: predict(params, model_state, inputs)

  def _made_again(self) -> Task:
    """The task that --task has named."""
    from decomp import spec, tasks  # here, because only who predicts needs models
    from decomp.tasks import models

    text = self.config['task']
    try:
      return spec.build(text, [tasks.named(), models], kind='task')
    except ValueError as error:
      raise ValueError(
        f'task={text!r} was made in Python: predict needs decomp.load(folder, task=task) ({error})'
      ) from error

  def _as_in(self, task: Task) -> tuple[PyTree, PyTree]:
    """Params and model state in the structures that the task makes."""
    shapes = jax.eval_shape(task.init, jax.eval_shape(lambda: jax.random.key(0)))
    trees = dict(zip(self._model, shapes, strict=True))
    here = {
      _name(part, reading.keys(path)): leaf
      for part, tree in trees.items()
      for path, leaf in jax.tree.leaves_with_path(tree)
    }
    there = {_name(part, keys): x for part, leaves in self._model.items() for keys, x in leaves}
    if lines := configuration.differences(_form(there), _form(here)):
      message = f'task={task.name}: its model is not that of the run:'
      raise ValueError('\n  '.join([message, *lines.values()]))
    params, model_state = (
      jax.tree.unflatten(jax.tree.structure(tree), [x for _, x in self._model[part]])
      for part, tree in trees.items()
    )
    return params, model_state


def _folder(path: Path) -> Path:
  """The folder with the checkpoints of a run's folder."""
  inner = path / _CHECKPOINTS if (path / _CHECKPOINTS).is_dir() else path
  if (inner / 'config.json').is_file():
    return inner
  wanted = 'must be the checkpoint_dir of decomp.train, or a folder of experiments.train'
  if not path.is_dir():
    raise ValueError(f'{path} is no folder: {wanted}')
  if any(inner.rglob('sweep.json')):
    raise ValueError(f'{path} is a sweep, whose runs are saved together: {wanted}')
  runs = [one.parent for one in sorted(path.glob(f'*/{_CHECKPOINTS}')) if one.is_dir()]
  if runs:
    raise ValueError(f'{path} holds {len(runs)} runs: choose one, such as {runs[0]}')
  raise ValueError(f'{path} holds no run: {wanted}')


def _read(path: Path, step: int) -> tuple[int, History, dict[str, Any]]:
  """The step, the rows and the mean model, as places in their trees and arrays."""
  _, config = configuration.begun(path / 'config.json')
  folder = path / str(step)
  found = reading.history(folder, config)
  if not _is_of_one_run(found['rows']):
    raise ValueError(f'{folder} is of no single run of decomp.train, or of an earlier version')
  (record,) = found['rows']
  form = {
    name: _shape(found['form'][name]) for part in record['model'].values() for _, name in part
  }
  stored = {name: shape for name, shape in form.items() if shape.size}
  arrays = reading.arrays(
    folder, stored, lambda store, like: np.asarray(store.read().result(), like.dtype)
  )
  sums = {name: checksums.checksum(array) for name, array in arrays.items()}
  reading.check_sums(folder, sums, found)
  arrays |= {
    name: np.zeros(shape.shape, shape.dtype) for name, shape in form.items() if name not in arrays
  }
  model = {
    part: [(keys, _mean(arrays[name])) for keys, name in places]
    for part, places in record['model'].items()
  }
  return step, _history(record), model


def _is_of_one_run(rows: Any) -> bool:
  return len(rows) == 1 and isinstance(rows[0], dict) and 'model' in rows[0]


def _history(record: Mapping[str, Any]) -> History:
  history = History(record['rows'])
  history.diverged, last = record['diverged'], history[-1]
  history.steps_per_second = last['step'] / max(last['seconds'], 1e-9)
  return history


def _settings(path: Path) -> dict[str, Any]:
  """The configuration; with the flags that do not define a run, if it is one of the programs'."""
  config, _ = configuration.begun(path / 'config.json')
  outer = path.parent / 'config.json'
  if path.name != _CHECKPOINTS or not outer.exists():
    return config
  try:
    return {**json.loads(outer.read_text()), **config}
  except (OSError, ValueError, TypeError) as error:
    raise ValueError(f'{outer} is damaged ({folders.reason(error)})') from error


def _shape(text: str) -> jax.ShapeDtypeStruct:
  """What a form says of an array.

  >>> _shape('bfloat16[8, 3]')
  ShapeDtypeStruct(shape=(8, 3), dtype=bfloat16)
  """
  dtype, bracket, shape = text.partition('[')
  return jax.ShapeDtypeStruct(tuple(json.loads(bracket + shape)), jnp.dtype(dtype))


def _mean(array: np.ndarray) -> np.ndarray:
  """As `metrics.mean_over_workers`, without a device.

  >>> _mean(np.array([[1, 2], [3, np.inf]], np.float32)), _mean(np.array([3, 4]))
  (array([ 2., inf], dtype=float32), np.int64(3))
  """
  if not jnp.issubdtype(array.dtype, jnp.floating):
    return array[0]
  with np.errstate(invalid='ignore'):  # of a run that diverged
    return np.asarray(array.astype(np.float64).mean(0)).astype(array.dtype)


def _nested(leaves: list[tuple[list[Any], np.ndarray]]) -> PyTree:
  """A tree of dicts; what is no tree stays what it is.

  >>> _nested([(['a', 0], 1), (['a', 1], 2)]), _nested([([], 1)])
  ({'a': {0: 1, 1: 2}}, 1)
  """
  root: dict[Any, Any] = {}
  for path, leaf in leaves:
    *above, last = ['', *path]
    node = root
    for key in above:
      node = node.setdefault(key, {})
    node[last] = leaf
  return root.get('', {})


def _name(part: str, keys: list[Any]) -> str:
  return part + ''.join(f'[{key!r}]' for key in keys)


def _form(arrays: Mapping[str, Any]) -> dict[str, str]:
  return {name: f'{x.dtype}{list(x.shape)}' for name, x in arrays.items()}
