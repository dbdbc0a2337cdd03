"""Stochastic rounding, and the checks that the quantizers share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def stochastic_round(key: jax.Array, x: jax.Array) -> jax.Array:
  """Rounds each element up with the probability of its fractional part, else down: E round(x) = x.

  The dither has 16 bits, two elements to a word of the generator: random bits are by far the
  largest cost of a quantizer. The bias this leaves is at most 2**-17 of the distance between two
  integers, and integers stay what they are.
  """
  low = jnp.floor(x)
  return low + (_dither(key, x.shape) < x - low).astype(x.dtype)


def _dither(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Uniform numbers (k + 1/2) / 2**16."""
  size = 1
  for extent in shape:
    size *= extent
  words = jax.random.bits(key, ((size + 1) // 2,), jnp.uint32)
  halves = jnp.concatenate([words & 0xFFFF, words >> 16])[:size]
  return ((halves.astype(jnp.float32) + 0.5) * 2.0**-16).reshape(shape)


def safe_divide(x: jax.Array, scale: jax.Array) -> jax.Array:
  """x / scale, and 0 where the scale is 0 or too small to divide by."""
  usable = ~(scale < jnp.finfo(jnp.float32).tiny)
  return jnp.where(usable, x / jnp.where(usable, scale, 1), 0)


def is_whole(value: Any) -> bool:
  """Whether it is a whole number, of Python's or NumPy's."""
  return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_bits(value: Any, least: int, most: int) -> int:
  """`bits` as an int, or a ValueError that says what is allowed."""
  if not is_whole(value) or not least <= value <= most:
    raise ValueError(f'bits={value!r}: must be a whole number from {least} to {most}')
  return int(value)


def check_fraction(value: Any) -> float:
  """`fraction` as a float, or a ValueError that says what is allowed."""
  number = isinstance(value, int | float | np.floating) and not isinstance(value, bool)
  if not number or not 0 < value <= 1:
    raise ValueError(f'fraction={value!r}: must be above 0 and at most 1, such as 0.01 for 1 %')
  return float(value)


def kept(size: int, fraction: float) -> int:
  """How many of `size` elements a sparsifier keeps: the nearest whole number, at least one."""
  return min(size, max(1, round(fraction * size)))
