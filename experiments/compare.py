r"""Compares algorithms on the same task, data, start and seed.

For example:

  python -m experiments.compare --task=digits --topology='ring(8)' --steps=500 \
    --algorithm=allreduce --algorithm=d_psgd \
    --algorithm='dcd_psgd(stochastic_quantizer(4))' \
    --algorithm='choco_sgd(top_k(0.1), consensus_rate=0.2)'

Results go to one folder: a folder for each algorithm as experiments.train makes it, plot.png with
all of them, and results.json. An algorithm that diverges is reported, and the others go on. Ctrl-C
is safe, and --resume continues. Presets: --flagfile=experiments/flags/NAME.flags; what follows on
the command line overrides them, and adds to their algorithms.
"""

from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

import decomp
from decomp import plots
from experiments.common import output, report, settings

ALGORITHM = flags.DEFINE_multi_string(
  'algorithm',
  ['allreduce', 'd_psgd', 'naive', 'dcd_psgd', 'ecd_psgd', 'choco_sgd'],
  settings.ALGORITHM_HELP,
)
flags.adopt_module_key_flags(settings)


def main(argv: Sequence[str]) -> None:
  """Runs the program."""
  settings.start(argv)
  with settings.mistakes_in_one_line():
    setup = settings.build_setup()
    chosen = [settings.build_algorithm(text, setup.steps) for text in ALGORITHM.value]
    name = f'compare-{setup.task.name}-{setup.topology.name}-seed{settings.SEED.value}'
    with output.own_folder(name) as path:
      output.say(f'{setup.task.name} on {setup.topology} -> {path}')
      histories = compare(setup, chosen, path)
      rows = [report.summary(histories[a.name], a.name) for a in chosen]
      title = f'{setup.task.name} on {setup.topology.name}, {setup.steps} steps'
      figure = plots.overview(histories, f'{title}, seed {settings.SEED.value}')
      output.save_plot(figure, path / 'plot.png')
      output.save_shards(setup, path)
      output.write_json(path / 'results.json', output.for_json(rows))
      report.print_table(rows, title)
      print(f'plot: {path / "plot.png"}')


def compare(
  setup: settings.Setup, chosen: Sequence[decomp.Algorithm], path: Path
) -> dict[str, decomp.History]:
  """Trains with each algorithm in turn."""
  repeated = [a.name for a in chosen if [b.name for b in chosen].count(a.name) > 1]
  if repeated:
    raise ValueError(f'--algorithm={repeated[0]} is given more than once')
  if not settings.RESUME.value:
    output.Folder(path).write_config(algorithm=ALGORITHM.value)
  histories = {}
  for number, algorithm in enumerate(chosen, start=1):
    output.say_verdict(setup, algorithm)
    folder = output.Folder(path / output.slug(algorithm.name))
    history = histories[algorithm.name] = settings.run(setup, algorithm, folder)
    shown = [m for m in ('train_loss', 'test_loss', 'test_accuracy') if m in history[-1]]
    metrics = ', '.join(f'{m.replace("_", " ")} {history[-1][m]:.4g}' for m in shown)
    ended = f', {history.stopped}' if history.stopped else ''
    said = history.diverged or f'{algorithm.name}: {metrics}{ended}'
    output.say(f'[{number}/{len(chosen)}] {said}')
  # Written again, because a resumed comparison may have more algorithms or steps.
  output.Folder(path).write_config(algorithm=ALGORITHM.value)
  return histories


if __name__ == '__main__':
  app.run(main)
