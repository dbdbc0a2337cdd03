"""The bench of the study: what is run with a quantizer, and what is expected."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.studies.disagreement import runs, theory
from experiments.studies.disagreement.runs import FIXED, NORM, Grid, Quadratics, Track

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


FAMILIES = {
  'qsgd': (NORM, ''),
  'max': (runs.MAXIMUM, ''),
  'bucket': (runs.BUCKETS, ''),
  'dcd_grid': (FIXED, 'dcd_psgd'),
  'ecd_grid': (FIXED, 'ecd_psgd'),
}
"""Quantizers that differ in bits: what scales the grid, and whose largest message limits it."""


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
    settings: other ones than a constant step size, each as problem, number of workers, variant,
      and the families and bits that are run with it.
  """

  steps: int
  every: int
  dimension: int
  seeds: int
  bits: Mapping[int, Mapping[str, Sequence[int]]]
  levels: Sequence[int]
  limits: Sequence[float]
  settings: Sequence[tuple[str, int, str, Sequence[tuple[str, int]]]]


class Bench:
  """One problem in one setting: its reference, its limits, and rows for any quantizer."""

  def __init__(self, lab: runs.Lab, variant: str, plan: Plan, seeds: Sequence[int]):
    self.lab, self.variant, self.plan = lab, variant, plan
    optimizer, self._rates = _optimizer(variant, lab.rate, plan.steps)
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    starts = jax.jit(jax.vmap(lab.start))(keys)
    self._runners = {
      name: runs.Runner(lab, name, optimizer, plan.steps, plan.every, keys, starts)
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
      # Levels a side; QSGD's authors don't count the sign's bit.
      levels = round(2 ** (number - (kind != NORM))) - 1
      yield {'family': family, 'bits': number, 'levels': levels, 'limit': limit}

  def rows(self, grids: Iterable[Row], chosen: Sequence[str] = ALGORITHMS) -> Iterator[Row]:
    """Predictions and results of each quantizer with each algorithm."""
    for row in grids:
      grid = Grid(FAMILIES[row['family']][0], row['levels'], row['limit'])
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
    clipped, average = track.steps.clipped, track.average
    converged = (ratios <= CONVERGED).all()
    return {
      'outcome': 'diverged' if diverged.any() else 'converged' if converged else 'stalled',
      'ratio': float(ratios.mean()),
      'ratios': _rounded(ratios),
      'diverged': int(diverged.sum()),
      'worker_ratio': float(workers.mean()),
      'accuracy': float(self._accuracy(average).mean()),
      'model_rms': float(optax.tree.norm(average)) / math.sqrt(optax.tree.size(average)),
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
    runs.MAXIMUM: theory.largest(size),
    runs.BUCKETS: theory.largest(min(runs.BUCKET, size)),
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


def _rounded(values: np.ndarray) -> list[float]:
  return [float(f'{value:.4g}') for value in np.asarray(values, float)]
