"""Compression of whole pytrees, leaf by leaf."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decomp.base import Compressor, Info, Network, PyTree, SharedKey
from decomp.engine import platforms
from decomp.engine.cpu import keys
from decomp.engine.cpu.loops import folded, largest, once


class Message(NamedTuple):
  """A compressed pytree z.

  Attributes:
    payload: what is sent.
    decode: payload -> C(z); the same function decodes the neighbours' messages.
    value: C(z), as every receiver will see it.
    info: diagnostics.
  """

  payload: PyTree
  decode: Callable[[PyTree], PyTree]
  value: PyTree
  info: Info


def compress(
  compressor: Compressor, key: jax.Array, tree: PyTree, net: Network | None = None
) -> Message:
  """Encodes every leaf with a key of its own, and decodes it again.

  Diagnostics are NaN in a step that is not `observed`: they read the whole message again, twice.

  Args:
    compressor: for every leaf.
    key: this worker's, of this step.
    tree: z.
    net: where the message goes; None if it is not sent.
  """
  leaves, treedef = jax.tree.flatten(tree)
  shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
  leaf_keys = _keys(compressor, key, len(leaves), net)
  if net is not None and net.packs:
    encode_leaf, decode_leaf = compressor.encode, compressor.decode
  elif compressor.quick:
    encode_leaf, decode_leaf = compressor.quick
  else:

    def encode_leaf(key: jax.Array, x: jax.Array) -> jax.Array:
      return compressor.decode(compressor.encode(key, x), x)

    def decode_leaf(value: jax.Array, like: Any) -> jax.Array:
      return value

  def encode(leaf_keys: jax.Array, leaves: list[jax.Array]) -> list[PyTree]:
    def on(limits: tuple[int, float]) -> Callable[..., list[PyTree]]:
      return lambda *args: _each(encode_leaf, *limits, *args)

    return platforms.dependent(lambda wants: (wants.stacked, wants.looped), on, leaf_keys, leaves)

  def decode(payload: list[PyTree]) -> PyTree:
    values = [decode_leaf(p, like) for p, like in zip(payload, shapes, strict=True)]
    return jax.tree.unflatten(treedef, values)

  def diagnose(payload: list[PyTree]) -> Info:
    scale = _magnitude(leaves)

    def apart(payload: PyTree, leaf: jax.Array) -> jax.Array:
      return decode_leaf(payload, leaf) - leaf

    parts = zip(payload, leaves, strict=True)
    errors = [_squared(scale, apart, p, leaf) for p, leaf in parts]
    return _info(compressor, leaves, errors, scale)

  payload = once(encode, leaf_keys, leaves)
  info = diagnose(payload) if net is None else _if_observed(net, diagnose, payload)
  return Message(payload, decode, decode(payload), info)


def _keys(compressor: Compressor, key: jax.Array, count: int, net: Network | None) -> PyTree:
  """A key for each leaf: this worker's own, or everyone's and how far its dithers are shifted.

  Shifts are multiples of a part of a turn near the golden ratio, so that those of all workers are
  evenly spread, and those of neighbours, whose numbers are close, are far apart.
  """
  numbers = jnp.arange(count)
  if net is None or not compressor.correlated:
    return keys.fold_in(key, numbers)
  n = net.num_workers
  step = min((k for k in range(1, n + 1) if math.gcd(k, n) == 1), key=lambda k: abs(k - 0.618 * n))
  shift = net.index * step % n * 2**16 // n
  return SharedKey(keys.fold_in(net.key, numbers), jnp.broadcast_to(shift, (count,)))


def _each(
  encode: Callable[[jax.Array, jax.Array], PyTree],
  stacked: int,
  looped: float,
  leaf_keys: PyTree,
  leaves: list[jax.Array],
) -> list[PyTree]:
  """encode(key, leaf) of all leaves; those alike as one, or in a loop: see `platforms.Wants`."""

  def key_of(number: Any) -> PyTree:
    return jax.tree.map(lambda x: x[number], leaf_keys)

  groups: dict[Any, list[int]] = {}
  for number, leaf in enumerate(leaves):
    groups.setdefault((leaf.shape, leaf.dtype), []).append(number)
  found: dict[int, PyTree] = {}
  for group in groups.values():
    small = leaves[group[0]].size <= stacked
    if len(group) == 1 or not (small or len(group) >= looped):
      found |= {number: encode(key_of(number), leaves[number]) for number in group}
      continue
    rows = key_of(np.array(group)), jnp.stack([leaves[number] for number in group])
    payloads = jax.vmap(encode)(*rows) if small else jax.lax.map(lambda row: encode(*row), rows)
    for row, number in enumerate(group):
      found[number] = jax.tree.map(lambda x, row=row: x[row], payloads)
  return [found[number] for number in range(len(leaves))]


def exact(tree: PyTree, net: Network) -> Info:
  """The diagnostics of a message that is sent as it is."""
  zero = jnp.zeros((), jnp.float32)
  return _if_observed(net, lambda tree: Info(zero, norm(tree), zero), tree)


def _if_observed(net: Network, diagnose: Callable[[PyTree], Info], message: PyTree) -> Info:
  unknown = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), jax.eval_shape(diagnose, message))
  return jax.lax.cond(net.observed, diagnose, lambda _: unknown, message)


def add_scaled(tree: PyTree, scale: jax.typing.ArrayLike, other: PyTree) -> PyTree:
  """tree + scale * other, each leaf in its own dtype (optax's would promote bfloat16)."""
  scale = jnp.asarray(scale)
  return jax.tree.map(lambda x, y: x + scale.astype(x.dtype) * y, tree, other)


def scale(factor: jax.typing.ArrayLike, tree: PyTree) -> PyTree:
  """factor * tree, each leaf in its own dtype (optax's would promote bfloat16)."""
  return jax.tree.map(lambda x: jnp.asarray(factor).astype(x.dtype) * x, tree)


class Sum(NamedTuple):
  """A sum over many steps that forgets nothing: what rounding takes away is added the next time.

  A float32 sum of 1 does not notice a term of 1e-8, however often it is added. Here the terms
  gather in `lost` until they count.

  Attributes:
    value: the sum.
    lost: what it is too coarse to hold, with half of its bits.

  >>> total = start_sum(jnp.float32(1.0))
  >>> for _ in range(100):
  ...   total = add_to(total, jnp.float32(1e-8))
  >>> float(total.value - 1)
  9.5367431640625e-07
  """

  value: PyTree
  lost: PyTree


def start_sum(tree: PyTree) -> Sum:
  """A `Sum` that begins with `tree`."""
  return Sum(tree, jax.tree.map(lambda x: jnp.zeros_like(x, _half(x)), tree))


def add_to(total: Sum, terms: PyTree) -> Sum:
  """`total` + `terms`, by Kahan's compensated summation, each leaf in its own dtype."""
  terms = jax.tree.map(lambda term, lost: term + lost.astype(term.dtype), terms, total.lost)
  value = optax.tree.add(total.value, terms)

  def left(new: jax.Array, old: jax.Array, term: jax.Array) -> jax.Array:
    return (term - (new - old)).astype(_half(new))

  return Sum(value, jax.tree.map(left, value, total.value, terms))


def _half(x: jax.Array) -> Any:
  return jnp.float32 if x.dtype.itemsize > 4 else jnp.bfloat16


def norm(tree: PyTree) -> jax.Array:
  """The L2 norm of all leaves together, in float32 whatever they are."""
  return optax.tree.norm(optax.tree.cast(tree, jnp.float32))


def _magnitude(leaves: list[jax.Array]) -> jax.Array:
  """The power of two at the largest element: squares of what is divided by it stay in range."""
  most = jnp.stack([largest(leaf.astype(jnp.float32).reshape(-1)) for leaf in leaves]).max()
  exponent = jax.lax.bitcast_convert_type(most, jnp.int32) & 0x7F800000  # without the mantissa
  power = jax.lax.bitcast_convert_type(exponent, jnp.float32)
  # Its inverse must be in range, too; where there are only zeros or a NaN it does not matter.
  return jnp.where((power > 0) & (power < jnp.inf), jnp.minimum(power, 2.0**126), 1)


def _squared(scale: jax.Array, function: Callable[..., jax.Array], *args: Any) -> jax.Array:
  """|function(*args) / scale|², in float32."""

  def squares(*args: Any) -> jax.Array:
    return (function(*args).astype(jnp.float32) * (1 / scale)) ** 2

  return folded(jnp.add, squares, *args).sum()


def _info(
  compressor: Compressor, leaves: list[jax.Array], errors: list[jax.Array], scale: jax.Array
) -> Info:
  """The diagnostics of z, of whose leaves |C(z) - z|² / scale² is given."""
  size2 = sum(_squared(scale, lambda x: x, leaf) for leaf in leaves)
  relative = jnp.where(size2 == 0, 0, sum(errors) / jnp.where(size2 == 0, 1, size2))
  clipped = jnp.zeros((), jnp.float32)
  if math.isfinite(compressor.limit):
    beyond = [jnp.sum(jnp.abs(leaf) > compressor.limit) for leaf in leaves]
    clipped = jnp.stack(beyond).sum().astype(jnp.float32) / optax.tree.size(leaves)
  return Info(relative, jnp.sqrt(size2) * scale, clipped)
