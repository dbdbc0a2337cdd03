"""A network that counts: how many bytes a step sends, without running it."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from decomp.base import Change, PyTree, Shared
from decomp.engine import wire
from decomp.engine.stacked import as_is, latest
from decomp.topology import Topology


class Meter:
  """A network that only counts the bytes of what a step sends."""

  packs = True
  observed = False

  def __init__(self, topology: Topology):
    self.index = self.round = jnp.zeros((), jnp.int32)
    self.key, self.num_workers = jax.random.key(0), topology.num_workers
    self.bytes = 0
    self.topology = topology

  def mix(self, payload: PyTree, decode: Callable[[PyTree], PyTree] = as_is) -> PyTree:
    """Counts one packed message to each neighbour."""
    sends = self.topology.degrees.mean(0).max()
    self.bytes += math.ceil(wire.size(payload) * sends)
    return decode(payload)

  def mean(self, payload: PyTree, decode: Callable[[PyTree], PyTree] | None = None) -> PyTree:
    """Counts a ring all-reduce, or a ring all-gather of what must be decoded before it is added."""
    others = self.topology.num_workers - 1
    sends = others if decode else 2 * others / (others + 1)
    self.bytes += math.ceil(wire.size(payload) * sends)
    return (decode or as_is)(payload)

  def share(self, value: PyTree) -> Shared:
    """Counts one exact message to each neighbour."""
    return Shared(self.mix(value))

  def pull(self, shared: Shared) -> PyTree:
    """Counts nothing: what neighbours share is known."""
    return shared.value

  def update(self, shared: Shared, message: Any, change: Change = latest) -> Shared:
    """Counts one packed message to each neighbour."""
    return Shared(change(shared.value, self.mix(message.payload, message.decode)))
