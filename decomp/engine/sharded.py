"""A worker's window to the others, for workers spread over devices.

`jax.shard_map` runs the same per-worker code on every device of a mesh; a device with k workers
runs them under `vmap`. Between devices travels what a real network would carry, to each device that
needs it once, by `lax.ppermute`: on CPU each message packed into ONE uint8 vector, on accelerators
the same bytes in a few arrays (`platforms.Wants.joined`). Receivers decode.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, PartitionSpec

from decomp.base import Change, PyTree, Shared
from decomp.engine import platforms, tree, wire
from decomp.engine.stacked import (
  AXIS,
  Moment,
  as_is,
  check_floating,
  latest,
  weighted,
  weighted_sum,
)
from decomp.topology import Topology
from decomp.topology.permutations import permutations

SLOT = 'slot'
"""The axis of the workers of one device."""


def worker_mesh(num_workers: int, devices: Any = None) -> Mesh:
  """A mesh for `simulate` and `train`: the most devices that divide the workers evenly.

  Args:
    num_workers: n.
    devices: the devices to choose from; None for all.

  >>> worker_mesh(1).shape['worker']
  1
  """
  if num_workers < 1:
    raise ValueError(f'num_workers={num_workers}: must be at least 1')
  devices = list(jax.devices() if devices is None else devices)
  count = max(d for d in range(1, len(devices) + 1) if num_workers % d == 0)
  return Mesh(np.array(devices[:count]), (AXIS,), axis_types=(AxisType.Auto,))


class Route(NamedTuple):
  """How messages travel in one round, and what each worker makes of them.

  Attributes:
    pairs: for each exchange, the (sending, receiving) devices.
    send: (devices, exchanges): which of its workers' messages a device sends.
    weights: (n, k + exchanges): a worker's weights of its own device's messages, then of those
      received in each exchange.
  """

  pairs: list[list[tuple[int, int]]]
  send: np.ndarray
  weights: np.ndarray


def routes(topology: Topology, num_devices: int) -> list[Route]:
  """One `Route` for each round of the topology's period."""
  return [_route(matrix, num_devices) for matrix in topology.matrices]


def _route(matrix: np.ndarray, num_devices: int) -> Route:
  n = len(matrix)
  k = n // num_devices
  device = np.arange(n) // k
  # A device needs each remote message once, however many of its workers listen to it.
  needed = [
    (sender, receiver)
    for receiver in range(num_devices)
    for sender in np.flatnonzero(matrix[device == receiver].any(0) & (device != receiver))
  ]
  counts = np.zeros((num_devices, num_devices), int)
  for sender, receiver in needed:
    counts[receiver, device[sender]] += 1
  exchanges = permutations(counts)
  send = np.zeros((num_devices, len(exchanges)), int)
  weights = np.zeros((n, k + len(exchanges)))
  for worker in range(n):
    weights[worker, :k] = matrix[worker, device == device[worker]]
  pairs: list[list[tuple[int, int]]] = [[] for _ in exchanges]
  for sender, receiver in needed:
    number = next(
      e
      for e, sources in enumerate(exchanges)
      if sources[receiver] == device[sender] and (device[sender], receiver) not in pairs[e]
    )
    pairs[number].append((int(device[sender]), receiver))
    send[device[sender], number] = sender % k
    weights[device == receiver, k + number] = matrix[device == receiver, sender]
  return Route(pairs, send, weights)


@dataclasses.dataclass(eq=False)
class ShardedNetwork:
  """What one of the workers of a device sees: see `decomp.base.Network`."""

  _routes: list[Route]
  _wants: platforms.Wants
  num_workers: int
  index: jax.Array
  round: jax.Array
  observed: jax.Array
  key: Any
  packs = True

  def mix(self, payload: PyTree, decode: Callable[[PyTree], PyTree] = as_is) -> PyTree:
    """sum_j W_ij decode(payload_j), own message included."""
    arrays, message = wire.parcels(payload, self._wants.joined)
    # All that this device has to offer: the same for each of its workers.
    local = jax.lax.all_gather(arrays, SLOT)

    def travel(route: Route, local: list[jax.Array]) -> PyTree:
      send = jnp.asarray(route.send)[jax.lax.axis_index(AXIS)]
      received = [
        [jax.lax.ppermute(array[send[number]], AXIS, pairs) for array in local]
        for number, pairs in enumerate(route.pairs)
      ]
      row = jnp.asarray(route.weights)[self.index]
      return self._total(row, local, received, lambda arrays: decode(message(arrays)))

    branches = [lambda local, route=route: travel(route, local) for route in self._routes]
    return jax.lax.switch(self.round % len(branches), branches, local)

  def _total(
    self,
    row: jax.Array,
    local: list[jax.Array],
    received: list[list[jax.Array]],
    decode: Callable[[list[jax.Array]], PyTree],
  ) -> PyTree:
    """The messages of the own device, [k, ...], and those from others, weighted by a worker's row.

    Where a device has one worker, decoded terms are added as they come, and never written.
    """
    if len(local[0]) == 1:
      messages = [[array[0] for array in local], *received]
      return weighted_sum(row, [decode(arrays) for arrays in messages])
    everything = [
      jnp.concatenate([own, *(other[None] for other in others)])
      for own, *others in zip(local, *received, strict=True)
    ]
    return jax.tree.map(lambda x: weighted(row, x), jax.vmap(decode)(everything))

  def mean(self, payload: PyTree, decode: Callable[[PyTree], PyTree] | None = None) -> PyTree:
    """The average over all workers of decode(payload_j), added in the dtype that travels."""
    if decode is None:
      jax.tree.map(check_floating, payload)
      return jax.tree.map(lambda x: jax.lax.pmean(x, (AXIS, SLOT)), payload)
    arrays, message = wire.parcels(payload, self._wants.joined)
    everyone = jax.lax.all_gather(jax.lax.all_gather(arrays, SLOT), AXIS, tiled=True)
    values = jax.vmap(lambda arrays: decode(message(arrays)))(everyone)
    share = jnp.full(self.num_workers, 1 / self.num_workers)
    return jax.tree.map(lambda x: weighted(share, x), values)

  def share(self, value: PyTree) -> Shared:
    """`value`, and how far the neighbours' are from it, which messages keep up to date."""
    return Shared(value, tree.start_sum(optax.tree.sub(self.mix(value), value)))

  def pull(self, shared: Shared) -> PyTree:
    """sum_j W_ij v_j - v_i."""
    return shared.pull.value

  def update(self, shared: Shared, message: Any, change: Change = latest) -> Shared:
    """v ← v + change(v, message) here and, since that is linear, in the sum over neighbours."""
    value = optax.tree.add(shared.value, change(shared.value, message.value))
    apart = optax.tree.sub(self.mix(message.payload, message.decode), message.value)
    return Shared(value, tree.add_to(shared.pull, change(shared.pull.value, apart)))


def lift(function: Callable[..., Any], topology: Topology, mesh: Mesh) -> Callable[..., Any]:
  """`function(*args, net)` of one worker, for a `Moment` and stacked arguments."""
  k = topology.num_workers // mesh.size
  plan, wants = routes(topology, mesh.size), platforms.of(mesh.devices.flat[0])

  def on_device(moment: Moment, *args: Any) -> Any:
    def one(*args: Any) -> Any:
      index = jax.lax.axis_index(AXIS) * k + jax.lax.axis_index(SLOT)
      return function(
        *args,
        ShardedNetwork(
          plan, wants, topology.num_workers, index, moment.round, moment.observed, moment.key
        ),
      )

    return jax.vmap(one, axis_name=SLOT, axis_size=k)(*args)

  def everywhere(moment: Moment, *args: Any) -> Any:
    stacked = PartitionSpec(AXIS)
    specs = (PartitionSpec(), *(stacked for _ in args))
    # What the check would track is not expressible for a mix of vmap's and shard_map's axes.
    return jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=stacked, check_vma=False)(
      moment, *args
    )

  return everywhere
