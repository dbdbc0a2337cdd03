"""A tiny causal transformer on characters.

References:
  Vaswani et al., 2017, Attention is all you need, arXiv:1706.03762.
  Xiong et al., 2020, On layer normalization in the transformer architecture, arXiv:2002.04745.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp


class CharTransformer(nn.Module):
  """Causal transformer; see :func:`char_transformer`."""

  vocabulary: int
  width: int
  heads: int
  layers: int
  length: int

  @nn.compact
  def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
    """Return the logits at every position."""
    length = tokens.shape[1]
    if length > self.length:
      raise ValueError(f"tokens have length {length}: raise the model's length={self.length}")
    start = nn.initializers.normal(0.02)
    positions = self.param('positions', start, (self.length, self.width))[:length]
    x = nn.Embed(self.vocabulary, self.width, embedding_init=start)(tokens)
    x = x + jnp.broadcast_to(positions, x.shape)
    for _ in range(self.layers):
      x = Layer(self.heads)(x)
    return nn.Dense(self.vocabulary)(nn.LayerNorm()(x))


class Layer(nn.Module):
  """Causal self-attention and a perceptron, each after a layer norm and beside a shortcut."""

  heads: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Return the representations [batch, length, width] of the next layer."""
    batch, length, width = x.shape
    mask = nn.make_causal_mask(jnp.ones((batch, length)))
    x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), mask=mask)
    hidden = nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x)))
    return x + nn.Dense(width)(hidden)


def char_transformer(
  vocabulary: int, width: int = 64, heads: int = 2, layers: int = 2, length: int = 64
) -> nn.Module:
  """Tiny causal transformer (pre-norm, learned positions, no dropout).

  Args:
    vocabulary: Number of tokens.
    width: Size of a token's representation; a multiple of `heads`.
    heads: Attention heads per layer.
    layers: Number of layers.
    length: Longest sequence.

  Returns:
    A linen module: tokens [batch, length], integers -> logits [batch, length, vocabulary], where
    the logits at a position depend on the tokens up to it.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> model, tokens = char_transformer(27, width=8), jnp.zeros((2, 16), jnp.int32)
    >>> jax.eval_shape(model.init_with_output, jax.random.key(0), tokens)[0].shape
    (2, 16, 27)
  """
  if width % heads:
    raise ValueError(f'width={width} is not a multiple of heads={heads}: change one of them')
  return CharTransformer(vocabulary, width, heads, layers, length)
