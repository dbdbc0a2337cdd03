"""Whether a value is of the kind that an annotation says, as far as that can be told."""

import collections.abc
import inspect
import types
import typing
from typing import Any

import jax
import numpy as np

from decomp.checks import is_number, is_whole

_UNIONS = (typing.Union, types.UnionType)
_NUMBERS = (float, np.number, np.ndarray, jax.Array)


def fits(value: Any, annotation: Any) -> bool:
  """Whether a value is what an annotation says; True where the annotation says too little.

  True and False are no numbers here, and nothing is a complex one.

  >>> fits(3, float), fits(True, int | None), fits([1, 0.5], collections.abc.Sequence[int])
  (True, False, False)
  """
  origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
  if annotation is None or annotation is type(None):
    return value is None
  if origin in _UNIONS:
    # bool and complex stand beside float in unions that mean any number.
    options = [one for one in inner if one is not bool or float not in inner]
    return any(fits(value, one) for one in options)
  if annotation is complex:
    return False
  if annotation is int:
    return is_whole(value)
  if annotation in _NUMBERS:
    return is_number(value)
  if origin is collections.abc.Callable or annotation is collections.abc.Callable:
    return callable(value)
  if isinstance(origin, type) and issubclass(origin, collections.abc.Mapping):
    known = isinstance(value, origin)
    return known and all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
  if isinstance(origin, type) and issubclass(origin, collections.abc.Sequence):
    known = isinstance(value, list | tuple)
    return known and all(fits(one, inner[0]) for one in value)
  if inspect.isclass(annotation) and annotation not in (Any, inspect.Parameter.empty):
    return getattr(annotation, '_is_protocol', False) or isinstance(value, annotation)
  return True


def words(annotation: Any) -> str:
  """An annotation in words.

  >>> words(collections.abc.Sequence[int] | None)
  'a list of whole numbers or None'
  """
  return ' or '.join(dict.fromkeys(_words(annotation)))


def _words(annotation: Any) -> list[str]:
  origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
  if origin in _UNIONS:
    skipped = (bool, complex) if float in inner else ()
    options = [one for one in inner if one not in skipped]
    found = [word for one in options for word in _words(one)]
    return [one for one in found if one != 'a whole number' or 'a number' not in found]
  if annotation is type(None):
    return ['None']
  if annotation in _NUMBERS:
    return ['a number']
  if annotation in (int, bool, str):
    return [{int: 'a whole number', bool: 'True or False', str: 'a text in quotes'}[annotation]]
  if origin is collections.abc.Callable:
    return ['a schedule']
  if isinstance(origin, type) and issubclass(origin, collections.abc.Mapping):
    return [f'a dictionary from {words(inner[0])} to {words(inner[1])}']
  if isinstance(origin, type) and issubclass(origin, collections.abc.Sequence):
    return [f'a list of {words(inner[0]).removeprefix("a ")}s']
  return [f'a {getattr(annotation, "__name__", annotation)}']
