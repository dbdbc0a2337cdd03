"""Whether a number can be what it is given as; if not, one sentence says what would be right."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

MOST_SEED = 2**31 - 1
"""Beyond it JAX, which has 32 bits for a seed, would take two different ones for the same."""


def is_whole(value: Any) -> bool:
  """Whether it is a whole number, of Python's or NumPy's."""
  return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
  """Whether it is a real number, of Python's, NumPy's or JAX's, traced or not."""
  if isinstance(value, np.generic | np.ndarray | jax.Array):
    return value.ndim == 0 and np.dtype(value.dtype).kind in 'iuf'
  return isinstance(value, int | float) and not isinstance(value, bool)


def whole(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
  """A whole number in a range, as an int.

  >>> whole('bits', 9, 1, 8)
  Traceback (most recent call last):
  ValueError: bits=9: must be a whole number from 1 to 8

  Args:
    name: of the argument, for the sentence.
    value: what was given for it.
    least: the least value that is allowed.
    most: the largest; None for no limit.
  """
  if not is_whole(value) or value < least or (most is not None and value > most):
    allowed = f'of at least {least}' if most is None else f'from {least} to {most}'
    raise ValueError(f'{name}={value!r}: must be a whole number {allowed}')
  return int(value)


def real(name: str, value: Any, least: float = 0.0, most: float = math.inf) -> float:
  """A finite number in a range, as a float.

  >>> real('noise', -1)
  Traceback (most recent call last):
  ValueError: noise=-1: must be a number of at least 0
  """
  # Compared as Python compares: a whole number may be too large for a float.
  if not is_number(value) or not (least <= value <= most and -math.inf < value < math.inf):
    allowed = f'of at least {least:g}' if most == math.inf else f'from {least:g} to {most:g}'
    raise ValueError(f'{name}={value!r}: must be a number {allowed}')
  try:
    return float(value)
  except OverflowError:
    raise ValueError(f'{name}={value!r}: must be a number below 1e308') from None


def width(name: str, value: Any) -> int:
  """The width of a layer of a model, as an int."""
  return whole(name, value, 1, 2**20)


def widths(name: str, values: Any) -> tuple[int, ...]:
  """The widths of some layers, as a tuple.

  >>> widths('hidden', [32, 0])
  Traceback (most recent call last):
  ValueError: hidden[1]=0: must be a whole number from 1 to 1048576
  """
  if isinstance(values, str) or not isinstance(values, Sequence) or len(values) > 100:
    raise ValueError(f'{name}={values!r}: must be up to 100 whole numbers, such as (64, 32)')
  return tuple(width(f'{name}[{k}]', value) for k, value in enumerate(values))


def seed(value: Any, name: str = 'seed') -> int:
  """A seed, as an int."""
  return whole(name, value, 0, MOST_SEED)
