"""Objects from the text of a flag: ``stochastic_quantizer(bits=4)``, without ``eval``.

A spec is ``name`` or ``name(literal, key=literal, ...)``; an argument may be a spec itself, as in
``choco_sgd(compressor=top_k(0.01), consensus_rate=0.1)``. Names are looked up in the namespaces
the program offers, so a spec can call nothing else.
"""

import ast
import difflib
import functools
import inspect
import math
import sys
import traceback
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from decomp import algorithms as _algorithms
from decomp import checks, kinds

__all__ = ['Call', 'Namespace', 'algorithms', 'build', 'check_optimizer', 'optimizers', 'parse']

Namespace = ModuleType | Mapping[str, Callable[..., Any]]

_OPTIMIZERS = (
  'adabelief',
  'adadelta',
  'adafactor',
  'adagrad',
  'adam',
  'adamax',
  'adamw',
  'adan',
  'amsgrad',
  'lamb',
  'lars',
  'lion',
  'nadam',
  'nadamw',
  'novograd',
  'radam',
  'rmsprop',
  'rprop',
  'sgd',
  'sign_sgd',
  'yogi',
)
_TRANSFORMATIONS = ('add_decayed_weights', 'chain', 'clip', 'clip_by_global_norm')
_SCHEDULES = (
  'constant_schedule',
  'cosine_decay_schedule',
  'cosine_onecycle_schedule',
  'exponential_decay',
  'linear_onecycle_schedule',
  'linear_schedule',
  'piecewise_constant_schedule',
  'piecewise_interpolate_schedule',
  'polynomial_schedule',
  'warmup_constant_schedule',
  'warmup_cosine_decay_schedule',
  'warmup_exponential_decay_schedule',
)


_BELOW_1 = ('b1', 'b2', 'b3', 'decay', 'momentum', 'rho')
_NOT_NEGATIVE = ('eps', 'eps_root', 'max_delta', 'max_norm', 'weight_decay', 'weight_decay_rate')
"""Arguments of optax, which takes any number there."""


class Call(NamedTuple):
  """A parsed spec.

  Attributes:
    name: What is called.
    args: Positional arguments, literals or nested calls.
    kwargs: Keyword arguments, likewise.
  """

  name: str
  args: tuple[Any, ...]
  kwargs: dict[str, Any]


def parse(text: str) -> Call:
  """Reads a spec; nothing is looked up or called.

  Example:
    >>> parse('top_k(0.01)')
    Call(name='top_k', args=(0.01,), kwargs={})
    >>> parse('sgd(linear_schedule(1, 0, 100), momentum=0.9)').args
    (Call(name='linear_schedule', args=(1, 0, 100), kwargs={}),)

  Args:
    text: ``name`` or ``name(argument, key=argument, ...)``.

  Returns:
    The call. A bare name is a call without arguments.

  Raises:
    ValueError: If the text is anything else.
  """
  # ast.parse takes leading blanks for an indentation.
  text = text.strip()
  try:
    tree = ast.parse(text, mode='eval')
  except SyntaxError as error:
    position = error.offset or 0
    raise ValueError(f'cannot read {text!r} at position {position}: {error.msg}') from None
  except (ValueError, MemoryError, RecursionError) as error:  # null bytes; too deeply nested
    raise ValueError(f'cannot read {text!r}: {error or "too deeply nested"}') from None
  call = _argument(tree.body, text)
  if not isinstance(call, Call):
    raise ValueError(f'{text!r} is not of the form name or name(argument, key=argument)')
  return call


def build(
  text: str, namespace: Namespace | Sequence[Namespace], /, *, kind: str = 'name', **extra: Any
) -> Any:
  """Reads a spec and makes its object.

  Example:
    >>> build('sgd(0.1, momentum=0.9)', optimizers(), kind='optimizer').init([])
    (TraceState(trace=[]), EmptyState())
    >>> build('sdg(0.1)', {'sgd': optax.sgd, 'lion': optax.lion}, kind='optimizer')
    Traceback (most recent call last):
    ValueError: unknown optimizer 'sdg'; did you mean 'sgd'? Known: lion, sgd

  Args:
    text: The spec, see `parse`.
    namespace: Where names are looked up: a module (its ``__all__``) or a mapping. Of a sequence,
      the first namespace must hold the spec's own name, and nested names are searched in all of
      them in order: ``(algorithms, compressors)``.
    kind: What the spec stands for, to name it in errors.
    **extra: Keyword arguments for the outermost call, each used only if the spec does not give
      that argument and the callable has a parameter of that name.

  Returns:
    What the named callable returns.

  Raises:
    ValueError: If the text cannot be read, a name is unknown, or arguments do not fit: those that
      are not of the kind their annotation says, and whatever else the callable stumbles over.
  """
  call = parse(text)
  parts = (namespace,) if isinstance(namespace, ModuleType | Mapping) else namespace
  tables = [_table(part) for part in parts]
  return _apply(_look_up(call.name, tables[0], kind), call, ChainMap(*tables), extra)


def algorithms(optimizer: optax.GradientTransformation) -> dict[str, Callable[..., Any]]:
  """Returns the namespace for algorithms: those of decomp, each with its optimizer given."""
  return {name: functools.partial(make, optimizer) for name, make in _table(_algorithms).items()}


def optimizers() -> dict[str, Callable[..., Any]]:
  """Returns the namespace for optimizers: those of optax, its schedules, chain and clipping."""
  return {name: getattr(optax, name) for name in _OPTIMIZERS + _TRANSFORMATIONS + _SCHEDULES}


def check_optimizer(optimizer: Any) -> None:
  """Whether an optimizer takes a step, and not up the gradient.

  optax looks at its arguments when it uses them, and takes a clipping or a learning rate below 0
  for an optimizer like any other.

  >>> check_optimizer(optax.clip(1.0))
  Traceback (most recent call last):
  ValueError: its first step goes up the gradient or is not finite: it needs a part such as sgd(0.1)

  Raises:
    ValueError: If it is none, or does not.
  """
  if not isinstance(optimizer, optax.GradientTransformation):
    raise ValueError(f'{optimizer!r} is no optimizer: it needs a part such as sgd(0.1)')
  one = jnp.ones(1)
  try:
    with jax.ensure_compile_time_eval():
      updates, _ = optimizer.update(one, optimizer.init(one), one)
      step = updates[0]
      if isinstance(step, jax.core.Tracer):  # a number of a sweep, which are looked at one by one
        return
      down = math.isfinite(step) and step <= 0
  except Exception as error:
    reason = f'{type(error).__name__}: {error}'.splitlines()[0]
    raise ValueError(f'it cannot take a step ({reason})') from error
  if not down:
    raise ValueError(
      'its first step goes up the gradient or is not finite: it needs a part such as sgd(0.1)'
    )


def _argument(node: ast.expr, text: str) -> Any:
  """Turns the syntax of an argument into a literal or a `Call`."""
  if isinstance(node, ast.Name):
    return Call(node.id, (), {})
  if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
    args = tuple(_argument(arg, text) for arg in node.args)
    return Call(node.func.id, args, _keywords(node, text))
  try:
    return ast.literal_eval(node)
  except (ValueError, TypeError, MemoryError, RecursionError):
    raise _forbidden(ast.get_source_segment(text, node), text) from None


def _keywords(node: ast.Call, text: str) -> dict[str, Any]:
  kwargs: dict[str, Any] = {}
  for keyword in node.keywords:
    if keyword.arg is None:
      raise _forbidden(ast.get_source_segment(text, keyword), text)
    # The compiler would find repeated keywords, the parser does not.
    if keyword.arg in kwargs:
      raise ValueError(f'argument {keyword.arg!r} is given twice in {text!r}')
    kwargs[keyword.arg] = _argument(keyword.value, text)
  return kwargs


def _forbidden(part: str | None, text: str) -> ValueError:
  return ValueError(
    f"{part!r} in {text!r} is not allowed: arguments are only literals, such as 0.1, 'text' "
    'or (1, 2), and calls of known names'
  )


def _table(namespace: Namespace) -> dict[str, Callable[..., Any]]:
  if isinstance(namespace, ModuleType):
    return {name: getattr(namespace, name) for name in namespace.__all__}
  return dict(namespace)


def _look_up(name: str, table: Mapping[str, Callable[..., Any]], kind: str) -> Callable[..., Any]:
  if name in table:
    return table[name]
  # 'dcd' is not close to 'dcd_psgd', but what it begins with.
  close = difflib.get_close_matches(name, table, n=1) or [k for k in table if k.startswith(name)]
  hint = f'; did you mean {close[0]!r}?' if close else '.'
  raise ValueError(f'unknown {kind} {name!r}{hint} Known: {", ".join(sorted(table))}')


def _apply(
  function: Callable[..., Any],
  call: Call,
  table: Mapping[str, Callable[..., Any]],
  extra: Mapping[str, Any],
) -> Any:
  """Calls `function` with the call's arguments, nested specs built first."""
  args = [_value(arg, table) for arg in call.args]
  kwargs = {key: _value(arg, table) for key, arg in call.kwargs.items()}
  signature = _signature(function)
  shown = f'{call.name}{_without_annotations(signature)}'
  try:
    given = signature.bind_partial(*args, **kwargs).arguments
    missing = {k: v for k, v in extra.items() if k in signature.parameters and k not in given}
    bound = signature.bind(*args, **kwargs, **missing)
  except TypeError as error:
    raise ValueError(f'{call.name}: {error}; its signature is {shown}') from None
  _check_kinds(call.name, signature, bound.arguments)
  package = getattr(function, 'func', function).__module__.partition('.')[0]
  if package == 'optax':
    _check_ranges(call.name, bound.arguments)
  try:
    return function(*bound.args, **bound.kwargs)
  except (OSError, Warning):  # warnings are raised for those who want them to be
    raise
  except Exception as error:
    if isinstance(error, ValueError) and package != 'optax' and _raised_in(package, error):
      raise  # it was made to be read
    reason = f'{type(error).__name__}: {error}'.splitlines()[0]
    raise ValueError(f'{call.name} cannot use its arguments ({reason}); see {shown}') from error


def _value(argument: Any, table: Mapping[str, Callable[..., Any]]) -> Any:
  if isinstance(argument, Call):
    return _apply(_look_up(argument.name, table, 'name'), argument, table, {})
  return argument


def _check_kinds(name: str, signature: inspect.Signature, values: Mapping[str, Any]) -> None:
  """Whether values are of the kinds that the parameters' annotations say."""
  for key, value in values.items():
    parameter = signature.parameters[key]
    several = parameter.kind is parameter.VAR_POSITIONAL
    for one in value if several else [value]:
      if parameter.default is not one and not kinds.fits(one, parameter.annotation):
        wanted = kinds.words(parameter.annotation)
        shown = ' '.join(repr(one).split())  # a flax module shows itself in several lines
        raise ValueError(f'{name}: {key}={shown} must be {wanted}')


def _raised_in(package: str, error: Exception) -> bool:
  """Whether an error comes from a package itself, and not from what that calls."""
  *_, (frame, _) = traceback.walk_tb(error.__traceback__)
  return frame.f_globals['__name__'].partition('.')[0] == package


def _check_ranges(name: str, values: Mapping[str, Any]) -> None:
  """Whether the numbers of an optimizer are in their ranges."""
  for key, value in values.items():
    if not checks.is_number(value) or isinstance(value, jax.core.Tracer):
      continue
    most = 0.999999 if key in _BELOW_1 else sys.float_info.max
    least = 0.0 if key in _BELOW_1 + _NOT_NEGATIVE else -sys.float_info.max
    if not least <= value <= most:
      allowed = 'from 0 to below 1' if key in _BELOW_1 else 'finite' + ', at least 0' * (least == 0)
      raise ValueError(f'{name}: {key}={value!r} must be {allowed}')


def _signature(function: Callable[..., Any]) -> inspect.Signature:
  """The signature, with annotations that are text read where that is possible."""
  try:
    return inspect.signature(function, eval_str=True)
  except NameError:  # what is imported for type checkers only
    return inspect.signature(function)


def _without_annotations(signature: inspect.Signature) -> inspect.Signature:
  """Drops the types, which are longer than the rest in optax."""
  empty = inspect.Parameter.empty
  parameters = [p.replace(annotation=empty) for p in signature.parameters.values()]
  return signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
