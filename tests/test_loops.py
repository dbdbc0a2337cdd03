import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decomp.engine.cpu import loops

INPUTS = {
  'key': jax.random.key,
  'float32': lambda seed: jnp.full(5, float(seed)),
  'bfloat16': lambda seed: jnp.full((2, 3), seed, jnp.bfloat16),
  'uint8': lambda seed: jnp.full(5, seed, jnp.uint8),
}


def numbers(x):
  """A function of any of the inputs."""
  return jax.random.normal(x, (3,)) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else 2 * x


@pytest.mark.parametrize('name', INPUTS)
def test_once_is_the_function(name):
  x = INPUTS[name](7)
  result = jax.jit(lambda x: loops.once(numbers, x))(x)
  np.testing.assert_array_equal(result, numbers(x))
  assert result.dtype == numbers(x).dtype


@pytest.mark.parametrize('value', [0.0, -0.0, np.nan, np.inf])
def test_once_whatever_the_first_number_is(value):
  x = jnp.array([value, 1.0])
  np.testing.assert_array_equal(jax.jit(lambda x: loops.once(lambda x: x + 1, x))(x), x + 1)


@pytest.mark.parametrize('name', INPUTS)
def test_the_compiler_does_not_see_through_once(name):
  x = INPUTS[name](7)
  compiled = jax.jit(lambda x: loops.once(numbers, x)).lower(x).compile().as_text()
  assert ' conditional(' in compiled


def test_once_for_many_workers_is_one_condition():
  x = jnp.arange(6.0).reshape(2, 3)
  lifted = jax.jit(jax.vmap(lambda x: loops.once(jnp.sin, x)))
  np.testing.assert_array_equal(lifted(x), jnp.sin(x))
  compiled = lifted.lower(x).compile().as_text()
  assert ' conditional(' in compiled
  assert ' select(' not in compiled


@pytest.mark.parametrize('size', [0, 1, 4095, 4096, 5000, 12_345])
def test_folded_keeps_sums_and_maxima(size):
  x = jax.random.normal(jax.random.key(size), (size,))
  folded = jax.jit(lambda x: loops.folded(jnp.maximum, jnp.abs, x))(x)
  assert folded.size < 4096
  np.testing.assert_array_equal(folded.max(initial=0), jnp.abs(x).max(initial=0))
  total = loops.folded(jnp.add, lambda x, y: x * y, x, x).sum()
  np.testing.assert_allclose(total, np.sum(np.asarray(x, np.float64) ** 2), rtol=1e-5)


def test_folded_does_not_hide_what_is_not_finite():
  for value in (np.nan, np.inf):
    x = jnp.ones(5000).at[4321].set(value)
    assert not np.isfinite(loops.folded(jnp.maximum, jnp.abs, x).max())
