"""A learning problem as one worker sees it."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np

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
    predict: (params, model state, inputs) -> outputs of the model, of raw inputs as `train` has
      them; None if there are none. Only `decomp.load(folder).predict` asks for it.
  """

  name: str
  init: Callable[[jax.Array], tuple[PyTree, PyTree]]
  loss: Callable[[PyTree, PyTree, Batch, jax.Array], tuple[jax.Array, PyTree]]
  evaluate: Callable[[PyTree, PyTree, Batch], dict[str, jax.Array]]
  train: Mapping[str, np.ndarray]
  test: Mapping[str, np.ndarray]
  predict: Callable[[PyTree, PyTree, PyTree], PyTree] | None = None
