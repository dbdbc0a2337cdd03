r"""Trains with every combination of seeds and numbers, many runs at a time in one program.

For example, nine settings with three seeds each:

  python -m experiments.sweep --task=digits --steps=500 --seeds=0,1,2 \
    --optimizer='sgd(learning_rate)' --grid='learning_rate=0.05,0.1,0.2' \
    --algorithm='choco_sgd(top_k(0.1), consensus_rate)' --grid='consensus_rate=0.1,0.2,0.4'

The name of a grid stands for its numbers wherever --optimizer or --algorithm say it; an algorithm
is run with the grids that it mentions. What decides on sizes (bits, fractions) can't be in a grid:
give an --algorithm for each. Results go to a folder: metrics.jsonl with the rows of every run,
results.json with mean and standard deviation over seeds, and plot.png with a heat map for each
algorithm. With --validation settings are compared on training examples that were held out for it,
else on the test's. A run that diverges is marked, and does not disturb the others. Ctrl-C is safe,
and --resume continues.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

import decomp
from decomp import algorithms, checks, plots
from experiments.common import output, report, settings

ALGORITHM = flags.DEFINE_multi_string(
  'algorithm',
  ['d_psgd', 'dcd_psgd'],
  f'One of {", ".join(algorithms.__all__)}, with the names of grids for numbers to vary.',
)
GRID = flags.DEFINE_multi_string(
  'grid',
  ['learning_rate=0.05,0.1,0.2,0.4'],
  'A name and its numbers, such as "consensus_rate=0.1,0.2".',
)
SEEDS = flags.DEFINE_list('seeds', ['0', '1', '2'], 'Each setting is run with all of them.')
MEMBERS_AT_ONCE = flags.DEFINE_integer(
  'members_at_once',
  None,
  'Runs in one program; by default as many as fit half of the memory, or as the resumed sweep has.',
  1,
)
flags.adopt_module_key_flags(settings)
flags.set_default(settings.OPTIMIZER, 'sgd(learning_rate)')

Grids = Mapping[str, Any]
"""Name -> numbers."""


def main(argv: Sequence[str]) -> None:
  """Runs the program."""
  settings.start(argv)
  with settings.mistakes_in_one_line():
    _refuse_other_flags()
    grids, seeds = read_grids(GRID.value), read_seeds(SEEDS.value)
    setup = settings.build_setup()
    chosen = {text: mentioned(text, setup.steps, grids) for text in ALGORITHM.value}
    unused = set(grids) - {name for names in chosen.values() for name in names}
    if unused:
      raise ValueError(
        f'--grid={min(unused)}=...: neither --optimizer={settings.OPTIMIZER.value} nor an '
        '--algorithm mentions it'
      )
    with output.own_folder(f'sweep-{setup.task.name}-{setup.topology.name}') as path:
      output.say(f'{setup.task.name} on {setup.topology} -> {path}')
      rows = sweep(setup, chosen, seeds, path)
      title = f'{setup.task.name} on {setup.topology.name}, {setup.steps} steps, {len(seeds)} seeds'
      save(rows, chosen, path, title)
      report.print_table([_shown(row, grids) for row in rows], title)
      for row in rows:
        if row['best']:
          setting = ', '.join(f'{name}={row[name]:g}' for name in chosen[row['algorithm']])
          print(f'best of {row["algorithm"]}: {setting}, by {row["metric"].replace("_", " ")}')
      print(f'plot: {path / "plot.png"}')


def sweep(
  setup: settings.Setup, chosen: Mapping[str, Grids], seeds: Sequence[int], path: Path
) -> list[dict[str, Any]]:
  """Runs one algorithm after another; gives the rows of all their tables, the best ones marked."""
  names = {name for grids in chosen.values() for name in grids}
  tables: list[dict[str, Any]] = []
  config = {'algorithm': ALGORITHM.value, 'grid': GRID.value, 'seeds': seeds}
  with output.Folder(path).writers(**config) as write:
    for number, (text, grids) in enumerate(chosen.items(), start=1):
      # Every row names every grid, so that all have the same columns.
      start = {'algorithm': text, **dict.fromkeys(sorted(names))}

      def on_row(point: Grids, row: Grids, start: Grids = start) -> None:
        write({**start, **point, **row})

      found = decomp.sweep(
        setup.task,
        functools.partial(_make, text, setup.steps),
        setup.topology,
        setup.steps,
        setup.batch_size,
        seeds,
        shards=functools.partial(settings.build_shards, setup.task, setup.topology),
        reshuffle=settings.RESHUFFLE.value,
        replacement=settings.REPLACEMENT.value,
        eval_every=setup.eval_every,
        patience=settings.PATIENCE.value,
        worker_examples=settings.WORKER_EXAMPLES.value,
        mesh=setup.mesh,
        members_at_once=MEMBERS_AT_ONCE.value,
        checkpoint_dir=str(path / 'checkpoints' / output.slug(text)),
        checkpoint_seconds=settings.CHECKPOINT_SECONDS.value,
        resume=settings.RESUME.value,
        config=settings.shared_by_resumed(setup),
        on_row=on_row,
        **grids,
      )
      best = found.best()
      tables += [{'algorithm': text, **row, 'best': row == best} for row in found.table()]
      lost = sum(history.diverged is not None for history in found.histories)
      ended = f'step {max(history[-1]["step"] for history in found.histories)}'
      count = f'{len(found.points)} runs, {lost} diverged'
      if early := sum(history.stopped is not None for history in found.histories):
        count += f', {early} stopped early'
      output.say(f'[{number}/{len(chosen)}] {text}: {count}, {ended} reached')
  return tables


def save(
  rows: Sequence[Mapping[str, Any]], chosen: Mapping[str, Grids], path: Path, title: str
) -> None:
  """Writes the table and a heat map for each algorithm."""
  import matplotlib.pyplot as plt

  output.write_json(path / 'results.json', output.for_json(rows))
  mapped = {text: list(grids) for text, grids in chosen.items() if grids}
  if mapped:
    size = (5 * len(mapped), 4.2)
    figure, axes = plt.subplots(1, len(mapped), figsize=size, layout='constrained', squeeze=False)
    for ax, (text, names) in zip(axes[0], mapped.items(), strict=True):
      own = [row for row in rows if row['algorithm'] == text]
      x, y = (*names, None)[:2]
      plots.heat_map(own, str(x), y, ax).set_title(text, fontsize=9)
    figure.suptitle(title)
    output.save_plot(figure, path / 'plot.png')


def read_grids(texts: Sequence[str]) -> Grids:
  """Grids from texts such as 'learning_rate=0.1,0.2'."""
  grids: dict[str, list[float]] = {}
  for text in texts:
    name, _, values = text.partition('=')
    name = name.strip()
    try:
      numbers = [float(value) for value in values.split(',')]
    except ValueError:
      numbers = []
    if not name.isidentifier() or not numbers or not np.isfinite(numbers).all():
      raise ValueError(f'--grid={text}: must be like learning_rate=0.05,0.1,0.2')
    if name in grids:
      raise ValueError(f'--grid={text}: {name} has a grid already')
    if len(set(numbers)) < len(numbers):
      raise ValueError(f'--grid={text}: must be numbers that differ')
    grids[name] = numbers
  return grids


def read_seeds(texts: Sequence[str]) -> list[int]:
  """Seeds from --seeds."""
  shown = f'--seeds={",".join(texts)}'
  try:
    seeds = [int(text) for text in texts]
  except ValueError:
    raise ValueError(f'{shown}: must be whole numbers, such as 0,1,2') from None
  if not seeds or len(set(seeds)) < len(seeds):
    raise ValueError(f'{shown}: must be some seeds that differ, such as 0,1,2')
  return [checks.seed(seed, f'{shown}: seed') for seed in seeds]


def mentioned(text: str, steps: int, grids: Grids) -> Grids:
  """The grids whose names occur in an algorithm or its optimizer."""
  used = set()

  def first(name: str) -> float:
    used.add(name)
    return grids[name][0]

  settings.build_algorithm(text, steps, {name: functools.partial(first, name) for name in grids})
  return {name: grids[name] for name in grids if name in used}


def _make(text: str, steps: int, **numbers: Any) -> decomp.Algorithm:
  values = {name: functools.partial(lambda value: value, value) for name, value in numbers.items()}
  return settings.build_algorithm(text, steps, values)


def _refuse_other_flags() -> None:
  for holder, instead in (
    (settings.SEED, 'give --seeds'),
    (settings.TENSORBOARD, 'its rows are in metrics.jsonl'),
    (settings.NETWORK, 'train the best setting with it'),
    (settings.MAPPING, 'it chooses by itself'),
  ):
    if holder.present:
      raise ValueError(f'--{holder.name} is not for a sweep: {instead}')


def _shown(row: Mapping[str, Any], grids: Grids) -> dict[str, str]:
  """A row of the table for people."""
  if row['metric'].endswith('accuracy'):
    value = f'{100 * row["mean"]:.2f} ± {100 * row["std"]:.2f} %'
  else:
    value = f'{row["mean"]:.4g} ± {row["std"]:.2g}'
  lost, seeds = row['diverged'], row['seeds']
  return {
    'algorithm': row['algorithm'],
    **{name: f'{row[name]:g}' if name in row else '' for name in grids},
    row['metric'].replace('_', ' '): 'diverged' if lost == seeds else value,
    'diverged': f'{lost} of {seeds}' if lost else '',
    'best': '*' if row['best'] else '',
  }


if __name__ == '__main__':
  app.run(main)
