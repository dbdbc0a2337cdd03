import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh

from decomp import mapping, models

NUM_WORKERS = 16


def worker_mesh(num_devices, name='worker'):
  return Mesh(np.asarray(jax.devices()[:num_devices]), (name,), axis_types=(AxisType.Auto,))


def worker(params, key, scale):
  """A worker's function with a loop, a random key, a nested result and a scalar one."""
  total, _ = lax.scan(lambda c, row: (c + row, None), jnp.zeros(3), params['rows'])
  noise = jax.random.bits(key, (3,), jnp.uint32)
  return {'total': (total * scale, noise)}, jnp.sum(total)


@pytest.fixture(scope='module')
def arguments():
  rows = np.random.default_rng(0).normal(size=(NUM_WORKERS, 4, 3)).astype(np.float32)
  keys = jax.random.split(jax.random.key(0), NUM_WORKERS)
  return {'rows': rows}, keys, np.arange(NUM_WORKERS, dtype=np.float32)


@pytest.fixture(scope='module')
def expected(arguments):
  results = [worker(*jax.tree.map(lambda x, i=i: x[i], arguments)) for i in range(NUM_WORKERS)]
  return jax.tree.map(lambda *xs: np.stack(xs), *results)


@pytest.mark.parametrize('num_devices', [None, 2])
@pytest.mark.parametrize('name', mapping.MAPPINGS)
def test_every_worker_gets_its_own_result(name, num_devices, arguments, expected):
  mesh = None if num_devices is None else worker_mesh(num_devices)
  actual = jax.jit(mapping.lift(worker, name, mesh))(*arguments)
  chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  ('name', 'num_devices', 'used'),
  [('vmap', None, 1), ('scan', None, 1), ('devices', None, 8), ('devices', 2, 2), ('vmap', 4, 4)],
)
def test_which_devices_are_used(name, num_devices, used):
  mesh = None if num_devices is None else worker_mesh(num_devices)
  out = jax.jit(mapping.lift(lambda x: x + 1, name, mesh))(jnp.zeros((NUM_WORKERS, 2)))
  assert len(out.sharding.device_set) == used
  assert out.addressable_shards[0].data.shape == (NUM_WORKERS // used, 2)


@pytest.mark.parametrize('name', mapping.MAPPINGS)
def test_inside_a_scan_over_steps(name):
  lifted = mapping.lift(jax.grad(lambda x: 0.25 * jnp.sum(x**2)), name)
  start = jnp.arange(NUM_WORKERS, dtype=jnp.float32).reshape(NUM_WORKERS, 1)
  run = jax.jit(lambda x: lax.scan(lambda x, _: (x - lifted(x), None), x, None, length=3)[0])
  np.testing.assert_array_equal(run(start), start / 8)


def test_unknown_mapping():
  with pytest.raises(ValueError, match=r"mapping='pmap' .* vmap, scan, devices"):
    mapping.lift(jnp.sin, 'pmap')


def test_mesh_with_another_axis():
  with pytest.raises(ValueError, match=r"axes \('data',\).* 'worker'"):
    mapping.lift(jnp.sin, 'devices', worker_mesh(2, name='data'))


def test_devices_do_not_divide_workers():
  lifted = mapping.lift(jnp.sin, 'devices')
  with pytest.raises(ValueError, match=r'num_workers=12 .* 8 devices.* mesh of fewer .*scan'):
    lifted(jnp.zeros((12, 2)))


@pytest.mark.parametrize('other', [np.zeros((4, 2)), 1.0], ids=['other size', 'scalar'])
def test_leading_axes_differ(other):
  with pytest.raises(ValueError, match='same leading worker axis'):
    mapping.lift(lambda x, y: x, 'devices')(np.zeros((8, 2)), other)
  with pytest.raises(ValueError, match='same leading worker axis'):
    mapping.choose(lambda x, y: x, np.zeros((8, 2)), other)


def gradient_and_arguments(model):
  """Return one worker's gradient function and the shapes of the arguments of 8 workers."""
  x = jax.ShapeDtypeStruct((2, 8, 8, 1), jnp.float32)
  variables = jax.eval_shape(model.init, jax.random.key(0), x)

  def loss(variables, x):
    return jnp.sum(model.apply(variables, x, train=True, mutable=['batch_stats'])[0])

  def stack(one):
    return jax.ShapeDtypeStruct((8, *one.shape), one.dtype)

  return jax.grad(loss), jax.tree.map(stack, (variables, x))


@pytest.mark.parametrize(
  ('platform', 'num_devices', 'choice'),
  [
    ('cpu', 1, 'scan'),
    ('cpu', 2, 'devices'),
    ('cpu', 3, 'scan'),
    ('gpu', 8, 'vmap'),
    ('tpu', 1, 'vmap'),
  ],
)
@pytest.mark.parametrize('model', [models.cnn(10), models.resnet8()], ids=['cnn', 'resnet8'])
def test_choice_for_our_convolutions(model, platform, num_devices, choice):
  gradient, arguments = gradient_and_arguments(model)
  options = {'platform': platform, 'num_devices': num_devices}
  assert mapping.choose(gradient, *arguments, **options) == choice


def test_choice_without_convolutions():
  gradient, arguments = gradient_and_arguments(models.mlp(10))
  assert mapping.choose(gradient, *arguments, platform='cpu', num_devices=2) == 'vmap'


@pytest.mark.parametrize(
  'wrapped', [lambda f: f, jax.jit, jax.checkpoint], ids=['', 'jit', 'remat']
)
def test_one_plain_gradient_suffices_for_vmap(wrapped):
  gradient, arguments = gradient_and_arguments(models.cnn(10))
  kernel = np.ones((8, 3, 3, 1, 1), np.float32)

  @wrapped
  def blur(x, kernel):
    dimensions = ('NHWC', 'HWIO', 'NHWC')
    return lax.conv_general_dilated(x, kernel, (1, 1), 'SAME', dimension_numbers=dimensions)

  def worker(variables, x, kernel):
    return gradient(variables, x), jax.grad(lambda k: jnp.sum(blur(x, k)))(kernel)

  assert mapping.choose(worker, *arguments, kernel, platform='cpu', num_devices=2) == 'vmap'


def test_choice_sees_convolutions_in_loops():
  gradient, arguments = gradient_and_arguments(models.cnn(10))

  def worker(variables, x):
    return lax.map(lambda x: gradient(variables, x), x[None])

  assert mapping.choose(worker, *arguments, platform='cpu', num_devices=1) == 'scan'


def test_choice_takes_this_machine_by_default():
  gradient, arguments = gradient_and_arguments(models.cnn(10))
  assert mapping.choose(gradient, *arguments) == 'devices'


def test_choice_takes_random_keys():
  keys = jax.random.split(jax.random.key(0), 8)
  assert mapping.choose(lambda key: jax.random.bits(key, (3,)), keys) == 'vmap'


def test_import_starts_no_backend():
  # Fails when a backend runs: the number of devices is fixed from then on.
  program = """
import jax, decomp.engine.mapping, decomp.tasks.models
jax.config.update('jax_num_cpu_devices', 3)
assert jax.device_count() == 3
"""
  subprocess.run([sys.executable, '-c', program], check=True, timeout=120)
