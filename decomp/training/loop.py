"""The host's side of training: rows of metrics, checkpoints, progress, signals and divergence."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from decomp.base import PyTree
from decomp.engine.simulation import Simulation
from decomp.training import history as histories
from decomp.training import reading, signals
from decomp.training.history import History, Row
from decomp.training.processes import agree
from decomp.training.program import Members, Program
from decomp.training.progress import Progress
from decomp.training.steps import Carry, Sampling, Totals


class Run(NamedTuple):
  """What the host knows of a run.

  Attributes:
    sim: the algorithm on its topology.
    sampling: how batches are drawn.
    bytes_per_step: what one worker sends.
    on_row: called with every row.
    wire_seconds: of one step's messages, on a network that is simulated; None for none.
    patience: rows without a better validation_loss that end the run; None for any number.
  """

  sim: Simulation
  sampling: Sampling
  bytes_per_step: int
  on_row: Callable[[Row], None]
  wire_seconds: float | None = None
  patience: int | None = None

  def row(self, step: int, measured: Mapping[str, float], seconds: float) -> Row:
    """A row of metrics; before the first step there are none of steps."""
    if step == 0:
      measured = {k: v for k, v in measured.items() if k not in ('train_loss', *Totals._fields)}
    row = {
      'step': step,
      'epoch': step * self.sampling.batch_size / float(np.mean(self.sampling.shards.lengths)),
      **measured,
      'bytes_sent': step * self.bytes_per_step,
      'seconds': seconds,
    }
    if self.wire_seconds is not None:
      local = seconds / self.sim.topology.num_workers
      row['simulated_seconds'] = local + step * self.wire_seconds
    return row


class Checkpoints(NamedTuple):
  """Where checkpoints go, and when.

  Attributes:
    directory: None for no checkpoints.
    seconds: a checkpoint is written when the last one is this old.
    resume: whether to continue from the newest one.
    facts: what a run that is continued must share, as JSON values.
    ignore: the names of facts that may differ.
  """

  directory: str | None
  seconds: float
  resume: bool
  facts: Mapping[str, Any]
  ignore: Sequence[str]

  def open(self) -> Any:
    """A context that gives the `Checkpointer`, or None."""
    if self.directory is None:
      return contextlib.nullcontext()
    from decomp.training.checkpoint import Checkpointer  # here, because Orbax takes long to import

    facts = json.loads(json.dumps(self.facts))
    return Checkpointer(self.directory, facts, ignore=self.ignore)


class Loop:
  """Drives a `Program` from row to row: one run, or some side by side.

  Args:
    program: compiled for as many members as there are.
    members: None for one run. There may be more than runs: copies that fill up a group.
    runs: what the host knows of each.
    checkpoints: where to keep them, or to continue from.
    bar: shows progress.
    done: steps of earlier runs that the bar counts.
  """

  def __init__(
    self,
    program: Program,
    members: Members | None,
    runs: Sequence[Run],
    checkpoints: Checkpoints,
    bar: Progress,
    done: int = 0,
  ):
    self._program, self._members, self._runs = program, members, runs
    self._checkpoints, self._bar, self._done = checkpoints, bar, done
    self._histories = [History() for _ in runs]
    self._over = np.arange(program.size) >= len(runs)  # the copies are of no interest
    self._saved_at = time.monotonic()
    self._seconds = self._pace = 0.0
    self._advice: dict[str, str] = {}
    self._carry: Carry

  def train(self, begin: PyTree, steps: int, eval_every: int) -> list[History]:
    """Each run's history, from its parameters and model state at the start to step `steps`."""
    with self._checkpoints.open() as self._checkpointer:
      self._start(begin)
      return self._run(steps, eval_every)

  def _start(self, begin: PyTree) -> None:
    """Begins at step 0, or where the newest checkpoint ends."""
    self._carry = self._program.start(self._members, begin)
    found = self._checkpointer.restore(self._like, self._follow) if self._checkpointer else None
    if found is None:
      return
    if not self._checkpoints.resume:
      raise ValueError(
        f'checkpoint_dir holds a run up to step {found.step} already: pass resume=True to continue '
        'it, or choose another directory'
      )
    self._carry, seconds, ends, bests, *_ = found.state
    self._seconds = float(seconds)
    for number, (history, record) in enumerate(zip(self._histories, found.rows, strict=True)):
      history.extend(record['rows'])
      history.best_params, history.best_model_state = bests.get(str(number), (None, None))
      # By this run's patience, which may be another one.
      stopped = histories.stop(history, self._runs[number].patience)
      if record['diverged'] or stopped:
        state, model_state = ends.get(str(number)) or self._program.end(self._carry, number)
        self._end(number, state, model_state, record['diverged'], stopped)
    pairs = zip(self._runs, self._histories, strict=True)
    rows = [(row, run) for run, history in pairs for row in history]
    for row, run in sorted(rows, key=lambda pair: pair[0]['step']):  # the order they came in
      run.on_row(row)

  def _run(self, steps: int, eval_every: int) -> list[History]:
    step = self._step
    if step > steps:
      raise ValueError(
        f'steps={steps}: checkpoint_dir holds a run up to step {step} already; pass as many, or '
        'choose another directory'
      )
    if step < steps and not self._over.all():
      self._program.compile()
    if not self._histories[0]:
      self._look(is_row=True)
    self._bar.start_at(self._done + step * len(self._runs))
    stop = Stop()
    with signals.caught(stop.note):
      try:
        while step < steps and not self._over.all():
          row_at = histories.next_row(step, steps, eval_every)
          # A second's worth of steps at a time: the bar moves, and signals are heard.
          step = self._advance(min(row_at, step + max(1, int(self._pace))), row_at)
          last = self._histories[0][-1] if len(self._runs) == 1 else {}
          self._bar.update(self._done + step * len(self._runs), last)
          late = time.monotonic() - self._saved_at >= self._checkpoints.seconds
          late = late or step == steps or bool(self._over.all())
          due, stopped, self._pace = agree(late, stop.number, self._pace)
          if due:
            self._save()
          if stopped:
            raise KeyboardInterrupt(int(stopped))
      except KeyboardInterrupt:
        if not stop.at_once:
          self._save()
        raise
      finally:
        if self._checkpointer and not stop.at_once:
          self._checkpointer.wait()
      if stop.number:  # it came while the last checkpoint was written
        raise KeyboardInterrupt(stop.number)
    for number in np.flatnonzero(~self._over).tolist():
      self._end(number, *self._program.end(self._carry, number))
    return self._histories

  @property
  def _step(self) -> int:
    return int(self._carry.state.round)

  def _advance(self, until: int, row_at: int) -> int:
    before, began = self._step, time.perf_counter()
    limits = np.resize([histories.limit(one) for one in self._histories], self._program.size)
    self._carry = self._program.advance(
      self._carry, self._members, until, row_at, limits.astype(np.float32), self._over
    )
    step = self._step
    took = time.perf_counter() - began
    self._seconds += took
    self._pace = (step - before) / max(took, 1e-9)
    self._look(is_row=step == row_at)
    return step

  def _look(self, is_row: bool) -> None:
    """Adds rows, of all runs still well or of those that have just failed, and ends the latter."""
    losses, failed = self._program.outcome(self._carry)
    fresh = failed.any(1) & ~self._over
    shown = np.flatnonzero(~self._over if is_row else fresh).tolist()
    if not shown:
      return
    step, measured = self._step, self._program.measure(self._carry, self._members)
    for number in shown:
      own = {name: float(values[number]) for name, values in measured.items()}
      row = self._runs[number].row(step, own, self._seconds / len(self._runs))
      history = self._histories[number]
      history.append(row)
      if history.best is row:
        best = self._program.mean(self._carry, number)
        history.best_params, history.best_model_state = best
    if is_row:
      self._carry = self._program.reset(self._carry)
    for number in shown:
      run, history = self._runs[number], self._histories[number]
      sim = run.sim
      if what := histories.explain(history, losses[number], failed[number]):
        state, model_state = self._program.end(self._carry, number)
        name = sim.algorithm.name
        if name not in self._advice:  # it takes a second, and many members may diverge
          self._advice[name] = histories.advise(sim, state.params)
        reason = f'{name} on {sim.topology.name} {what}. {self._advice[name]}'
        self._end(number, state, model_state, diverged=reason)
      elif stopped := histories.stop(history, run.patience):
        self._end(number, *self._program.end(self._carry, number), stopped=stopped)
    for number in shown:  # at last: all is well to be saved if one of them raises
      self._runs[number].on_row(self._histories[number][-1])

  def _end(
    self,
    number: int,
    state: Any,
    model_state: PyTree,
    diverged: str | None = None,
    stopped: str | None = None,
  ) -> None:
    history = self._histories[number]
    history.state, history.model_state = state, model_state
    history.diverged, history.stopped = diverged, stopped
    history.steps_per_second = history[-1]['step'] / max(history[-1]['seconds'], 1e-9)
    self._over[number] = True

  def _save(self) -> None:
    if self._checkpointer:
      record: list[dict[str, Any]] = [
        {'rows': list(one), 'diverged': one.diverged, 'stopped': one.stopped}
        for one in self._histories
      ]
      named = {str(number): one for number, one in enumerate(self._histories)}
      ends = {
        name: (one.state, one.model_state)
        for name, one in named.items()
        if one.diverged or one.stopped
      }
      bests = {
        name: (one.best_params, one.best_model_state) for name, one in named.items() if one.best
      }
      computed = self._computed()
      saved = self._carry, np.float64(self._seconds), ends, bests, *computed
      if self._members is None:  # for `decomp.load`
        (params,) = computed or (self._carry.state.params,)
        record[0]['model'] = {
          'params': reading.places(params, saved),
          'model_state': reading.places(self._carry.model_state, saved),
        }
      self._checkpointer.save(self._step, saved, record)
      self._saved_at = time.monotonic()

  def _computed(self) -> tuple[PyTree, ...]:
    """A run's parameters, if its algorithm's state does not hold but computes them."""
    if self._members is not None:
      return ()
    params = self._carry.state.params
    return () if reading.places(params, self._carry) is not None else (params,)

  def _follow(self, saved: Any) -> Any:
    """What `_save` has saved on other devices, as these need it."""
    carry, *others = saved
    return self._program.follow(self._members, carry), *others

  def _like(self, record: Sequence[Mapping[str, Any]]) -> Any:
    """The form of what `_save` has saved with this record."""
    named = {str(number): one for number, one in enumerate(record)}
    ended = [name for name, one in named.items() if one['diverged'] or one['stopped']]
    better = [name for name, one in named.items() if History(one['rows']).best]
    ends = dict.fromkeys(ended, self._program.end_shape)
    bests = dict.fromkeys(better, self._program.mean_shape)
    return self._carry, np.float64(0), ends, bests, *self._computed()


class Stop:
  """Notes a signal instead of raising: the arrays of a step under way are donated, not to be saved.

  A second Ctrl-C does not wait. Other signals may well come twice: `timeout` and schedulers send
  them to a process and to its group.

  Attributes:
    number: the signal; 0 for none.
    at_once: whether there was a second Ctrl-C.
  """

  number = 0
  at_once = False

  def note(self, number: int, *_: Any) -> None:
    """Handles a signal."""
    if self.number and number == signal.SIGINT:
      self.at_once = True
      raise KeyboardInterrupt(number)
    self.number = self.number or number
