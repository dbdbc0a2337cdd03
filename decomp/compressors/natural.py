"""Powers of two."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from decomp import wire
from decomp.base import Compressor


def natural() -> Compressor:
  """Rounds each magnitude at random to one of the two nearest powers of two.

  Adding 23 random bits to the mantissa of a float32 carries into the exponent with exactly the
  right probability; sign and exponent are then sent. E C(x) = x and α² <= 1/8, whatever the size.

  Returns:
    An unbiased `Compressor` with 9 bits per element and nothing else.

  >>> x = jnp.array([4.0, -0.5, 0.0])
  >>> natural().decode(natural().encode(jax.random.key(0), x), x)
  Array([ 4. , -0.5,  0. ], dtype=float32)

  Reference: Horváth et al., Natural Compression for Distributed Deep Learning, arXiv 1905.10988.
  """

  def encode(key: jax.Array, x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32).reshape(-1)
    word = jax.lax.bitcast_convert_type(x, jnp.uint32)
    dithered = word + (jax.random.bits(key, x.shape, jnp.uint32) >> 9)
    # In NaN and infinity there is no mantissa to round: the carry would run into the sign.
    return wire.pack_bits(jnp.where(jnp.isfinite(x), dithered, word) >> 23, 9)

  def decode(payload: jax.Array, like: Any) -> jax.Array:
    word = wire.unpack_bits(payload, 9, like.size) << 23
    return jax.lax.bitcast_convert_type(word, jnp.float32).reshape(like.shape).astype(like.dtype)

  return Compressor(encode, decode, unbiased=True, alpha2=lambda size: 1 / 8, name='natural()')
