r"""DCD or ECD? Two papers disagree: shows by experiment that the quantizer decides, and where.

  python -m experiments.disagreement --output=runs/disagreement

Tang et al. (2018) find that ECD survives aggressive compression and DCD does not; Koloskova et al.
(2020) find ECD the weaker one. This runs dcd_psgd and ecd_psgd with five families of quantizers
from 8 bits down to 2 (the L2 norm from 16), on rings of 8 and 16, on

  quadratic  one for each worker, 4096 elements, noisy gradients, optimum known
  digits     a multi-layer perceptron on handwritten digits, as in flags/demo.flags

with four seeds each, and compares the loss at the end with that of d_psgd. What theory says is
computed beforehand, by the formulas of experiments.disagreement_theory. Two of the families are
the same fixed grid with different limits: the largest message that DCD would send in a run
without compression, and the largest that ECD would. Further runs look closer at where DCD ends,
at the limit of a fixed grid, and at step sizes that fall, momentum and weight decay.

Quantizers are those of decomp.compressors with dither='hash'.

Prints a line for each run, and writes results.json and plot.png; results.json grows while it runs.
experiments/disagreement.md tells what was found.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

from decomp.base import PyTree
from experiments import disagreement_theory as theory
from experiments import output, report, settings
from experiments.disagreement_runs import (
  BOTH,
  BUCKET,
  BUCKETS,
  FIXED,
  MAXIMUM,
  NORM,
  Digits,
  Grid,
  Lab,
  Quadratics,
  Runner,
  Track,
)

flags.declare_key_flag('output')
flags.declare_key_flag('seed')
flags.declare_key_flag('smoke')

ALGORITHMS = ('dcd_psgd', 'ecd_psgd')
CONVERGED = 2.0
"""At most so many times the loss of d_psgd."""
HOPELESS = 1e4
"""A run with so many times the loss at the start is not continued."""
TOO_MUCH_CLIPPED = 1e-3
"""ECD is expected to fail if more of its elements are beyond the limit at the end."""
WEIGHT_DECAY = 0.03
"""So that with digits' rate of 0.2 γht is 6 at the end, in every direction."""
TIMES = 12
"""Points in time for which a row tells how large messages and errors are."""

Row = dict[str, Any]


class Family(NamedTuple):
  """Quantizers that differ in bits only.

  Attributes:
    kind: what the grid is scaled by.
    limit_of: whose largest message is the limit, of a fixed grid.
  """

  kind: int
  limit_of: str = ''


FAMILIES = {
  'qsgd': Family(NORM),
  'max': Family(MAXIMUM),
  'bucket': Family(BUCKETS),
  'dcd_grid': Family(FIXED, 'dcd_psgd'),
  'ecd_grid': Family(FIXED, 'ecd_psgd'),
}


class Setting(NamedTuple):
  """Something else than a constant step size, and the family and bits that are run with it."""

  problem: str
  num_workers: int
  variant: str
  cells: Sequence[tuple[str, int]]


class Plan(NamedTuple):
  """How much to run.

  Attributes:
    steps: of every run.
    every: steps between two looks at the loss.
    dimension: of the quadratics.
    seeds: how many.
    bits: of each family, for each number of workers on the ring.
    levels: further levels of qsgd, around where DCD should end.
    limits: of fixed grids with 4 bits, over the largest message of ECD.
    settings: other ones than a constant step size.
  """

  steps: int
  every: int
  dimension: int
  seeds: int
  bits: Mapping[int, Mapping[str, Sequence[int]]]
  levels: Sequence[int]
  limits: Sequence[float]
  settings: Sequence[Setting]


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
    Setting('quadratic', 8, 'falling', SOME),
    Setting('digits', 8, 'falling', SOME),
    Setting('digits', 8, 'momentum', SOME),
    Setting('digits', 8, 'weight decay', SOME),
    Setting('digits', 8, BOTH, [*SOME[:2], ('max', 4), *[('ecd_grid', bits) for bits in ALL]]),
    Setting('digits', 16, BOTH, [('ecd_grid', bits) for bits in FEWER]),
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


def levels_of(kind: int, bits: float) -> int:
  """Levels a side; QSGD's authors don't count the sign's bit."""
  return round(2**bits) - 1 if kind == NORM else round(2 ** (bits - 1)) - 1


class Bench:
  """One problem in one setting: its reference, its limits, and rows for any quantizer."""

  def __init__(self, lab: Lab, variant: str, plan: Plan, seeds: Sequence[int]):
    self.lab, self.variant, self.plan = lab, variant, plan
    optimizer, self._rates = _optimizer(variant, lab.rate, plan.steps)
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    starts = jax.jit(jax.vmap(lab.start))(keys)
    self._runners = {
      name: Runner(lab, name, optimizer, plan.steps, plan.every, keys, starts)
      for name in ('d_psgd', *ALGORITHMS)
    }
    self._accuracy = jax.jit(jax.vmap(lab.accuracy))
    self._looks = plan.steps // plan.every
    self._some_looks = np.unique(np.geomspace(1, self._looks, TIMES).round().astype(int))
    self._at_start = np.asarray(jax.jit(jax.vmap(lab.losses))(starts)).sum(-1)
    track = self._runners['d_psgd'].run(Grid(NORM, 1.0))
    self._losses = _last(track.losses.sum(-1), self._looks)
    self._worker = _last(track.steps.worker, plan.steps)
    self.limits = dict(zip(ALGORITHMS, track.steps.largest.max((0, 1)).tolist(), strict=True))
    exact = self._moments('dcd_psgd', np.zeros_like)
    self._predicted = self._end(exact) if exact else math.nan
    self.reference: Row = {
      **self._where(),
      'loss': float(self._losses.mean()),
      'predicted': self._predicted,
      'start_ratio': float((self._at_start / self._losses).mean()),
      'accuracy': float(self._accuracy(track.average).mean()),
      'worker': float(self._worker.mean()),
      'limits': self.limits,
      **self._course(track, parts=True),
      **(self._predicted_parts(exact) if exact else {}),
    }

  def grids(self, family: str, bits: Iterable[float]) -> Iterator[Row]:
    """The quantizers of a family."""
    kind, limit_of = FAMILIES[family]
    limit = self.limits[limit_of] if limit_of else math.inf
    for number in bits:
      yield {'family': family, 'bits': number, 'levels': levels_of(kind, number), 'limit': limit}

  def rows(self, grids: Iterable[Row], chosen: Sequence[str] = ALGORITHMS) -> Iterator[Row]:
    """Predictions and results of each quantizer with each algorithm."""
    for row in grids:
      grid = Grid(FAMILIES[row['family']].kind, row['levels'], row['limit'])
      in_parts = row['family'] == 'ecd_grid' and 'swept' not in row
      for name in chosen:
        expected = self._expected(name, grid, in_parts)  # before looking
        track = self._runners[name].run(grid, HOPELESS * self._at_start.max())
        results = {**self._results(track), **self._course(track, in_parts)}
        yield {**self._where(), **row, 'algorithm': name, **results, **expected}

  def _where(self) -> Row:
    return {'problem': self.lab.name, 'topology': self.lab.graph.name, 'variant': self.variant}

  def _results(self, track: Track) -> Row:
    losses = _last(track.losses.sum(-1), self._looks)
    ratios, diverged = losses / self._losses, ~(losses <= self._at_start)
    workers = _last(track.steps.worker, self.plan.steps) / self._worker
    clipped = track.steps.clipped
    return {
      'outcome': _outcome(ratios, diverged),
      'ratio': float(ratios.mean()),
      'ratios': _rounded(ratios),
      'diverged': int(diverged.sum()),
      'worker_ratio': float(workers.mean()),
      'accuracy': float(self._accuracy(track.average).mean()),
      'model_rms': _rms(track.average),
      'alpha2': float(np.nanmedian(_alpha2(track))),
      'clipped': float(clipped[:, -max(1, clipped.shape[1] // 5) :].mean()),
    }

  def _course(self, track: Track, parts: bool) -> Row:
    """How messages, errors and the loss change, at some steps each."""
    steps, losses = track.steps, track.losses.mean(0)
    times = np.unique(np.geomspace(1, steps.noise2.shape[1], TIMES).round().astype(int))
    looks = self._some_looks[self._some_looks <= len(losses)]
    means = {name: getattr(steps, name).mean(0) for name in ('message2', 'noise2', 'error2')}
    return {
      'steps': times.tolist(),
      'alpha2_at': _rounded(_alpha2(track)[times - 1]),
      **{f'{name}_at': _rounded(values[times - 1]) for name, values in means.items()},
      'looks': (looks * self.plan.every).tolist(),
      'loss_at': _rounded(losses.sum(-1)[looks - 1]),
      **({'parts_at': [_rounded(losses[look - 1]) for look in looks]} if parts else {}),
    }

  def _expected(self, name: str, grid: Grid, parts: bool) -> Row:
    """By formula: the ratio, and at the end α² and what is clipped; nothing where there is none."""
    noise, alpha2 = noise_of(grid, self.plan.dimension)
    found = self._moments(name, noise, float(grid.limit))
    if found is None:
      return {}
    ratio = self._end(found) / self._predicted
    clipped = float(found.clipped[-1])
    if grid.kind == FIXED:
      alpha2 = float(found.noise2[-1] / found.message2[-1])
      if name == 'ecd_psgd' and clipped > TOO_MUCH_CLIPPED:
        ratio = math.nan  # it fails, and how far is not known
    return {
      'predicted': ratio,
      'predicted_alpha2': alpha2,
      'predicted_clipped': clipped,
      **(self._predicted_parts(found) if parts else {}),
    }

  def _end(self, found: theory.Moments) -> float:
    """The excess at the looks in the last fifth."""
    looks = found.excess[self.plan.every - 1 :: self.plan.every].sum(-1)
    return float(_last(looks[None], self._looks)[0])

  def _predicted_parts(self, found: theory.Moments) -> Row:
    excess = found.excess[self._some_looks * self.plan.every - 1]
    return {'predicted_parts_at': [_rounded(values) for values in excess]}

  def _moments(
    self, name: str, noise: theory.Noise, limit: float = math.inf
  ) -> theory.Moments | None:
    if not isinstance(self.lab, Quadratics) or self._rates is None:
      return None
    return theory.moments(self.lab, self.lab.graph, name, noise, self._rates, limit)


def noise_of(grid: Grid, size: int) -> tuple[theory.Noise, float]:
  """A quantizer's noise by formula, and its α² on Gaussian input (of a fixed grid: not known)."""
  if grid.kind == FIXED:
    return theory.noise_of_fixed(float(grid.limit / grid.levels)), math.nan
  in_rms = {
    NORM: math.sqrt(size),
    MAXIMUM: theory.largest(size),
    BUCKETS: theory.largest(min(BUCKET, size)),
  }[int(grid.kind)]
  alpha2 = float(theory.rounding_noise(in_rms / grid.levels))
  return theory.noise_of_scaled(alpha2), alpha2


def _optimizer(
  variant: str, rate: float, steps: int
) -> tuple[optax.GradientTransformation, np.ndarray | None]:
  """A setting's optimizer, and its step sizes if it is plain SGD."""
  if variant == 'falling':

    def schedule(count: Any) -> Any:
      return rate / (1 + count / (steps / 10))

    return optax.sgd(schedule), schedule(np.arange(steps))
  if variant == 'constant':
    return optax.sgd(rate), np.full(steps, rate)
  sgd = optax.sgd(rate / 10, momentum=0.9) if 'momentum' in variant else optax.sgd(rate)
  return optax.chain(optax.add_decayed_weights(WEIGHT_DECAY * ('decay' in variant)), sgd), None


def _last(values: np.ndarray, length: int) -> np.ndarray:
  """Means over the last fifth, [seeds, time, ...]; infinity if a run did not come to its end."""
  if values.shape[1] < length:
    return np.full((values.shape[0], *values.shape[2:]), np.inf)
  return np.asarray(values, np.float64)[:, -max(1, length // 5) :].mean(1)


def _alpha2(track: Track) -> np.ndarray:
  """The mean over seeds, [steps]."""
  with np.errstate(all='ignore'):
    return track.steps.noise2.mean(0) / track.steps.message2.mean(0)


def _rms(params: PyTree) -> float:
  return float(optax.tree.norm(params)) / math.sqrt(optax.tree.size(params))


def _outcome(ratios: np.ndarray, diverged: np.ndarray) -> str:
  if diverged.any():
    return 'diverged'
  return 'converged' if (ratios <= CONVERGED).all() else 'stalled'


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
  draw(path)
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
    (path / 'results.json').write_text(_as_text(found))
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


def draw(path: Path) -> None:
  """Writes plot.png, from results.json."""
  from experiments import disagreement_plot

  found = json.loads((path / 'results.json').read_text())
  output.save_plot(disagreement_plot.figure(found), path / 'plot.png')


def _line(row: Row) -> str:
  said = f' (expected {row["predicted"]:.3g})' if 'predicted' in row else ''
  limit = f' to ±{row["limit"]:.3g}' if math.isfinite(row['limit']) else ''
  what = f'{row["algorithm"]} {row["family"]} {row["bits"]:.3g} bits{limit}'
  return f'{what}: {row["outcome"]}, {row["ratio"]:.3g} times d_psgd{said}'


def _rounded(values: np.ndarray) -> list[float]:
  return [float(f'{value:.4g}') for value in np.asarray(values, float)]


def _as_text(found: Row) -> str:
  """JSON with a line for each row, and null for what is not finite."""

  def clean(value: Any) -> Any:
    if isinstance(value, dict):
      return {k: clean(v) for k, v in value.items()}
    if isinstance(value, list):
      return [clean(v) for v in value]
    if isinstance(value, float):
      return float(f'{value:.5g}') if math.isfinite(value) else None
    return value

  lines = {name: json.dumps(clean(value)) for name, value in found.items()}
  for name in ('references', 'rows'):
    lines[name] = '[\n    ' + ',\n    '.join(json.dumps(clean(r)) for r in found[name]) + '\n  ]'
  return '{\n  ' + ',\n  '.join(f'"{name}": {text}' for name, text in lines.items()) + '\n}\n'


if __name__ == '__main__':
  app.run(main)
