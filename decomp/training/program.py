"""Runs that differ in numbers only, as one compiled program: `vmap` over its members.

All share the number of the step: what depends on it alone (which graph, whether a row is due) is
decided once for all. A member whose loss fails makes the loop pause for its last row, and goes on
unheeded; no operation mixes members, so the others don't notice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from decomp.base import PyTree
from decomp.data.partition import Partition
from decomp.run import WIDE, Carry, Data, Steps, Totals, reset, step_keys
from decomp.simulate import State

# What of a carry is one for all members (None), and what has their axis in front.
_AXES: Any = Carry(State(None, 0), 0, Totals(None, None, 0, 0, 0, 0), 0, 0)  # type: ignore[arg-type]


class Members(NamedTuple):
  """What tells runs apart; every leaf has their axis in front.

  Attributes:
    seed: int32.
    numbers: name -> value.
    shards: the data of each worker.
    start: parameters and model state.
  """

  seed: Any
  numbers: dict[str, Any]
  shards: Partition
  start: PyTree


class Program:
  """The compiled functions of some runs at once."""

  def __init__(self, steps_of: Callable[[Members], Steps], data: Data):
    self._steps_of, self._data = steps_of, data
    self.start = jax.jit(self._start)
    self.reset = jax.jit(jax.vmap(reset, in_axes=(_AXES,), out_axes=_AXES), donate_argnums=0)
    self.member = jax.jit(_member)

  def compile(self, members: Members) -> int:
    """Compiles for so many members; gives the bytes of memory that they need."""
    carry, number = jax.eval_shape(self._start, members), np.int32(0)
    limits, known = np.zeros(len(members.seed), np.float32), np.zeros(len(members.seed), bool)
    advance, measure = jax.jit(self._advance, donate_argnums=0), jax.jit(self._measure)
    arguments = carry, members, number, number, limits, known, self._data
    self._chunk = advance.lower(*arguments).compile(WIDE)
    self._measured = measure.lower(carry, members, self._data).compile()
    return max(_bytes(self._chunk), _bytes(self._measured))

  def advance(
    self,
    carry: Carry,
    members: Members,
    until: int,
    row_at: int,
    limits: np.ndarray,
    known: np.ndarray,
  ) -> Carry:
    """Steps up to number `until`, or to a loss above its limit of a member not `known` to fail."""
    numbers = np.int32(until), np.int32(row_at)
    return self._chunk(carry, members, *numbers, limits, known, self._data)

  def measure(self, carry: Carry, members: Members) -> dict[str, np.ndarray]:
    """The metrics of a row that come from the device, for each member."""
    return jax.device_get(self._measured(carry, members, self._data))

  def _start(self, members: Members) -> Carry:
    def start(member: Members) -> Carry:
      return self._steps_of(member).start(*member.start)

    return jax.vmap(start, out_axes=_AXES)(members)

  def _advance(
    self,
    carry: Carry,
    members: Members,
    until: jax.Array,
    row_at: jax.Array,
    limits: jax.Array,
    known: jax.Array,
    data: Data,
  ) -> Carry:
    keys = jax.vmap(step_keys)(members.seed)

    def going(carry: Carry) -> jax.Array:
      return (carry.state.round < until) & ~(carry.failed.any(1) & ~known).any()

    def step(member: Members, keys: jax.Array, limit: jax.Array, carry: Carry) -> Carry:
      return self._steps_of(member).step(keys, row_at, limit, data.train, carry)

    steps = jax.vmap(step, in_axes=(0, 0, 0, _AXES), out_axes=_AXES)
    return jax.lax.while_loop(going, lambda carry: steps(members, keys, limits, carry), carry)

  def _measure(self, carry: Carry, members: Members, data: Data) -> dict[str, jax.Array]:
    def measure(carry: Carry, member: Members) -> dict[str, jax.Array]:
      return self._steps_of(member).measure(carry, data)

    return jax.vmap(measure, in_axes=(_AXES, 0))(carry, members)


def _member(carry: Carry, number: jax.Array) -> tuple[State, PyTree]:
  workers, model_state = jax.tree.map(lambda x: x[number], (carry.state.workers, carry.model_state))
  return State(carry.state.round, workers), model_state


def _bytes(compiled: Any) -> int:
  used = compiled.memory_analysis()
  return (
    used.argument_size_in_bytes
    + used.output_size_in_bytes
    + used.temp_size_in_bytes
    - used.alias_size_in_bytes
  )
