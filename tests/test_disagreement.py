"""The study disagreement: its formulas against simulations, its quantizer, and what it writes."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_experiments import Program, interrupted

from decomp import compressors, topology, tree
from decomp.theory.rules.common import noise_gain
from experiments.studies.disagreement import bench, runs, theory

pytestmark = pytest.mark.usefixtures('as_users_have_it')

RING = topology.ring(8)


@pytest.fixture
def program(monkeypatch):
  return Program('studies.disagreement.__main__', monkeypatch)


# The quantizer


@pytest.mark.parametrize('bits', [8, 4, 2])
@pytest.mark.parametrize(
  ('kind', 'make'),
  [
    (runs.NORM, compressors.qsgd),
    (runs.MAXIMUM, compressors.stochastic_quantizer),
    (runs.BUCKETS, functools.partial(compressors.stochastic_quantizer, bucket=runs.BUCKET)),
    (runs.FIXED, functools.partial(compressors.fixed_grid, limit=1.5)),
  ],
  ids=['qsgd', 'max', 'bucket', 'fixed'],
)
def test_the_quantizer_is_that_of_the_library(kind, make, bits):
  """The same random numbers give the same points, but where a division rounds otherwise."""
  levels = 2**bits - 1 if kind == runs.NORM else 2 ** (bits - 1) - 1
  ours = runs.quantizer(runs.Grid(jnp.int32(kind), jnp.float32(levels), jnp.float32(1.5)))
  x, key = jax.random.normal(jax.random.key(0), (10, 100)), jax.random.key(1)
  theirs = make(bits, dither='hash')
  expected = theirs.decode(theirs.encode(key, x), x)
  different = np.abs(ours.encode(key, x) - expected) > 1e-5
  assert different.mean() <= 0.001
  assert np.asarray(expected).std() > 0
  assert not np.any(ours.encode(key, jnp.zeros(5)))


# Formulas


@pytest.mark.parametrize(
  ('compressor', 'in_rms'),
  [
    (compressors.qsgd(8), 64 / 255),
    (compressors.qsgd(4), 64 / 15),
    (compressors.stochastic_quantizer(3), theory.largest(4096) / 3),
    (compressors.stochastic_quantizer(2, bucket=64), theory.largest(64)),
    (compressors.fixed_grid(2, limit=8.0), 8.0),
    (compressors.fixed_grid(2, limit=30.0), 30.0),
  ],
  ids=str,
)
def test_alpha2_by_formula(compressor, in_rms):
  """On 4096 Gaussian elements, within 5 %.

  Bounds allow for scales that vary with the input, where α² is not quite that of the mean scale.
  """

  def draw(key):
    input_key, key = jax.random.split(key)
    x = jax.random.normal(input_key, (4096,))
    return tree.compress(compressor, key, x).info.compression_error

  measured = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(2), 128)).mean()
  assert measured == pytest.approx(theory.rounding_noise(in_rms), rel=0.05)


def test_coarsest_cell_inverts_the_noise():
  for alpha2 in (1e-3, 1 / noise_gain(RING), 20.0):
    assert theory.rounding_noise(theory.coarsest_cell(alpha2)) == pytest.approx(alpha2, rel=1e-6)


def at_the_optimum(dimension=1024):
  """Quadratics whose workers begin at the optimum of their mean: all that moves it is noise."""
  lab = runs.Quadratics(8, dimension, seed=0)
  lab.centers = lab.centers - lab.optimum
  lab.optimum = np.zeros_like(lab.optimum)
  return lab


STEPS, SEEDS = 80, 4
CASES = {
  'dcd max 3': ('dcd_psgd', runs.Grid(runs.MAXIMUM, 3)),
  'dcd coarse fixed grid': ('dcd_psgd', runs.Grid(runs.FIXED, 127, 15.0)),
  'ecd fixed grid': ('ecd_psgd', runs.Grid(runs.FIXED, 31, 12.0)),
  'ecd qsgd 7': ('ecd_psgd', runs.Grid(runs.NORM, 127)),
}


@pytest.mark.parametrize('case', CASES)
def test_moments_agree_with_runs(case):
  """The recursion's loss, noise and error of estimates, and how much loss that is.

  The loss is a sum of squares of Gaussians, whose deviation is known: |z| < 4. That resolves 20 %,
  and without compression the loss is less than two thirds. Noise and errors of estimates are means
  over 32,768 elements: 6 %, which allows for messages that are not quite Gaussian.
  """
  name, grid = CASES[case]
  lab = at_the_optimum()
  noise, _ = bench.noise_of(grid, 1024)
  rates = np.full(STEPS, lab.rate)
  said = theory.moments(lab, lab.graph, name, noise, rates, grid.limit)
  exact = theory.moments(lab, lab.graph, name, np.zeros_like, rates)
  keys = jax.random.split(jax.random.key(3), SEEDS)
  starts = jax.vmap(lab.start)(keys)
  track = runs.Runner(lab, name, optax.sgd(lab.rate), STEPS, STEPS, keys, starts).run(grid)

  expected = said.excess[-1]
  elements = SEEDS * 1024 / len(expected)
  deviation = math.sqrt(2 * (expected**2).sum() / elements)
  assert exact.excess[-1].sum() < 2 / 3 * expected.sum()
  assert 4 * deviation < 0.25 * expected.sum()
  assert abs(track.losses[:, 0].sum(-1).mean() - expected.sum()) < 4 * deviation
  measured = jax.tree.map(lambda values: values.mean(0)[-20:].mean(), track.steps)
  assert measured.message2 == pytest.approx(said.message2[-20:].mean(), rel=0.06)
  assert measured.noise2 == pytest.approx(said.noise2[-20:].mean(), rel=0.06)
  assert measured.error2 == pytest.approx(said.error2[-20:].mean(), rel=0.06)
  assert measured.clipped <= 1e-4


@pytest.mark.parametrize(('factor', 'grows'), [(0.9, False), (1.1, True)])
def test_moments_have_the_limit_of_dcd(factor, grows):
  """Without gradients, messages grow from α² = 1/K on."""
  lab = at_the_optimum(64)
  noise = theory.noise_of_scaled(factor / noise_gain(RING))
  rates = np.concatenate([np.full(20, 0.1), np.zeros(400)])
  found = theory.moments(lab, lab.graph, 'dcd_psgd', noise, rates)
  assert (found.message2[-1] > found.message2[100]) == grows


def test_closed_forms_are_ends_of_the_recursion():
  """DCD's ratio without curvature, and both laws of ECD's error, with 10 % for early steps."""
  lab = at_the_optimum(64)
  gain, alpha2, t = noise_gain(RING), 0.3, 2000
  lab.curvatures, lab.centers = np.array([0.02]), np.zeros((8, 1, 64))
  rates = np.full(t, 0.1)

  def loss(noise):
    return theory.moments(lab, lab.graph, 'dcd_psgd', noise, rates).excess[-1].sum()

  ratio = loss(theory.noise_of_scaled(alpha2)) / loss(np.zeros_like)
  assert ratio == pytest.approx(theory.dcd_ratio(np.array(alpha2), gain), rel=0.02)
  said = theory.moments(lab, lab.graph, 'ecd_psgd', lambda z2: np.full_like(z2, 0.5), rates)
  assert said.error2[-1] == pytest.approx(theory.ecd_error_bounded(0.5, np.array(t)), rel=1e-6)
  said = theory.moments(lab, lab.graph, 'ecd_psgd', theory.noise_of_scaled(1e-6), rates)
  change2 = (0.1 * lab.noise) ** 2 * (1 + gain)
  expected = theory.ecd_error_scaled(1e-6, 0.0, change2, np.array(t))
  assert said.error2[-1] == pytest.approx(expected, rel=0.1)


def test_the_reference_is_d_psgd():
  """With messages that are exact to 16 bits DCD takes the very steps of D-PSGD."""
  lab = runs.Quadratics(4, 64, seed=0)
  keys = jnp.stack([jax.random.key(0)])
  starts = jax.vmap(lab.start)(keys)
  ends = {}
  for name in ('d_psgd', 'dcd_psgd'):
    runner = runs.Runner(lab, name, optax.sgd(lab.rate), 6, 3, keys, starts)
    ends[name] = runner.run(runs.Grid(runs.MAXIMUM, 2.0**15)).losses.sum(-1)[0]
  np.testing.assert_allclose(ends['dcd_psgd'], ends['d_psgd'], rtol=1e-4)
  assert ends['d_psgd'][-1] < ends['d_psgd'][0]


# The program


def test_smoke(program, tmp_path, capsys):
  program('--smoke', '--seed=5', f'--output={tmp_path}')
  said = capsys.readouterr().out
  assert 'works down to so many bits' in said
  assert (tmp_path / 'plot.png').stat().st_size > 50_000
  found = json.loads((tmp_path / 'results.json').read_text(), parse_constant=pytest.fail)
  assert found['seeds'] == [5, 6]
  assert len(found['rows']) == said.count(' times d_psgd')
  cells = {(r['problem'], r['family'], r['algorithm']) for r in found['rows']}
  assert len(cells) == 2 * len(bench.FAMILIES) * 2
  for row in found['rows']:
    assert row['outcome'] in ('converged', 'stalled', 'diverged')
    assert ('predicted' in row) == (row['problem'] == 'quadratic')


def test_interrupted(program, tmp_path, monkeypatch):
  monkeypatch.setattr(program.module, 'runs', interrupted)
  with pytest.raises(SystemExit, match='stopped'):
    program('--smoke', f'--output={tmp_path}')


def test_least_bits(program):
  rows = [{'bits': b, 'outcome': o} for b, o in [(2, 'converged'), (3, 'stalled')]]
  rows += [{'bits': b, 'outcome': 'converged'} for b in (4, 8)]
  assert program.module.least_bits(rows) == '4'
  assert program.module.least_bits(rows[:2]) == 'none'
