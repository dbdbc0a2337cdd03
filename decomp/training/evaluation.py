"""Test examples, and means over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from decomp.base import PyTree
from decomp.tasks import Task


def batched_tests(task: Task, worker_examples: int) -> tuple[Batched, Batched, Batched | None]:
  """The test examples for the mean model, the first few for single workers, and validation."""
  if not len(next(iter(task.test.values()), ())):
    raise ValueError(f'task={task.name}: has no test examples, which rows of metrics need')
  if task.validation is not None and not len(next(iter(task.validation.values()), ())):
    raise ValueError(f'task={task.name}: has a validation set without examples')
  some = {name: x[:worker_examples] for name, x in task.test.items()}
  held = None if task.validation is None else Batched.of(task.validation, size=100)
  return Batched.of(task.test, size=100), Batched.of(some, size=100), held


class Batched(NamedTuple):
  """Test examples cut into batches of one size, the last one filled up and masked."""

  examples: PyTree
  mask: Any

  @classmethod
  def of(cls, examples: Mapping[str, np.ndarray], size: int) -> Batched:
    """Cuts `examples` into batches of `size`."""
    total = len(next(iter(examples.values())))
    size = min(size, total)
    rows = np.arange(-(-total // size) * size)
    cut = {
      name: values[np.minimum(rows, total - 1)].reshape(-1, size, *values.shape[1:])
      for name, values in examples.items()
    }
    return cls(cut, (rows < total).reshape(-1, size).astype(np.float32))

  def mean(self, evaluate: Callable[[PyTree], dict[str, jax.Array]]) -> dict[str, jax.Array]:
    """The mean of every metric over all examples, each counted once."""

    def sums_of(part: tuple[PyTree, jax.Array]) -> dict[str, jax.Array]:
      examples, mask = part
      found = evaluate(examples)
      for name, values in found.items():
        if np.shape(values) != mask.shape:
          raise ValueError(
            f"task: evaluate gives '{name}' of shape {np.shape(values)} for {len(mask)} examples: "
            f'must give a value for each, of shape {mask.shape}'
          )
      return {name: (values * mask).sum() for name, values in found.items()}

    sums = jax.lax.map(sums_of, (self.examples, self.mask))
    return {name: value.sum() / self.mask.sum() for name, value in sums.items()}
