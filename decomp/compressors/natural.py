"""Powers of two."""

import jax
import jax.numpy as jnp

from decomp.base import Compressor
from decomp.compressors.common import coder
from decomp.compressors.rounding import quarters, threefry


def natural() -> Compressor:
  """Rounds each magnitude at random to one of the two nearest powers of two.

  Adding 23 random bits to the mantissa of a float32 carries into the exponent with exactly the
  right probability; sign and exponent are then sent. E C(x) = x and α² <= 1/8, whatever the size,
  for elements up to 2**127: larger ones may round up to infinity.

  Returns:
    An unbiased `Compressor` with 9 bits per element and nothing else.

  >>> x = jnp.array([4.0, -0.5, 0.0])
  >>> natural().decode(natural().encode(jax.random.key(0), x), x)
  Array([ 4. , -0.5,  0. ], dtype=float32)

  Reference: Horváth et al., Natural Compression for Distributed Deep Learning, arXiv 1905.10988.
  """

  def quantize(key: jax.Array, x: jax.Array) -> tuple[list[jax.Array], tuple[()]]:
    word = jax.lax.bitcast_convert_type(x, jnp.uint32)
    dithered = word + (threefry(key, x.size)[0] >> 9)
    # In NaN and infinity there is no mantissa to round: the carry would run into the sign.
    return quarters(jnp.where(jnp.isfinite(x), dithered, word) >> 23), ()

  def dequantize(codes: jax.Array, scale: tuple[()]) -> jax.Array:
    return jax.lax.bitcast_convert_type(codes << 23, jnp.float32)

  facts = {'unbiased': True, 'alpha2': lambda size: 1 / 8, 'name': 'natural()'}
  return coder(quantize, dequantize, 9, **facts)
