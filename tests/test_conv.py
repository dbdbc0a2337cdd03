import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from decomp.engine import mapping
from decomp.tasks.models.conv import Conv, conv

EXPLICIT = ((1, 2), (0, 1))
WIDER_THAN_KERNEL = ((4, 6), (5, 3))  # the gradient then cuts: negative padding


def xla_conv(x, kernel, strides, padding):
  dimensions = ('NHWC', 'HWIO', 'NHWC')
  return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=dimensions)


def random(seed, *shape):
  # From numpy: jax.random compiles for seconds, once for every shape.
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def value_and_gradients(fn, strides, padding):
  """Return a function that gives y, dx and dk for a random cotangent."""

  def run(x, kernel):
    y, pullback = jax.vjp(lambda x, kernel: fn(x, kernel, strides, padding), x, kernel)
    return y, *pullback(jnp.asarray(random(2, *y.shape)))

  return run


def assert_close(actual, expected, tolerance=1e-5):
  """Compare pytrees leaf by leaf, relative to a leaf's largest entry."""
  for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
    assert a.shape == e.shape
    assert a.dtype == e.dtype
    np.testing.assert_allclose(a, e, rtol=0, atol=tolerance * np.abs(e).max())


def assert_equals_xla(x, kernel, strides, padding):
  actual, expected = jax.jit(
    lambda *args: [value_and_gradients(fn, strides, padding)(*args) for fn in (conv, xla_conv)]
  )(x, kernel)
  assert_close(actual, expected)


# Height and width differ in everything, so that a mix-up of the two shows as well.
@pytest.mark.parametrize('padding', ['SAME', 'VALID', EXPLICIT, WIDER_THAN_KERNEL], ids=str)
@pytest.mark.parametrize('strides', [(1, 2), (2, 3), (3, 1)], ids=str)
@pytest.mark.parametrize('kernel_size', [(1, 3), (3, 5), (5, 2)], ids=str)
def test_value_and_gradients_equal_xla(kernel_size, strides, padding):
  assert_equals_xla(random(0, 2, 9, 8, 3), random(1, *kernel_size, 3, 4), strides, padding)


@pytest.mark.parametrize('size', [(7, 7), (8, 8)], ids=str)
@pytest.mark.parametrize('strides', [(1, 1), (2, 2)], ids=str)
@pytest.mark.parametrize('kernel_size', [(1, 1), (3, 3)], ids=str)
def test_usual_convolutions_equal_xla(size, strides, kernel_size):
  assert_equals_xla(random(0, 2, *size, 3), random(1, *kernel_size, 3, 4), strides, 'SAME')


@pytest.mark.parametrize('mapping', ['vmap', 'map'])
@pytest.mark.parametrize('strides', [(1, 1), (2, 2)], ids=str)
def test_a_kernel_per_worker(mapping, strides):
  args = random(0, 3, 2, 6, 7, 2), random(1, 3, 3, 3, 2, 4)
  worker = value_and_gradients(conv, strides, 'SAME')
  lifted = jax.vmap(worker) if mapping == 'vmap' else lambda *a: lax.map(lambda b: worker(*b), a)
  expected = jax.jit(jax.vmap(value_and_gradients(xla_conv, strides, 'SAME')))(*args)
  assert_close(jax.jit(lifted)(*args), expected)


def test_second_derivative():
  x, kernel, direction = random(0, 2, 6, 7, 2), random(1, 3, 3, 2, 4), random(2, 3, 3, 2, 4)

  def curvature(fn):
    gradient = jax.grad(lambda kernel: jnp.sum(jnp.tanh(fn(x, kernel, (2, 1), 'SAME'))))
    return jax.jit(jax.grad(lambda kernel: jnp.vdot(gradient(kernel), direction)))(kernel)

  assert_close(curvature(conv), curvature(xla_conv))


def test_all_convolutions_are_nhwc():
  # What makes the gradient fast in a loop on CPU; XLA's own has other layouts.
  x, kernel = random(0, 2, 8, 8, 3), random(1, 3, 3, 3, 4)
  nhwc = lax.conv_dimension_numbers(x.shape, kernel.shape, ('NHWC', 'HWIO', 'NHWC'))

  def layouts(fn):
    return list(mapping.layouts(jax.make_jaxpr(value_and_gradients(fn, (2, 2), 'SAME'))(x, kernel)))

  assert layouts(conv) == [nhwc] * 3
  assert layouts(xla_conv).count(nhwc) == 1


@pytest.mark.parametrize('use_bias', [True, False])
def test_module_equals_linen(use_bias):
  x = random(0, 2, 7, 8, 3)
  options = {'strides': (2, 1), 'padding': ((1, 1), (0, 2)), 'use_bias': use_bias}
  ours, linen = Conv(5, (3, 2), **options), nn.Conv(5, (3, 2), **options)
  shapes = jax.eval_shape(ours.init, jax.random.key(1), x)
  assert shapes == jax.eval_shape(linen.init, jax.random.key(1), x)
  variables = jax.tree.map(lambda s: jnp.asarray(random(1, *s.shape)), shapes)
  assert_close(ours.apply(variables, x), linen.apply(variables, x))


def test_module_starts_with_variance_for_relu():
  kernel = Conv(64).init(jax.random.key(0), random(0, 1, 4, 4, 32))['params']['kernel']
  variance = 2 / (3 * 3 * 32)
  deviations = 6 * np.sqrt(2 / kernel.size)  # of the sample variance, relative
  assert abs(float(jnp.var(kernel)) / variance - 1) < deviations
