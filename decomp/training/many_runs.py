"""Many runs at once: seeds × learning rates × consensus rates × any number of an algorithm.

The runs, its members, differ in numbers only, so that one compiled loop takes their steps: see
`decomp.members`. Here they are made, and their rows collected.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decomp.base import Algorithm, PyTree
from decomp.data.partition import Partition
from decomp.members import Members, Program
from decomp.progress import Progress
from decomp.run import Data, Sampling, Steps, batched_tests, choose_mapping, initial
from decomp.simulate import Simulation, simulate
from decomp.tasks import Task
from decomp.topology import Topology
from decomp.training import (
  History,
  Row,
  check_positive,
  divide,
  explain,
  explain_scatter,
  is_scattered,
  limit,
  make_row,
  next_row,
)

Point = dict[str, Any]
"""The numbers that a member was made with, and its 'seed'."""

_MEMORY = 0.5
"""The part of the memory that members may fill together."""


class Sweep(NamedTuple):
  """The runs of a sweep.

  Attributes:
    points: what each was made with; the seed varies fastest.
    histories: their rows, as `decomp.train` returns them.
  """

  points: list[Point]
  histories: list[History]

  def table(self, metric: str | None = None) -> list[Row]:
    """A row for each setting, over its seeds: 'mean' and 'std' of the last value of a metric.

    Args:
      metric: a column of the histories; None for the first there is of test_suboptimality,
        test_accuracy and test_loss.

    Returns:
      Rows with the setting, 'metric', 'mean', 'std' (of those that did not diverge; NaN if there
      are none), 'seeds' and 'diverged', their numbers.
    """
    metric = metric or self._metric
    settings: dict[tuple[Any, ...], list[float]] = {}
    for point, history in zip(self.points, self.histories, strict=True):
      values = tuple((name, value) for name, value in point.items() if name != 'seed')
      last = history[-1].get(metric, math.nan)
      settings.setdefault(values, []).append(math.nan if history.diverged else last)
    return [
      {**dict(setting), 'metric': metric, **_statistics(np.array(values))}
      for setting, values in settings.items()
    ]

  def best(self, metric: str | None = None) -> Row | None:
    """The row of the table with the best mean, the largest accuracy or the least of anything else.

    None if no setting is without a seed that diverged.
    """
    rows = [row for row in self.table(metric) if not row['diverged']]
    sign = -1 if rows and rows[0]['metric'].endswith('accuracy') else 1
    return min(rows, key=lambda row: sign * row['mean'], default=None)

  @property
  def _metric(self) -> str:
    columns = self.histories[0][0]
    names = ('test_suboptimality', 'test_accuracy', 'test_loss')
    return next(name for name in names if name in columns)


def sweep(
  task: Task,
  make_algorithm: Callable[..., Algorithm],
  topology: Topology,
  steps: int,
  batch_size: int,
  seeds: Sequence[int] = (0, 1, 2),
  *,
  shards: Partition | str | Callable[[int], Partition] = 'iid',
  reshuffle: bool = False,
  replacement: bool = False,
  eval_every: int | None = None,
  worker_examples: int = 2000,
  members_at_once: int | None = None,
  on_row: Callable[[Point, Row], None] | None = None,
  progress: bool | None = None,
  **grids: Sequence[float],
) -> Sweep:
  """Trains with every combination of seeds and numbers, many at a time in one compiled program.

  A member's history is that of `decomp.train` with its seed and numbers: the same start, division
  of the data, batches and random numbers. The values agree up to the last bits, which depend on how
  many members run at once; after a stochastic rounding that such a bit decides, up to its noise.

  Args:
    task: what to train.
    make_algorithm: called with a number for each grid by its name, such as `lambda learning_rate:
      algorithms.d_psgd(optax.sgd(learning_rate))`; in the program the numbers are traced scalars.
    topology: its number of workers divides the data.
    steps: the length of every run.
    batch_size: examples per worker and step.
    seeds: of everything random; each setting is run with all of them.
    shards: as in `decomp.train`, where 'iid' depends on the seed; or a function of the seed.
    reshuffle: as in `decomp.train`.
    replacement: as in `decomp.train`.
    eval_every: steps between two rows of metrics; None for 20 rows in all.
    worker_examples: as in `decomp.train`.
    members_at_once: how many runs the program holds; None for as many as fit half of the memory.
    on_row: called with a member's point and its row, for every row.
    progress: whether to show a progress bar; None for when a terminal is attached.
    **grids: the values of each number.

  Returns:
    A `Sweep`. In a row, seconds is the member's share of the time that all took together.

  >>> import optax, decomp
  >>> found = sweep(
  ...   decomp.tasks.logistic_regression(num_examples=64, dimension=3),
  ...   lambda learning_rate: decomp.algorithms.d_psgd(optax.sgd(learning_rate)),
  ...   decomp.topology.ring(4), steps=40, batch_size=4, seeds=(0, 1), learning_rate=(0.01, 0.5),
  ... )
  >>> found.points[1], len(found.histories), found.best()['learning_rate']
  ({'learning_rate': 0.01, 'seed': 1}, 4, 0.5)
  """
  if not isinstance(task, Task):
    raise ValueError(f'task={task!r}: must be a decomp.Task, such as decomp.tasks.digits()')
  check_positive(
    steps=steps,
    batch_size=batch_size,
    eval_every=eval_every,
    worker_examples=worker_examples,
    members_at_once=members_at_once,
  )
  points = _points(grids, seeds)
  # With the very numbers: whoever checks its arguments can, and says which one is wrong.
  sims = [simulate(make_algorithm(**_numbers(point)), topology) for point in points]
  starts = {seed: initial(task, seed) for seed in seeds}
  parts = _same_shape({seed: _shards(shards, task, topology, seed) for seed in seeds})
  mapping = choose_mapping(task, starts[seeds[0]], topology.num_workers, batch_size, num_devices=1)

  def sampling(shards: Partition) -> Sampling:
    return Sampling(shards, batch_size, reshuffle, replacement)

  def steps_of(member: Members) -> Steps:
    sim = simulate(_traced(make_algorithm, member.numbers), topology)
    return Steps(task, sim, sampling(member.shards), mapping)

  def members(group: Sequence[int]) -> Members:
    chosen = [points[number] for number in group]
    seeds = [point['seed'] for point in chosen]
    return Members(
      np.array(seeds, np.int32),
      {name: _weakly_typed([point[name] for point in chosen]) for name in grids},
      _stack([parts[seed] for seed in seeds]),
      _stack([starts[seed] for seed in seeds]),
    )

  data = jax.tree.map(jnp.asarray, Data(dict(task.train), *batched_tests(task, worker_examples)))
  groups = _groups(len(points), members_at_once or len(points))
  program = Program(steps_of, data)
  bytes_per_step = sims[0].bytes_per_step(starts[seeds[0]][0])
  histories: list[History] = []
  with Progress(progress, f'{len(points)} runs', steps * len(points)) as bar:
    used, most = program.compile(members(groups[0])), _MEMORY * _memory_of_the_device()
    if members_at_once is None and used > most:
      groups = _groups(len(points), max(1, int(len(points) * most / used)))
      program.compile(members(groups[0]))
    bar.start_at(0)
    for group in groups:
      runs = [
        _Run(points[i], sims[i], sampling(parts[points[i]['seed']]), bytes_per_step)
        for i in sorted(set(group))
      ]
      loop = _Loop(program, members(group), runs, on_row, bar, len(histories) * steps)
      histories += loop.run(steps, eval_every or max(1, steps // 20))
  return Sweep(points, histories)


class _Run(NamedTuple):
  """What the host knows of a member."""

  point: Point
  sim: Simulation
  sampling: Sampling
  bytes_per_step: int


class _Loop:
  """Drives a `Program` from row to row, for one group of members."""

  def __init__(
    self,
    program: Program,
    members: Members,
    runs: Sequence[_Run],
    on_row: Callable[[Point, Row], None] | None,
    bar: Progress,
    done: int,
  ):
    self._program, self._members, self._runs = program, members, runs
    self._on_row, self._bar, self._done = on_row or (lambda point, row: None), bar, done
    self._histories = [History() for _ in runs]
    # Beyond the runs there are copies, which fill up the last group.
    self._known = np.arange(len(members.seed)) >= len(runs)
    self._carry = program.start(members)
    self._seconds = 0.0

  def run(self, steps: int, eval_every: int) -> list[History]:
    """Trains up to step number `steps`."""
    self._add_rows(range(len(self._runs)))
    limits = np.resize([limit(history) for history in self._histories], len(self._known))
    step, pace = 0, 0.0
    while step < steps and not self._known.all():
      row_at = next_row(step, steps, eval_every)
      # A second's worth of steps at a time: the bar moves, and Ctrl-C is heard.
      until = min(row_at, step + max(1, int(pace)))
      before, began = step, time.perf_counter()
      self._carry = self._program.advance(
        self._carry, self._members, until, row_at, limits.astype(np.float32), self._known
      )
      step = int(self._carry.state.round)
      took = time.perf_counter() - began
      self._seconds += took
      pace = (step - before) / max(took, 1e-9)
      self._note(step == row_at)
      self._bar.update(self._done + step * len(self._runs), {})
    for number in _true(~self._known):
      self._finish(number)
    return self._histories

  def _note(self, is_row: bool) -> None:
    """Adds rows, of all members still well or of those that have just failed."""
    losses, failed = np.asarray(self._carry.losses), np.asarray(self._carry.failed)
    fresh = failed.any(1) & ~self._known
    if is_row or fresh.any():
      self._add_rows(_true(~self._known if is_row else fresh))
    scattered = np.zeros_like(fresh)
    for number in _true(~self._known):
      history, sim = self._histories[number], self._runs[number].sim
      if fresh[number]:
        history.diverged = explain(sim, history, losses[number], failed[number])
      elif is_scattered(history[-1]):
        scattered[number] = True
        history.diverged = explain_scatter(sim, history[-1])
      if history.diverged:
        self._finish(number)
    self._known = self._known | fresh | scattered
    if is_row:
      self._carry = self._program.reset(self._carry)

  def _add_rows(self, numbers: Iterable[int]) -> None:
    step, measured = int(self._carry.state.round), self._program.measure(self._carry, self._members)
    for number in numbers:
      own = {name: float(values[number]) for name, values in measured.items()}
      run = self._runs[number]
      share = self._seconds / len(self._runs)
      row = make_row(step, own, run.sampling, run.bytes_per_step, share)
      self._histories[number].append(row)
      self._on_row(run.point, row)

  def _finish(self, number: int) -> None:
    history = self._histories[number]
    history.state, history.model_state = self._program.member(self._carry, number)
    history.steps_per_second = history[-1]['step'] / max(history[-1]['seconds'], 1e-9)


def _points(grids: Mapping[str, Sequence[float]], seeds: Sequence[int]) -> list[Point]:
  if 'seed' in grids:
    raise ValueError(f'seed={grids["seed"]!r}: must be given as seeds, such as seeds=(0, 1, 2)')
  for name, values in grids.items():
    found = np.asarray(values)
    if found.ndim != 1 or not found.size or found.dtype.kind not in 'iuf':
      raise ValueError(f'{name}={values!r}: must be a sequence of numbers, such as (0.1, 0.2)')
  found = np.asarray(seeds)
  if found.ndim != 1 or not found.size or found.dtype.kind not in 'iu' or found.min() < 0:
    raise ValueError(f'seeds={seeds!r}: must be a sequence of whole numbers, such as (0, 1, 2)')
  if len(set(found.tolist())) < found.size:
    raise ValueError(f'seeds={seeds!r}: must be different from each other')
  axes = {**grids, 'seed': seeds}
  lists = [np.asarray(values).tolist() for values in axes.values()]
  return [dict(zip(axes, values, strict=True)) for values in itertools.product(*lists)]


def _true(flags: np.ndarray) -> list[int]:
  return np.flatnonzero(flags).tolist()


def _numbers(point: Point) -> dict[str, Any]:
  return {name: value for name, value in point.items() if name != 'seed'}


def _traced(make_algorithm: Callable[..., Algorithm], numbers: Mapping[str, Any]) -> Algorithm:
  try:
    return make_algorithm(**numbers)
  except (TypeError, ValueError) as error:  # it has taken the same as Python's numbers
    raise ValueError(
      f'make_algorithm takes {", ".join(numbers)} only as Python numbers, not as traced ones: what '
      'decides on sizes, such as bits or a fraction, needs a sweep for each value; cause: '
      + str(error).split('\n')[0]
    ) from error


def _shards(
  shards: Partition | str | Callable[[int], Partition], task: Task, topology: Topology, seed: int
) -> Partition:
  return divide(shards(seed) if callable(shards) else shards, task, topology, seed)


def _same_shape(parts: Mapping[int, Partition]) -> dict[int, Partition]:
  """Partitions with padding to the longest shard of all."""
  longest = max(part.indices.shape[1] for part in parts.values())
  return {
    seed: part._replace(
      indices=np.pad(
        part.indices, ((0, 0), (0, longest - part.indices.shape[1])), constant_values=-1
      )
    )
    for seed, part in parts.items()
  }


def _weakly_typed(values: Sequence[float]) -> jax.Array:
  """As Python's numbers are in JAX, so that parameters keep their dtype whatever they meet."""
  return jnp.stack([jnp.asarray(value) for value in values])


def _stack(trees: Sequence[PyTree]) -> PyTree:
  return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def _groups(count: int, at_once: int) -> list[list[int]]:
  """Members in groups of one size, at most `at_once`; the last member fills up the last group.

  >>> _groups(5, at_once=4)
  [[0, 1, 2], [3, 4, 4]]
  """
  size = math.ceil(count / math.ceil(count / at_once))
  last = count - 1
  return [[min(i, last) for i in range(k, k + size)] for k in range(0, count, size)]


def _memory_of_the_device() -> float:
  """Bytes of the device, or on CPU of the machine."""
  statistics = jax.local_devices()[0].memory_stats() or {}
  return statistics.get('bytes_limit') or os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')


def _statistics(values: np.ndarray) -> Row:
  finite = values[np.isfinite(values)]
  return {
    'mean': float(finite.mean()) if len(finite) else math.nan,
    'std': float(finite.std()) if len(finite) else math.nan,
    'seeds': len(values),
    'diverged': len(values) - len(finite),
  }
