r"""Runs the table of Koloskova et al. (ICLR 2020): DCD, ECD and CHOCO, compressor by compressor.

  python -m experiments.studies.koloskova --flagfile=experiments/flags/koloskova_short.flags

Their setting is ResNet-20 on CIFAR-10 for 300 epochs (arXiv 1907.09356, table 1); the flags say
which task is used here, and --optimizer holds the name learning_rate. As theirs, learning rates are
tuned: the first of --learning_rates that works is taken, and if none does the best. A cell works if
the mean model's test accuracy is at most --tolerance below that of all-reduce, and diverges if its
loss explodes at every learning rate.

Results go to one folder: a folder for each run, as experiments.train makes it, and results.json and
results.md with every cell next to theirs. Ctrl-C is safe, and --resume continues.
"""

import functools
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import app, flags

import decomp
from experiments.common import output, report, settings

LEARNING_RATES = flags.DEFINE_list(
  'learning_rates', ['0.05', '0.01', '0.002'], 'What learning_rate in --optimizer stands for.'
)
TOLERANCE = flags.DEFINE_float(
  'tolerance', 0.03, 'How far below all-reduce an accuracy may be to count as converged.', 0.0
)
flags.adopt_module_key_flags(settings)

DIVERGES = math.nan
ALL_REDUCE = 92.64
# Their test accuracies in per cent, of dcd_psgd, ecd_psgd and choco_sgd; they count a compressor
# that failed in two of three runs with the accuracy of the third.
COLUMNS: dict[str, tuple[float, float, float]] = {
  'qsgd(16)': (92.51, 92.02, 92.34),
  'qsgd(8)': (92.36, 59.11, 92.30),
  'qsgd(4)': (23.56, DIVERGES, 91.92),
  'qsgd(2)': (DIVERGES, DIVERGES, 91.41),
  'random_k(0.5)': (92.05, DIVERGES, 92.54),
  'random_k(0.1)': (DIVERGES, DIVERGES, 91.87),
  'random_k(0.01)': (DIVERGES, DIVERGES, 91.32),
  'top_k(0.5)': (92.40, 17.03, 92.54),
  'top_k(0.1)': (91.97, 16.78, 92.29),
  'top_k(0.01)': (89.79, 18.03, 91.73),
  'sign_norm()': (92.40, DIVERGES, 92.46),
}
# CHOCO scales unbiased compressors down, and has a consensus rate for each: those of
# `decomp.theory.rules.choco_sgd.stable_rate`, for the largest leaf where it depends on the size;
# not so for qsgd(8), top_k(0.01) and sign_norm.
CHOCO = {
  'qsgd(16)': 'contractive(qsgd(16)), consensus_rate=1.0',
  'qsgd(8)': 'contractive(qsgd(8)), consensus_rate=0.5',
  'qsgd(4)': 'contractive(qsgd(4)), consensus_rate=0.05',
  'qsgd(2)': 'contractive(qsgd(2)), consensus_rate=0.01',
  'random_k(0.5)': 'contractive(random_k(0.5)), consensus_rate=0.3',
  'random_k(0.1)': 'contractive(random_k(0.1)), consensus_rate=0.04',
  'random_k(0.01)': 'contractive(random_k(0.01)), consensus_rate=0.004',
  'top_k(0.5)': 'top_k(0.5), consensus_rate=1.0',
  'top_k(0.1)': 'top_k(0.1), consensus_rate=0.25',
  'top_k(0.01)': 'top_k(0.01), consensus_rate=0.0375',
  'sign_norm()': 'sign_norm(), consensus_rate=0.45',
}
ALGORITHMS = ('dcd_psgd', 'ecd_psgd', 'choco_sgd')


class Cell(NamedTuple):
  """One cell: theirs and ours.

  Attributes:
    theirs: test accuracy, NaN where theirs diverges.
    ours: test accuracy of the mean model; NaN where it diverges at every learning rate.
    worst: that of the worst worker.
    alpha2: the noise-to-signal ratio of the messages since the row before the last.
  """

  algorithm: str
  compressor: str
  theirs: float
  ours: float
  worst: float
  alpha2: float
  learning_rate: str
  works: bool

  @property
  def agrees(self) -> bool:
    """Whether both work, or neither: theirs by the same tolerance."""
    return self.works == (self.theirs >= ALL_REDUCE - 100 * TOLERANCE.value)


def main(argv: Sequence[str]) -> None:
  """Runs the program."""
  settings.start(argv)
  with settings.mistakes_in_one_line():
    setup = settings.build_setup()
    with output.own_folder(f'koloskova-{setup.task.name}-{setup.topology.name}') as path:
      output.say(f'{setup.task.name} on {setup.topology}, {setup.steps} steps -> {path}')
      output.Folder(path).write_config(learning_rates=LEARNING_RATES.value)
      reference = tuned(setup, 'allreduce', math.inf, path)[1][-1]['test_accuracy']
      output.say(f'allreduce: {reference:.2%}')
      cells: list[Cell] = []
      for cell in run(setup, reference, path, read(path) if settings.RESUME.value else []):
        cells.append(cell)
        output.say(f'[{len(cells)}/{len(COLUMNS) * len(ALGORITHMS)}] {describe(cell)}')
        write(path, cells, reference)
  report.print_table(table(cells), f'{setup.task.name}: theirs -> here, in % of test accuracy')
  print(agreement(cells))


def run(
  setup: settings.Setup, reference: float, path: Path, known: Sequence[Cell]
) -> Iterator[Cell]:
  """Every cell, as it is found."""
  found = {(cell.algorithm, cell.compressor): cell for cell in known}
  for compressor, theirs in COLUMNS.items():
    for algorithm, published in zip(ALGORITHMS, theirs, strict=True):
      inside = CHOCO[compressor] if algorithm == 'choco_sgd' else compressor
      if (algorithm, inside) in found:
        yield found[algorithm, inside]
        continue
      goal = reference - TOLERANCE.value
      rate, history = tuned(setup, f'{algorithm}({inside})', goal, path)
      last = history[-1]
      accuracy = math.nan if history.diverged else last['test_accuracy']
      worst = math.nan if history.diverged else last['worst_accuracy']
      noise = last.get('compression_error', math.nan)
      works = accuracy >= goal
      yield Cell(algorithm, inside, published, accuracy, worst, noise, rate, works)


def tuned(setup: settings.Setup, text: str, goal: float, path: Path) -> tuple[str, decomp.History]:
  """The first learning rate whose accuracy reaches the goal, or the best one, and its run."""
  best: tuple[str, decomp.History] | None = None
  for rate in LEARNING_RATES.value:
    algorithm = build(text, setup.steps, rate)
    folder = output.Folder(path / output.slug(f'{algorithm.name}-{rate}'))
    found = rate, settings.run(setup, algorithm, folder)
    best = found if best is None else max(best, found, key=lambda pair: _rank(pair[1]))
    if _rank(best[1]) >= goal:
      break
  assert best is not None
  return best


def build(text: str, steps: int, rate: str) -> decomp.Algorithm:
  """An algorithm with this learning rate; that a compressor is biased is meant so here."""
  with warnings.catch_warnings():
    warnings.filterwarnings('ignore', '.* which is biased')
    values = {'learning_rate': functools.partial(float, rate)}
    return settings.build_algorithm(text, steps, values)


def _rank(history: decomp.History) -> float:
  return -1.0 if history.diverged else history[-1]['test_accuracy']


def describe(cell: Cell) -> str:
  """One line."""
  mark = 'agrees' if cell.agrees else 'DIFFERS'
  return (
    f'{cell.algorithm}({cell.compressor}): {_percent(100 * cell.ours)} at learning rate '
    f'{cell.learning_rate}; theirs {_percent(cell.theirs)}: {mark}'
  )


def table(cells: Sequence[Cell]) -> list[dict[str, Any]]:
  """A row for each compressor: 'theirs -> here' for each algorithm, marked where they differ."""
  rows = []
  for compressor in COLUMNS:
    row: dict[str, Any] = {'compressor': compressor}
    for cell in cells:
      if cell.compressor in (compressor, CHOCO[compressor]):
        mark = '' if cell.agrees else ' (differs)'
        row[cell.algorithm] = f'{_percent(cell.theirs)} -> {_percent(100 * cell.ours)}{mark}'
    if len(row) > 1:
      rows.append(row)
  return rows


def agreement(cells: Sequence[Cell]) -> str:
  """How many cells agree."""
  return f'{sum(cell.agrees for cell in cells)} of {len(cells)} cells agree'


def write(path: Path, cells: Sequence[Cell], reference: float) -> None:
  """Writes what has been found so far."""
  found = {
    'seed': settings.SEED.value,
    'allreduce': reference,
    'agreement': agreement(cells),
    'cells': output.for_json([cell._asdict() | {'agrees': cell.agrees} for cell in cells]),
  }
  output.write_json(path / 'results.json', found)
  (path / 'results.md').write_text(report.markdown(table(cells)))


def read(path: Path) -> list[Cell]:
  """What `write` has written, if anything."""
  if not (path / 'results.json').exists():
    return []
  cells: list[dict[str, Any]] = json.loads((path / 'results.json').read_text())['cells']
  return [Cell(*(_or_nan(cell[name]) for name in Cell._fields)) for cell in cells]


def _or_nan(value: Any) -> Any:
  return math.nan if value is None else value


def _percent(value: float) -> str:
  return 'diverges' if math.isnan(value) else f'{value:.2f}'


if __name__ == '__main__':
  app.run(main)
