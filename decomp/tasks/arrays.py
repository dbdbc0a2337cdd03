"""A user's arrays as devices will have them, or a sentence that says what is wrong with them."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decomp.base import PyTree

Arrays = dict[str, np.ndarray]
"""'input', or 'input/NAME' for each array of a dict, and 'label'."""

_EXAMPLES = 3
"""How many examples a model is shown to see its outputs' shape."""


def examples(where: str, pair: Any) -> Arrays:
  """The arrays of `train=(x, y)`, `test=(x, y)` or `validation=(x, y)`."""
  if not isinstance(pair, tuple | list) or len(pair) != 2:
    raise ValueError(f'{where}={type(pair).__name__}: must be a pair of arrays, (x, y)')
  x, y = pair
  if y is None:
    raise ValueError(
      f'{where}=(x, None): must have targets, such as (x, x) for an autoencoder or '
      '(text[:, :-1], text[:, 1:]) for a language model'
    )
  parts = {f'input/{key}': part for key, part in x.items()} if isinstance(x, Mapping) else {}
  named = {**(parts or {'input': x}), 'label': y}
  arrays = {key: _array(_name(where, key), values) for key, values in named.items()}
  count = len(arrays['label'])
  for key, values in arrays.items():
    if len(values) != count:
      raise ValueError(
        f'{_name(where, key)} has {len(values)} examples, but y has {count}: must be as many'
      )
  return arrays


def _name(where: str, key: str) -> str:
  """How an array is called in a sentence.

  >>> _name('train', 'input'), _name('test', 'input/age'), _name('test', 'label')
  ('train: x', "test: x['age']", 'test: y')
  """
  of, _, part = key.partition('/')
  return f'{where}: {"y" if of == "label" else "x"}' + (f'[{part!r}]' if part else '')


def _array(name: str, values: Any) -> np.ndarray:
  """The values as devices will have them: float32 for float64, int32 for int64."""
  try:
    array = np.asarray(values)
  except ValueError as error:  # a list whose rows differ in length
    raise ValueError(f'{name} must be an array: {error}') from error
  kinds = jnp.number, jnp.bool_
  if array.ndim == 0 or not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
    raise ValueError(
      f'{name} is {array.dtype} of shape {array.shape}: must be numbers or booleans with an axis '
      'of examples'
    )
  if not array.size:
    raise ValueError(f'{name} has shape {array.shape}: must not be empty')
  with np.errstate(over='ignore'):
    held = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
  if held.dtype != array.dtype and array.dtype.kind in 'iu':
    limits = np.iinfo(held.dtype)
    if array.min() < limits.min or array.max() > limits.max:
      raise ValueError(
        f'{name} holds whole numbers from {array.min()} to {array.max()}: must fit {held.dtype}'
      )
  if not jnp.issubdtype(held.dtype, jnp.inexact):
    return held
  bad = np.flatnonzero(~np.isfinite(held.reshape(len(held), -1)).all(1))
  if bad.size:
    raise ValueError(
      f'{name} holds NaN or infinite values in {bad.size} of {len(held)} examples, number {bad[0]} '
      f'the first: must be finite in {held.dtype}'
    )
  return held


def outputs(predict: Callable[[jax.Array, Arrays], PyTree], examples: Arrays) -> PyTree:
  """The dtypes and shapes of a model's outputs for `_EXAMPLES` examples."""
  some = {
    key: jax.ShapeDtypeStruct((_EXAMPLES, *x.shape[1:]), x.dtype) for key, x in examples.items()
  }
  return jax.eval_shape(predict, jax.eval_shape(lambda: jax.random.key(0)), some)


def labels(name: str, y: np.ndarray, outputs: Any) -> np.ndarray:
  """Labels as int32 of the shape that the logits want."""
  _check_outputs(outputs, 2, "loss='cross_entropy' needs logits of shape [examples, ..., classes]")
  classes = outputs.shape[-1]
  if y.shape[1:] == outputs.shape[1:]:
    raise ValueError(
      f'{name} has shape {y.shape}, that of the outputs: must be labels, such as y.argmax(-1) if '
      'these are one-hot'
    )
  y = _shaped(name, y, outputs.shape[1:-1], outputs)
  least, most = int(np.floor(y.min())), int(np.ceil(y.max()))
  if least < 0 or most >= classes:
    raise ValueError(
      f'{name} holds labels from {least} to {most}: must be from 0 to {classes - 1}, since the '
      f'model gives {classes} logits'
    )
  whole = y.astype(np.int32, copy=False)
  if (whole != y).any():
    raise ValueError(
      f'{name} holds {y[whole != y][0]}: labels must be whole numbers; to predict numbers use '
      "loss='squared'"
    )
  return whole


def numbers(name: str, y: np.ndarray, outputs: Any) -> np.ndarray:
  """Targets in the shape of the outputs, in float32 at least."""
  _check_outputs(outputs, 1, "loss='squared' needs one array of predictions")
  return _shaped(name, y, outputs.shape[1:], outputs).astype(
    jnp.promote_types(outputs.dtype, jnp.float32), copy=False
  )


def _check_outputs(outputs: Any, least: int, wanted: str) -> None:
  if not _has_rows(outputs) or len(outputs.shape) < least:
    raise ValueError(f'model gives {_shown(outputs)} for {_EXAMPLES} examples: {wanted}')


def _has_rows(found: Any) -> bool:
  """Whether this is one array of floating point numbers with a row for each example."""
  return (
    isinstance(found, jax.ShapeDtypeStruct)
    and found.shape[:1] == (_EXAMPLES,)
    and jnp.issubdtype(found.dtype, jnp.floating)
  )


def _shaped(name: str, y: np.ndarray, shape: tuple[int, ...], outputs: Any) -> np.ndarray:
  """Targets [examples, *shape]; axes of one element at the end don't matter."""

  def essence(shape: tuple[int, ...]) -> tuple[int, ...]:
    while shape[-1:] == (1,):
      shape = shape[:-1]
    return shape

  if essence(y.shape[1:]) != essence(shape):
    raise ValueError(
      f'{name} has shape {y.shape}: must be {(len(y), *shape)}, since the model gives '
      f'{_shown(outputs)} for {_EXAMPLES} examples'
    )
  return y.reshape(len(y), *shape)


def check_alike(train: Arrays, where: str, found: Arrays) -> None:
  """Whether examples for tests or validation look like those for training."""
  if train.keys() != found.keys():
    raise ValueError(
      f'{where}: x has {", ".join(found)}: must have the arrays of train, {", ".join(train)}'
    )
  for key, values in found.items():
    there, here = ((*x.shape[1:], x.dtype.name) for x in (train[key], values))
    if there != here:
      raise ValueError(
        f'{_name(where, key)} is {values.dtype} with examples of shape {values.shape[1:]}: must '
        f'be {train[key].dtype} with {train[key].shape[1:]}, as in train'
      )


def check_record(read: Arrays, wanted: Arrays) -> None:
  """Whether a record has its target in the form that the loss wants, since nothing converts it."""
  there, here = read['label'], wanted['label']
  if (there.dtype, there.shape) != (here.dtype, here.shape):
    raise ValueError(
      f'train: y of a record is {there.dtype} of shape {there.shape[1:]}: must be {here.dtype} of '
      f'shape {here.shape[1:]}'
    )


def check_losses(losses: Callable[..., Any], outputs: PyTree, targets: np.ndarray) -> None:
  """Whether there is a loss for each example."""
  some = jax.ShapeDtypeStruct((_EXAMPLES, *targets.shape[1:]), targets.dtype)
  found = jax.eval_shape(losses, outputs, some)
  if not _has_rows(found):
    raise ValueError(
      f'loss gives {_shown(found)} for {_EXAMPLES} examples: must give a loss for each, of shape '
      f'({_EXAMPLES},)'
    )


def _shown(tree: PyTree) -> str:
  """Dtypes and shapes in a sentence.

  >>> _shown(jax.ShapeDtypeStruct((3, 2), 'float32'))
  'float32[3, 2]'
  """
  return str(jax.tree.map(lambda x: f'{x.dtype}{list(x.shape)}', tree))
