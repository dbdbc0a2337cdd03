r"""Trains with one algorithm.

For example, eight workers on a ring that exchange four-bit differences:

  python -m experiments.train --algorithm=dcd_psgd --compressor='stochastic_quantizer(bits=4)' \
    --topology='ring(8)' --task=digits --optimizer='sgd(0.2)' --steps=1000

Results go to a folder of their own: config.json (every setting), metrics.jsonl (a row for each
evaluation), plot.png and checkpoints/. Ctrl-C is safe, and --resume continues. Presets:
--flagfile=experiments/flags/NAME.flags; what follows on the command line overrides them.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from decomp import plots
from decomp.training import processes
from experiments.common import launch, output, report, settings

ALGORITHM = flags.DEFINE_string('algorithm', 'dcd_psgd', f'{settings.ALGORITHM_HELP}.')
flags.adopt_module_key_flags(settings)


def main(argv: Sequence[str]) -> None:
  """Runs the program."""
  settings.start(argv)
  run()


def run() -> None:
  """Trains as the flags say, in one process or as one of several."""
  with settings.mistakes_in_one_line():
    setup = settings.build_setup()
    algorithm = settings.build_algorithm(ALGORITHM.value, setup.steps)
    name = f'{setup.task.name}-{algorithm.name}-{setup.topology.name}-seed{settings.SEED.value}'
    with output.own_folder(name) as path:
      launch.check_shared(path)
      say_who_goes_on(path)
      output.say(f'{algorithm.name} on {setup.topology}\n{setup.task.name} -> {path}')
      output.say_verdict(setup, algorithm)
      history = settings.run(setup, algorithm, output.Folder(path))
      if processes.is_first():
        title = f'{setup.task.name}, {setup.topology.name}'
        output.save_plot(plots.overview({algorithm.name: history}, title), path / 'plot.png')
        output.save_shards(setup, path)
        report.print_table([report.summary(history, algorithm.name)], str(path))
        if history.stopped:
          output.say(history.stopped)
  if history.diverged:
    sys.exit(f'error: {history.diverged}')


def say_who_goes_on(folder: Path) -> None:
  """Says so where a run goes on in another number of processes, which add in another order."""
  file = folder / 'config.json'
  if settings.RESUME.value and file.exists():
    now = settings.environment()['processes']
    before = json.loads(file.read_text())['environment'].get('processes', now)
    if before != now:
      output.say(
        f'begun in {before} processes, goes on in {now}: last bits differ from those of a run that '
        'was not stopped'
      )


if __name__ == '__main__':
  app.run(main)
