"""Floating point numbers of a few bits."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Minifloat(NamedTuple):
  """Magnitudes 0 = v_0 < v_1 < ..., of which every 2**mantissa ones are twice as far apart.

  Their codes count them, which is also their exponent above their mantissa. The first
  2**(mantissa + 1) are multiples of 2**(least - mantissa).

  Attributes:
    mantissa: bits of it.
    least: exponent of the numbers from which on spacing grows.
    top: code of the largest.

  >>> Minifloat(mantissa=1, least=0, top=7).value(jnp.arange(8))
  Array([0. , 0.5, 1. , 1.5, 2. , 3. , 4. , 6. ], dtype=float32)
  """

  mantissa: int
  least: int
  top: int

  def code(self, x: jax.Array, whole: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The code of a neighbour of x >= 0, int32; that of the largest beyond it.

    Args:
      x: float32.
      whole: rounds numbers from 0 to 2**(mantissa + 1) to whole ones: to the nearest, say.

    Between two neighbours, `whole` gets a number as far along between two whole ones.
    """
    exponent = jnp.maximum((bits_of(x) >> 23) - 127, self.least)
    place = whole(x * power_of_two(self.mantissa - exponent)).astype(jnp.int32)
    return jnp.minimum(place + ((exponent - self.least) << self.mantissa), self.top)

  def value(self, code: jax.Array) -> jax.Array:
    """The magnitude that a code stands for, float32."""
    code = code.astype(jnp.int32)
    steps = jnp.maximum((code >> self.mantissa) - 1, 0)  # how often spacing has doubled
    place = (code - (steps << self.mantissa)).astype(jnp.float32)
    return place * power_of_two(steps + self.least - self.mantissa)

  @property
  def largest(self) -> float:
    """The magnitude of the code `top`."""
    steps = (self.top >> self.mantissa) - 1
    return math.ldexp(self.top - (steps << self.mantissa), steps + self.least - self.mantissa)

  @property
  def power(self) -> float:
    """The largest power of two among the magnitudes."""
    return math.ldexp(1, (self.top >> self.mantissa) - 1 + self.least)


def power_of_two(exponent: jax.Array) -> jax.Array:
  """2.0**exponent, float32, for whole exponents from -126 to 127."""
  return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def bits_of(x: jax.Array) -> jax.Array:
  """The bits of a float32 as an int32."""
  return jax.lax.bitcast_convert_type(x, jnp.int32)


E4M3 = Minifloat(mantissa=3, least=-6, top=126)
E5M2 = Minifloat(mantissa=2, least=-14, top=123)
E2M3 = Minifloat(mantissa=3, least=0, top=31)
E3M2 = Minifloat(mantissa=2, least=-2, top=31)
E2M1 = Minifloat(mantissa=1, least=0, top=7)
E3M0 = Minifloat(mantissa=0, least=-6, top=7)
