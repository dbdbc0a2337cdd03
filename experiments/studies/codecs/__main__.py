r"""Bytes against errors of every codec, on Gaussian numbers and on what real runs send.

  python -m experiments.studies.codecs

Measures α² = E|C(x) - x|² / |x|² and the bytes of the packed message for each codec of a list, on

  Gaussian     65,536 normal numbers
  gradients    of one worker where a run starts
  differences  of one worker's models in a later step of D-PSGD: what DCD and CHOCO compress

The last two are those of handwritten digits (a multi-layer perceptron, SGD) and of text (a
transformer of characters, Adam). Prints a table, and writes results.json, table.md and plot.png
beside this program; --output=FOLDER writes them elsewhere. It takes some minutes.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app, flags

from decomp import compressors, spec
from experiments.common import output, report, settings
from experiments.studies.codecs import inputs, plot

for flag in ('output', 'smoke'):
  flags.declare_key_flag(flag)

FAMILIES: Mapping[str, Sequence[str]] = {
  'stochastic_quantizer': [f'stochastic_quantizer({bits})' for bits in (1, 2, 3, 4, 6, 8)],
  'in buckets of 512': [f'stochastic_quantizer({b}, bucket=512)' for b in (2, 3, 4, 6, 8)],
  'affine': [f'affine({bits})' for bits in (2, 4, 8)],
  'qsgd': [f'qsgd({bits})' for bits in (2, 4, 8)],
  'natural': ['natural()'],
  'ternary': ['ternary()'],
  'eden': [f'eden({bits})' for bits in (1, 2, 3, 4)],
  'random_k, eden': [f'chain(random_k({part}), eden(1))' for part in (0.25, 0.5)],
  'random_k': [f'random_k({part})' for part in (0.01, 0.1, 0.5)],
  'block_float, at random': [
    f'block_float({name!r}, stochastic=True)' for name in ('mxfp4', 'nvfp4', 'mxfp6', 'mxfp8')
  ],
  'block_float': [
    f'block_float({name!r})' for name in ('mxfp4', 'nvfp4', 'e3m0', 'mxfp6', 'mxfp8', 'fp8')
  ],
  'statistical': [f'statistical({bits})' for bits in (2, 4, 8)],
  'dynamic_map': ['dynamic_map()'],
  'sign_norm': ['sign_norm()'],
  'top_k': [f'top_k({part})' for part in (0.01, 0.1)],
  'chunk_top_k, 2 bits': [f'chain(chunk_top_k({k}, 4096), statistical(2))' for k in (64, 512)],
  'low_rank': [f'low_rank({rank})' for rank in (1, 4)],
  'dct, top_k': ['dct(chunk_top_k(8, 64), chunk=64)'],
}
"""Texts of codecs, by what a picture shows as one line; the unbiased ones first."""


def main(argv: Sequence[str]) -> None:
  """Runs the program."""
  settings.start(argv)
  path = Path(settings.OUTPUT.value or Path(__file__).parent / 'results')
  path.mkdir(parents=True, exist_ok=True)
  with settings.mistakes_in_one_line('stopped'):
    messages = inputs.messages(settings.SMOKE.value)
    families = dict(list(FAMILIES.items())[:1]) if settings.SMOKE.value else FAMILIES
    rows = list(measure(families, messages, samples=1 if settings.SMOKE.value else 16))
  table = [_shown(row, messages) for row in rows]
  report.print_table(table, 'α² of every codec; bits are of Gaussian numbers')
  facts = {'environment': settings.environment(), 'rows': rows}
  output.write_json(path / 'results.json', output.for_json(facts, digits=4))
  (path / 'table.md').write_text(report.markdown(table))
  output.save_plot(plot.figure(rows), path / 'plot.png')
  print(f'results: {path}')


def measure(
  families: Mapping[str, Sequence[str]], messages: Mapping[str, Any], samples: int
) -> Iterator[dict[str, Any]]:
  """A row for each codec, as it is found."""
  for family, texts in families.items():
    for text in texts:
      codec = spec.build(text, [compressors], kind='compressor')
      row = {'family': family, 'codec': text, 'unbiased': codec.unbiased}
      for name, message in messages.items():
        found = compressors.measure(codec, message, jax.random.key(0), samples)
        row[name] = {'bits': 8 * found.bytes_per_element, 'alpha2': found.alpha2}
      print(f'{text}: {row["Gaussian"]["bits"]:.3g} bits', flush=True)
      yield row


def _shown(row: Mapping[str, Any], messages: Mapping[str, Any]) -> dict[str, Any]:
  errors = {f'α², {name}': row[name]['alpha2'] for name in messages}
  unbiased = 'yes' if row['unbiased'] else 'no'
  return {'codec': row['codec'], 'unbiased': unbiased, 'bits': row['Gaussian']['bits'], **errors}


if __name__ == '__main__':
  app.run(main)
