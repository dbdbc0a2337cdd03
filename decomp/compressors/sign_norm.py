"""Signs and one magnitude."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from decomp import wire
from decomp.base import Compressor
from decomp.compressors.rounding import safe_divide


class Signs(NamedTuple):
  """One bit for each element, and the mean magnitude."""

  signs: jax.Array
  magnitude: jax.Array


def sign_norm() -> Compressor:
  """C(x) = (|x|₁ / d) sign(x): one bit per element.

  Biased. Contractive with δ = |x|₁² / (d |x|₂²): 2/π for Gaussian input, 1/d at worst.

  Returns:
    A `Compressor` with 1 bit per element and 4 bytes per leaf.

  >>> x = jnp.array([1.0, -3.0])
  >>> sign_norm().decode(sign_norm().encode(jax.random.key(0), x), x)
  Array([ 2., -2.], dtype=float32)

  Reference: Karimireddy et al., Error Feedback Fixes SignSGD, arXiv 1901.09847.
  """

  def encode(key: jax.Array, x: jax.Array) -> Signs:
    del key  # deterministic
    x = x.astype(jnp.float32)
    # Sums of large or small elements leave the range of float32; those of x / max do not.
    largest = jnp.abs(x).max(initial=0)
    magnitude = largest * (jnp.abs(safe_divide(x, largest)).sum() / max(1, x.size))
    return Signs(wire.pack_bits((x >= 0).astype(jnp.uint8), 1), magnitude)

  def decode(payload: Signs, like: Any) -> jax.Array:
    bits = wire.unpack_bits(payload.signs, 1, like.size)
    values = (2 * bits.astype(jnp.float32) - 1) * payload.magnitude
    return values.reshape(like.shape).astype(like.dtype)

  return Compressor(encode, decode, False, delta=lambda size: 1 / max(1, size), name='sign_norm()')
