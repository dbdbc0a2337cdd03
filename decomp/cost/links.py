"""The network between workers."""

import dataclasses
from typing import Any

import numpy as np

from decomp import checks
from decomp.cost.units import BANDWIDTHS, above_zero, quantity, seconds

WINDOW = 3e5
"""Bytes under way. Of windows from 100 kB to infinity this one predicts best what Linux's TCP took
in experiments.studies.network_bench: within 25 % (median) at 5 and 20 ms, 100 and 1000 Mbit/s."""


@dataclasses.dataclass(frozen=True, eq=False)
class Links:
  """The network between workers, as `lan` makes it.

  Attributes:
    bandwidth: of each worker's card, bits per second; a number, or an array of them to compare.
    latency: of a message, seconds; a number, or an array that broadcasts with `bandwidth`.
    duplex: 'full' or 'half'.
    allreduce: 'ring' or 'recursive_doubling'.
    paths: (n, n), the bits per second of the path to each receiver (row) from each sender; None if
      only the cards limit.
    efficiency: the share of the bandwidth that messages get.
    window: the bytes that a sender may have under way.
  """

  bandwidth: Any
  latency: Any
  duplex: str
  allreduce: str
  paths: np.ndarray | None = None
  efficiency: float = 1.0
  window: float = WINDOW


def lan(
  bandwidth: Any = '1Gbps',
  latency: Any = '0.1ms',
  duplex: str = 'full',
  allreduce: str = 'ring',
  paths: Any = None,
  efficiency: float = 1.0,
  window: float = WINDOW,
) -> Links:
  """Workers that are joined by a switch.

  >>> network = lan(bandwidth='100Mbps', latency='5ms')
  >>> network.bandwidth, network.latency
  (100000000.0, 0.005)

  Args:
    bandwidth: of each worker's card: '100Mbps', or bits per second; may be infinite, or an array.
    latency: from sender to receiver: '5ms', or seconds; may be an array.
    duplex: 'full' if a card sends and receives at once, 'half' if one after the other.
    allreduce: 'ring' (workers in the order of their numbers: few bytes, many messages) or
      'recursive_doubling' (few messages, many bytes).
    paths: an (n, n) matrix of bandwidths for links that differ, receivers as rows; the diagonal is
      not used.
    efficiency: the share of the bandwidth that messages get; headers, acknowledgements and waiting
      take the rest. See `fit_transport`.
    window: the bytes that a sender may have under way before they are acknowledged, as TCP has it:
      on a path with a latency of 20 ms the default of 300 kB lets 60 Mbit/s through, whatever the
      bandwidth. Infinite (`math.inf`) if it never runs out.

  Returns:
    `Links`, for `step_seconds` and the rest of `decomp.cost`.
  """
  for argument, value, known in (
    ('duplex', duplex, ('full', 'half')),
    ('allreduce', allreduce, ('ring', 'recursive_doubling')),
  ):
    if value not in known:
      raise ValueError(f'{argument}={value!r} is unknown: use one of {", ".join(known)}')
  if not checks.is_number(efficiency) or not 0 < efficiency <= 1:
    raise ValueError(f'efficiency={efficiency!r}: must be above 0 and at most 1')
  if not checks.is_number(window) or not window > 0:
    raise ValueError(f'window={window!r}: must be above 0 bytes')
  return Links(
    above_zero('bandwidth', quantity('bandwidth', bandwidth, BANDWIDTHS)),
    seconds('latency', latency),
    duplex,
    allreduce,
    None if paths is None else _paths(paths),
    efficiency,
    window,
  )


def _paths(rows: Any) -> np.ndarray:
  try:
    lengths = {len(row) for row in rows if not isinstance(row, str)}
  except TypeError:
    lengths = set()
  if len(lengths) != 1:
    raise ValueError(f'paths={rows!r}: must be a matrix of bandwidths, a row for each receiver')
  paths = np.array([[quantity('paths', value, BANDWIDTHS) for value in row] for row in rows])
  if paths.ndim != 2 or paths.shape[0] != paths.shape[1]:
    raise ValueError(f'paths has shape {paths.shape}: must be square, a row for each receiver')
  above_zero('paths', paths[~np.eye(len(paths), dtype=bool)])
  return paths
