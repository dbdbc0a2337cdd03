"""Tasks made of a model, a loss and examples with targets."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decomp import checks
from decomp.base import PyTree
from decomp.engine.cpu import keys
from decomp.tasks import arrays
from decomp.tasks.functional import Functional, functional
from decomp.tasks.records import Records
from decomp.tasks.task import Batch, Task, hold_out

Losses = Callable[[Any, Any], jax.Array]
"""(outputs, targets) -> the loss of each example, or of each of its positions."""


def from_arrays(
  model: Any,
  train: tuple[Any, Any] | Records,
  test: tuple[Any, Any],
  loss: str | Losses = 'cross_entropy',
  *,
  validation: float | tuple[Any, Any] | None = None,
  augment: Callable[[jax.Array, PyTree], PyTree] | None = None,
  name: str = 'arrays',
) -> Task:
  """Your own model on your own data.

  Example:
    >>> import decomp, flax.linen as nn, optax
    >>> x = np.random.default_rng(0).normal(size=(200, 2))
    >>> y = x[:, 0] > x[:, 1]
    >>> task = from_arrays(nn.Dense(2), train=(x[:150], y[:150]), test=(x[150:], y[150:]))
    >>> algorithm = decomp.algorithms.d_psgd(optax.sgd(1.0))
    >>> history = decomp.train(task, algorithm, decomp.topology.ring(2), steps=20, batch_size=8)
    >>> bool(history[-1]['test_accuracy'] > 0.9)
    True

  Args:
    model: one of

      * a flax linen module. Where its `__call__` takes `train`, `training` or `deterministic`, it
        is told whether it is being trained. Variables besides the parameters, such as BatchNorm's
        `batch_stats`, stay with their worker.
      * what makes an nnx module when it is called with `rngs=`, such as the module's class or
        `functools.partial` of it; or such a module, with which runs of all seeds then begin. It is
        switched by `train()` and `eval()`.
      * a pair `(init, apply)` of `init(key) -> params` and `apply(params, x) -> outputs`, with
        params any pytree of floating point arrays.
    train: `(x, y)`, one row for each example: anything that NumPy makes arrays of; x may also be
      a dict of them, in which case the model is called with a dict. What is predicted from itself
      needs targets too: `(x, x)` for an autoencoder, `(text[:, :-1], text[:, 1:])` for a language
      model. Or `Records`, which are read when they are needed.
    test: `(x, y)` of the same form, which rows of metrics are averaged over.
    loss: one of

      * 'cross_entropy': outputs [batch, ..., classes] are logits, y holds labels from 0. The
        metrics are then loss and accuracy, else the loss only.
      * 'squared': the mean of (outputs - y)².
      * a function (outputs, targets) -> the loss of each example, [batch]. Where it is [batch,
        ...], as with sequences, an example's loss is the mean.
    validation: `(x, y)` of the same form, to decide by when to stop or which setting is best; or
      the part of train that `hold_out` takes for it, such as 0.1. None for none.
    augment: (key, x of a batch) -> x, in training only.
    name: of the data, for tables, plots and checkpoints.

  Returns:
    The `Task`, with y as 'label'.
  """
  net, losses = functional(model), _losses(loss)
  held = {
    'train': train.rows([0]) if isinstance(train, Records) else arrays.examples('train', train),
    'test': arrays.examples('test', test),
  }
  part: Any = validation if checks.is_number(validation) else None
  if part is None and validation is not None:
    held['validation'] = arrays.examples('validation', validation)
  outputs = arrays.outputs(lambda key, part: _predict(net, key, part), held['train'])
  for where, found in held.items():
    if loss == 'cross_entropy':
      found['label'] = arrays.labels(f'{where}: y', found['label'], outputs)
    elif loss == 'squared':
      found['label'] = arrays.numbers(f'{where}: y', found['label'], outputs)
    arrays.check_alike(held['train'], where, found)
  arrays.check_losses(losses, outputs, held['train']['label'])
  examples: Mapping[str, Any] = held['train']
  if isinstance(train, Records):
    arrays.check_record(train.rows([0]), held['train'])
    examples = train
  task = supervised(f'{name}/{net.name}', net, examples, held['test'], loss, augment=augment)
  if part is None:
    return task._replace(validation=held.get('validation'))
  try:
    return hold_out(task, part)
  except ValueError as error:
    raise ValueError(f'validation={part!r}: {error}') from error


def supervised(
  name: str,
  model: Functional,
  train: Mapping[str, Any],
  test: Mapping[str, np.ndarray],
  loss: str | Losses = 'cross_entropy',
  normalize: Callable[[PyTree], PyTree] = lambda x: x,
  augment: Callable[[jax.Array, PyTree], PyTree] | None = None,
) -> Task:
  """A model's loss on examples that are in order.

  Args:
    name: of the task.
    model: as pure functions.
    train: 'input', or 'input/NAME' for each array of a dict, and 'label'.
    test: the same.
    loss: as in `from_arrays`.
    normalize: raw inputs -> inputs of the model.
    augment: (key, raw inputs) -> raw inputs, in training only.
  """
  losses = _losses(loss)

  def init(key: jax.Array) -> tuple[PyTree, PyTree]:
    return model.init(key, normalize(_inputs({k: jnp.asarray(x[:1]) for k, x in train.items()})))

  def train_loss(
    params: PyTree, state: PyTree, batch: Batch, key: jax.Array
  ) -> tuple[jax.Array, PyTree]:
    inputs = _inputs(batch) if augment is None else augment(key, _inputs(batch))
    own_key = keys.fold_in(key, 1)  # not the one that augments
    outputs, state = model.apply(params, state, normalize(inputs), True, own_key)
    return losses(outputs, batch['label']).mean(), state

  def predict(params: PyTree, state: PyTree, inputs: PyTree) -> PyTree:
    return model.apply(params, state, normalize(inputs), False, None)[0]

  def evaluate(params: PyTree, state: PyTree, batch: Batch) -> dict[str, jax.Array]:
    outputs = predict(params, state, _inputs(batch))
    found = {'loss': losses(outputs, batch['label'])}
    if loss == 'cross_entropy':
      found['accuracy'] = (outputs.argmax(-1) == batch['label']).astype(jnp.float32)
    # The mean over the positions of a sequence, where there are any.
    return {name: values.reshape(len(values), -1).mean(1) for name, values in found.items()}

  return Task(name, init, train_loss, evaluate, train, test, predict=predict)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  exact = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
  return optax.softmax_cross_entropy_with_integer_labels(exact, labels)


def _squared(outputs: jax.Array, targets: jax.Array) -> jax.Array:
  return (outputs.astype(targets.dtype) - targets) ** 2


_LOSSES: dict[str, Losses] = {'cross_entropy': _cross_entropy, 'squared': _squared}


def _losses(loss: str | Losses) -> Losses:
  if callable(loss):
    return loss
  if loss not in _LOSSES:
    raise ValueError(
      f'loss={loss!r}: must be {", ".join(map(repr, _LOSSES))}, or a function (outputs, targets) '
      '-> the loss of each example'
    )
  return _LOSSES[loss]


def _predict(model: Functional, key: jax.Array, batch: Mapping[str, Any]) -> PyTree:
  """The outputs of a model that has just begun."""
  return model.apply(*model.init(key, _inputs(batch)), _inputs(batch), False, None)[0]


def _inputs(batch: Mapping[str, Any]) -> PyTree:
  """What the model is called with: an array, or a dict of them."""
  if 'input' in batch:
    return batch['input']
  return {k.removeprefix('input/'): x for k, x in batch.items() if k != 'label'}
