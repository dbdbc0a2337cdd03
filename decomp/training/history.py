"""What a run leaves: its rows of metrics, and how it ended."""

import math
from typing import Any

import jax
import numpy as np

from decomp import theory
from decomp.base import PyTree
from decomp.engine.simulation import Simulation, State
from decomp.training import display

Row = dict[str, Any]

EXPLODED = 1000.0
"""A run ends when a worker's loss is this many times above 1 + the loss at the start."""


class History(list[Row]):
  """Rows of metrics in order of steps: a list of dicts.

  A row has step, epoch, train_loss (the mean over the steps since the row before),
  compression_error and clipped (means over every eighth of them and the last), gradient_norm (of
  the mean gradient, at the last step), test_* of the mean model, validation_loss and
  validation_accuracy of it where the task has a validation set, worst_* of the worst worker,
  consensus_distance, bytes_sent by one worker, and seconds of training; with a network,
  simulated_seconds = seconds / n (one worker's share of the work done here) + step × its
  communication.

  Attributes:
    state: the final `decomp.State`.
    model_state: the final model state, leaves [n, ...].
    steps_per_second: over the whole run, evaluation and compilation left out.
    diverged: where and how the run went wrong, or None.
    stopped: where the run ran out of patience, or None.
    best_params: the mean model of the row `best`; None where there is no such row.
    best_model_state: the model state that belongs to it.
  """

  state: State
  model_state: PyTree
  steps_per_second: float = math.nan
  diverged: str | None = None
  stopped: str | None = None
  best_params: PyTree = None
  best_model_state: PyTree = None

  def column(self, name: str) -> np.ndarray:
    """One metric over time; NaN where a row lacks it."""
    return np.array([row.get(name, math.nan) for row in self])

  @property
  def best(self) -> Row | None:
    """The row with the least validation_loss, the first of them; None without a validation set."""
    rows = [row for row in self if math.isfinite(row.get('validation_loss', math.nan))]
    return min(rows, key=lambda row: row['validation_loss'], default=None)

  @property
  def params(self) -> PyTree:
    """Everyone's final parameters, leaves [n, ...]."""
    return self.state.params

  def to_pandas(self) -> Any:
    """The rows as a `pandas.DataFrame`, a column for each metric; NaN where a row lacks it."""
    try:
      import pandas
    except ImportError:
      raise ImportError(
        'to_pandas: needs pandas, which is not installed: pip install pandas'
      ) from None
    return pandas.DataFrame(list(self))

  def _repr_html_(self) -> str:
    """What notebooks show."""
    step = self[-1]['step'] if self else 0
    well = f'step {step:,}, {self.steps_per_second:.4g} steps per second'
    return display.table(self, self.diverged or well)


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


def explain(history: History, losses: np.ndarray, failed: np.ndarray) -> str | None:
  """Where and how a run went wrong; None if it did not.

  Args:
    history: with the row of this step.
    losses: each worker's, that of the step where it failed if it did.
    failed: the step in which its loss or gradient was bad; 0 where all is well.
  """
  if failed.any():
    step, start = failed[failed > 0].min(), history[0].get('test_loss', math.nan)
    bad = np.flatnonzero(failed == step)
    worst = bad[np.argmax(np.where(np.isfinite(losses[bad]), losses[bad], np.inf))]
    if -np.inf < losses[worst] < limit(history):
      what = f'the gradient of worker {worst} is not finite, and its loss is {losses[worst]:.4g}'
      return f'diverged at step {step}: {what}'
    what = f'the loss of worker {worst} is {losses[worst]:.4g}, and the run began at {start:.4g}'
    if len(bad) > 1 and not np.isfinite(losses[worst]):
      what += f' ({len(bad)} of {len(failed)} at once: a gradient or message before was not finite)'
    return f'diverged at step {step}: {what}'
  # The loss of models that are not finite can be: a network whose units are all off has
  # log(classes).
  if not math.isfinite(history[-1]['consensus_distance']):
    what = 'models are no longer finite, or too far apart to measure'
    return f'diverged at step {history[-1]["step"]}: {what}'
  return None


def stop(history: History, patience: int | None) -> str | None:
  """Why a run ends early; None if it goes on.

  >>> losses = 0.7, 0.5, 0.5, 0.6
  >>> rows = [{'step': step, 'validation_loss': loss} for step, loss in enumerate(losses)]
  >>> stop(History(rows), patience=2)
  'stopped at step 3: validation_loss has not improved in 2 rows, and was 0.5 at step 1'
  >>> stop(History(rows), patience=3) is None
  True
  """
  if patience is None or len(history) <= patience:
    return None
  best, last = history.best or history[0], history[-1]['step']
  if best['step'] >= history[-patience]['step']:
    return None
  return (
    f'stopped at step {last}: validation_loss has not improved in {patience} rows, and was '
    f'{best["validation_loss"]:.4g} at step {best["step"]}'
  )


def advise(sim: Simulation, params: PyTree) -> str:
  """What to try after a run of `sim` has diverged, by the algorithm's own theory if that tells."""
  one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params)
  found = theory.preflight(sim.algorithm, sim.topology, one)
  if found.is_good or sim.algorithm.theory is None:
    return 'Try a smaller learning rate.'
  return f'Its theory says "{found.verdict}": {found.reason}; {found.advice}.'
