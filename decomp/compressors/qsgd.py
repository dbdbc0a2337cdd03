"""QSGD: stochastic uniform quantization with the L2 norm as the scale."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from decomp import wire
from decomp.base import Compressor
from decomp.compressors.rounding import check_bits, safe_divide, stochastic_round


class QSGDPayload(NamedTuple):
  """Packed signed levels, and the norm of the leaf."""

  codes: jax.Array
  norm: jax.Array


def qsgd(bits: int) -> Compressor:
  """Rounds |x_i| s / |x|₂ at random to a whole level ξ_i, with s = 2**bits - 1.

    C(x)_i = |x|₂ sign(x_i) ξ_i / s

  E C(x) = x and α² <= min(d/s², √d/s), which grows with the leaf: few elements are anywhere near
  the norm, so most levels go unused. This is the quantizer of the CHOCO-SGD experiments; its
  authors count `bits` per element, and the sign makes it bits + 1 on the wire.

  Args:
    bits: bits of the level, 1 to 16; the sign is one more.

  Returns:
    An unbiased `Compressor` with bits + 1 bits per element and 4 bytes per leaf.

  >>> compressor = qsgd(bits=4)
  >>> x = jnp.array([0.0, 3.0, 0.0, 0.0])
  >>> compressor.decode(compressor.encode(jax.random.key(0), x), x)
  Array([0., 3., 0., 0.], dtype=float32)

  Reference: Alistarh et al., QSGD, arXiv 1610.02132.
  """
  bits = check_bits(bits, 1, 16)
  levels = 2**bits - 1

  def encode(key: jax.Array, x: jax.Array) -> QSGDPayload:
    x = x.astype(jnp.float32)
    # Squares of large or small elements leave the range of float32; those of x / max do not.
    largest = jnp.abs(x).max(initial=0)
    norm = largest * jnp.linalg.norm(safe_divide(x, largest).reshape(-1))
    codes = stochastic_round(key, safe_divide(x, norm) * levels) + levels
    codes = jnp.clip(codes, 0, 2 * levels).astype(jnp.uint32)
    return QSGDPayload(wire.pack_bits(codes, bits + 1), norm)

  def decode(payload: QSGDPayload, like: Any) -> jax.Array:
    codes = wire.unpack_bits(payload.codes, bits + 1, like.size)
    values = (codes.astype(jnp.float32) - levels) * (payload.norm / levels)
    return values.reshape(like.shape).astype(like.dtype)

  def alpha2(size: int) -> float:
    return min(size / levels**2, math.sqrt(size) / levels)

  return Compressor(encode, decode, unbiased=True, alpha2=alpha2, name=f'qsgd(bits={bits})')
