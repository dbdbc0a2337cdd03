"""What a compressor does to real input."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from decomp.base import Compressor, PyTree
from decomp.engine import tree, wire


class Measurement(NamedTuple):
  """Statistics of C on one input x.

  Attributes:
    alpha2: E|C(x) - x|² / |x|², over the draws.
    bias: |E C(x) - x| / |x|. Of an unbiased compressor only sampling noise is left, about
      sqrt(alpha2 / samples).
    bytes_per_element: the bytes of the packed message for each element of x.
  """

  alpha2: float
  bias: float
  bytes_per_element: float


def measure(compressor: Compressor, x: PyTree, key: jax.Array, samples: int = 64) -> Measurement:
  """Compresses `x` (an array or pytree, taken as float32) `samples` times with independent keys.

  >>> from decomp import compressors
  >>> measure(compressors.top_k(0.25), jnp.array([3.0, 4.0, 0.0, 0.0]), jax.random.key(0))
  Measurement(alpha2=0.36, bias=0.6, bytes_per_element=1.25)
  """
  x = jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(jnp.float32), x)
  # Squares of what is divided by the power of two at the largest element stay in range.
  largest = max(float(jnp.abs(leaf).max(initial=0)) for leaf in jax.tree.leaves(x))
  unit = 2.0 ** -min(max(math.frexp(largest)[1], -126), 126)

  @jax.jit
  def run(x: PyTree, keys: jax.Array) -> tuple[PyTree, jax.Array]:
    def draw(total: tuple[PyTree, jax.Array], key: jax.Array) -> tuple[Any, None]:
      error = tree.scale(unit, optax.tree.sub(tree.compress(compressor, key, x).value, x))
      sums, squares = total
      return (optax.tree.add(sums, error), squares + optax.tree.norm(error, squared=True)), None

    return jax.lax.scan(draw, (optax.tree.zeros_like(x), jnp.float32(0)), keys)[0]

  sums, squares = run(x, jax.random.split(key, samples))
  norm = float(optax.tree.norm(tree.scale(unit, x)))
  payload = jax.eval_shape(
    lambda key: [compressor.encode(key, leaf) for leaf in jax.tree.leaves(x)], key
  )
  return Measurement(
    alpha2=_ratio(float(squares) / samples, norm**2),
    bias=_ratio(float(optax.tree.norm(sums)) / samples, norm),
    bytes_per_element=wire.size(payload) / optax.tree.size(x),
  )


def _ratio(part: float, whole: float) -> float:
  return float(f'{part / whole:.6g}') if whole else 0.0
