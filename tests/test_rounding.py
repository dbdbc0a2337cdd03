"""The random numbers behind stochastic rounding: are they uniform, and independent of each other?

Every statistic is compared with its distribution under true randomness, at 4.5 standard deviations
(one false alarm in 150,000): over elements, bits, lags, and keys as a run makes them from steps,
workers and leaves.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from decomp.compressors import rounding
from decomp.engine.cpu import keys, loops

every_dither = pytest.mark.parametrize('dither', rounding.DITHERS)
SIZE = 2**16
ALARM = 4.5


def keys_of_a_run(steps=8, workers=8, leaves=4):
  """Keys [steps, workers, leaves] as `simulate` and `tree.compress` make them."""
  run = jax.random.key(7)

  def leaf_keys(step, worker):
    return jax.random.split(jax.random.fold_in(jax.random.fold_in(run, step), worker), leaves)

  return jax.vmap(jax.vmap(leaf_keys, (None, 0)), (0, None))(jnp.arange(steps), jnp.arange(workers))


def words(dither, keys, size=SIZE):
  """The words behind `size` elements, two for four of them."""
  draw = jax.jit(jax.vmap(lambda key: jnp.concatenate(rounding.DITHERS[dither](key, size // 4))))
  return np.asarray(draw(keys.reshape(-1))).reshape(*keys.shape, size // 2)


def uniform(dither, keys, size=SIZE):
  """Dithers in (0, 1), each in the middle of its 2**-16."""
  draw = jax.jit(jax.vmap(lambda key: jnp.concatenate(rounding.dithers(key, size // 4, dither))))
  return (np.asarray(draw(keys.reshape(-1))).reshape(*keys.shape, size) + np.float32(0.5)) / 2**16


def assert_normal(z):
  """Whether standard scores are what they should be: none far out, and variance 1."""
  z = np.asarray(z).ravel()
  assert np.abs(z).max() < ALARM + np.sqrt(2 * np.log(max(2, z.size))) - 1
  assert abs((z**2).sum() - z.size) < ALARM * np.sqrt(2 * z.size)


@every_dither
def test_uniform_over_all_elements(dither):
  draws = uniform(dither, keys_of_a_run()).ravel()
  counts = np.bincount((draws * 1024).astype(int), minlength=1024)
  expected = draws.size / 1024
  chi2 = ((counts - expected) ** 2 / expected).sum()
  assert 1e-5 < stats.chi2.cdf(chi2, 1023) < 1 - 1e-5
  # The tails, which decide about elements near a grid point.
  for edge in (2**-6, 2**-12):
    for share in ((draws < edge).mean(), (draws > 1 - edge).mean()):
      assert abs(share - edge) < ALARM * np.sqrt(edge / draws.size)


@every_dither
def test_every_bit_is_fair_and_independent_of_the_others(dither):
  bits = np.unpackbits(words(dither, keys_of_a_run(2, 4, 2)).view(np.uint8).reshape(-1, 4), axis=1)
  signs = bits.astype(np.float32) * 2 - 1
  assert_normal(signs.sum(0) / np.sqrt(len(signs)))
  products = (signs.T @ signs)[np.triu_indices(32, 1)] / np.sqrt(len(signs))
  assert_normal(products)


@every_dither
def test_elements_are_independent(dither):
  centred = (uniform(dither, keys_of_a_run(2, 4, 2)) - 0.5) * np.sqrt(12)
  for lag in (1, 2, 3, 4, 5, 7, 8, 16, 31, 64, 100, 256, 1000, 4096, 32768):
    products = centred[..., lag:] * centred[..., :-lag]
    assert_normal(products.sum(-1) / np.sqrt(products.shape[-1]))


@every_dither
@pytest.mark.parametrize('axis', ['steps', 'workers', 'leaves'])
def test_keys_are_independent(dither, axis):
  """The same element in different steps, workers or leaves; also next to each other."""
  centred = (uniform(dither, keys_of_a_run(**{axis: 16})) - 0.5) * np.sqrt(12)
  centred = np.moveaxis(centred, ['steps', 'workers', 'leaves'].index(axis), 0)
  for shift in (0, 1):
    products = centred[1:] * np.roll(centred, shift, -1)[:-1]
    assert_normal(products.sum(-1) / np.sqrt(SIZE))


@every_dither
def test_keys_that_differ_in_one_bit_are_independent(dither):
  base = np.array([123, 456], np.uint32)
  flips = [base ^ np.array([1 << b, 0], np.uint32) for b in range(32)]
  flips += [base ^ np.array([0, 1 << b], np.uint32) for b in range(32)]
  keys = jax.random.wrap_key_data(jnp.array([base, *flips]))
  centred = (uniform(dither, keys) - 0.5) * np.sqrt(12)
  assert_normal((centred[1:] * centred[0]).sum(-1) / np.sqrt(SIZE))
  bits = (words(dither, keys)[1:] ^ words(dither, keys)[0]).view(np.uint8)
  assert_normal(
    (np.unpackbits(bits, axis=-1).sum(-1, dtype=np.int64) - 8 * SIZE) / np.sqrt(4 * SIZE)
  )


@every_dither
@pytest.mark.parametrize('fraction', [0.0, 1e-3, 0.25, 0.5, 0.999])
def test_rounding_is_unbiased(dither, fraction):
  keys = keys_of_a_run(4, 4, 4).reshape(-1)
  x = jnp.full(SIZE, 3 + fraction, jnp.float32)
  rounded = jax.vmap(lambda key: rounding.stochastic_round(key, x, dither))(keys)
  assert set(np.unique(rounded)) <= {3.0, 4.0}
  total = rounded.size
  exact = float(np.float32(3 + fraction)) - 3
  off = float(np.asarray(rounded, np.float64).mean()) - 3 - exact
  assert abs(off) <= ALARM * np.sqrt(exact * (1 - exact) / total) + 2**-17


@every_dither
@pytest.mark.parametrize(('fraction', 'largest'), [(16, 2**15 - 1), (15, 2**16 - 1)])
def test_rounding_holds_the_largest_numbers(dither, fraction, largest):
  """The fixed point has room for them and for any dither; integers stay what they are."""
  x = jnp.tile(jnp.array([-largest, 1 - largest, 0, largest - 1, largest], jnp.float32), SIZE // 4)
  rounded = rounding.stochastic_round(jax.random.key(0), x, dither, fraction)
  np.testing.assert_array_equal(rounded, x)
  halves = rounding.stochastic_round(jax.random.key(0), 0.5 * x, dither, fraction)
  assert set(np.unique(jnp.abs(halves - 0.5 * x))) == {0.0, 0.5}


def test_threefry_is_that_of_jax():
  """The two words that JAX's own block function makes of a counter (i, 0)."""
  from jax.extend.random import threefry_2x32

  key = np.array([0x13198A2E, 0x03707344], np.uint32)
  counters = np.concatenate([np.arange(5), np.zeros(5)]).astype(np.uint32)
  expected = threefry_2x32(jnp.array(key), jnp.array(counters))
  found = rounding.threefry(jax.random.wrap_key_data(jnp.array(key)), 5)
  np.testing.assert_array_equal(jnp.concatenate(found), expected)


def test_keys_of_other_generators():
  with jax.numpy_dtype_promotion('standard'):
    key = jax.random.key(0, impl='rbg')
    assert len(np.unique(rounding.threefry(key, 100))) == 200


@pytest.mark.parametrize('size', [0, 1, 2, 3, 4, 5, 7, 8, 1001])
def test_quarters_are_joined_again(size):
  x = jnp.arange(float(size))
  parts = loops.pieces(x, 4)
  assert {part.shape for part in parts} == {(16 * -(-size // 64),)}
  np.testing.assert_array_equal(rounding.join(parts, size), x)


@pytest.mark.parametrize('number', [3, np.arange(5)])
def test_keys_are_those_of_jax(number):
  key = jax.random.key(11)
  expected = jax.vmap(lambda n: jax.random.fold_in(key, n))(jnp.atleast_1d(number))
  found = jnp.atleast_1d(keys.fold_in(key, number))
  assert (jax.random.key_data(found) == jax.random.key_data(expected)).all()
