"""`decomp.sweep`: many runs at once, seeds × learning rates × any number of an algorithm.

The runs, its members, differ in numbers only, so that one compiled loop takes their steps: see
`decomp.training.program`. Here they are made.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from decomp.base import Algorithm, PyTree
from decomp.engine.simulation import simulate
from decomp.tasks import Task
from decomp.tasks.data.partition import Partition
from decomp.topology import Topology
from decomp.training import arguments, configuration, folders
from decomp.training.history import History, Row
from decomp.training.loop import Checkpoints, Loop, Run
from decomp.training.processes import first_says
from decomp.training.program import Members, Program, place
from decomp.training.progress import Progress
from decomp.training.steps import Sampling, Steps, choose_mapping, initial

Point = dict[str, Any]
"""The numbers that a member was made with, and its 'seed'."""

_SWEEP = 'sweep.json'
"""Which runs a directory of checkpoints belongs to."""

_METRICS = (
  'validation_accuracy',
  'validation_loss',
  'test_suboptimality',
  'test_accuracy',
  'test_loss',
)
"""What settings are compared by: the first of them that there is."""

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

    Of a validation set's metrics it is not the last value but that of `History.best`.

    Args:
      metric: a column of the histories; None for the first there is of validation_accuracy,
        validation_loss, test_suboptimality, test_accuracy and test_loss.

    Returns:
      Rows with the setting, 'metric', 'mean', 'std' (of those that did not diverge; NaN if there
      are none), 'seeds' and 'diverged', their numbers.
    """
    metric = metric or next(name for name in _METRICS if name in self.histories[0][0])
    settings: dict[tuple[Any, ...], list[float]] = {}
    for point, history in zip(self.points, self.histories, strict=True):
      row = history.best if metric.startswith('validation_') else history[-1]
      found = math.nan if row is None or history.diverged else row.get(metric, math.nan)
      settings.setdefault(tuple(_numbers(point).items()), []).append(found)
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
  patience: int | None = None,
  worker_examples: int = 2000,
  mesh: Mesh | None = None,
  members_at_once: int | None = None,
  checkpoint_dir: str | None = None,
  checkpoint_seconds: float = 30.0,
  resume: bool = False,
  config: Mapping[str, Any] | None = None,
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
    patience: as in `decomp.train`, for every run; those that go on are not disturbed.
    worker_examples: as in `decomp.train`.
    mesh: as in `decomp.train`: spreads the workers of every run over devices.
    members_at_once: how many runs the program holds; None for as many as fit half of the memory, or
      as many as the sweep to resume had.
    checkpoint_dir: where to keep checkpoints, a folder for the runs of each program; None for none.
    checkpoint_seconds: as in `decomp.train`.
    resume: whether to continue from the newest checkpoints in `checkpoint_dir`.
    config: as in `decomp.train`.
    on_row: called with a member's point and its row, for every row, also with those of checkpoints.
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
  counts = {'eval_every': eval_every, 'worker_examples': worker_examples}
  counts |= {'steps': steps, 'batch_size': batch_size, 'members_at_once': members_at_once}
  points = _points(grids, seeds)
  arguments.check(task, checkpoint_dir, resume, seeds, checkpoint_seconds, patience, **counts)
  # With the very numbers: whoever checks its arguments can, and says which one is wrong.
  sims = [simulate(make_algorithm(**_numbers(point)), topology, mesh) for point in points]
  starts = {seed: initial(task, seed) for seed in seeds}
  dealt = {seed: shards(seed) if callable(shards) else shards for seed in seeds}
  divided = {seed: arguments.divide(dealt[seed], task, topology, seed) for seed in seeds}
  longest = max(part.indices.shape[1] for part in divided.values())
  parts = {seed: _padded(part, longest) for seed, part in divided.items()}
  start = starts[seeds[0]]
  how, devices = choose_mapping(task, start, topology.num_workers, batch_size, 'auto', mesh)
  data = place(task, worker_examples, devices)
  rows = on_row or (lambda point, row: None)
  bytes_per_step = sims[0].bytes_per_step(start[0])

  def sampling(shards: Partition) -> Sampling:
    return Sampling(shards, batch_size, reshuffle, replacement)

  def steps_of(member: Members) -> Steps:
    sim = simulate(_traced(make_algorithm, member.numbers), topology, mesh)
    return Steps(task, sim, sampling(member.shards), member.seed, how, devices)

  def members(group: Sequence[int]) -> tuple[Members, PyTree]:
    chosen = [points[number] for number in group]
    seeds = [point['seed'] for point in chosen]
    # Weakly typed as Python's numbers are, so that parameters keep their dtype whatever they meet.
    numbers = {name: jnp.stack([jnp.asarray(p[name]) for p in chosen]) for name in grids}
    shards = _stack([parts[seed] for seed in seeds])
    return Members(np.array(seeds, np.int32), numbers, shards), _stack([starts[s] for s in seeds])

  def program_of(group: Sequence[int]) -> Program:
    return Program(steps_of, data, *members(group), devices, watch=mesh is None)

  def run(number: int) -> Run:
    own = sampling(parts[points[number]['seed']])
    on_own_row = functools.partial(rows, points[number])
    return Run(sims[number], own, bytes_per_step, on_own_row, patience=patience)

  def checkpoints(group: Sequence[int], own: Members) -> Checkpoints:
    facts = {
      **arguments.facts(
        task, topology, sampling(own.shards), rows_every, worker_examples, patience
      ),
      'algorithms': [sims[number].algorithm.name for number in group],
      'runs': [points[number] for number in group],
      **(config or {}),
    }
    folder = checkpoint_dir and str(Path(checkpoint_dir, f'runs-{group[0]}-to-{group[-1]}'))
    return Checkpoints(folder, checkpoint_seconds, resume, facts, ignore)

  rows_every, ignore = arguments.interval(eval_every, steps)
  histories: list[History] = []
  with (
    folders.locked(Path(checkpoint_dir)) if checkpoint_dir else contextlib.nullcontext(),
    Progress(progress, f'{len(points)} runs', steps * len(points)) as bar,
  ):
    known = members_at_once or _begun_with(checkpoint_dir, resume)
    groups = _groups(len(points), known or len(points))
    program = program_of(groups[0])
    if known is None:
      program.compile()
      most = _MEMORY * arguments.memory_of_a_device(devices.size if devices else 1)
      if (used := program.bytes()) > most:
        groups = _groups(len(points), max(1, int(len(points) * most / used)))
        program = program_of(groups[0])
    _note(checkpoint_dir, points, len(groups[0]))
    for group in groups:
      own, begin = members(group)
      runs, done = [run(number) for number in sorted(set(group))], len(histories) * steps
      loop = Loop(program, own, runs, checkpoints(group, own), bar, done)
      histories += loop.train(begin, steps, rows_every)
  return Sweep(points, histories)


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


def _padded(part: Partition, longest: int) -> Partition:
  missing = longest - part.indices.shape[1]
  return part._replace(indices=np.pad(part.indices, ((0, 0), (0, missing)), constant_values=-1))


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


def _begun_with(directory: str | None, resume: bool) -> int | None:
  """How many runs at once the sweep in this directory was begun with; None if there is none."""
  path, own = Path(directory or '', _SWEEP), 0
  if directory and path.exists():
    own = configuration.begun(path)[0]['members_at_once']
  at_once = int(first_says(str(own)))
  if at_once and not resume:
    raise ValueError(
      'checkpoint_dir holds a sweep already: pass resume=True to continue it, or choose another '
      'directory'
    )
  return at_once or None


def _note(directory: str | None, points: Sequence[Point], at_once: int) -> None:
  """Writes down which runs there are, or checks that they are those of the sweep to resume.

  Last bits depend on how many run at once, and so do the folders.
  """
  if directory:
    noted = {'members_at_once': at_once, 'runs': points}
    configuration.check(Path(directory, _SWEEP), noted)


def _statistics(values: np.ndarray) -> Row:
  finite = values[np.isfinite(values)]
  return {
    'mean': float(finite.mean()) if len(finite) else math.nan,
    'std': float(finite.std()) if len(finite) else math.nan,
    'seeds': len(values),
    'diverged': len(values) - len(finite),
  }
