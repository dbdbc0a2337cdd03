"""The host's side of training: rows of metrics, checkpoints, progress and divergence."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from decomp import cost
from decomp.base import Algorithm, PyTree
from decomp.data import partition
from decomp.data.partition import Partition
from decomp.processes import agree, is_first
from decomp.progress import Progress
from decomp.run import Carry, Run, Sampling, Totals
from decomp.simulate import Simulation, State, simulate
from decomp.tasks import Task
from decomp.topology import Topology

Row = dict[str, Any]

EXPLODED = 1000.0
"""A run ends when a worker's loss is this many times above 1 + the loss at the start."""


class History(list[Row]):
  """Rows of metrics in order of steps: a list of dicts.

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


def train(
  task: Task,
  algorithm: Algorithm,
  topology: Topology,
  steps: int,
  batch_size: int,
  seed: int = 0,
  *,
  shards: Partition | str = 'iid',
  reshuffle: bool = False,
  replacement: bool = False,
  eval_every: int | None = None,
  worker_examples: int = 2000,
  mapping: str = 'auto',
  mesh: Mesh | None = None,
  network: cost.Links | None = None,
  checkpoint_dir: str | None = None,
  checkpoint_seconds: float = 30.0,
  resume: bool = False,
  config: Mapping[str, Any] | None = None,
  on_row: Callable[[Row], None] | None = None,
  progress: bool | None = None,
) -> History:
  """Trains with one algorithm on one topology.

  A run whose loss is no longer finite, or 1000 times what it was, ends at that very step with a
  warning, and one whose models are not finite at the next row; `history.diverged` then says where
  and what to try.

  Args:
    task: what to train.
    algorithm: with its optimizer inside.
    topology: its number of workers divides the data.
    steps: the length of the run.
    batch_size: examples per worker and step.
    seed: of everything random.
    shards: who has which examples: 'iid', 'by_label', or a `Partition`.
    reshuffle: whether the data are dealt anew to all workers every epoch.
    replacement: whether each example is drawn independently, as theory has it.
    eval_every: steps between two rows of metrics; None for 20 rows in all.
    worker_examples: single workers are evaluated on this many test examples at most; the mean
      model on all of them.
    mapping: how the gradients of all workers are computed: 'vmap', 'scan', 'devices', or 'auto'
      for the fastest on this platform; see `decomp.mapping`.
    mesh: spreads workers over devices that exchange packed bytes, see `decomp.simulate`; None
      simulates the exchange.
    network: such as `decomp.cost.lan('100Mbps', '5ms')`: rows then have simulated_seconds, what
      the run would have taken there.
    checkpoint_dir: where to keep checkpoints; None for none.
    checkpoint_seconds: a checkpoint is written when the last one is this old, on Ctrl-C, and at the
      end.
    resume: whether to continue from the newest checkpoint in `checkpoint_dir`, if there is one.
    config: more facts of the run, which the run that resumes it must share; the optimizer is one
      that the algorithm does not tell.
    on_row: called with every row, also with those of a checkpoint.
    progress: whether to show a progress bar; None for when a terminal is attached.

  Returns:
    A `History`: rows for step 0, for every `eval_every` steps, and for the last one, which takes in
    up to a tenth of `eval_every` steps that are left over. A row has step, epoch, train_loss (the
    mean over the steps since the row before), compression_error and clipped (means over every
    eighth of them and the last), gradient_norm (of the mean gradient, at the last step), test_* of
    the mean model, worst_* of the worst worker, consensus_distance, bytes_sent by one worker, and
    seconds of training; with a network, simulated_seconds = seconds / n (one worker's share of the
    work done here) + step × its communication.

  >>> import optax, decomp
  >>> task = decomp.tasks.logistic_regression(num_examples=64, dimension=3)
  >>> algorithm = decomp.algorithms.d_psgd(optax.sgd(0.5))
  >>> history = train(task, algorithm, decomp.topology.ring(4), steps=40, batch_size=4)
  >>> history[-1]['step'], bool(history[-1]['test_suboptimality'] < 0.1)
  (40, True)
  """
  if not isinstance(task, Task):
    raise ValueError(f'task={task!r}: must be a decomp.Task, such as decomp.tasks.digits()')
  check_positive(
    steps=steps, batch_size=batch_size, eval_every=eval_every, worker_examples=worker_examples
  )
  if resume and checkpoint_dir is None:
    raise ValueError('resume=True: needs the checkpoint_dir of the run to continue')
  ignore = () if eval_every else ('eval_every',)  # a run that is to be longer has another default
  eval_every = eval_every or max(1, steps // 20)
  sim = simulate(algorithm, topology, mesh)
  sampling = Sampling(divide(shards, task, topology, seed), batch_size, reshuffle, replacement)
  facts = {
    'task': task.name,
    'algorithm': algorithm.name,
    'topology': topology.name,
    'weights': zlib.crc32(topology.matrices.tobytes()),
    'batch size': batch_size,
    'seed': seed,
    'examples of each worker': np.asarray(sampling.shards.lengths).tolist(),
    'checksum of the shards': zlib.crc32(np.ascontiguousarray(sampling.shards.indices).tobytes()),
    'reshuffle': reshuffle,
    'replacement': replacement,
    'eval_every': eval_every,
    'test examples of a worker': worker_examples,
    **json.loads(json.dumps(dict(config or {}))),
  }
  run = Run(task, sim, sampling, seed, mapping, worker_examples)
  with (
    _open(checkpoint_dir, facts, ignore) as checkpointer,
    Progress(progress if is_first() else False, algorithm.name, steps) as bar,
  ):
    wire_seconds = None if network is None else _wire_seconds(task, sim, network)
    loop = _Loop(run, checkpointer, checkpoint_seconds, bar, on_row, wire_seconds)
    loop.start(resume)
    return loop.run(steps, eval_every)


class _Loop:
  """Drives a `Run` from row to row."""

  def __init__(
    self,
    run: Run,
    checkpointer: Any,
    checkpoint_seconds: float,
    bar: Progress,
    on_row: Callable[[Row], None] | None,
    wire_seconds: float | None,
  ):
    self._wire_seconds = wire_seconds
    self._run, self._checkpointer, self._bar = run, checkpointer, bar
    self._checkpoint_seconds = checkpoint_seconds
    self._on_row = on_row or (lambda row: None)
    self._saved_at = time.monotonic()
    self._seconds = self._pace = 0.0
    self._history = History()
    self._carry: Carry

  def start(self, resume: bool) -> None:
    """Begins at step 0, or where the newest checkpoint ends."""
    self._carry = self._run.start()
    found = self._checkpointer.restore(self._checkpointed) if self._checkpointer else None
    if found is None:
      self._add_row()
      return
    if not resume:
      raise ValueError(
        f'checkpoint_dir holds a run up to step {found.step} already: pass resume=True to continue '
        'it, or choose another directory'
      )
    self._carry, self._seconds = found.state[0], float(found.state[1])
    self._history.extend(found.rows)
    for row in found.rows:
      self._on_row(row)

  def run(self, steps: int, eval_every: int) -> History:
    """Trains up to step number `steps`."""
    history, step = self._history, self._step
    if step > steps:
      raise ValueError(
        f'steps={steps}: checkpoint_dir holds a run up to step {step} already; pass as many, or '
        'choose another directory'
      )
    if step < steps:
      self._run.compile(self._carry)
    self._bar.start_at(step)
    with _Interrupts() as interrupts:
      try:
        while step < steps and not history.diverged:
          row_at = next_row(step, steps, eval_every)
          # A second's worth of steps at a time: the bar moves, and Ctrl-C is heard.
          step = self._advance(min(row_at, step + max(1, int(self._pace))), row_at)
          if step == row_at or history.diverged:
            self._add_row()
          self._bar.update(step, history[-1])
          late = step == steps or self._checkpoint_is_due
          due, interrupted, self._pace = agree(late, interrupts.count, self._pace)
          if due and not history.diverged:
            self._save()
          if interrupted:
            raise KeyboardInterrupt
      except KeyboardInterrupt:
        if interrupts.count < 2:
          self._save()
        raise
    history.state, history.model_state = self._carry.state, self._carry.model_state
    history.steps_per_second = self._step / max(self._seconds, 1e-9)
    return history

  @property
  def _step(self) -> int:
    return int(self._carry.state.round)

  @property
  def _checkpointed(self) -> tuple[Carry, np.float64]:
    return self._carry, np.float64(self._seconds)

  @property
  def _checkpoint_is_due(self) -> bool:
    return time.monotonic() - self._saved_at >= self._checkpoint_seconds

  def _advance(self, until: int, row_at: int) -> int:
    before, began = self._step, time.perf_counter()
    self._carry = self._run.advance(self._carry, until, row_at, limit(self._history))
    losses, failed = (np.asarray(x) for x in self._run.outcome(self._carry))
    took = time.perf_counter() - began
    self._seconds += took
    self._pace = (self._step - before) / max(took, 1e-9)
    if failed.any():
      self._stop(explain(self._run.sim, self._history, losses, failed))
    return self._step

  def _stop(self, reason: str) -> None:
    self._history.diverged = reason
    warnings.warn(reason, RuntimeWarning, stacklevel=5)

  def _add_row(self) -> None:
    step, run = self._step, self._run
    row = make_row(step, run.measure(self._carry), run.sampling, run.bytes_per_step, self._seconds)
    if self._wire_seconds is not None:
      local = self._seconds / run.sim.topology.num_workers
      row['simulated_seconds'] = local + step * self._wire_seconds
    self._carry = run.reset(self._carry)
    self._history.append(row)
    self._on_row(row)
    if not self._history.diverged and is_scattered(row):
      self._stop(explain_scatter(run.sim, row))

  def _save(self) -> None:
    if self._checkpointer:
      self._checkpointer.save(self._step, self._checkpointed, list(self._history))
      self._saved_at = time.monotonic()


def next_row(step: int, steps: int, eval_every: int) -> int:
  """The step of the row after `step`.

  Up to a tenth of an interval that is left over at the end belongs to the last row: means over a
  few steps would only be noise.

  >>> next_row(1755, 1953, 195), next_row(20, 25, 10)
  (1953, 25)
  """
  row = (step // eval_every + 1) * eval_every
  return steps if 10 * (steps - row) <= eval_every else row


def make_row(
  step: int,
  measured: Mapping[str, float],
  sampling: Sampling,
  bytes_per_step: int,
  seconds: float,
) -> Row:
  """A row of metrics; before the first step there are none of steps."""
  if step == 0:
    measured = {k: v for k, v in measured.items() if k not in ('train_loss', *Totals._fields)}
  return {
    'step': step,
    'epoch': step * sampling.batch_size / float(np.mean(sampling.shards.lengths)),
    **measured,
    'bytes_sent': step * bytes_per_step,
    'seconds': seconds,
  }


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


class _Interrupts:
  """Counts Ctrl-C instead of raising: the arrays of a step under way are donated, not to be saved.

  A second Ctrl-C does not wait.
  """

  count = 0

  def __enter__(self) -> _Interrupts:
    if threading.current_thread() is threading.main_thread():  # signals go to no other
      self._before: Any = signal.signal(signal.SIGINT, self._note)
    return self

  def __exit__(self, *_: Any) -> None:
    if hasattr(self, '_before'):
      signal.signal(signal.SIGINT, self._before)

  def _note(self, *_: Any) -> None:
    self.count += 1
    if self.count > 1:
      raise KeyboardInterrupt


def _open(directory: str | None, facts: Mapping[str, Any], ignore: Sequence[str]) -> Any:
  if directory is None:
    return contextlib.nullcontext()
  from decomp.checkpoint import Checkpointer

  return Checkpointer(directory, dict(facts), ignore=ignore)


def _wire_seconds(task: Task, sim: Simulation, network: cost.Links) -> float:
  params, _ = jax.eval_shape(task.init, jax.random.key(0))
  work = cost.workload(sim.algorithm, sim.topology, params, compute=0.0, codec=0.0)
  return float(cost.communication_seconds(work, network))


def divide(shards: Partition | str, task: Task, topology: Topology, seed: int) -> Partition:
  """The shards that a run's arguments mean."""
  n, examples = topology.num_workers, len(next(iter(task.train.values())))
  if isinstance(shards, str):
    if shards == 'iid':
      return partition.iid(np.zeros(examples), n, seed)
    if shards == 'by_label':
      if 'label' not in task.train:
        raise ValueError(f"shards='by_label': task={task.name} has no train['label'] to go by")
      return partition.by_label(task.train['label'], n)
  if not isinstance(shards, Partition):
    raise ValueError(f"shards={shards!r}: must be 'iid', 'by_label' or a Partition")
  if len(shards.lengths) != n:
    raise ValueError(
      f'shards has {len(shards.lengths)} workers, but topology={topology.name} has {n}'
    )
  if int(np.sum(shards.lengths)) != examples:
    raise ValueError(
      f'shards divides {int(np.sum(shards.lengths))} examples, but task={task.name} has {examples}'
    )
  return shards


def check_positive(**values: int | None) -> None:
  """Whether arguments that count something can do so."""
  for name, value in values.items():
    if value is not None and (not isinstance(value, int | np.integer) or value < 1):
      raise ValueError(f'{name}={value!r}: must be a whole number of at least 1')
