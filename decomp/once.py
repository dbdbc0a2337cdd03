"""Results that the compiler must not compute anew for each of their uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from decomp.base import PyTree


def once(function: Callable[..., PyTree], key: jax.Array, *args: Any) -> PyTree:
  """function(key, *args), with arguments and result each written to memory once.

  A compiler that fuses everything into one loop computes a message, random numbers included, anew
  for each neighbour that adds it and for each bit that is packed. On CPU nothing but control flow
  keeps XLA from it: the result of a condition that always holds, in a way that the compiler does
  not see.

  Args:
    function: of arrays to arrays.
    key: a random key, or several in an array.
    *args: pytrees of arrays.
  """
  if jax.default_backend() != 'cpu':
    return jax.lax.optimization_barrier(function(key, *jax.lax.optimization_barrier(args)))
  holds = _holds(jax.random.key_data(key))
  zeros = optax.tree.zeros_like(jax.eval_shape(function, key, *args))
  return jax.lax.cond(holds, function, lambda *_: zeros, key, *args)


@jax.custom_batching.custom_vmap
def _holds(words: jax.Array) -> jax.Array:
  """True, for all workers at once: a condition of each worker's own would compute both branches."""
  return (words.reshape(-1)[0] | 1) != 0


@_holds.def_vmap
def _holds_for_all(axis_size: int, in_batched: Any, words: jax.Array) -> tuple[jax.Array, bool]:
  del axis_size, in_batched
  return _holds(words), False
