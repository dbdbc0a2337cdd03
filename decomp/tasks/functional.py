"""Models of any library as pure functions of their parameters."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from decomp.base import PyTree

_MODES = {'train': True, 'training': True, 'deterministic': False}
"""Arguments that tell a model that it is being trained, and the value that does."""


class Functional(NamedTuple):
  """A model as pure functions.

  Attributes:
    name: for the task's name.
    init: (key, inputs) -> (params, model state).
    apply: (params, model state, inputs, train, key) -> (outputs, model state). Whether it is
      training is a Python bool; the key is for what is random then.
  """

  name: str
  init: Callable[[jax.Array, PyTree], tuple[PyTree, PyTree]]
  apply: Callable[[PyTree, PyTree, PyTree, bool, jax.Array | None], tuple[PyTree, PyTree]]


def functional(model: Any) -> Functional:
  """A flax module, or a pair of functions, as pure functions.

  Args:
    model: see `decomp.tasks.from_arrays`.

  Example:
    >>> model = functional((lambda key: jnp.ones(3), lambda params, x: x @ params))
    >>> model.apply(jnp.ones(3), (), jnp.ones((2, 3)), False, None)
    (Array([3., 3.], dtype=float32), ())
  """
  if isinstance(model, nn.Module):
    return _linen(model)
  if isinstance(model, tuple | list) and len(model) == 2 and all(map(callable, model)):
    return _pair(*model)
  from flax import nnx  # here, because few need it and it takes long to import

  if isinstance(model, nnx.Module):
    return _nnx(model, lambda key: model)
  if not callable(model):
    raise ValueError(_wanted(model))
  try:
    abstract = nnx.eval_shape(lambda: model(rngs=nnx.Rngs(0)))
  except TypeError as error:
    raise ValueError(_wanted(model)) from error
  if not isinstance(abstract, nnx.Module):
    raise ValueError(_wanted(model))
  return _nnx(abstract, lambda key: model(rngs=nnx.Rngs(key)))


def _linen(model: nn.Module) -> Functional:
  def init(key: jax.Array, inputs: PyTree) -> tuple[PyTree, PyTree]:
    variables = dict(model.init(key, inputs, **_mode(model, False)))
    return variables.pop('params', {}), variables

  def apply(
    params: PyTree, state: PyTree, inputs: PyTree, train: bool, key: jax.Array | None
  ) -> tuple[PyTree, PyTree]:
    variables, mode = {'params': params, **state}, _mode(model, train)
    if not train:
      return model.apply(variables, inputs, **mode), state
    # One key is for all of a module's random streams, 'dropout' or whatever their names are.
    return model.apply(variables, inputs, **mode, rngs=key, mutable=list(state))

  return Functional(type(model).__name__.lower(), init, apply)


def _nnx(form: Any, make: Callable[[jax.Array], Any]) -> Functional:
  """An nnx module; `form` is one like those that `make` makes of a key.

  Its random streams begin anew in every step, from the step's key: they are not part of its state.
  """
  from flax import nnx

  def split(model: Any) -> Any:
    graph, *states = nnx.split(model, nnx.Param, nnx.RngState, ...)
    return graph, *map(nnx.to_pure_dict, states)

  graph, _, streams, _ = split(form)

  def init(key: jax.Array, inputs: PyTree) -> tuple[PyTree, PyTree]:
    _, params, _, state = split(make(key))
    return params, state

  def apply(
    params: PyTree, state: PyTree, inputs: PyTree, train: bool, key: jax.Array | None
  ) -> tuple[PyTree, PyTree]:
    random = _begun(streams, jax.random.key(0) if key is None else key)
    model = nnx.merge(graph, params, random, state)
    model.train() if train else model.eval()
    outputs = model(inputs, **_mode(model, train))
    return outputs, split(model)[-1]

  return Functional(type(form).__name__.lower(), init, apply)


def _begun(streams: PyTree, key: jax.Array) -> PyTree:
  """Random streams of these shapes at their beginning: a key of its own for each, and count 0."""
  leaves, structure = jax.tree.flatten(streams)
  own = jax.random.split(key, len(leaves)) if leaves else ()
  begun = [
    jax.random.split(one, leaf.shape)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    else jnp.zeros(leaf.shape, leaf.dtype)
    for one, leaf in zip(own, leaves, strict=True)
  ]
  return jax.tree.unflatten(structure, begun)


def _pair(init: Callable[..., PyTree], apply: Callable[..., PyTree]) -> Functional:
  return Functional(
    'functions',
    lambda key, inputs: (init(key), ()),
    lambda params, state, inputs, train, key: (apply(params, inputs), state),
  )


def _mode(model: Any, train: bool) -> dict[str, Any]:
  """What tells a model whether it is being trained; nothing if it does not take that."""
  taken = inspect.signature(type(model).__call__).parameters
  return {name: value == train for name, value in _MODES.items() if name in taken}


def _wanted(model: Any) -> str:
  return (
    f'model={model!r}: must be a flax linen module, an nnx module or what makes one when it is '
    'called with rngs=, or a pair of functions (init, apply)'
  )
