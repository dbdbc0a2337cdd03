r"""DCD at one bit: what a random rotation before rounding changes, predicted and measured.

  python -m experiments.studies.one_bit --output=runs/one_bit
  python -m experiments.studies.one_bit --part=theory --part=gossip

DCD-PSGD converges while the noise-to-signal ratio α² of its compressor is below 1/K, a number of
the graph. Grids that are scaled by the largest element get there with 3 bits on a ring;
compressors.eden rotates first, and has α² = 0.571 with ONE bit, whatever the message. The parts:

  theory    which graphs bear 1, 2, 3 and 4 bits, and fractions of a bit: formulas only
  gossip    the rate at which workers agree, predicted and measured, on both sides of the limit
  floor     what few bits cost where the noise of gradients decides: quadratics
  digits    training: all codecs, with SGD, momentum and Adam, examples at random and by label
  cifar10   ResNet-8 on CIFAR-10 at 16 x 16 pixels (experiments.prepare_data gets it)
  text      a transformer that predicts characters
  messages  α² of what is sent: heavy tails, few elements, a transformer's real differences
  codec     seconds of encoding and decoding, and which network they pay on

Prints a line for each finished cell, and writes PART.json for each part; a cell that is in there is
not run again, so that the study can be stopped and continued. Figures are drawn, and tables.md is
written, of all parts that are there. experiments/studies/one_bit/README.md tells what was found.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import app, flags

from experiments.common import settings
from experiments.studies.one_bit import (
  codec,
  floor,
  gossip,
  messages,
  plot,
  tables,
  theory,
  training,
)
from experiments.studies.one_bit.kept import Kept

for flag in ('output', 'smoke'):
  flags.declare_key_flag(flag)

Part = Callable[[Kept, bool], None]
PARTS: dict[str, Part] = {
  'theory': theory.predict,
  'gossip': gossip.measure,
  'floor': floor.measure,
  **{task: functools.partial(training.train, task) for task in training.BENCHES},
  'messages': messages.measure,
  'codec': codec.measure,
}
CHOSEN = flags.DEFINE_multi_enum('part', list(PARTS), list(PARTS), 'What to run; all by default.')


def main(argv: Sequence[str]) -> None:
  """Runs the program."""
  settings.start(argv)
  path = Path(settings.OUTPUT.value or 'runs/one_bit')
  with settings.mistakes_in_one_line('stopped; the same command continues from here'):
    for part in CHOSEN.value:
      PARTS[part](Kept(path / f'{part}.json'), settings.SMOKE.value)
    for figure in plot.draw(path):
      print(f'plot: {figure}')
    print(f'tables: {tables.write(path)}')


if __name__ == '__main__':
  app.run(main)
