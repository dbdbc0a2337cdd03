"""A convolution as a flax module, whose gradient is fast on CPU too."""

import math
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from decomp.engine.cpu.convolution import Padding, Pair, conv


def _he_normal(key: jax.Array, shape: Sequence[int]) -> jax.Array:
  # Drawn flat because XLA:CPU compiles random numbers with four axes for seconds.
  flat = jax.random.normal(key, (math.prod(shape),))
  return math.sqrt(2 / math.prod(shape[:-1])) * flat.reshape(shape)


class Conv(nn.Module):
  """Like `flax.linen.Conv` in two dimensions, with the same parameters, through `conv`.

  The kernel starts with variance 2 / (height * width * in), for ReLU (He et al., 2015,
  arXiv:1502.01852), the bias with zeros.

  Attributes:
    features: Number of output channels.
    kernel_size: Height and width of the kernel.
    strides: Step between outputs along height and width.
    padding: 'SAME', 'VALID', or ((low, high), (low, high)).
    use_bias: Whether to add a bias per output channel.
  """

  features: int
  kernel_size: Pair = (3, 3)
  strides: Pair = (1, 1)
  padding: Padding = 'SAME'
  use_bias: bool = True

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Return the convolved batch [batch, height, width, features]."""
    shape = (*self.kernel_size, x.shape[-1], self.features)
    y = conv(x, self.param('kernel', _he_normal, shape), self.strides, self.padding)
    if self.use_bias:
      bias = self.param('bias', nn.initializers.zeros_init(), (self.features,))
      y = y + jnp.broadcast_to(bias, y.shape)
    return y
