"""What a run leaves: its rows of metrics, and how it ended."""

import math
from typing import Any

import numpy as np

from decomp.base import PyTree
from decomp.engine.simulation import Simulation, State

Row = dict[str, Any]

EXPLODED = 1000.0
"""A run ends when a worker's loss is this many times above 1 + the loss at the start."""


class History(list[Row]):
  """Rows of metrics in order of steps: a list of dicts.

  A row has step, epoch, train_loss (the mean over the steps since the row before),
  compression_error and clipped (means over every eighth of them and the last), gradient_norm (of
  the mean gradient, at the last step), test_* of the mean model, worst_* of the worst worker,
  consensus_distance, bytes_sent by one worker, and seconds of training; with a network,
  simulated_seconds = seconds / n (one worker's share of the work done here) + step × its
  communication.

  Attributes:
    state: the final `decomp.State`.
    model_state: the final model state, leaves [n, ...].
    steps_per_second: over the whole run, evaluation and compilation left out.
    diverged: where and how the run went wrong, or None.
  """

  state: State
  model_state: PyTree
  steps_per_second: float = math.nan
  diverged: str | None = None

  def column(self, name: str) -> np.ndarray:
    """One metric over time; NaN where a row lacks it."""
    return np.array([row.get(name, math.nan) for row in self])

  @property
  def params(self) -> PyTree:
    """Everyone's final parameters, leaves [n, ...]."""
    return self.state.params


def next_row(step: int, steps: int, eval_every: int) -> int:
  """The step of the row after `step`.

  Up to a tenth of an interval that is left over at the end belongs to the last row: means over a
  few steps would only be noise.

  >>> next_row(1755, 1953, 195), next_row(20, 25, 10)
  (1953, 25)
  """
  row = (step // eval_every + 1) * eval_every
  return steps if 10 * (steps - row) <= eval_every else row


def limit(history: History) -> float:
  """The loss at which a run has exploded."""
  start = history[0].get('test_loss', math.nan)
  return EXPLODED * (1 + abs(start)) if math.isfinite(start) else math.inf


def explain(sim: Simulation, history: History, losses: np.ndarray, failed: np.ndarray) -> str:
  """Where and how a run's loss went wrong, and what to try."""
  step = failed[failed > 0].min()
  worker = int(np.argmax(np.where(failed == step, np.where(losses < np.inf, losses, np.inf), -1)))
  start = history[0].get('test_loss', math.nan)
  what = f'the loss of worker {worker} is {losses[worker]:.4g}, and the run began at {start:.4g}'
  return _diverged(sim, int(step), what)


def is_scattered(row: Row) -> bool:
  """Whether models are not finite, or too far apart to measure.

  Their loss can stay finite: that of a network whose units are all off is log(classes).
  """
  return not math.isfinite(row['consensus_distance'])


def explain_scatter(sim: Simulation, row: Row) -> str:
  """The same as `explain`, of a run whose loss tells nothing."""
  return _diverged(sim, row['step'], 'models are no longer finite, or too far apart to measure')


def _diverged(sim: Simulation, step: int, what: str) -> str:
  return (
    f'{sim.algorithm.name} on {sim.topology.name} diverged at step {step}: {what}. Try a smaller '
    'learning rate, or a compressor with more bits or smaller buckets; choco_sgd with a small '
    'consensus_rate bears the strongest compression.'
  )
