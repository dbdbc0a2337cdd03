"""A learning problem as one worker sees it."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np

from decomp import checks
from decomp.base import PyTree

Batch = Mapping[str, jax.Array]


class Task(NamedTuple):
  """A learning problem, as one worker sees it.

  Attributes:
    name: for tables, plots and checkpoints.
    init: key -> (params, model state). Params are exchanged and must be floating point; the model
      state (BatchNorm's statistics, or `()`) stays with its worker.
    loss: (params, model state, batch, key) -> (loss, model state); the gradient is taken of it.
    evaluate: (params, model state, batch) -> {metric: one value for each example}.
    train: the training examples, arrays [N, ...]; `train['label']` [N] is what partitions go by.
    test: the examples that `evaluate` is averaged over.
    validation: examples to decide by, such as when to stop or which learning rate is best, so that
      the test tells nothing of it; None for none. `hold_out` takes them from the training examples.
    predict: (params, model state, inputs) -> outputs of the model, of raw inputs as `train` has
      them; None if there are none. Only `decomp.load(folder).predict` asks for it.
  """

  name: str
  init: Callable[[jax.Array], tuple[PyTree, PyTree]]
  loss: Callable[[PyTree, PyTree, Batch, jax.Array], tuple[jax.Array, PyTree]]
  evaluate: Callable[[PyTree, PyTree, Batch], dict[str, jax.Array]]
  train: Mapping[str, np.ndarray]
  test: Mapping[str, np.ndarray]
  validation: Mapping[str, np.ndarray] | None = None
  predict: Callable[[PyTree, PyTree, PyTree], PyTree] | None = None


def hold_out(task: Task, part: float = 0.1, seed: int = 0) -> Task:
  """The task with some of its training examples, chosen at random, as its validation set.

  Example:
    >>> import decomp
    >>> task = hold_out(decomp.tasks.logistic_regression(num_examples=50), part=0.2)
    >>> len(task.train['label']), len(task.validation['label'])
    (40, 10)

  Args:
    task: without a validation set; its test examples stay as they are.
    part: how many of the training examples, between 0 and 1.
    seed: of the choice.
  """
  if task.validation is not None:
    raise ValueError(f'task={task.name}: has a validation set already')
  total = len(next(iter(task.train.values())))
  count = round(part * total) if checks.is_number(part) and 0 < part < 1 else 0
  if not 0 < count < total:
    raise ValueError(
      f'part={part!r}: must be a number between 0 and 1 that leaves some of {total} examples for '
      'training and some for validation'
    )
  order = np.random.default_rng(seed).permutation(total)
  held, kept = np.sort(order[:count]), np.sort(order[count:])
  arrays = {name: np.asarray(x) for name, x in task.train.items()}
  return task._replace(
    train={name: x[kept] for name, x in arrays.items()},
    validation={name: x[held] for name, x in arrays.items()},
  )
