"""A worker's window to the others, for workers stacked on one device.

Inside `jax.vmap(..., axis_name=AXIS)` each worker runs its own code, and the collectives of JAX
become operations on the stacked axis: `all_gather` followed by a product with one's own row of W is
ONE matrix product W @ X for all workers; `ppermute` is a gather of rows.

No packing happens here, but receivers decode what they are sent: codes take less memory than
numbers, and on one device memory is what an exchange costs. Only before a product with W the
sender's slot decodes, since everyone needs everything. Values that workers share are read where
they are: nothing has to be carried along in order to know them.

Whom a worker does not hear has weight 0. A model that is not finite may therefore spoil others than
its neighbours in the same step (0 · inf is NaN), here as on a mesh; runs end at that step anyway.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decomp.base import Change, PyTree, Shared
from decomp.engine import platforms
from decomp.topology import Topology

AXIS = 'worker'


def as_is(payload: PyTree) -> PyTree:
  """What is sent uncompressed needs no decoding."""
  return payload


def latest(value: PyTree, message: PyTree) -> PyTree:
  """The change of a shared value whose messages are added to it."""
  return message


class Moment(NamedTuple):
  """What all workers know of the present step: see `decomp.base.Network`.

  Attributes:
    round: its number.
    observed: whether anyone looks at its diagnostics.
    key: everyone's; None at the start of a run.
  """

  round: jax.Array
  observed: jax.Array
  key: Any = None


class Mixer(NamedTuple):
  """How sum_j W_ij x_j is computed.

  Attributes:
    weights: arrays with a leading worker axis; each worker gets its own row.
    mix: (weights of this worker, round, payload, decode) -> sum_j W_ij decode(payload_j).
  """

  weights: PyTree
  mix: Callable[[PyTree, jax.Array, PyTree, Callable[[PyTree], PyTree]], PyTree]


def mixer(topology: Topology) -> Mixer:
  """A matrix product or a sum over permutations, as the platform likes it."""
  makers = {True: _dense, False: _sparse}
  size = topology.num_workers, topology.degree
  mixers = {dense: makers[dense](topology) for dense in {w.product(*size) for w in platforms.ALL}}

  def mix(rows: Any, round: Any, payload: PyTree, decode: Callable[[PyTree], PyTree]) -> PyTree:
    def on(dense: bool) -> Callable[[PyTree], PyTree]:
      return lambda payload: mixers[dense].mix(rows[dense], round, payload, decode)

    return platforms.dependent(lambda wants: wants.product(*size), on, payload)

  return Mixer({dense: one.weights for dense, one in mixers.items()}, mix)


def _dense(topology: Topology) -> Mixer:
  def mix(rows: Any, round: Any, payload: PyTree, decode: Callable[[PyTree], PyTree]) -> PyTree:
    row = rows[round % topology.period] if topology.period > 1 else rows[0]
    everyone = jax.lax.all_gather(decode(payload), AXIS)
    return jax.tree.map(lambda x: weighted(row, x), everyone)

  return Mixer(topology.matrices.transpose(1, 0, 2), mix)


def _sparse(topology: Topology) -> Mixer:
  rounds = topology.decomposition
  weights = [np.concatenate([part.own[None], part.weights]).T for part in rounds]

  def mix_with(
    number: int, row: jax.Array, payload: PyTree, decode: Callable[[PyTree], PyTree]
  ) -> PyTree:
    received = [
      jax.lax.ppermute(payload, AXIS, [(int(j), i) for i, j in enumerate(sources)])
      for sources in rounds[number].sources
    ]

    return weighted_sum(row, [decode(message) for message in (payload, *received)])

  def mix(rows: Any, round: Any, payload: PyTree, decode: Callable[[PyTree], PyTree]) -> PyTree:
    branches = [
      lambda payload, k=k: mix_with(k, rows[k], payload, decode) for k in range(topology.period)
    ]
    return jax.lax.switch(round % topology.period, branches, payload)

  return Mixer(weights, mix)


@dataclasses.dataclass(eq=False)
class StackedNetwork:
  """What one of the stacked workers sees: see `decomp.base.Network`."""

  _mixer: Mixer
  _weights: PyTree
  num_workers: int
  index: jax.Array
  round: jax.Array
  observed: jax.Array
  key: Any
  packs = False

  def mix(self, payload: PyTree, decode: Callable[[PyTree], PyTree] = as_is) -> PyTree:
    """sum_j W_ij decode(payload_j), own message included."""
    return self._mixer.mix(self._weights, self.round, payload, decode)

  def mean(self, payload: PyTree, decode: Callable[[PyTree], PyTree] | None = None) -> PyTree:
    """The exact average over all workers of decode(payload_j)."""

    def average(x: jax.Array) -> jax.Array:
      everyone = jax.lax.all_gather(x, AXIS)
      return weighted(jnp.full(everyone.shape[0], 1 / everyone.shape[0]), everyone)

    return jax.tree.map(average, (decode or as_is)(payload))

  def share(self, value: PyTree) -> Shared:
    """`value`, which others find where it is."""
    return Shared(value)

  def pull(self, shared: Shared) -> PyTree:
    """sum_j W_ij v_j - v_i."""
    return optax.tree.sub(self.mix(shared.value), shared.value)

  def update(self, shared: Shared, message: Any, change: Change = latest) -> Shared:
    """v ← v + change(v, message)."""
    return Shared(optax.tree.add(shared.value, change(shared.value, message.value)))


def lift(function: Callable[..., Any], topology: Topology) -> Callable[..., Any]:
  """`function(*args, net)` of one worker, for a `Moment` and stacked arguments."""
  how = mixer(topology)

  def everyone(moment: Moment, *args: Any) -> Any:
    def one(index: jax.Array, weights: PyTree, *args: Any) -> Any:
      return function(
        *args,
        StackedNetwork(
          how, weights, topology.num_workers, index, moment.round, moment.observed, moment.key
        ),
      )

    weights = jax.tree.map(jnp.asarray, how.weights)
    indices = jnp.arange(topology.num_workers)
    return jax.vmap(one, axis_name=AXIS)(indices, weights, *args)

  return everyone


def weighted(row: jax.Array, everyone: jax.Array) -> jax.Array:
  """sum_j row_j everyone_j, in full precision also where a matrix unit would take bfloat16."""
  check_floating(everyone)
  kind = _accumulator(everyone)
  # As a product: XLA's CPU reduction over a leading axis is an order of magnitude slower.
  total = jnp.tensordot(
    row.astype(kind), everyone.astype(kind), axes=1, precision=jax.lax.Precision.HIGHEST
  )
  return total.astype(everyone.dtype)


def weighted_sum(row: jax.Array, values: list[PyTree]) -> PyTree:
  """The same of one value after another, which need not be written before they are added."""

  def total(*values: jax.Array) -> jax.Array:
    check_floating(values[0])
    weights = row.astype(_accumulator(values[0]))
    terms = [w * x.astype(weights.dtype) for w, x in zip(weights, values, strict=True)]
    return sum(terms[1:], terms[0]).astype(values[0].dtype)

  return jax.tree.map(total, *values)


def check_floating(x: Any) -> None:
  """Whether a message can be averaged as it is."""
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise ValueError(
      f'a message of dtype {x.dtype} cannot be averaged: pass net.mix or net.mean the `decode` '
      'that turns it into floating point numbers'
    )


def _accumulator(x: Any) -> Any:
  return jnp.float32 if x.dtype.itemsize < 4 else x.dtype
