"""chunk_top_k, chain, low_rank and dct: against NumPy, and their constants as derived."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.fft

from decomp import compressors, spec, wire

KEY = jax.random.key(0)
GAUSSIAN = np.random.default_rng(0).normal(size=4096).astype(np.float32)


def apply(compressor, x, key=KEY):
  return jax.jit(lambda key, x: compressor.decode(compressor.encode(key, x), x))(key, x)


def errors(compressor, x, count):
  """|C(x) - x|² / |x|² of many draws."""

  @jax.jit
  def run(keys, x):
    def error(key):
      return ((compressor.decode(compressor.encode(key, x), x) - x) ** 2).sum()

    return jax.lax.map(error, keys, batch_size=50) / (x**2).sum()

  return np.asarray(run(jax.random.split(KEY, count), x), np.float64)


def size_of(compressor, *shape):
  like = jax.ShapeDtypeStruct(shape, 'float32')
  return wire.size(jax.eval_shape(compressor.encode, jax.eval_shape(lambda: KEY), like))


def test_the_largest_of_every_chunk():
  """The last chunk has 4 elements: three are kept, and none of what it is filled up with."""
  compressor = compressors.chunk_top_k(3, 16)
  inputs = np.stack([GAUSSIAN[:100], GAUSSIAN[:100], np.zeros(100, np.float32)])
  inputs[1, 98:] = 0
  expected = np.zeros_like(inputs)
  for x, y in zip(inputs, expected, strict=True):
    for start in range(0, 100, 16):
      chosen = start + np.argsort(-np.abs(x[start : start + 16]))[:3]
      y[chosen] = x[chosen]
  found = jax.jit(jax.vmap(lambda x: compressor.decode(compressor.encode(KEY, x), x)))(inputs)
  np.testing.assert_array_equal(found, expected)
  assert size_of(compressor, 100) == 21 * 4 + 6 + 6  # 21 places of 2 bits, and 21 + 25 bits


def test_64_of_4096_of_two_bits():
  """8 bits a place and 2 bits a value, .156 bits an element; and a scale for each chunk."""
  plain = compressors.chunk_top_k(64, 4096)
  coded = compressors.chain(plain, compressors.stochastic_quantizer(2, bucket=64))
  assert size_of(plain, 10 * 4096) == 10 * 64 * (4 + 1)
  assert size_of(coded, 10 * 4096) == 10 * (16 + 64) + 10 * 4


def test_the_noise_of_a_chain_is_the_product():
  """Exactly, where both parts make the same error whatever they are given."""
  compressor = compressors.chain(compressors.random_k(0.25), compressors.eden(1))
  found = errors(compressor, jnp.array(GAUSSIAN), 400)
  expected = (1 + 3) * (1 + compressors.eden(1).alpha2(1024)) - 1
  assert compressor.unbiased
  assert compressor.alpha2(4096) == pytest.approx(expected)
  assert abs(found.mean() - expected) < 4 * found.std() / 20 + 0.01 * expected


def test_what_a_chain_keeps_is_the_product():
  part, quarter = compressors.eden(1), compressors.random_k(0.25, unbiased=False)
  compressor = compressors.chain(quarter, part)
  found = errors(compressor, jnp.array(GAUSSIAN), 100)
  expected = 0.25 * (1 - part.alpha2(1024))
  assert not compressor.unbiased
  assert compressor.alpha2 is None
  assert compressor.delta(4096) == pytest.approx(expected)
  assert abs(1 - found.mean() - expected) < 4 * found.std() / 10 + 0.01 * expected
  # A quantizer that may make the values longer than they are: nothing is promised.
  coarse = compressors.chain(compressors.top_k(0.1), compressors.qsgd(2))
  assert coarse.delta(1000) == 1 - compressors.qsgd(2).alpha2(100) < 0


def test_a_chain_in_a_simulation_sends_the_same_numbers():
  compressor = compressors.chain(compressors.chunk_top_k(4, 16), compressors.sign_norm())
  encode, decode = compressor.quick
  x = jnp.array(GAUSSIAN[:40])
  quick = jax.jit(lambda key, x: decode(encode(key, x), x))(KEY, x)
  np.testing.assert_array_equal(quick, apply(compressor, x))


def test_a_chain_from_a_flag():
  text = 'chain(top_k(0.01), stochastic_quantizer(bits=4))'
  compressor = spec.build(text, compressors)
  assert compressor.name == text
  assert spec.build(compressor.name, compressors).name == text
  assert size_of(compressor, 1000) == 5 + 4 + 12


@pytest.mark.parametrize(
  ('sparsifier', 'quantizer', 'words'),
  [
    (compressors.qsgd(3), compressors.qsgd(3), r'sparsifier=qsgd\(bits=3\): its payload must have'),
    (compressors.identity(), compressors.qsgd(3), 'a field `values`'),
    (compressors.top_k(0.1), compressors.fixed_grid(4, 1.0), 'must scale with its input'),
    (compressors.top_k(0.1), compressors.correlated(compressors.qsgd(3)), 'share dithers'),
  ],
)
def test_chains_that_cannot_be(sparsifier, quantizer, words):
  with pytest.raises(ValueError, match=words):
    compressors.chain(sparsifier, quantizer)


def matrix(singular_values, rows=40, columns=30):
  random = np.random.default_rng(1)
  left, right = (
    np.linalg.qr(random.normal(size=(n, len(singular_values))))[0] for n in (rows, columns)
  )
  return left @ np.diag(singular_values) @ right.T


@pytest.mark.parametrize('scale', [1e-30, 1.0, 1e30])
def test_matrices_of_low_rank_are_exact(scale):
  """Also those of lower rank, with one row only, and of all sizes of numbers."""
  one_row = np.zeros((40, 30))
  one_row[7] = GAUSSIAN[:30]
  stack = [matrix([1, 0.3, 1e-3]), matrix([1]), one_row, np.zeros((40, 30))]
  x = scale * np.stack(stack).astype(np.float32)
  compressor = compressors.low_rank(3)
  found = jax.jit(jax.vmap(lambda x: compressor.decode(compressor.encode(KEY, x), x)))(jnp.array(x))
  np.testing.assert_allclose(found, x, rtol=0, atol=3e-6 * scale)
  np.testing.assert_array_equal(found[3], 0)
  assert size_of(compressor, 40, 30) == 4 * 3 * 70


def test_low_rank_is_the_projection_that_numpy_finds():
  """With other random columns: the mean error agrees within its spread. None beats the SVD."""
  x = matrix(0.7 ** np.arange(30))
  found = errors(compressors.low_rank(4), jnp.array(x, jnp.float32), 300)
  starts = np.random.default_rng(2).normal(size=(2000, 30, 4))
  left = np.linalg.qr(x @ x.T @ x @ starts)[0]
  expected = 1 - ((x.T @ left) ** 2).sum((1, 2)) / (x**2).sum()
  noise = math.sqrt(found.var() / 300 + expected.var() / 2000)
  assert abs(found.mean() - expected.mean()) < 4 * noise
  assert found.min() > 0.7**8 - 1e-6  # sum of σ² beyond the first four


def test_low_rank_delta_is_reached_where_all_singular_values_are_equal():
  x = jnp.array(matrix(np.ones(30)), jnp.float32)
  found = errors(compressors.low_rank(4), x, 5)
  np.testing.assert_allclose(found, 1 - 4 / 30, rtol=1e-5)
  assert compressors.low_rank(4).delta(900) == 4 / 30


def test_low_rank_of_a_kernel_and_of_what_is_too_small():
  compressor = compressors.low_rank(2)
  assert size_of(compressor, 3, 3, 16, 32) == 4 * 2 * (144 + 32)
  for shape in [(3, 4), (50,), (), (0, 8)]:
    assert size_of(compressor, *shape) == 4 * math.prod(shape)
  with_nan = jnp.array(GAUSSIAN[:200].reshape(10, 20)).at[3, 4].set(jnp.nan)
  assert np.isnan(apply(compressor, with_nan)).any()


@pytest.mark.parametrize('size', [50, 7])
def test_cosine_transform(size):
  """All coefficients kept: the input again. One kept: the largest that SciPy finds."""
  x = jnp.array(GAUSSIAN[:size])
  everything = compressors.dct(compressors.identity(), chunk=16)
  np.testing.assert_allclose(apply(everything, x), x, atol=3e-6)
  parts = np.split(np.asarray(x), range(16, size, 16))
  expected = np.concatenate([scipy.fft.dct(part, norm='ortho') for part in parts])
  coefficients = jax.jit(everything.encode)(KEY, x)
  np.testing.assert_allclose(coefficients, expected, atol=3e-6)


def test_cosine_transform_keeps_the_constants_of_its_compressor():
  inner = compressors.random_k(0.25)
  compressor = compressors.dct(inner, chunk=16)
  assert (compressor.unbiased, compressor.alpha2(50)) == (True, inner.alpha2(50))
  assert size_of(compressor, 50) == size_of(inner, 50)
  assert compressors.dct(compressors.top_k(0.1), 16).delta(50) == 0.1
  smooth = jnp.array(np.sin(np.linspace(0, 3, 640)), jnp.float32)
  lost = apply(compressors.dct(compressors.top_k(0.025), 64), smooth) - smooth
  # The 16 largest elements would keep at most 16 / 300 of it.
  assert float((lost**2).sum() / (smooth**2).sum()) < 1e-3
