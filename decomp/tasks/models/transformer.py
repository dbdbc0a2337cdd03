"""A tiny causal transformer on characters.

References:
  Vaswani et al., 2017, Attention is all you need, arXiv:1706.03762.
  Xiong et al., 2020, On layer normalization in the transformer architecture, arXiv:2002.04745.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from decomp import checks

DTYPES = ('float32', 'bfloat16', 'float16')


class CharTransformer(nn.Module):
  """Causal transformer; see :func:`char_transformer`."""

  vocabulary: int
  width: int
  heads: int
  layers: int
  length: int
  dtype: str = 'float32'

  @nn.compact
  def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
    """Return the logits at every position."""
    length = tokens.shape[1]
    if length > self.length:
      raise ValueError(f"tokens have length {length}: raise the model's length={self.length}")
    start = nn.initializers.normal(0.02)
    positions = self.param('positions', start, (self.length, self.width))[:length]
    x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype, embedding_init=start)(tokens)
    x = x + jnp.broadcast_to(positions, x.shape).astype(x.dtype)
    for _ in range(self.layers):
      x = Layer(self.heads, self.dtype)(x)
    return nn.Dense(self.vocabulary)(nn.LayerNorm()(x.astype(jnp.float32)))


class Layer(nn.Module):
  """Causal self-attention and a perceptron, each after a layer norm and beside a shortcut."""

  heads: int
  dtype: str = 'float32'

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Return the representations [batch, length, width] of the next layer."""
    batch, length, width = x.shape
    mask = nn.make_causal_mask(jnp.ones((batch, length)))
    attend = nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)
    x = x + attend(nn.LayerNorm(dtype=self.dtype)(x), mask=mask)
    hidden = nn.Dense(4 * width, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
    return x + nn.Dense(width, dtype=self.dtype)(nn.gelu(hidden))


def char_transformer(
  vocabulary: int,
  width: int = 64,
  heads: int = 2,
  layers: int = 2,
  length: int = 64,
  dtype: str = 'float32',
) -> nn.Module:
  """Tiny causal transformer (pre-norm, learned positions, no dropout).

  Args:
    vocabulary: Number of tokens.
    width: Size of a token's representation; a multiple of `heads`.
    heads: Attention heads per layer.
    layers: Number of layers.
    length: Longest sequence.
    dtype: What layers compute in, such as 'bfloat16'; parameters and logits stay float32.

  Returns:
    A linen module: tokens [batch, length], integers -> logits [batch, length, vocabulary], where
    the logits at a position depend on the tokens up to it.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> model, tokens = char_transformer(27, width=8), jnp.zeros((2, 16), jnp.int32)
    >>> jax.eval_shape(model.init_with_output, jax.random.key(0), tokens)[0].shape
    (2, 16, 27)
  """
  for name, value in {'vocabulary': vocabulary, 'width': width, 'length': length}.items():
    checks.width(name, value)
  checks.whole('layers', layers, 0, 100)
  if dtype not in DTYPES:
    raise ValueError(f'dtype={dtype!r}: must be one of {", ".join(DTYPES)}')
  if width % checks.whole('heads', heads, 1, width):
    raise ValueError(f'width={width} is not a multiple of heads={heads}: change one of them')
  return CharTransformer(vocabulary, width, heads, layers, length, dtype)
