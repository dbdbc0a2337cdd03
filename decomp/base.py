"""The two values everything is made of: a `Compressor` and an `Algorithm`.

Both are NamedTuples of pure functions, written for ONE worker and ONE array (a compressor) or one
pytree (an algorithm). `decomp.simulate` lifts them to all workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax

if TYPE_CHECKING:
  from decomp.theory.evidence import Theory

PyTree = Any
"""Any nesting of tuples, lists, dicts and NamedTuples with arrays as leaves."""

Encode = Callable[[Any, jax.Array], PyTree]
"""(key, x) -> payload."""
Decode = Callable[[PyTree, Any], jax.Array]
"""(payload, an array or its shape and dtype) -> x."""


Change = Callable[[PyTree, PyTree], PyTree]
"""(a shared value, a message) -> what is added to the value; linear in both together."""


class Shared(NamedTuple):
  """A value v of one worker that all its neighbours know, because it changes by messages only.

  Attributes:
    value: v_i.
    pull: what the network itself must carry in order to know sum_j W_ij v_j - v_i; nothing where
      everyone's values are at hand. Ask `net.pull`.
  """

  value: PyTree
  pull: PyTree = ()


class Network(Protocol):
  """What a worker sees of the others. `decomp.engine` implements it for each executor."""

  index: jax.Array
  """This worker's number, 0 to n - 1."""
  num_workers: int
  """n."""
  key: jax.Array
  """A key of this step, the same for all workers; `step` gets one of the worker's own."""
  round: jax.Array
  """The number of the current step, from 0; the same for all workers."""
  packs: bool
  """Whether messages travel as bytes, or are only simulated."""
  observed: jax.Array | bool
  """Whether anyone looks at the diagnostics of this step; the same for all workers."""

  def mix(self, payload: PyTree, decode: Callable[[PyTree], PyTree] = ...) -> PyTree:
    """Sends `payload` to the neighbours; returns sum_j W_ij decode(payload_j), own one included."""
    ...

  def mean(self, payload: PyTree, decode: Callable[[PyTree], PyTree] | None = None) -> PyTree:
    """The average over all workers of decode(payload_j)."""
    ...

  def share(self, value: PyTree) -> Shared:
    """Tells the neighbours a value as it is, at the start of a run."""
    ...

  def pull(self, shared: Shared) -> PyTree:
    """sum_j W_ij v_j - v_i of the shared values v. Nothing is sent. W must be fixed."""
    ...

  def update(self, shared: Shared, message: Any, change: Change = ...) -> Shared:
    """Sends a message, by which everyone who knows v changes it: v ← v + change(v, message).

    Args:
      shared: v.
      message: from `decomp.tree.compress`.
      change: linear in both of its arguments; the message itself by default.
    """
    ...


class SharedKey(NamedTuple):
  """Where several workers draw their dithers from, each shifted by its own part of a whole turn.

  Attributes:
    key: the same for all of them.
    shift: this worker's, from 0 to 2**16 - 1.
  """

  key: jax.Array
  shift: jax.Array


class Compressor(NamedTuple):
  """A lossy code for one array.

  C(x) = decode(encode(key, x), x) is what the receiver gets. A leaf of zeros decodes to zeros, and
  non-finite input gives non-finite output.

  Attributes:
    encode: (key, x) -> payload, a pytree of bit-packed arrays. Its bytes are what the wire carries.
    decode: (payload, like) -> x, with the shape and dtype of `like`.
    unbiased: whether E C(x) = x.
    alpha2: d -> the least known bound on E|C(x) - x|² / |x|² over arrays of d elements, or None.
    delta: d -> the largest known δ with E|C(x) - x|² <= (1 - δ)|x|², or None.
    limit: elements beyond ±limit are clipped; infinity for compressors that scale with their input.
    correlated: whether workers draw their dithers together; keys are then `SharedKey`s.
    quick: another pair (encode, decode) with the very same C(x), whose payload is quick to make
      rather than small; None if there is none. A simulation on one device sends no bytes.
    name: the call that made it.
  """

  encode: Encode
  decode: Decode
  unbiased: bool
  alpha2: Callable[[int], float] | None = None
  delta: Callable[[int], float] | None = None
  limit: float = math.inf
  correlated: bool = False
  quick: tuple[Encode, Decode] | None = None
  name: str = 'custom compressor'

  def __repr__(self) -> str:
    return self.name


class Needs(NamedTuple):
  """What an algorithm asks of the topology; `simulate` checks it before the first step.

  Attributes:
    connected: information from every worker reaches every other one.
    symmetric: W equals its transpose.
    fixed: W is the same in every round, because workers carry sums of their neighbours' messages.
  """

  connected: bool = False
  symmetric: bool = False
  fixed: bool = False


class Algorithm(NamedTuple):
  """One worker's part of a decentralised algorithm.

  Attributes:
    init: (params, net) -> state.
    step: (key, grads, state, net) -> (state, info). `state.params` is the point where the next
      gradient is taken; `info` holds diagnostics.
    needs: what is asked of the topology.
    name: the call that made it.
    theory: when it converges, for `decomp.theory.preflight`; None if that is not known.
  """

  init: Callable[[PyTree, Any], Any]
  step: Callable[[jax.Array, PyTree, Any, Any], tuple[Any, Any]]
  needs: Needs = Needs()
  name: str = 'custom algorithm'
  theory: Theory | None = None

  def __repr__(self) -> str:
    return self.name


class Info(NamedTuple):
  """Diagnostics of one worker's step: what shows trouble coming. NaN in a step nobody observes.

  Attributes:
    compression_error: |C(z) - z|² / |z|² of the message z, the α² of this very step (0 if z = 0).
      DCD stops contracting when it stays above the topology's limit.
    message_norm: |z|. In DCD it should shrink with the learning rate; in ECD it grows with t.
    clipped: the fraction of z's elements beyond the compressor's limit.
  """

  compression_error: jax.Array
  message_norm: jax.Array
  clipped: jax.Array
