"""Algorithms over many steps, against what theory says about their errors.

Seeds are fixed, and every bound is either a z-score or comes from the theory in the docstring, so
that no test depends on the numbers of one generator.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import REPLICAS, make_algorithms

import decomp
from decomp import algorithms, compressors, topology

RING = topology.ring(8)
quantizer = compressors.stochastic_quantizer


def rollout(sim, start, steps, grads, observe=lambda state: None, stacked=False):
  """`steps` steps in one scan, of a key: the last state, and observe(state) after each step.

  grads(key, params) gives everyone's gradients, with keys that the compressors don't use.
  """

  @jax.jit
  def run(key):
    key, noise = jax.random.split(key)

    def body(state, t):
      state, _ = sim.step(key, grads(jax.random.fold_in(noise, t), state.params), state)
      return state, observe(state)

    return jax.lax.scan(body, sim.init(start, stacked=stacked), jnp.arange(steps))

  return run


def additive_noise(variance):
  """C(x) = x + noise, which does not depend on x: the assumption of ECD's theorem."""
  return decomp.Compressor(
    encode=lambda key, x: x + variance**0.5 * jax.random.normal(key, x.shape),
    decode=lambda payload, like: payload,
    unbiased=True,
  )


def variance_scores(measured, predicted, samples):
  """z-scores of mean squares of independent centred Gaussians: relative deviation sqrt(2/N)."""
  return (np.asarray(measured, np.float64) / predicted - 1) / np.sqrt(2 / samples)


def rms(x):
  return np.sqrt(np.mean(np.square(np.asarray(x, np.float64))))


# ECD: the error of the estimate


def ecd_variance(t):
  """Var(x̃ - x) / v after step t."""
  return 4.0 if t == 1 else 2 * (2 * t - 1) / (3 * t * (t - 1))


def test_ecd_error_variance():
  """e ← (1-2/t) e + (2/t) noise has variance 4v, v, 5v/9, ... whatever the gradients are.

  40000 elements are independent samples; |z| < 5
  in each of 50 steps allows 3.5 %, and a counter that starts at 0 or 2 is off by 44 % or more.
  """
  size, variance, times = 40_000, 0.25, np.arange(1, 51)
  algorithm = algorithms.ecd_psgd(optax.sgd(0.1), additive_noise(variance))
  sim = decomp.simulate(algorithm, topology.complete(1))

  def squared_error(state):
    error = state.workers.estimate.value - state.params
    return jnp.mean(error**2), jnp.mean(error)

  run = rollout(sim, jnp.full(size, 2.0), 50, lambda key, x: x, squared_error)
  _, (squares, means) = run(jax.random.key(0))
  predicted = variance * np.array([ecd_variance(t) for t in times])
  np.testing.assert_allclose(predicted[[0, 1, 2, 4]] / variance, [4, 1, 5 / 9, 3 / 10], rtol=1e-12)
  assert np.abs(variance_scores(squares, predicted, size)).max() < 5
  assert np.abs(np.asarray(means) / np.sqrt(predicted / size)).max() < 5


def test_ecd_forgets_the_error_of_the_estimate_by_the_right_factor():
  """A shift p of x̃ before step t leaves (1 - 2/t) p: -p at t = 1, nothing at t = 2.

  At t = 2 the estimate is C(x) of that step, whatever was believed before. The next x moves by W p
  too, so the error x̃ - x is what counts. Noise is the same with and without the shift; p = 64
  leaves rounding errors near 64 · 2**-23 = 8e-6.
  """
  sim = decomp.simulate(algorithms.ecd_psgd(optax.sgd(0.1), additive_noise(0.25)), RING)
  keys = jax.random.split(jax.random.key(1), 3)
  state = sim.init(jax.random.normal(keys[0], (8, 30)), stacked=True)
  shift = 64 * jax.random.normal(keys[1], (8, 30))
  estimate = decomp.Shared(state.workers.estimate.value + shift)
  shifted = state._replace(workers=state.workers._replace(estimate=estimate))

  def error(state, t):
    state, _ = sim.step(keys[2], jnp.ones((8, 30)), state._replace(round=jnp.int32(t - 1)))
    return state.workers.estimate.value - np.asarray(state.params, np.float64)

  for t in (1, 2, 3, 10):
    assert rms(error(state, t)) > 0.01
    left = error(shifted, t) - error(state, t)
    np.testing.assert_allclose(left, (1 - 2 / t) * shift, rtol=0, atol=5e-4, err_msg=f't = {t}')


# DCD: the stability limit


def dcd_recursion(matrix, alpha2):
  """M with E energies' = M energies, over the Fourier modes of a circulant W without gradients.

  E_k' = λ_k² E_k + (α²/n) sum_j (1-λ_j)² E_j if E|C(z)-z|² = α²|z|², independent over workers.
  """
  eigenvalues = np.fft.fft(matrix[0]).real
  return np.diag(eigenvalues**2) + alpha2 / len(matrix) * (1 - eigenvalues)[None] ** 2


def mode_energies(x):
  """|Fourier coefficient over workers|², from [..., n, d] to [..., n, d]."""
  x = np.asarray(x, np.float64)
  return np.abs(np.fft.fft(x, axis=-2)) ** 2 / x.shape[-2]


@pytest.mark.parametrize(('n', 'limit'), [(8, 1.36585), (16, 1.36603), (64, (1 + 3**0.5) / 2)])
def test_the_stability_limit_of_dcd_on_a_ring(n, limit):
  """Disagreement contracts iff α² < n / sum_{j>=2} (1-λ_j)/(1+λ_j): the recursion's radius is 1."""
  matrix = topology.ring(n).matrix
  eigenvalues = np.linalg.eigvalsh(matrix)[:-1]
  found = n / ((1 - eigenvalues) / (1 + eigenvalues)).sum()
  assert found == pytest.approx(limit, abs=1e-5)
  radius = [
    np.abs(np.linalg.eigvals(dcd_recursion(matrix, found * factor)[1:, 1:])).max()
    for factor in (0.99, 1.0, 1.01)
  ]
  assert radius[0] < 1 < radius[2]
  assert radius[1] == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize(('fraction', 'contracts'), [(0.5, True), (0.3, False)])
def test_dcd_follows_its_second_moment_recursion(fraction, contracts):
  """random_k has α² = d/k - 1 exactly: 50 % is below the ring's limit of 1.366, 30 % above.

  Given X_t, the recursion predicts the expected energy of X_{t+1} exactly, element by element. So
  ratios of measured to predicted energy in blocks of 500 elements average to 1 over blocks and
  steps, with uncorrelated deviations: |z| < 4, where z resolves 2 % or better. Over 40 steps the
  elements that happened to grow dominate the mean, which has heavy tails: there only the power of
  ten is checked, -4.1 for 50 % and +8.6 for 30 %. A sum of positive terms exceeds 100 times its
  expectation with a probability below 1 %; 40 runs gave 0.15 to 30 times.
  """
  n, blocks, block, steps = 8, 20, 500, 40
  algorithm = algorithms.dcd_psgd(optax.sgd(1.0), compressors.random_k(fraction))
  sim = decomp.simulate(algorithm, RING)
  start = jax.random.normal(jax.random.key(2), (n, blocks * block))

  no_grads = lambda key, x: jnp.zeros_like(x)  # noqa: E731
  run = rollout(sim, start, steps, no_grads, lambda s: s.params, stacked=True)
  path = np.concatenate([start[None], run(jax.random.key(3))[1]])
  energies = mode_energies(path).reshape(steps + 1, n, blocks, block).sum(-1)
  recursion = dcd_recursion(RING.matrix, 1 / fraction - 1)
  expected = np.einsum('kj,tjb->tkb', recursion, energies[:-1])
  for modes in (slice(0, 1), slice(1, n)):  # the mean, and disagreement
    ratios = energies[1:, modes].sum(1) / expected[:, modes].sum(1)
    deviation = ratios.std() / np.sqrt(ratios.size)
    assert deviation < 0.02
    assert abs(ratios.mean() - 1) < 4 * deviation

  growth = energies[-1, 1:].sum() / energies[0, 1:].sum()
  last = np.linalg.matrix_power(recursion, steps) @ energies[0].sum(-1)
  predicted = last[1:].sum() / energies[0, 1:].sum()
  assert predicted < 1e-3 if contracts else predicted > 1e6
  assert -1.5 < np.log10(growth / predicted) < 2


# Long runs without noise, where nothing dithers what rounding takes away


LONG = 100_000


@functools.cache
def distance_after_a_long_run(name, compressor, graph, carried=False):
  """RMS distance of the mean model from the optimum of sum_i |x - b_i|²/2, lr 0.01, |x| about 1.

  carried: on a mesh (of one device), where sums over neighbours are carried from step to step.
  """
  algorithm = make_algorithms(optax.sgd(0.01), compressor)[name]
  mesh = decomp.worker_mesh(graph.num_workers, jax.devices()[:1]) if carried else None
  sim = decomp.simulate(algorithm, graph, mesh)
  optima = 1 + jax.random.normal(jax.random.key(4), (graph.num_workers, 16))

  @jax.jit
  def run():
    step = lambda t, state: sim.step(jax.random.key(5), state.params - optima, state, False)[0]  # noqa: E731
    return jax.lax.fori_loop(0, LONG, step, sim.init(jnp.zeros(16))).params

  return rms(np.asarray(run(), np.float64).mean(0) - np.asarray(optima, np.float64).mean(0))


LONG_GRAPHS = [RING, topology.star(10), topology.torus(4, 4)]


@pytest.mark.parametrize('graph', LONG_GRAPHS, ids=lambda graph: graph.name)
@pytest.mark.parametrize('name', algorithms.__all__)
def test_long_runs_do_not_drift(name, graph):
  """Within ten times the error of d_psgd (7e-7 to 7e-6), or 1e-4."""
  found = distance_after_a_long_run(name, compressors.identity(), graph)
  allowed = distance_after_a_long_run('d_psgd', compressors.identity(), graph)
  assert found <= max(10 * allowed, 1e-4)


@pytest.mark.parametrize('graph', LONG_GRAPHS[:2], ids=lambda graph: graph.name)
@pytest.mark.parametrize('name', REPLICAS)
def test_carried_sums_do_not_drift(name, graph):
  assert distance_after_a_long_run(name, compressors.identity(), graph, carried=True) < 1e-4


# The noise of 8 bits on elements of up to 3.5: |x|, and the gradients at the optimum.
NOISE = (3.5 / 127) ** 2 / 4
KEEP_NOISE = {
  # Errors last for t steps: sqrt((4/3) v / (n t)) / γh, at most 1.8e-3. In float64 it is 4e-4 to
  # 9e-4, and 1.2e-3 to 2e-3 here, as 2/t of an error is by then what rounding takes from a model.
  'ecd_psgd': (1e-4, 1.5 * (4 / 3 * NOISE / (8 * LONG)) ** 0.5 / 0.01),
  # Noise of constant size: sqrt(v / (n (1 - (1-γh)²))) of the models, and γ of that of gradients.
  'naive': (1e-3, 2 * (NOISE / (8 * (1 - 0.99**2))) ** 0.5),
  'compressed_allreduce': (1e-5, 2 * 0.01 * (NOISE / (8 * (1 - 0.99**2))) ** 0.5),
}
"""Algorithms whose compression noise does not go to 0, with bounds of where it leaves the mean."""


@pytest.mark.parametrize('graph', LONG_GRAPHS[:2], ids=lambda graph: graph.name)
@pytest.mark.parametrize(
  ('name', 'carried'),
  [(name, False) for name in algorithms.__all__] + [(name, True) for name in REPLICAS],
)
def test_long_runs_with_8_bits_do_not_drift(name, carried, graph):
  """What is compressed goes to 0, and its noise with it; exceptions end where theory puts them."""
  found = distance_after_a_long_run(name, quantizer(8), graph, carried)
  least, most = KEEP_NOISE.get(name, (0, 1e-4))
  assert least <= found < most


# Exact gradients: where everyone ends


class Quadratic:
  """Worker i has the gradient A_i (x - b_i), with different curvatures and different optima."""

  def __init__(self, n=8, size=20, rate=0.1):
    rng = np.random.default_rng(6)
    factors = rng.normal(size=(n, size, size))
    self.curvature = factors @ factors.transpose(0, 2, 1) / size + 0.1 * np.eye(size)
    self.optima = rng.normal(size=(n, size))
    self.rate = rate

  def grads(self, key, x):
    curvature, optima = (jnp.array(a, jnp.float32) for a in (self.curvature, self.optima))
    return jnp.einsum('nij,nj->ni', curvature, x - optima)

  def _linear(self):
    """A and b as one system over everyone's elements, and W - I."""
    n, size = self.optima.shape
    blocks = np.zeros((n, size, n, size))
    blocks[np.arange(n), :, np.arange(n), :] = self.curvature
    laplacian = np.kron(RING.matrix - np.eye(n), np.eye(size))
    return blocks.reshape(n * size, -1), self.optima.reshape(-1), laplacian

  def d_psgd_limit(self):
    """The solution of x = W x - γ A (x - b)."""
    A, b, laplacian = self._linear()
    solution = np.linalg.solve(self.rate * A - laplacian, self.rate * A @ b)
    return solution.reshape(self.optima.shape)

  def choco_limit(self, consensus_rate):
    """The solution of x = h + η (W - I) h with h = x - γ A (x - b)."""
    A, b, laplacian = self._linear()
    spread = np.eye(len(b)) + consensus_rate * laplacian
    matrix = np.eye(len(b)) - spread @ (np.eye(len(b)) - self.rate * A)
    return np.linalg.solve(matrix, spread @ (self.rate * A @ b)).reshape(self.optima.shape)

  def distances(self, algorithm, limit, times, keys=1):
    """RMS distance to the limit, relative to the limit's RMS, after these numbers of steps."""
    sim = decomp.simulate(algorithm, RING)
    start = jnp.zeros(self.optima.shape[1])
    run = rollout(sim, start, max(times), self.grads, lambda state: state.params)
    paths = np.stack([run(key)[1] for key in jax.random.split(jax.random.key(7), keys)])
    return [rms(paths[:, t - 1] - limit) / rms(limit) for t in times]


QUADRATIC = Quadratic()


@pytest.mark.parametrize('bits', [None, 8, 4, 3])
def test_dcd_ends_where_d_psgd_does(bits):
  """At x = W x - γ g the difference to send is 0, and so is the noise of a scaled quantizer.

  The limit is solved for in float64; float32 reaches it to 3e-6 (measured, for any bits). With
  d = 20 and 3 bits α² is at most 20/36, well below the ring's limit.
  """
  sgd = optax.sgd(QUADRATIC.rate)
  algorithm = algorithms.dcd_psgd(sgd, quantizer(bits)) if bits else algorithms.d_psgd(sgd)
  (distance,) = QUADRATIC.distances(algorithm, QUADRATIC.d_psgd_limit(), [1000])
  assert distance < 2e-5


@pytest.mark.parametrize(
  ('compressor', 'consensus_rate'),
  [(compressors.identity(), 1.0), (quantizer(4), 0.4), (compressors.top_k(0.25), 0.2)],
  ids=lambda p: getattr(p, 'name', p),
)
def test_choco_ends_where_it_does_without_compression(compressor, consensus_rate):
  """At its fixed point h = x̂ and nothing is left to send, biased or not.

  Float32 reaches it to 1e-6 to 5e-6 (measured).
  """
  algorithm = algorithms.choco_sgd(optax.sgd(QUADRATIC.rate), compressor, consensus_rate)
  limit = QUADRATIC.choco_limit(consensus_rate)
  (distance,) = QUADRATIC.distances(algorithm, limit, [1000])
  assert distance < 2e-5


def test_naive_keeps_a_floor_and_ecd_falls_slowly():
  """With 4 bits of max|x| every naive message is off by up to 1/14 of it, for ever.

  ECD's error falls as 1/sqrt(t): by 4 from step 250 to 4000, of which at least 2 is asked.
  """
  sgd, limit = optax.sgd(QUADRATIC.rate), QUADRATIC.d_psgd_limit()
  naive = QUADRATIC.distances(algorithms.naive(sgd, quantizer(4)), limit, [250, 4000], keys=4)
  ecd = QUADRATIC.distances(algorithms.ecd_psgd(sgd, quantizer(4)), limit, [250, 4000], keys=4)
  assert min(naive) > 0.05
  assert naive[1] > naive[0] / 2
  assert 1e-3 < ecd[1] < ecd[0] / 2
  assert ecd[1] < naive[1] / 4


# Noise of constant variance: naive's floor, and how ECD leaves it


def mean_square_of_the_mean(name, variance, size, steps):
  """(key, γ) -> the mean square of the average model after each step, at the loss |x|²/2."""

  # Millions of random numbers: this one program is worth optimizing.
  @functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 3})
  def run(key, rate):
    algorithm = getattr(algorithms, name)(optax.sgd(rate), additive_noise(variance))
    sim = decomp.simulate(algorithm, RING)
    observe = lambda state: jnp.mean(state.params.mean(0) ** 2)  # noqa: E731
    return rollout(sim, jnp.zeros(size), steps, lambda key, x: x, observe)(key)[1]

  return run


def test_the_floor_of_naive_rises_as_the_step_size_falls():
  """x̄ ← (1-γ) x̄ + mean noise ends with the variance v / (n (1 - (1-γ)²)); 4000 samples each.

  After 400 steps a part (1-γ)^800 < 1e-7 is missing.
  """
  size, variance = 4000, 0.5
  run = mean_square_of_the_mean('naive', variance, size, 400)
  floors = []
  for seed, rate in enumerate([0.5, 0.1, 0.02]):
    floors.append(run(jax.random.key(seed), rate)[-1])
    predicted = variance / (8 * (1 - (1 - rate) ** 2))
    assert abs(variance_scores(floors[-1], predicted, size)) < 4
  assert floors[0] < floors[1] / 3 < floors[2] / 12


def test_ecd_falls_below_the_floor_of_naive():
  """The pair (x̄, ē) is a linear recursion with known noise, so its variance is known at every t:

    x̄ ← (1-γ) x̄ + ē,   ē ← (1-2/t) ē + (2/t) mean noise.

  It tends to (4/3) v / (n t γ²): worse than naive's floor at first, 100 times better at t = 3000.
  """
  size, variance, rate, steps = 2000, 0.5, 0.1, 3000
  run = mean_square_of_the_mean('ecd_psgd', variance, size, steps)
  measured = np.asarray(run(jax.random.key(8), rate))
  covariance, predicted = np.zeros((2, 2)), []
  for t in range(1, steps + 1):
    step = np.array([[1 - rate, 1], [0, 1 - 2 / t]])
    covariance = step @ covariance @ step.T + np.diag([0, (2 / t) ** 2 * variance / 8])
    predicted.append(covariance[0, 0])
  assert predicted[0] == measured[0] == 0
  assert np.abs(variance_scores(measured[1:], predicted[1:], size)).max() < 5
  assert predicted[-1] == pytest.approx(4 / 3 * variance / (8 * steps * rate**2), rel=0.1)
  assert measured[-1] < variance / (8 * (1 - (1 - rate) ** 2)) / 50


# Stochastic gradients


class LeastSquares:
  """Workers draw batches of 16 from 64 rows of their own; the optimum of them all is known."""

  def __init__(self, n, size=32, rows=64, batch=16):
    rng = np.random.default_rng(9)
    self.inputs = rng.normal(size=(n, rows, size))
    weights = np.linspace(-3, 3, size) + 0.1 * rng.normal(size=(n, 1, size))
    self.outputs = (self.inputs * weights).sum(-1) + rng.normal(size=(n, rows))
    self.batch = batch
    everything = self.inputs.reshape(-1, size), self.outputs.reshape(-1)
    self.optimum = np.linalg.lstsq(*everything)[0]

  def grads(self, key, x):
    inputs, outputs = (jnp.array(a, jnp.float32) for a in (self.inputs, self.outputs))
    n, rows = outputs.shape
    drawn = jax.random.randint(key, (n, self.batch), 0, rows)
    inputs = jnp.take_along_axis(inputs, drawn[:, :, None], 1)
    residuals = jnp.einsum('nbd,nd->nb', inputs, x) - jnp.take_along_axis(outputs, drawn, 1)
    return jnp.einsum('nbd,nb->nd', inputs, residuals) / self.batch


SGD = optax.sgd(0.15)
CONVERGING = {
  'd_psgd': algorithms.d_psgd(SGD),
  'allreduce': algorithms.allreduce(SGD),
  'compressed_allreduce': algorithms.compressed_allreduce(SGD, quantizer(8)),
  'dcd_psgd': algorithms.dcd_psgd(SGD, quantizer(8)),
  'ecd_psgd': algorithms.ecd_psgd(SGD, compressors.fixed_grid(8, limit=20.0)),
  'choco_sgd': algorithms.choco_sgd(SGD, compressors.top_k(0.25), consensus_rate=0.5),
  'naive': algorithms.naive(SGD, quantizer(4)),
}


@functools.cache
def errors(name, n=8, steps=160, keys=8):
  """E|x̄ - x*|² of the average model and E|x_i - x*|² of one worker's, in the run's second half."""
  problem = LeastSquares(n)
  sim = decomp.simulate(CONVERGING[name], topology.ring(n))
  start = jnp.zeros(problem.optimum.shape, jnp.float32)
  run = rollout(sim, start, steps, problem.grads, lambda state: state.params)
  drawn = [run(key)[1] for key in jax.random.split(jax.random.key(10), keys)]
  paths = np.stack([path[steps // 2 :] for path in drawn])
  average = np.square(paths.mean(2) - problem.optimum).sum(-1).mean()
  return average, np.square(paths - problem.optimum).sum(-1).mean()


CONVERGES = [name for name in CONVERGING if name not in ('d_psgd', 'naive')]


@pytest.mark.parametrize('name', CONVERGES)
def test_compression_hardly_costs_accuracy(name):
  """The error of a constant step size is gradient noise: at most twice that of full precision.

  ECD pays most: its grid must reach 20, because the extrapolation is up to t/2 steps long, and
  adds about (4/3) v d / (n t γ²) = 0.01 with v = (20/127)²/6 to the 0.026 of the gradients.
  """
  average, worker = errors(name)
  expected_average, expected_worker = errors('d_psgd')
  assert expected_average / 2 < average < 2 * expected_average
  assert worker < 2 * expected_worker


def test_naive_does_not_converge():
  """Its floor v d / (n (1 - (1-γ)²)) is 0.4 with v = Δ²/6, Δ = max|x|/7 and max|x| = 3.

  That is 16 times the error of full precision, of which at least 8 times is asked.
  """
  average, worker = errors('naive')
  expected_average, expected_worker = errors('d_psgd')
  assert average > 8 * expected_average
  assert worker > 4 * expected_worker


def test_more_workers_average_more_noise_away():
  """The error of the mean is proportional to 1/n: a quarter for 16 workers of what it is for 4."""
  few, _ = errors('dcd_psgd', n=4)
  many, _ = errors('dcd_psgd', n=16)
  assert few / 8 < many < few / 2
