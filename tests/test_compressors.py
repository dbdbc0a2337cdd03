import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import COMPRESSORS, params

from decomp import compressors, tree, wire

everyone = pytest.mark.parametrize('compressor', params(COMPRESSORS))


def apply(compressor, key, x):
  return compressor.decode(compressor.encode(key, x), x)


def draws(compressor, x, count, seed=0):
  keys = jax.random.split(jax.random.key(seed), count)
  return np.asarray(jax.jit(jax.vmap(lambda key: apply(compressor, key, x)))(keys), np.float64)


def compress(compressor, x):
  message = jax.jit(lambda key: tree.compress(compressor, key, x)._replace(decode=None))
  return message(jax.random.key(0))


def gaussian(size, seed=1):
  return jnp.array(np.random.default_rng(seed).normal(size=size), jnp.float32)


SHAPES = [((), 'float32'), ((7,), 'bfloat16'), ((13, 3), 'float32'), ((0,), 'float32')]


@everyone
def test_shapes_and_dtypes(compressor):
  key = jax.random.key(0)
  inputs = [jnp.array(np.random.default_rng(0).normal(size=s)).astype(d) for s, d in SHAPES]

  @jax.jit
  def run(key, inputs):
    payloads = [compressor.encode(key, x) for x in inputs]
    back = wire.unpack(wire.pack(payloads), payloads)
    return payloads, back, [compressor.decode(p, x) for p, x in zip(payloads, inputs, strict=True)]

  payloads, back, outputs = run(key, inputs)
  chex.assert_trees_all_equal(back, payloads)
  chex.assert_trees_all_equal_shapes_and_dtypes(outputs, inputs)
  assert all(np.isfinite(np.asarray(y, np.float32)).all() for y in outputs)


@pytest.mark.parametrize('compressor', params(c for c in COMPRESSORS if c.quick))
def test_the_quick_pair_gives_the_same_numbers(compressor):
  """Also where the input is not finite."""
  x = jnp.array(np.random.default_rng(0).normal(size=(13, 3)), jnp.float32)
  inputs = [x, x.astype(jnp.bfloat16), x.at[2, 1].set(jnp.nan), 0 * x, jnp.zeros(0)]
  encode, decode = compressor.quick
  quick = jax.jit(lambda key, x: decode(encode(key, x), x))
  usual = jax.jit(functools.partial(apply, compressor))
  for value in inputs:
    found, expected = (run(jax.random.key(1), value) for run in (quick, usual))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    assert found.dtype == value.dtype


@pytest.mark.parametrize(
  'make',
  [
    lambda dither: compressors.stochastic_quantizer(4, dither=dither),
    lambda dither: compressors.qsgd(4, dither=dither),
    lambda dither: compressors.fixed_grid(4, 3.0, dither=dither),
  ],
)
def test_dither(make):
  hashed, usual = make('hash'), make('threefry')
  assert hashed.name == f"{usual.name[:-1]}, dither='hash')"
  x = gaussian(2000)
  for compressor in (hashed, usual):
    mean = draws(compressor, x, 500).mean(0)
    inside = np.abs(x) < 3
    assert np.abs(mean - np.asarray(x))[inside].max() < 0.25
    assert abs((mean - np.asarray(x))[inside].mean()) < 3e-3
  with pytest.raises(ValueError, match="dither='none': must be one of threefry, hash"):
    make('none')


@everyone
def test_zeros_stay_zeros(compressor):
  zeros = [jnp.zeros(size) for size in (1, 5)]
  got = jax.jit(lambda key: [apply(compressor, key, x) for x in zeros])(jax.random.key(0))
  chex.assert_trees_all_equal(got, zeros)


@everyone
def test_what_is_not_finite_stays_visible(compressor):
  bad = jnp.array([np.nan, np.inf, -np.inf] * 5)
  keys = jax.random.split(jax.random.key(0), len(bad))
  x = gaussian(50)
  run = jax.jit(jax.vmap(lambda key, value: apply(compressor, key, x.at[17].set(value))))
  assert not np.isfinite(run(keys, bad)).all(1).any()


@everyone
def test_what_is_not_finite_stays_visible_in_large_leaves(compressor):
  """XLA's own maximum loses a NaN there."""
  size = 40_001
  run = jax.jit(jax.vmap(functools.partial(apply, compressor)))
  places = np.array([0, 17, size // 2, size - 1])
  x = jnp.tile(gaussian(size), (4, 1)).at[np.arange(4), places].set(jnp.nan)
  assert not np.isfinite(run(jax.random.split(jax.random.key(0), 4), x)).all(1).any()


@everyone
def test_tiny_and_huge_leaves(compressor):
  scales = np.array([1e-45, 1e-38, 1e-30, 1e30, 1e37], np.float32)
  x = jnp.array(np.linspace(-1, 1, 40, dtype=np.float32) * scales[:, None])
  y = np.asarray(jax.jit(jax.vmap(lambda row: apply(compressor, jax.random.key(0), row)))(x))
  assert np.isfinite(y).all()
  if not math.isfinite(compressor.limit):
    # No element may be larger than the whole leaf, rescaled sampling included.
    assert (np.abs(y).max(1) <= 40 * scales.astype(np.float64) + 1e-44).all()


@everyone
def test_other_keys_give_other_noise(compressor):
  x = gaussian(200)
  values = draws(compressor, x, 8)
  lossy = not np.array_equal(values, np.broadcast_to(x, values.shape))
  random = not np.array_equal(values, np.broadcast_to(values[0], values.shape))
  nearest = "block_float('nvfp4')", 'dynamic_map', 'statistical'
  deterministic = compressor.name.startswith(('top_k', 'chunk_top_k', 'sign_norm', *nearest))
  assert random == (lossy and not deterministic)


@everyone
def test_vmap_gives_each_worker_its_own_bits(compressor):
  x = gaussian(99).reshape(3, 33)
  keys = jax.random.split(jax.random.key(1), 3)
  run = jax.jit(functools.partial(apply, compressor))
  together = jax.jit(jax.vmap(run))(keys, x)
  for k in range(3):
    # Rounding errors of a rotation are relative to the whole leaf.
    most = float(jnp.abs(x[k]).max())
    np.testing.assert_allclose(together[k], run(keys[k], x[k]), rtol=1e-6, atol=1e-6 * most)


@pytest.mark.parametrize('compressor', params(c for c in COMPRESSORS if c.unbiased))
def test_unbiased_where_declared(compressor):
  """The mean of many draws is within 5 standard errors of x, for every element.

  None is so small that it is hardly ever rounded away from 0: a few events do not tell the spread.
  """
  x = gaussian(97)
  x = jnp.copysign(jnp.maximum(jnp.abs(x), 0.05), x)
  count = 20_000
  values = draws(compressor, x, count)
  error = values.mean(0) - np.asarray(x, np.float64)
  spread = values.std(0) / math.sqrt(count)
  # Half a quantum of the 16-bit dither is allowed by construction.
  quantum = 2.0**-17 * np.abs(values - np.asarray(x)).max()
  assert (np.abs(error) <= 5 * spread + quantum + 1e-6).all()


@everyone
def test_declared_constants_hold(compressor):
  """No input exceeds alpha2 or falls below delta, on average over draws."""
  inputs = [gaussian(96), jnp.zeros(96).at[5].set(2.0), jnp.ones(96), jnp.linspace(0, 1, 96) ** 6]
  by_key = jax.vmap(functools.partial(apply, compressor), in_axes=(0, None))
  by_input = jax.jit(jax.vmap(by_key, in_axes=(None, 0)))
  everything = by_input(jax.random.split(jax.random.key(0), 2000), jnp.stack(inputs))
  for x, values in zip(inputs, np.asarray(everything, np.float64), strict=True):
    squares = ((values - np.asarray(x, np.float64)) ** 2).sum(1) / float((x**2).sum())
    error, noise = squares.mean(), 4 * squares.std() / math.sqrt(2000) + 1e-6
    if compressor.alpha2:
      assert error <= compressor.alpha2(96) + noise
    if compressor.delta:
      assert error <= 1 - compressor.delta(96) + noise
    if compressor.limit < math.inf:
      bits = int(compressor.name.partition('bits=')[2][0])
      assert error * float((x**2).sum()) <= 96 * (4 / (2 ** (bits - 1) - 1)) ** 2 / 4 + 1e-3


def test_random_k_alpha2_is_exact():
  for size, fraction in ((96, 0.25), (97, 0.3), (10, 0.5)):
    compressor = compressors.random_k(fraction)
    x = gaussian(size)
    x64 = np.asarray(x, np.float64)
    squares = ((draws(compressor, x, 40_000) - x64) ** 2).sum(1) / (x64**2).sum()
    expected = compressor.alpha2(size)
    assert expected == size / max(1, round(fraction * size)) - 1
    # Keeping exactly half gives the same error in every draw; float32 is then all that is left.
    assert abs(squares.mean() - expected) < 4 * squares.std() / 200 + 1e-6


def test_random_k_keeps_each_place_equally_often_and_exactly_k():
  x = jnp.ones(10)
  values = draws(compressors.random_k(0.3, unbiased=False), x, 30_000)
  np.testing.assert_array_equal(values.sum(1), 3)
  share = values.mean(0)
  assert np.abs(share - 0.3).max() < 5 * math.sqrt(0.3 * 0.7 / 30_000)


def test_quantizer_error_is_exactly_what_theory_says():
  """E|C(x) - x|² = Δ² sum f (1 - f) with f the fractional parts of x/Δ."""
  x = gaussian(200)
  for bits in (2, 4):
    step = float(jnp.abs(x).max()) / (2 ** (bits - 1) - 1)
    f = np.mod(np.asarray(x, np.float64) / step, 1)
    expected = step**2 * (f * (1 - f)).sum()
    values = draws(compressors.stochastic_quantizer(bits), x, 20_000)
    squares = ((values - np.asarray(x)) ** 2).sum(1)
    assert abs(squares.mean() - expected) < 5 * squares.std() / math.sqrt(20_000)


@pytest.mark.parametrize(('bits', 'expected'), [(8, 1.5e-4), (4, 0.048), (3, 0.27), (2, 2.0)])
def test_measured_alpha2_of_the_quantizer_on_gaussian_input(bits, expected):
  x = gaussian(4608)
  got = compressors.measure(compressors.stochastic_quantizer(bits), x, jax.random.key(0))
  assert got.alpha2 == pytest.approx(expected, rel=0.3)
  assert got.bias < 3 * math.sqrt(got.alpha2 / 64)
  assert got.bytes_per_element == pytest.approx(bits / 8, abs=5 / 4608)


@pytest.mark.parametrize(('bits', 'expected'), [(8, 0.012), (4, 2.6), (2, 17)])
def test_measured_alpha2_of_qsgd_on_gaussian_input(bits, expected):
  x = gaussian(4608)
  got = compressors.measure(compressors.qsgd(bits), x, jax.random.key(0))
  assert got.alpha2 == pytest.approx(expected, rel=0.15)


def test_contraction_on_gaussian_input():
  x = gaussian(100_000)
  sign = compressors.measure(compressors.sign_norm(), x, jax.random.key(0), samples=1)
  assert 1 - sign.alpha2 == pytest.approx(2 / math.pi, abs=0.01)
  top = compressors.measure(compressors.top_k(0.01), x, jax.random.key(0), samples=1)
  assert 1 - top.alpha2 == pytest.approx(0.082, abs=0.005)
  natural = compressors.measure(compressors.natural(), x, jax.random.key(0), samples=4)
  assert natural.alpha2 == pytest.approx(0.081, abs=0.003)


@pytest.mark.parametrize('power', [-100, 70, 120])
def test_measured_statistics_do_not_depend_on_the_size_of_the_input(power):
  x = gaussian(4608)
  key, compressor = jax.random.key(0), compressors.stochastic_quantizer(3)
  expected = compressors.measure(compressor, x, key)
  assert compressors.measure(compressor, 2.0**power * x, key) == expected
  assert compressors.measure(compressor, 0 * x, key).alpha2 == 0


BYTES = [
  (compressors.identity(), 4 * 1000),
  (compressors.stochastic_quantizer(8), 1000 + 4),
  (compressors.stochastic_quantizer(4), 500 + 4),
  (compressors.stochastic_quantizer(3), 375 + 4),
  (compressors.stochastic_quantizer(2), 250 + 4),
  (compressors.stochastic_quantizer(1), 125 + 4),
  (compressors.stochastic_quantizer(4, bucket=64), 500 + 4 * 16),
  (compressors.fixed_grid(4, 1.0), 500),
  (compressors.qsgd(4), 625 + 4),
  (compressors.qsgd(16), 2125 + 4),
  (compressors.eden(1), 128 + 4 + 4),
  (compressors.eden(4), 512 + 4 + 4),
  (compressors.sign_norm(), 125 + 4),
  (compressors.top_k(0.01), 10 * 4 + 8 + 4),  # 10 indices of 6 bits, and 10 + 16 bits
  (compressors.chunk_top_k(2, 250), 8 * 4 + 6 + 3),  # 8 indices of 6 bits, and 8 + 16 bits
  (compressors.random_k(0.01), 10 * 4 + 4),
  (compressors.natural(), 1125),
]


@pytest.mark.parametrize(('compressor', 'expected'), BYTES, ids=lambda p: str(p))
def test_bytes_of_a_leaf_of_1000(compressor, expected):
  buffer = jax.jit(lambda key, x: wire.pack(compressor.encode(key, x)))
  assert buffer(jax.random.key(0), gaussian(1000)).nbytes == expected


def test_one_bit_means_the_two_extremes():
  x = jnp.array([-3.0, 1.0, 2.0])
  assert set(np.unique(draws(compressors.stochastic_quantizer(1), x, 50))) == {-3.0, 3.0}


def test_bucket_scales_are_independent():
  x = jnp.concatenate([jnp.full(16, 1e-3), jnp.full(16, 1e3)])
  y = apply(compressors.stochastic_quantizer(2, bucket=16), jax.random.key(0), x)
  np.testing.assert_allclose(y, x, rtol=1e-6)


def test_fixed_grid_clips_and_the_diagnostics_count_it():
  message = compress(compressors.fixed_grid(8, limit=1.0), {'a': jnp.array([0.5, 3.0, -7.0, 0.0])})
  np.testing.assert_allclose(message.value['a'][1:3], [1, -1], rtol=1e-6)
  assert message.info.clipped == 0.5


def test_info_is_the_alpha2_of_this_message():
  x = {'a': gaussian(50), 'b': gaussian(20, seed=5)}
  message = compress(compressors.stochastic_quantizer(3), x)
  error = sum(float(((message.value[k] - x[k]) ** 2).sum()) for k in x)
  norm = sum(float((x[k] ** 2).sum()) for k in x)
  assert message.info.compression_error == pytest.approx(error / norm, rel=1e-5)
  assert message.info.message_norm == pytest.approx(math.sqrt(norm), rel=1e-5)
  nothing = compress(compressors.natural(), jnp.zeros(3))
  assert nothing.info.compression_error == 0


def test_leaves_get_different_keys():
  x = {'a': jnp.full(64, 0.3).at[0].set(1.0), 'b': jnp.full(64, 0.3).at[0].set(1.0)}
  value = compress(compressors.stochastic_quantizer(2), x).value
  assert not np.array_equal(value['a'], value['b'])


@pytest.mark.parametrize(
  ('make', 'words'),
  [
    (
      lambda: compressors.stochastic_quantizer(bits=9),
      'bits=9: must be a whole number from 1 to 8',
    ),
    (lambda: compressors.stochastic_quantizer(bits=0), 'bits=0'),
    (lambda: compressors.stochastic_quantizer(bits=4.0), 'bits=4.0'),
    (lambda: compressors.stochastic_quantizer(4, bucket=0), 'bucket=0'),
    (lambda: compressors.fixed_grid(bits=1, limit=1.0), 'bits=1: must be a whole number from 2'),
    (lambda: compressors.fixed_grid(bits=4, limit=0), 'limit=0'),
    (lambda: compressors.qsgd(bits=17), 'bits=17'),
    (lambda: compressors.top_k(0), 'fraction=0'),
    (lambda: compressors.top_k(1.5), 'fraction=1.5'),
    (lambda: compressors.random_k('half'), "fraction='half'"),
    (lambda: compressors.chunk_top_k(65, 64), 'k=65: must be a whole number from 1 to 64'),
    (lambda: compressors.chunk_top_k(1, 0), 'chunk=0: must be a whole number of at least 1'),
    (lambda: compressors.low_rank(1.5), 'rank=1.5'),
    (lambda: compressors.dct(compressors.fixed_grid(4, 1.0), 8), 'must scale with its input'),
  ],
)
def test_bad_arguments_are_named(make, words):
  with pytest.raises(ValueError, match=words):
    make()


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 8), st.integers(0, 50), st.integers(1, 20), st.integers(0, 2**31))
def test_any_size_and_bucket(bits, size, bucket, seed):
  compressor = compressors.stochastic_quantizer(bits, bucket=bucket)
  x = gaussian(size, seed)

  @jax.jit
  def run(key, x):
    payload = compressor.encode(key, x)
    return payload, compressor.decode(payload, x)

  payload, y = run(jax.random.key(seed + 1), x)
  buckets = max(1, math.ceil(size / bucket))
  assert wire.size(payload) == wire.packed_size(size, bits) + 4 * buckets
  if size:
    largest = float(jnp.abs(x).max())
    quantum = largest * (2 if bits == 1 else 1 / (2 ** (bits - 1) - 1))
    assert float(jnp.abs(y - x).max()) <= quantum * 1.001


def test_random_k_draws_alike_under_every_generator_and_vmap():
  """Receivers draw the places again, under another vmap than the sender's."""
  with jax.default_prng_impl('rbg'):
    compressor = compressors.random_k(0.25)
    x = gaussian(120).reshape(3, 40)
    keys = jax.random.split(jax.random.key(0), 3)
    payloads = jax.vmap(compressor.encode)(keys, x)
    together = jax.vmap(compressor.decode)(payloads, x)
    for k in range(3):
      alone = compressor.decode(jax.tree.map(lambda p, k=k: p[k], payloads), x[k])
      np.testing.assert_array_equal(together[k], alone)


def test_measure_tells_small_errors():
  got = compressors.measure(compressors.qsgd(16), gaussian(10), jax.random.key(0))
  assert 0 < got.alpha2 < 1e-8


@pytest.mark.parametrize('magnitude', [1e-30, 1e-12, 1e12, 1e30])
def test_diagnostics_of_large_and_small_messages(magnitude):
  """Squares would leave the range of float32; magnitudes are powers of two, up to rounding."""
  scale = 2.0 ** round(np.log2(magnitude))
  x = jax.random.normal(jax.random.key(0), (5000,)) / 8
  compressor = compressors.stochastic_quantizer(4)
  found, plain = (
    jax.jit(lambda key, x: tree.compress(compressor, key, x).info)(jax.random.key(1), x)
    for x in (x * scale, x)
  )
  assert found.compression_error == plain.compression_error
  assert found.message_norm == plain.message_norm * scale
