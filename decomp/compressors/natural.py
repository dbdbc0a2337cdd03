"""Powers of two."""

from typing import Any

import jax
import jax.numpy as jnp

from decomp.base import Compressor
from decomp.compressors.common import coder


def natural() -> Compressor:
  """Rounds each magnitude at random to one of the two nearest powers of two.

  Adding 16 random bits to the mantissa of a float32 carries into the exponent with the right
  probability, up to 2**-17; sign and exponent are then sent. E C(x) = x and α² <= 1/8, whatever
  the size, for elements up to 2**127: larger ones may round up to infinity.

  Returns:
    An unbiased `Compressor` with 9 bits per element and nothing else.

  >>> x = jnp.array([4.0, -0.5, 0.0])
  >>> natural().decode(natural().encode(jax.random.key(0), x), x)
  Array([ 4. , -0.5,  0. ], dtype=float32)

  Reference: Horváth et al., Natural Compression for Distributed Deep Learning, arXiv 1905.10988.
  """

  def quantize(x: jax.Array) -> tuple[jax.Array, tuple[()]]:
    return x, ()

  def code(x: jax.Array, draws: jax.Array) -> jax.Array:
    word = jax.lax.bitcast_convert_type(x, jnp.int32)
    # The mantissa rounded to 16 bits (+64), and as many random ones.
    dithered = jax.lax.shift_right_logical(word + 64 + (draws << 7), 23)
    # In NaN and infinity there is no mantissa to round: the carry would run into the sign.
    return jnp.where(jnp.isfinite(x), dithered, jax.lax.shift_right_logical(word, 23))

  def dequantize(codes: jax.Array, scale: tuple[()]) -> jax.Array:
    return jax.lax.bitcast_convert_type(codes.astype(jnp.uint32) << 23, jnp.float32)

  facts: dict[str, Any] = {'unbiased': True, 'alpha2': lambda size: 1 / 8, 'name': 'natural()'}
  return coder(quantize, code, dequantize, 9, **facts)
