"""The linear speed-up: slopes on made-up errors, the program, and the rate itself."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_experiments import Program

from decomp import algorithms
from decomp.compressors.common import coder
from decomp.compressors.rounding import round_with
from experiments.studies.linear_speedup import __main__ as linear_speedup

pytestmark = pytest.mark.usefixtures('as_users_have_it')


@pytest.fixture(scope='module')
def problem():
  return linear_speedup.Regression(seed=0)


def made_up(grid, in_n, in_t, noise=0.05):
  """Errors that follow a power law, up to a factor for each seed and cell."""
  workers, steps = np.array(grid.workers, float), np.array(grid.steps, float)
  exact = np.outer(workers**in_n, steps**in_t)[..., None]
  rng = np.random.default_rng(0)
  return exact * (1 + noise * rng.standard_normal((*exact.shape[:2], grid.seeds)))


def assert_close(estimate, value):
  assert abs(estimate.value - value) < 4 * estimate.error


def test_fit_recovers_exponents():
  grid = linear_speedup.Grid(target=0.004)
  found = linear_speedup.fit(made_up(grid, -0.4, -0.7), grid)
  assert_close(found.n, -0.4)
  assert_close(found.steps, -0.7)
  for slope in found.at:
    assert_close(slope, -0.4)
  # n^-0.4 T^-0.7 = 0.004
  assert_close(found.to_target_slope, -0.4 / 0.7)
  for n, steps in zip(grid.workers, found.to_target, strict=True):
    assert_close(steps, (0.004 * n**0.4) ** (-1 / 0.7))
  assert 0.001 < found.n.error < 0.01
  assert found.misfit > 1.1  # two exponents are no power of nT


def test_fit_where_the_curves_collapse():
  grid = linear_speedup.Grid(target=1e-9)
  found = linear_speedup.fit(made_up(grid, -0.5, -0.5), grid)
  assert_close(found.both, -0.5)
  assert 1 < found.misfit < 1.03
  assert np.isnan([steps.value for steps in found.to_target]).all()
  assert str(found.to_target_slope) == '–'


def test_fit_leaves_out_short_runs():
  grid = linear_speedup.Grid()
  errors = made_up(grid, -0.5, -0.5, noise=1e-3)
  errors[:, :2] *= 7
  assert_close(linear_speedup.fit(errors, grid).both, -0.5)


def test_jackknife_of_a_mean_is_its_standard_error():
  samples = np.random.default_rng(0).standard_normal((3, 10))
  for row, found in zip(samples, linear_speedup.jackknife(lambda x: x, samples), strict=True):
    assert found.value == pytest.approx(row.mean())
    assert found.error == pytest.approx(row.std(ddof=1) / 10**0.5)


def test_program(monkeypatch, tmp_path, capsys):
  Program('studies.linear_speedup.__main__', monkeypatch)('--smoke', f'--output={tmp_path}')
  printed = capsys.readouterr().out
  assert '[3/3] ecd_psgd(fixed_grid(8, limit=30.0))' in printed
  assert 'slope of the error in n, at each T' in printed
  results = json.loads((tmp_path / 'results.json').read_text(), parse_constant=pytest.fail)
  assert [row['algorithm'] for row in results['slopes']] == [
    'allreduce',
    'dcd_psgd(stochastic_quantizer(4))',
    'ecd_psgd(fixed_grid(8, limit=30.0))',
  ]
  assert len(results['cells']) == 3 * 2 * 2
  assert all(0 < cell['error'] < 1 and cell['stderr'] > 0 for cell in results['cells'])
  assert (tmp_path / 'plot.png').read_bytes().startswith(b'\x89PNG')


def test_the_problem_is_not_convex(problem):
  assert np.linalg.eigvalsh(jax.hessian(problem.loss)(problem.start))[0] < -0.01


def errors_of(problem, make, n, steps, seeds=8):
  runs = linear_speedup.runner(problem, make, n)(
    jax.random.split(jax.random.key(0), seeds), jnp.int32(steps)
  )
  assert float(runs.clipped.max()) == 0
  return np.asarray(runs.error, np.float64)


def test_error_is_the_predicted_one(problem):
  """C/sqrt(nT) with no constant to fit: 8 workers reach sqrt(8) times less than one.

  Biases are 3 % at this T: the start counts for less than all of f(x₀) - f*.
  """
  make = functools.partial(linear_speedup.build, 'dcd_psgd(stochastic_quantizer(4))')
  for n in (1, 8):
    errors = errors_of(problem, make, n, 2048) * (n * 2048) ** 0.5 / problem.constant
    assert abs(errors.mean() - 1) < 0.04 + 3 * errors.std(ddof=1) / 8**0.5


def grid_of_16_bits(limit):
  """As `fixed_grid`, but fine enough to hold the extrapolations of a long run."""
  levels = 2**15 - 1
  step = limit / levels

  def quantize(x):
    return jnp.clip(x / step, -levels, levels), ()

  def code(grid, draws):
    return round_with(draws, grid) + levels

  def dequantize(codes, scale):
    return (codes.astype(jnp.float32) - levels) * step

  return coder(quantize, code, dequantize, 16, unbiased=True, limit=limit, name='grid')


def test_noise_of_constant_variance_leaves_ecd_an_error_that_does_not_fall_with_the_steps(problem):
  """The estimates' errors last for t steps, so that x̄ settles where γ∇f is their mean e.

  |e|² = (4/3) d v/(nt), and with γ² = n/(Tσ²) the mean of |e|²/γ² over t is that of 1/n², times
  log T. On one worker, so that there is no ring to blame.
  """

  def make(optimizer):
    return algorithms.ecd_psgd(optimizer, grid_of_16_bits(limit=1000.0))

  steps = np.array([1024, 16384])
  errors = np.array([errors_of(problem, make, 1, t).mean() for t in steps])
  added = errors - problem.constant / steps**0.5
  assert added[1] > added[0] > 0
  assert errors[1] > 2 * problem.constant / steps[1] ** 0.5
