"""Bandwidths and seconds from texts such as '100Mbps' and '5ms'."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

BANDWIDTHS = {'bps': 1.0, 'kbps': 1e3, 'Mbps': 1e6, 'Gbps': 1e9, 'Tbps': 1e12}
"""Bits, not bytes, per second."""
SECONDS = {'s': 1.0, 'ms': 1e-3, 'us': 1e-6, 'ns': 1e-9}


def quantity(argument: str, value: Any, units: Mapping[str, float]) -> Any:
  """A text with a unit, or a number or array in the base unit, as float(s)."""
  if not isinstance(value, str):
    try:
      numbers = np.asarray(value)
    except ValueError:  # rows of different lengths
      numbers = np.asarray(None)
    if numbers.dtype.kind not in 'iuf':
      raise ValueError(f'{argument}={value!r}: {_right(units)}, or a number')
    return float(numbers) if numbers.ndim == 0 else numbers.astype(float)
  found = re.fullmatch(r'\s*([\d.]+(?:e[+-]?\d+)?)\s*([a-zA-Z/]*)\s*', value)
  try:
    return float(found[1]) * units[found[2]]  # type: ignore[index]
  except (TypeError, ValueError, KeyError):
    raise ValueError(f'{argument}={value!r}: {_right(units)}') from None


def _right(units: Mapping[str, float]) -> str:
  return f"must be a number and one of the units {', '.join(units)}, such as '5{list(units)[2]}'"


def seconds(argument: str, value: Any) -> Any:
  """A time, or an array of them, that is finite and not negative."""
  found = quantity(argument, value, SECONDS)
  if not (np.isfinite(found) & (np.asarray(found) >= 0)).all():
    raise ValueError(f'{argument}={value!r}: must be finite and at least 0')
  return found


def above_zero(argument: str, value: Any) -> Any:
  """The value itself, a bandwidth or an array of them."""
  if not (np.asarray(value) > 0).all():
    raise ValueError(f'{argument}={value!r}: must be above 0 bits per second, such as 100Mbps')
  return value
