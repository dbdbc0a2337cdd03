"""Residual networks for small images.

References:
  He et al., 2016, Deep residual learning for image recognition, arXiv:1512.03385, section 4.2.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from decomp import checks
from decomp.tasks.models.conv import Conv


class ResNet(nn.Module):
  """Residual network for small images; see :func:`resnet`."""

  depth: int
  num_classes: int
  norm: str = 'batch'
  width: int = 16

  @nn.compact
  def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
    """Return the logits of a batch."""
    x = nn.relu(_norm(self.norm, self.width, train)(_conv3x3(self.width)(x)))
    for stage in range(3):
      for block in range((self.depth - 2) // 6):
        stride = 2 if stage > 0 and block == 0 else 1
        x = Block(self.width * 2**stage, stride, self.norm)(x, train)
    return nn.Dense(self.num_classes)(x.mean((1, 2)))


class Block(nn.Module):
  """Two 3x3 convolutions and a shortcut without parameters (option A of the paper)."""

  features: int
  stride: int
  norm: str

  @nn.compact
  def __call__(self, x: jax.Array, train: bool) -> jax.Array:
    """Return a batch's features, changed by a residual."""
    y = _conv3x3(self.features, self.stride)(x)
    y = nn.relu(_norm(self.norm, self.features, train)(y))
    y = _norm(self.norm, self.features, train)(_conv3x3(self.features)(y))
    shortcut = x[:, :: self.stride, :: self.stride]
    new_channels = self.features - x.shape[-1]
    return nn.relu(y + jnp.pad(shortcut, ((0, 0), (0, 0), (0, 0), (0, new_channels))))


def resnet(depth: int, num_classes: int, norm: str = 'batch', width: int = 16) -> nn.Module:
  """Residual network of He et al. for CIFAR-sized images.

  A 3x3 convolution, three stages of ``(depth - 2) / 6`` blocks with ``width``, ``2 width`` and
  ``4 width`` channels, the second and third starting with stride 2, the mean over positions, and
  a dense layer. A block is ``relu(x + norm(conv(relu(norm(conv(x))))))``.

  Args:
    depth: Number of layers with weights, 6 m + 2 for m blocks a stage: 8, 14, 20, 32, ...
    num_classes: Number of logits.
    norm: 'batch' (running statistics, momentum 0.9, in the collection 'batch_stats') or 'group'
      (up to 8 groups, no state; does not suffer from workers with different data).
    width: Channels of the first stage.

  Returns:
    A linen module: images [batch, height, width, channels] -> logits [batch, num_classes].

  Example:
    >>> resnet(14, num_classes=10, norm='group').depth
    14

  References:
    He et al., 2016, Deep residual learning for image recognition, arXiv:1512.03385.
    Hsieh et al., 2020, The non-IID data quagmire of decentralized machine learning,
    arXiv:1910.00189 (batch against group normalization).
  """
  if not checks.is_whole(depth) or not 8 <= depth <= 1202 or depth % 6 != 2:
    raise ValueError(f'depth={depth!r} is not 6 m + 2 with m from 1 to 200: use 8, 14, 20, 32, ...')
  if norm not in ('batch', 'group'):
    raise ValueError(f"norm={norm!r} is unknown: use 'batch' or 'group'")
  return ResNet(depth, checks.width('num_classes', num_classes), norm, checks.width('width', width))


def resnet20(num_classes: int = 10, norm: str = 'batch') -> nn.Module:
  """ResNet-20: 269,722 parameters with 10 classes and RGB images; see :func:`resnet`."""
  return resnet(20, num_classes, norm)


def resnet8(num_classes: int = 10, norm: str = 'batch') -> nn.Module:
  """ResNet-8, a fifth of the work of ResNet-20; see :func:`resnet`."""
  return resnet(8, num_classes, norm)


def _conv3x3(features: int, stride: int = 1) -> Conv:
  # Symmetric padding, unlike 'SAME' with stride 2, centres the outputs on the pixels that the
  # shortcut keeps.
  return Conv(features, strides=(stride, stride), padding=((1, 1), (1, 1)), use_bias=False)


def _norm(name: str, features: int, train: bool) -> nn.Module:
  if name == 'batch':
    return nn.BatchNorm(use_running_average=not train, momentum=0.9)
  return nn.GroupNorm(num_groups=math.gcd(8, features))
