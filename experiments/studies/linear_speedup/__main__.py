r"""Measures the linear speed-up: the error after T steps of n workers, which falls as 1/sqrt(nT).

  python -m experiments.studies.linear_speedup --output=runs/linear_speedup

The problem is robust regression, smooth and not convex, with its examples dealt out to the workers
of a ring, and one of them in each stochastic gradient. The error is that of the paper's theorems,
the mean over all steps of |∇f(x̄)|², and the step size that of their corollaries for large T:

  γ = sqrt(n/T) / σ

What to expect: to second order, f(x̄) changes in a step by -γ|∇f|² + γ² tr(HΣ)/(2n), where H is f's
Hessian and Σ the covariance of one worker's gradient, with trace σ². So for every smooth f, once it
has arrived at f* and the workers agree,

  error = (f(x₀) - f*) / (γT) + γ tr(HΣ)/(2n) = C/sqrt(nT),   C = σ (f(x₀) - f*) + tr(HΣ)/(2σ)

with no constant to fit. The program prints and draws, for each algorithm: the error for every n and
T; the slopes b and c of log error = a + b log n + c log T, both -1/2 if the theorem holds, and p of
error ~ (nT)^p, where T is large; the slope of the steps to a given error, T ~ 1/n. Errors of means
are over seeds, and those of slopes from leaving out one seed at a time. Writes results.json and
plot.png.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

import decomp
from decomp import compressors, metrics, spec, topology
from decomp.tasks.data import partition
from experiments.common import output, report, settings

for flag in ('output', 'seed', 'smoke'):
  flags.declare_key_flag(flag)

EXAMPLES = 1024
DIMENSION = 16
RIDGE = 0.02

ALGORITHMS = (
  'allreduce',
  'd_psgd',
  'dcd_psgd(stochastic_quantizer(8))',
  'dcd_psgd(stochastic_quantizer(4))',
  'ecd_psgd(qsgd(12))',
  'ecd_psgd(stochastic_quantizer(8))',
  'ecd_psgd(fixed_grid(8, limit=30.0))',
)


class Grid(NamedTuple):
  """What is run.

  Attributes:
    algorithms: as text.
    workers: the numbers n.
    steps: the numbers T, each with its own step size and so a run of its own.
    seeds: runs of each.
    settled: the T from which on a fit uses them.
    target: the error to reach.
  """

  algorithms: Sequence[str] = ALGORITHMS
  workers: Sequence[int] = (1, 2, 4, 8, 16, 32)
  steps: Sequence[int] = (128, 512, 2048, 8192, 32768)
  seeds: int = 16
  settled: int = 2048
  target: float = 0.0065


SMOKE = Grid(ALGORITHMS[::3], workers=(1, 2), steps=(4, 16), seeds=3, settled=4, target=0.1)


class Regression:
  """f(w) = mean over the examples of log(1 + r²)/2 + λ|w|²/2, r = xᵀw - y; it starts at w = 0.

  Attributes:
    sigma: σ at the optimum, where σ² is the variance of the gradient of one example.
    gap: f(x₀) - f*.
    constant: C, see the top.
  """

  def __init__(self, seed: int):
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((EXAMPLES, DIMENSION))
    truth = rng.standard_normal(DIMENSION)
    targets = inputs @ (2 * truth / np.linalg.norm(truth)) + 0.5 * rng.standard_normal(EXAMPLES)
    self.inputs, self.targets = jnp.float32(inputs), jnp.float32(targets)
    self.start = jnp.zeros(DIMENSION, jnp.float32)
    optimum = jax.lax.fori_loop(0, 1000, lambda _, w: w - 0.5 * self.gradient(w), self.start)
    every = jax.vmap(self.gradient, in_axes=(None, 0))(optimum, np.arange(EXAMPLES)[:, None])
    covariance = np.cov(np.asarray(every, np.float64).T)
    self.sigma = float(np.sqrt(np.trace(covariance)))
    self.gap = float(self.loss(self.start) - self.loss(optimum))
    curvature = float(np.trace(np.asarray(jax.hessian(self.loss)(optimum)) @ covariance))
    self.constant = self.sigma * self.gap + curvature / (2 * self.sigma)

  def loss(self, weights: jax.Array) -> jax.Array:
    """Returns f."""
    residuals = self.inputs @ weights - self.targets
    return jnp.log1p(residuals**2).mean() / 2 + RIDGE / 2 * weights @ weights

  def gradient(self, weights: jax.Array, examples: Any = slice(None)) -> jax.Array:
    """Returns the gradient of f, or that of the mean over some examples."""
    inputs = self.inputs[examples]
    residuals = inputs @ weights - self.targets[examples]
    return (residuals / (1 + residuals**2)) @ inputs / len(inputs) + RIDGE * weights


class Runs(NamedTuple):
  """One value for each seed.

  Attributes:
    error: the mean over the steps of |∇f(x̄)|².
    loss: f(x̄) at the end.
    clipped: the mean over steps and workers of the fraction of a message beyond a grid.
  """

  error: Any
  loss: Any
  clipped: Any


Make = Callable[[optax.GradientTransformation], decomp.Algorithm]


def runner(problem: Regression, make: Make, n: int) -> Callable[[jax.Array, int], Runs]:
  """A function of keys and T that runs an algorithm on a ring of n workers."""
  graph = topology.ring(n)
  shards = jnp.asarray(partition.iid(np.asarray(problem.targets), n).indices)

  def step(key: jax.Array, sim: decomp.Simulation, t: jax.Array, carry: Any) -> Any:
    state, total, clipped = carry
    batch_key, step_key = jax.random.split(key)
    places = jax.random.randint(jax.random.fold_in(batch_key, t), (n, 1), 0, shards.shape[1])
    total += jnp.sum(problem.gradient(metrics.mean_over_workers(state.params)) ** 2)
    grads = jax.vmap(problem.gradient)(state.params, jnp.take_along_axis(shards, places, 1))
    state, info = sim.step(step_key, grads, state)
    return state, total, clipped + info.clipped.mean()

  def run(key: jax.Array, steps: jax.Array) -> Runs:
    sim = decomp.simulate(make(optax.sgd(jnp.sqrt(n / steps) / problem.sigma)), graph)
    start = sim.init(problem.start), jnp.float32(0), jnp.float32(0)
    end = jax.lax.fori_loop(0, steps, functools.partial(step, key, sim), start)
    loss = problem.loss(metrics.mean_over_workers(end[0].params))
    return Runs(end[1] / steps, loss, end[2] / steps)

  return jax.jit(jax.vmap(run, in_axes=(0, None)))


def build(text: str, optimizer: optax.GradientTransformation) -> decomp.Algorithm:
  """An algorithm from its text."""
  return spec.build(text, [spec.algorithms(optimizer), compressors], kind='algorithm')


def measure(problem: Regression, text: str, grid: Grid, seed: int) -> Runs:
  """Every n and T: arrays [workers, steps, seeds]."""
  keys = jax.random.split(jax.random.key(seed), grid.seeds)
  found = []
  for n in grid.workers:
    run = runner(problem, functools.partial(build, text), n)
    found.append([jax.device_get(run(keys, steps)) for steps in grid.steps])
    shown = ', '.join(f'{runs.error.mean():.3g}' for runs in found[-1])
    print(f'  n = {n}: {shown}', flush=True)
  return Runs(*np.moveaxis(np.array(found, np.float64), 2, 0))


class Estimate(NamedTuple):
  """A value with its standard error."""

  value: float
  error: float

  def __str__(self) -> str:
    return f'{self.value:.3f} ± {self.error:.3f}' if np.isfinite(self.value) else '–'


def jackknife(statistic: Callable[[np.ndarray], np.ndarray], samples: np.ndarray) -> list[Estimate]:
  """A statistic of means over the last axis, with standard errors from leaving out one sample."""
  count = samples.shape[-1]
  without = (samples.sum(-1, keepdims=True) - samples) / (count - 1)
  others = np.array([statistic(without[..., k]) for k in range(count)])
  errors = np.sqrt((count - 1) * others.var(axis=0))
  pairs = zip(statistic(samples.mean(-1)), errors, strict=True)
  return [Estimate(float(value), float(error)) for value, error in pairs]


def slopes(errors: np.ndarray, *logs: np.ndarray) -> np.ndarray:
  """The slopes of log error in the given logarithms of each cell, by least squares."""
  columns = [np.ones(errors.size), *(np.broadcast_to(x, errors.shape).ravel() for x in logs)]
  return np.linalg.lstsq(np.stack(columns, 1), np.log(errors).ravel(), rcond=None)[0][1:]


def steps_to(target: float, steps: np.ndarray, errors: np.ndarray) -> float:
  """The T at which the error first falls below the target, interpolated; NaN if it does not."""
  x, y = np.log(steps), np.log(errors / target)
  for k in range(len(x) - 1):
    if y[k] >= 0 > y[k + 1]:
      return float(np.exp(x[k] + (x[k + 1] - x[k]) * y[k] / (y[k] - y[k + 1])))
  return np.nan


class Fit(NamedTuple):
  """The slopes of an algorithm.

  Attributes:
    n: b in log error = a + b log n + c log T, where T is large.
    steps: c of the same.
    both: p in error ~ (nT)^p, where T is large.
    misfit: the factor by which that fit is wrong, in the root of the mean square.
    at: for each T, the slope in n alone.
    to_target: for each n, the steps to the given error.
    to_target_slope: of their logarithm in log n.
  """

  n: Estimate
  steps: Estimate
  both: Estimate
  misfit: float
  at: list[Estimate]
  to_target: list[Estimate]
  to_target_slope: Estimate


def fit(errors: np.ndarray, grid: Grid) -> Fit:
  """All slopes of the errors [workers, steps, seeds]."""
  workers, steps = np.array(grid.workers, float)[:, None], np.array(grid.steps, float)[None]
  n, t = np.log(workers), np.log(steps)
  late = steps[0] >= grid.settled

  def to_target(means: np.ndarray) -> np.ndarray:
    needed = np.array([steps_to(grid.target, steps[0], row) for row in means])
    slope = slopes(needed, n[:, 0]) if np.isfinite(needed).all() else [np.nan]
    return np.concatenate([needed, slope])

  in_n, in_t = jackknife(lambda e: slopes(e[:, late], n, t[:, late]), errors)
  (both,) = jackknife(lambda e: slopes(e[:, late], n + t[:, late]), errors)
  rest = np.log(errors.mean(-1)[:, late]) - both.value * (n + t[:, late])
  at = jackknife(lambda e: np.concatenate([slopes(column, n[:, 0]) for column in e.T]), errors)
  *needed, slope = jackknife(to_target, errors)
  return Fit(in_n, in_t, both, float(np.exp(rest.std())), at, needed, slope)


def draw(
  found: Mapping[str, Runs], fits: Mapping[str, Fit], problem: Regression, grid: Grid
) -> Any:
  """A panel for each algorithm, and one for how far rings are behind all-reduce."""
  import matplotlib.pyplot as plt

  columns = (len(found) + 2) // 2
  size = (4 * columns, 7.6)
  figure, axes = plt.subplots(2, columns, figsize=size, layout='constrained', squeeze=False)
  means = {text: runs.error.mean(-1) for text, runs in found.items()}
  least, most = min(map(np.min, means.values())), max(map(np.max, means.values()))
  for ax, (text, errors) in zip(axes.flat, means.items(), strict=False):
    _draw_errors(ax, errors, fits[text], problem, grid)
    ax.set_title(text, fontsize=10)
    ax.set_ylim(least / 1.5, most * 1.3)
  for ax in axes.flat[len(found) + 1 :]:
    ax.set_axis_off()
  handles, labels = axes[0, 0].get_legend_handles_labels()
  figure.legend(handles, labels, loc='outside lower center', ncols=len(labels), fontsize=9)
  _draw_lag(axes.flat[len(found)], means, grid)
  title = 'Error, the mean over T steps of |∇f(x̄)|², of n workers on a ring; step size sqrt(n/T)/σ'
  figure.suptitle(title)
  return figure


def _colors(grid: Grid) -> Any:
  import matplotlib.pyplot as plt

  return plt.get_cmap('viridis')(np.linspace(0, 0.92, len(grid.workers)))


def _draw_errors(ax: Any, errors: np.ndarray, found: Fit, problem: Regression, grid: Grid) -> None:
  samples = np.outer(grid.workers, grid.steps).astype(float)
  for n, color, x, y in zip(grid.workers, _colors(grid), samples, errors, strict=True):
    ax.plot(x, y, 'o-', color=color, markersize=4, linewidth=1.2, label=f'n = {n}')
  ends = np.array([samples.min(), samples.max()])
  line = problem.constant / np.sqrt(ends)
  ax.plot(ends, line, color='black', linewidth=0.8, label='C/√(nT), not fitted')
  lawless = found.misfit > 1.1
  title = 'slopes (no power law)' if lawless else 'slopes'
  text = f'{title}\nin n: {found.n}\nin T: {found.steps}\nin nT: {found.both}'
  if not lawless:
    late = np.array(grid.steps) >= grid.settled
    x, y = np.log(samples[:, late]), np.log(errors[:, late])
    line = np.exp(y.mean() + found.both.value * (np.log(ends) - x.mean()))
    label = f'fitted to T ≥ {grid.settled}'
    ax.plot(ends, line, '--', color='crimson', linewidth=1.6, label=label, zorder=3)
  box = {'facecolor': 'white', 'alpha': 0.8, 'linewidth': 0}
  ax.annotate(text, (0.04, 0.04), xycoords='axes fraction', fontsize=9, bbox=box)
  ax.set(xscale='log', yscale='log', xlabel='n T', ylabel='error')
  ax.grid(alpha=0.3)


def _draw_lag(ax: Any, means: Mapping[str, np.ndarray], grid: Grid) -> None:
  for text, style in (('d_psgd', 'o-'), ('dcd_psgd(stochastic_quantizer(4))', 's:')):
    if text in means:
      for n, color, ratio in zip(
        grid.workers, _colors(grid), means[text] / means['allreduce'], strict=True
      ):
        if n > 2:
          ax.plot(grid.steps, ratio, style, color=color, markersize=4, linewidth=1.2)
      ax.plot([], [], style, color='gray', markersize=4, label=text)
  ax.set(xscale='log', xlabel='T', ylabel="error / all-reduce's")
  ax.set_title('the transient of the ring', fontsize=10)
  ax.legend(fontsize=8)
  ax.grid(alpha=0.3)


def cells(text: str, runs: Runs, problem: Regression, grid: Grid) -> list[dict[str, Any]]:
  """The results as rows."""
  spread = runs.error.std(-1, ddof=1) / grid.seeds**0.5
  start = float(problem.loss(problem.start))
  return [
    {
      'algorithm': text,
      'n': n,
      'T': steps,
      'error': runs.error[i, j].mean(),
      'stderr': spread[i, j],
      'clipped': runs.clipped[i, j].mean(),
      'worse than at the start': int((~(runs.loss[i, j] <= start)).sum()),
    }
    for i, n in enumerate(grid.workers)
    for j, steps in enumerate(grid.steps)
  ]


def print_errors(text: str, rows: Sequence[dict[str, Any]]) -> None:
  """The errors of one algorithm: a line for each n, a column for each T."""
  table: dict[int, dict[str, Any]] = {}
  for row in rows:
    lost = f' ({row["worse than at the start"]} lost)' if row['worse than at the start'] else ''
    value = f'{row["error"]:.3g} ± {row["stderr"]:.1g}{lost}'
    table.setdefault(row['n'], {'n': f'{row["n"]}'})[f'T = {row["T"]}'] = value
  report.print_table([*table.values()], f'{text}: error ± standard error')


def print_slopes(fits: Mapping[str, Fit], grid: Grid) -> None:
  """The slopes of all algorithms."""
  at = [
    {'algorithm': text, **{f'T = {t}': str(x) for t, x in zip(grid.steps, found.at, strict=True)}}
    for text, found in fits.items()
  ]
  report.print_table(at, 'slope of the error in n, at each T')
  late = [
    {
      'algorithm': text,
      'in n': str(found.n),
      'in T': str(found.steps),
      'in nT': str(found.both),
      'misfit': f'{found.misfit:.3f}',
      f'steps to {grid.target}, in n': str(found.to_target_slope),
    }
    for text, found in fits.items()
  ]
  report.print_table(late, f'slopes, all but the last from T = {grid.settled} on')


def main(argv: Sequence[str]) -> None:
  """Runs the program."""
  settings.start(argv)
  path = Path(settings.OUTPUT.value or 'runs/linear_speedup')
  grid = SMOKE if settings.SMOKE.value else Grid()
  began, seed = time.perf_counter(), settings.SEED.value
  problem = Regression(seed)
  numbers = {'sigma': problem.sigma, 'f(x0) - f*': problem.gap, 'C': problem.constant}
  print(', '.join(f'{name} = {value:.4g}' for name, value in numbers.items()), flush=True)
  found, rows = {}, []
  for number, text in enumerate(grid.algorithms, start=1):
    print(f'[{number}/{len(grid.algorithms)}] {text}, errors for T = {grid.steps}', flush=True)
    found[text] = measure(problem, text, grid, seed)
    rows += output.for_json(cells(text, found[text], problem, grid), digits=4)
    print_errors(text, rows[-len(grid.workers) * len(grid.steps) :])
  fits = {text: fit(runs.error, grid) for text, runs in found.items()}
  print_slopes(fits, grid)
  minutes = (time.perf_counter() - began) / 60
  path.mkdir(parents=True, exist_ok=True)
  results = {
    'seed': seed,
    'minutes': round(minutes, 1),
    'environment': settings.environment(),
    'grid': {k: v for k, v in grid._asdict().items() if k != 'algorithms'},
    'problem': output.for_json(numbers, digits=4),
    'slopes': [{'algorithm': k, **output.for_json(f._asdict(), digits=4)} for k, f in fits.items()],
    'cells': rows,
  }
  output.write_rows(path / 'results.json', results)
  output.save_plot(draw(found, fits, problem, grid), path / 'plot.png')
  print(f'{minutes:.1f} minutes; plot: {path / "plot.png"}')


if __name__ == '__main__':
  app.run(main)
