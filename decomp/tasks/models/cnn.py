"""A small convolutional network."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from decomp import checks
from decomp.tasks.models.conv import Conv


class Cnn(nn.Module):
  """Convolutions, each with ReLU and 2x2 pooling, then a dense layer; see :func:`cnn`."""

  num_classes: int
  channels: tuple[int, ...]

  @nn.compact
  def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
    """Return the logits of a batch."""
    if min(x.shape[1:3]) < 2 ** len(self.channels):
      raise ValueError(
        f'channels={self.channels}: images of {x.shape[1]} x {x.shape[2]} cannot be halved '
        f'{len(self.channels)} times; use fewer'
      )
    for features in self.channels:
      x = max_pool_2x2(nn.relu(Conv(features)(x)))
    return nn.Dense(self.num_classes)(x.reshape(x.shape[0], -1))


def cnn(num_classes: int, channels: Sequence[int] = (16, 32)) -> nn.Module:
  """Small CNN: 3x3 convolution, ReLU and 2x2 max pooling per entry of `channels`, then dense.

  Args:
    num_classes: Number of logits.
    channels: Output channels of the convolutions; each halves height and width.

  Returns:
    A linen module: images [batch, height, width, channels] -> logits [batch, num_classes].

  Example:
    >>> import jax, jax.numpy as jnp
    >>> model, x = cnn(10, channels=(4, 8)), jnp.ones((2, 8, 8, 1))
    >>> jax.eval_shape(model.init_with_output, jax.random.key(0), x)[0].shape
    (2, 10)
  """
  return Cnn(checks.width('num_classes', num_classes), checks.widths('channels', channels))


def max_pool_2x2(x: jax.Array) -> jax.Array:
  """2x2 max pooling with stride 2; an odd last row or column is dropped.

  By slices, because XLA:CPU runs the gradient of a window reduction slowly, and its reductions may
  lose a NaN.
  """
  height, width = x.shape[1] // 2 * 2, x.shape[2] // 2 * 2
  rows = jnp.maximum(x[:, 0:height:2], x[:, 1:height:2])
  return jnp.maximum(rows[:, :, 0:width:2], rows[:, :, 1:width:2])
