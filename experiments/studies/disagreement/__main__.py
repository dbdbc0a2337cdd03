r"""DCD or ECD? Two papers disagree: shows by experiment that the quantizer decides, and where.

  python -m experiments.studies.disagreement --output=runs/disagreement

Tang et al. (2018) find that ECD survives aggressive compression and DCD does not; Koloskova et al.
(2020) find ECD the weaker one. This runs dcd_psgd and ecd_psgd with five families of quantizers
from 8 bits down to 2 (the L2 norm from 16), on rings of 8 and 16, on

  quadratic  one for each worker, 4096 elements, noisy gradients, optimum known
  digits     a multi-layer perceptron on handwritten digits, as in flags/demo.flags

with four seeds each, and compares the loss at the end with that of d_psgd. What theory says is
computed beforehand, by the formulas of theory.py beside this file. Two of the families are the
same fixed grid with different limits: the largest message that DCD would send in a run
without compression, and the largest that ECD would. Further runs look closer at where DCD ends,
at the limit of a fixed grid, and at step sizes that fall, momentum and weight decay.

Quantizers are those of decomp.compressors with dither='hash'.

Prints a line for each run, and writes results.json and plot.png; results.json grows while it runs.
experiments/studies/disagreement/README.md tells what was found.
"""

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from absl import app, flags

from experiments.common import output, report, settings
from experiments.studies.disagreement import plot
from experiments.studies.disagreement.bench import ALGORITHMS, FAMILIES, Bench, Plan, Row
from experiments.studies.disagreement.runs import BOTH, BUCKET, Digits, Lab, Quadratics

for flag in ('output', 'seed', 'smoke'):
  flags.declare_key_flag(flag)

ALL = (8, 7, 6, 5, 4, 3, 2)
FEWER = (8, 6, 4, 3, 2)
FEWEST = (8, 4, 2)
SOME = [('qsgd', 8), ('max', 6), *[('ecd_grid', bits) for bits in (8, 6, 4, 3)]]
FULL = Plan(
  steps=1000,
  every=20,
  dimension=4096,
  seeds=4,
  bits={
    8: {**dict.fromkeys(FAMILIES, ALL), 'qsgd': (16, 14, 12, 10, *ALL)},
    16: {
      'qsgd': (14, 12, 10, 8, 6, 4),
      'max': FEWER,
      'bucket': FEWEST,
      'dcd_grid': FEWEST,
      'ecd_grid': FEWER,
    },
  },
  levels=(18, 20, 22, 24),
  limits=tuple(2.0**k for k in (-10, -8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2)),
  settings=[
    ('quadratic', 8, 'falling', SOME),
    ('digits', 8, 'falling', SOME),
    ('digits', 8, 'momentum', SOME),
    ('digits', 8, 'weight decay', SOME),
    ('digits', 8, BOTH, [*SOME[:2], ('max', 4), *[('ecd_grid', bits) for bits in ALL]]),
    ('digits', 16, BOTH, [('ecd_grid', bits) for bits in FEWER]),
  ],
)
SMALL = Plan(
  steps=20,
  every=4,
  dimension=64,
  seeds=2,
  bits={4: dict.fromkeys(FAMILIES, (8, 4))},
  levels=(2,),
  limits=(0.1, 1.0),
  settings=[],
)


def runs(plan: Plan, seeds: Sequence[int]) -> Iterator[tuple[Bench, Iterator[Row]]]:
  """All problems and settings, and their rows."""

  def bench(problem: str, n: int, variant: str) -> Bench:
    lab: Lab = Digits(n, seeds[0])
    if problem == 'quadratic':
      lab = Quadratics(n, plan.dimension, seeds[0])
    return Bench(lab, variant, plan, seeds)

  for n in plan.bits:
    for problem in ('quadratic', 'digits'):
      yield (found := bench(problem, n, 'constant')), all_rows(found)
  for problem, n, variant, cells in plan.settings:
    found = bench(problem, n, variant)
    yield found, (row for family, bits in cells for row in found.rows(found.grids(family, [bits])))


def all_rows(bench: Bench) -> Iterator[Row]:
  """Every family with all bits; DCD around its limit; and fixed grids with all limits."""
  plan, n = bench.plan, bench.lab.graph.num_workers
  for family, bits in plan.bits[n].items():
    yield from bench.rows(bench.grids(family, bits))
  between = [math.log2(levels + 1) for levels in plan.levels]
  yield from bench.rows(bench.grids('qsgd', between), ['dcd_psgd'])
  if isinstance(bench.lab, Quadratics) and n == min(plan.bits):
    for factor in plan.limits:
      swept = {'limit': factor * bench.limits['ecd_psgd'], 'swept': True}
      yield from bench.rows({**grid, **swept} for grid in bench.grids('ecd_grid', [4]))


def main(argv: Sequence[str]) -> None:
  """Runs the program."""
  settings.start(argv)
  path = Path(settings.OUTPUT.value or 'runs/disagreement')
  plan = SMALL if settings.SMOKE.value else FULL
  try:
    found = measure(plan, settings.SEED.value, path)
  except KeyboardInterrupt:
    sys.exit(f'\nstopped; results.json in {path} has the problems that were finished')
  for problem in ('quadratic', 'digits'):
    report.print_table(regimes(found['rows'], problem), f'{problem}: works down to so many bits')
  # From what was written, where numbers that are not finite are null.
  output.save_plot(plot.figure(json.loads((path / 'results.json').read_text())), path / 'plot.png')
  print(f'plot: {path / "plot.png"}')


def measure(plan: Plan, seed: int, path: Path) -> Row:
  """Everything; results.json is written anew after each problem."""
  began, cpu = time.monotonic(), time.process_time()
  seeds = range(seed, seed + plan.seeds)
  path.mkdir(parents=True, exist_ok=True)
  found: Row = {
    'minutes': 0.0,
    'cpu_minutes': 0.0,
    'environment': settings.environment(),
    'seeds': list(seeds),
    'steps': plan.steps,
    'dimension': plan.dimension,
    'bucket': BUCKET,
    'rate': Quadratics.rate,
    'noise': Quadratics.noise,
    'references': [],
    'rows': [],
  }
  for bench, rows in runs(plan, seeds):
    found['references'].append(bench.reference)
    where = f'{bench.lab.name} on {bench.lab.graph.name}, {bench.variant}'
    print(f'{where}: d_psgd ends at {bench.reference["loss"]:.3g}', flush=True)
    for row in rows:
      found['rows'].append(row)
      print(f'{where}: {_line(row)}', flush=True)
    found['minutes'] = round((time.monotonic() - began) / 60, 1)
    found['cpu_minutes'] = round((time.process_time() - cpu) / 60, 1)
    output.write_rows(path / 'results.json', output.for_json(found, digits=5))
  return found


def regimes(rows: Sequence[Row], problem: str) -> list[Row]:
  """The least bits down to which each family works, for each algorithm and ring."""
  rows = [row for row in rows if row['problem'] == problem and row['variant'] == 'constant']
  rows = [row for row in rows if 'swept' not in row and row['bits'] == int(row['bits'])]
  table: dict[str, Row] = {family: {'quantizer': family} for family in FAMILIES}
  for family in FAMILIES:
    for graph in dict.fromkeys(row['topology'] for row in rows):
      for name in ALGORITHMS:
        cell = (family, graph, name)
        own = [r for r in rows if (r['family'], r['topology'], r['algorithm']) == cell]
        table[family][f'{name}, {graph}'] = least_bits(own)
  return list(table.values())


def least_bits(rows: Sequence[Row]) -> str:
  """The least bits with which a run converges, as do all with more; 'none' if not even the most."""
  least = 'none'
  for row in sorted(rows, key=lambda row: -row['bits']):
    if row['outcome'] != 'converged':
      break
    least = f'{row["bits"]:g}'
  return least


def _line(row: Row) -> str:
  said = f' (expected {row["predicted"]:.3g})' if 'predicted' in row else ''
  limit = f' to ±{row["limit"]:.3g}' if math.isfinite(row['limit']) else ''
  what = f'{row["algorithm"]} {row["family"]} {row["bits"]:.3g} bits{limit}'
  return f'{what}: {row["outcome"]}, {row["ratio"]:.3g} times d_psgd{said}'


if __name__ == '__main__':
  app.run(main)
