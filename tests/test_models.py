import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decomp import models
from decomp.tasks.models.cnn import max_pool_2x2
from decomp.tasks.models.resnet import Block, _conv3x3

NUM_CLASSES = 7
IMAGES = np.random.default_rng(0).normal(size=(4, 9, 8, 3)).astype(np.float32)
TOKENS = np.random.default_rng(0).integers(0, NUM_CLASSES, size=(3, 12))

# Every public factory, called small: factory -> (module, inputs, shape of the logits).
TABLE = {
  'softmax_regression': (models.softmax_regression(NUM_CLASSES), IMAGES, (4, NUM_CLASSES)),
  'mlp': (models.mlp(NUM_CLASSES, hidden=(5, 6)), IMAGES, (4, NUM_CLASSES)),
  'cnn': (models.cnn(NUM_CLASSES, channels=(2, 3)), IMAGES, (4, NUM_CLASSES)),
  'resnet': (models.resnet(8, NUM_CLASSES, norm='group', width=4), IMAGES, (4, NUM_CLASSES)),
  'resnet8': (models.resnet8(NUM_CLASSES), IMAGES, (4, NUM_CLASSES)),
  'resnet20': (models.resnet20(NUM_CLASSES), IMAGES, (4, NUM_CLASSES)),
  'char_transformer': (
    models.char_transformer(NUM_CLASSES, width=8, length=16),
    TOKENS,
    (3, 12, NUM_CLASSES),
  ),
}
SMALL = [name for name in TABLE if name != 'resnet20']  # which takes long to compile


def random_like(shapes):
  """Fill shapes with random numbers: quicker than a module's init, which compiles for each."""
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda s: jnp.asarray(0.3 * rng.normal(size=s.shape), s.dtype), shapes)


def variables_of(module, inputs):
  variables = random_like(jax.eval_shape(module.init, jax.random.key(0), inputs))
  if 'batch_stats' in variables:
    variables['batch_stats'] = jax.tree.map(jnp.abs, variables['batch_stats'])
  return variables


def num_params(module, *shape):
  variables = jax.eval_shape(module.init, jax.random.key(0), jax.ShapeDtypeStruct(shape, 'float32'))
  return sum(leaf.size for leaf in jax.tree.leaves(variables['params']))


def test_table_is_complete():
  assert sorted(TABLE) == sorted(models.__all__)


@pytest.mark.parametrize('train', [True, False])
@pytest.mark.parametrize('name', TABLE)
def test_logits_are_float32(name, train):
  module, inputs, shape = TABLE[name]
  variables = jax.eval_shape(module.init, jax.random.key(0), inputs)
  logits, state = jax.eval_shape(
    lambda v: module.apply(v, inputs, train=train, mutable=['batch_stats']), variables
  )
  assert (logits.shape, logits.dtype) == (shape, jnp.float32)
  before, after = (jax.tree.structure(v.get('batch_stats', {})) for v in (variables, state))
  assert after == before
  assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype('float32')}


@pytest.mark.parametrize('name', SMALL)
def test_every_parameter_has_a_gradient(name):
  module, inputs, _ = TABLE[name]

  def loss(params, variables):
    logits, _ = module.apply(
      variables | {'params': params}, inputs, train=True, mutable=['batch_stats']
    )
    return jnp.mean(nn.log_softmax(logits)[..., 0])

  variables = variables_of(module, inputs)
  gradients = jax.jit(jax.grad(loss))(variables['params'], variables)
  for path, leaf in jax.tree.leaves_with_path(gradients):
    assert np.isfinite(leaf).all(), path
    # A bias of attention keys shifts all scores alike, which softmax forgets.
    if "['key']['bias']" not in jax.tree_util.keystr(path):
      assert np.abs(leaf).max() > 1e-6, path


def test_init_starts_with_sensible_logits():
  logits, _ = jax.jit(models.cnn(NUM_CLASSES).init_with_output)(jax.random.key(0), IMAGES)
  assert 0.05 < float(jnp.std(logits)) < 5


@pytest.mark.parametrize(
  ('make', 'size', 'expected'),
  [
    (models.softmax_regression, 8, 64 * 10 + 10),
    (models.mlp, 28, (784 * 256 + 256) + (256 * 10 + 10)),
    (models.cnn, 28, (9 * 1 * 16 + 16) + (9 * 16 * 32 + 32) + 7 * 7 * 32 * 10 + 10),
  ],
)
def test_parameters(make, size, expected):
  assert num_params(make(10), 1, size, size, 1) == expected


@pytest.mark.parametrize('norm', ['batch', 'group'])
def test_parameters_of_resnet20(norm):
  """The paper's 0.27 M: 19 convolutions of 3x3 without bias, a norm after each, one dense layer.

  Shortcuts have no parameters (option A); projections would add 2,752 with their norms.
  """
  first = 9 * 3 * 16
  stages = 9 * 6 * 16 * 16 + 9 * (16 * 32 + 5 * 32 * 32) + 9 * (32 * 64 + 5 * 64 * 64)
  norms = 2 * (7 * 16 + 6 * 32 + 6 * 64)  # scale and bias per channel
  dense = 64 * 10 + 10
  assert first + stages + norms + dense == 269_722
  assert num_params(models.resnet20(norm=norm), 1, 32, 32, 3) == 269_722


def test_parameters_of_resnet8():
  blocks = 9 * 2 * 16 * 16 + 9 * (16 * 32 + 32 * 32) + 9 * (32 * 64 + 64 * 64)
  norms = 2 * (3 * 16 + 2 * 32 + 2 * 64)
  assert num_params(models.resnet8(), 1, 32, 32, 3) == 9 * 3 * 16 + blocks + norms + 650


def test_resnet_halves_twice():
  _, intermediates = jax.eval_shape(
    lambda x: models.resnet8().init_with_output(
      jax.random.key(0), x, capture_intermediates=True, mutable=True
    ),
    jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32),
  )
  blocks = [intermediates['intermediates'][f'Block_{i}']['__call__'][0] for i in range(3)]
  assert [b.shape for b in blocks] == [(2, 32, 32, 16), (2, 16, 16, 32), (2, 8, 8, 64)]


def test_block_with_zero_residual_is_its_shortcut():
  """With kernels of zero a strided block keeps every other pixel and adds empty channels."""
  block, x = Block(6, stride=2, norm='group'), np.abs(IMAGES)
  variables = jax.eval_shape(lambda: block.init(jax.random.key(0), x, True))
  y = block.apply(jax.tree.map(lambda s: jnp.zeros(s.shape), variables), x, True)
  np.testing.assert_array_equal(y[..., :3], x[:, ::2, ::2])
  np.testing.assert_array_equal(y[..., 3:], 0)


def test_strided_convolution_is_centred_on_the_pixels_of_the_shortcut():
  kernel = np.zeros((3, 3, 3, 3), np.float32)
  kernel[1, 1] = np.eye(3)
  y = _conv3x3(3, stride=2).apply({'params': {'kernel': kernel}}, IMAGES)
  np.testing.assert_allclose(y, IMAGES[:, ::2, ::2], rtol=1e-6)


def test_batch_statistics_move_by_a_tenth():
  module = models.resnet(8, NUM_CLASSES, width=4)
  variables = variables_of(module, IMAGES)
  apply = jax.jit(
    lambda variables, train: module.apply(
      variables, IMAGES, train=train, mutable=['batch_stats'], capture_intermediates=True
    ),
    static_argnums=1,
  )
  _, state = apply(variables, True)
  convolved = state['intermediates']['Conv_0']['__call__'][0]
  old, new = variables['batch_stats']['BatchNorm_0'], state['batch_stats']['BatchNorm_0']
  for name, value in [('mean', convolved.mean((0, 1, 2))), ('var', convolved.var((0, 1, 2)))]:
    np.testing.assert_allclose(new[name], 0.9 * old[name] + 0.1 * value, rtol=1e-4, atol=1e-5)
  _, state = apply(variables, False)
  jax.tree.map(np.testing.assert_array_equal, state['batch_stats'], variables['batch_stats'])


@pytest.mark.parametrize(('norm', 'alone'), [('batch', False), ('group', True)])
def test_only_batch_norm_couples_examples(norm, alone):
  module = models.resnet(8, NUM_CLASSES, norm=norm, width=4)
  variables = variables_of(module, IMAGES)
  assert ('batch_stats' in variables) == (norm == 'batch')
  apply = jax.jit(lambda x: module.apply(variables, x, train=True, mutable=['batch_stats'])[0])
  together, first = apply(IMAGES)[:1], apply(IMAGES[:1])
  assert np.allclose(together, first, rtol=1e-3, atol=1e-4) == alone


def test_transformer_is_causal():
  module, tokens, _ = TABLE['char_transformer']
  variables = variables_of(module, tokens)
  apply = jax.jit(lambda tokens: module.apply(variables, tokens))
  changed = tokens.copy()
  changed[:, 5] = (changed[:, 5] + 1) % NUM_CLASSES
  difference = np.abs(apply(tokens) - apply(changed)).max((0, 2))
  assert difference[:5].max() < 1e-6
  assert difference[5:].min() > 1e-3


def test_transformer_knows_positions():
  module, _, _ = TABLE['char_transformer']
  tokens = np.zeros((1, 8), np.int32)
  logits = jax.jit(module.apply)(variables_of(module, tokens), tokens)
  assert np.abs(logits[0, 1:] - logits[0, :-1]).max(1).min() > 1e-3


def test_max_pool_keeps_nan():
  x = jnp.zeros((32, 16, 16, 16)).at[3, 5, 6, 7].set(jnp.nan)
  assert np.isnan(jax.jit(max_pool_2x2)(x)).sum() == 1


def test_images_too_small_for_the_poolings():
  with pytest.raises(ValueError, match=r'channels=\(2, 2, 2\): images of 7 x 9 .* 3 times'):
    models.cnn(10, (2, 2, 2)).init(jax.random.key(0), jnp.zeros((1, 7, 9, 1)))


@pytest.mark.parametrize('size', [(4, 6), (5, 7)], ids=str)
def test_gradient_of_max_pool_equals_linen(size):
  x = np.random.default_rng(0).normal(size=(2, *size, 3)).astype(np.float32)

  def gradient(pool):
    return jax.jit(jax.grad(lambda x: jnp.sum(jnp.cos(pool(x)))))(x)

  expected = gradient(lambda x: nn.max_pool(x, (2, 2), (2, 2)))
  np.testing.assert_allclose(gradient(max_pool_2x2), expected, atol=1e-6)


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: models.resnet(18, 10), 'depth=18 .* use 8, 14, 20'),
    (lambda: models.resnet(2, 10), 'depth=2 .* use 8, 14, 20'),
    (lambda: models.resnet20(norm='layer'), "norm='layer' .* 'batch' or 'group'"),
    (lambda: models.char_transformer(27, width=9), 'width=9 .* heads=2'),
  ],
)
def test_wrong_arguments(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_sequence_too_long():
  module = models.char_transformer(NUM_CLASSES, length=8)
  with pytest.raises(ValueError, match="length 12: raise the model's length=8"):
    jax.eval_shape(module.init, jax.random.key(0), TOKENS)
