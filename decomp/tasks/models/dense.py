"""Models without structure: softmax regression and the multi-layer perceptron."""

from collections.abc import Sequence

import flax.linen as nn
import jax

from decomp import checks


class Dense(nn.Module):
  """Dense layers with ReLU between them; see :func:`mlp`."""

  num_classes: int
  hidden: tuple[int, ...]

  @nn.compact
  def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
    """Return the logits of a batch."""
    x = x.reshape(x.shape[0], -1)
    for width in self.hidden:
      x = nn.relu(nn.Dense(width)(x))
    return nn.Dense(self.num_classes)(x)


def softmax_regression(num_classes: int) -> nn.Module:
  """Multinomial logistic regression, a convex problem: logits ``x @ kernel + bias``.

  Args:
    num_classes: Number of logits.

  Returns:
    A linen module: inputs [batch, ...], flattened -> logits [batch, num_classes].

  Example:
    >>> import jax, jax.numpy as jnp
    >>> model, x = softmax_regression(10), jnp.ones((2, 8, 8, 1))
    >>> jax.eval_shape(model.init_with_output, jax.random.key(0), x)[0].shape
    (2, 10)
  """
  return mlp(num_classes, hidden=())


def mlp(num_classes: int, hidden: Sequence[int] = (256,)) -> nn.Module:
  """Multi-layer perceptron with ReLU.

  Args:
    num_classes: Number of logits.
    hidden: Widths of the hidden layers.

  Returns:
    A linen module: inputs [batch, ...], flattened -> logits [batch, num_classes].

  Example:
    >>> import jax, jax.numpy as jnp
    >>> model, x = mlp(10, hidden=(32, 16)), jnp.ones((2, 8, 8, 1))
    >>> jax.eval_shape(model.init_with_output, jax.random.key(0), x)[0].shape
    (2, 10)
  """
  return Dense(checks.width('num_classes', num_classes), checks.widths('hidden', hidden))
