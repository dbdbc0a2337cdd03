"""Shapes of loops: what XLA, on CPU above all, does not find out by itself."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from decomp.base import PyTree


def once(function: Callable[..., PyTree], *args: Any) -> PyTree:
  """function(*args), with arguments and result each written to memory once.

  A compiler that fuses everything into one loop computes a message, random numbers included, anew
  for each neighbour that adds it and for each bit that is packed. On CPU nothing but control flow
  keeps XLA from it: the result of a condition that always holds, in a way that the compiler does
  not see.

  Args:
    function: of arrays to arrays.
    *args: pytrees of arrays; the first array of all must not be empty.
  """
  function = jax.jit(function)  # traced once for all platforms
  zeros = optax.tree.zeros_like(jax.eval_shape(function, *args))

  def kept_apart(*args: Any) -> PyTree:
    return jax.lax.cond(_holds(jax.tree.leaves(args)[0]), function, lambda *_: zeros, *args)

  def barrier(*args: Any) -> PyTree:
    return jax.lax.optimization_barrier(function(*args))

  return jax.lax.platform_dependent(*args, cpu=kept_apart, default=barrier)


@jax.custom_batching.custom_vmap
def _holds(x: jax.Array) -> jax.Array:
  """True, for all workers at once: a condition of each worker's own would compute both branches."""
  x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
  bits = jax.lax.bitcast_convert_type(x.reshape(-1)[0], f'uint{8 * x.dtype.itemsize}')
  return (bits | 1) != 0


@_holds.def_vmap
def _holds_for_all(axis_size: int, in_batched: Any, x: jax.Array) -> tuple[jax.Array, bool]:
  del axis_size, in_batched
  return _holds(x), False


def pieces(x: jax.Array, count: int) -> list[jax.Array]:
  """A flat array cut into `count` of one length, the last ones filled up with zeros.

  The length is a multiple of 16: where XLA splits an odd one between two cores, neither uses vector
  instructions, and the loop takes six times as long.
  """
  length = piece_length(x.size, count)
  parts = [x[number * length : (number + 1) * length] for number in range(count)]
  return [jnp.pad(part, (0, length - part.size)) for part in parts]


def piece_length(size: int, count: int) -> int:
  """The length of `pieces` of an array of this size."""
  return 16 * -(-size // (16 * count))


def folded(
  combine: Callable[[jax.Array, jax.Array], jax.Array],
  function: Callable[..., jax.Array],
  *args: Any,
) -> jax.Array:
  """function(*args) made an eighth as long by `combine`, or as it is if it is short.

  XLA's reductions read little at a time on CPU, above all where they are fused with what they
  reduce; folding it first leaves them an eighth.

  Args:
    combine: such as `jnp.maximum`; of the zeros that fill the last piece up, too.
    function: of arrays to an array of any shape.
    *args: pytrees of arrays.
  """

  def fold(*args: Any) -> jax.Array:
    return functools.reduce(combine, pieces(function(*args).reshape(-1), 8))

  short = jax.eval_shape(function, *args).size < 4096
  return function(*args) if short else once(fold, *args)


def largest(x: jax.Array) -> jax.Array:
  """max |x_i| of a float32 array; 0 of an empty one, and NaN if there is one.

  In the order of their bits, where NaN comes after infinity: XLA's maximum of floating point
  numbers loses it on CPU from some thousand elements on.
  """

  def bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32)

  def on_cpu(x: jax.Array) -> jax.Array:
    return folded(jnp.maximum, bits, x.reshape(-1)).max(initial=0)

  most = jax.lax.platform_dependent(x, cpu=on_cpu, default=lambda x: bits(x).max(initial=0))
  return jax.lax.bitcast_convert_type(most, jnp.float32)
