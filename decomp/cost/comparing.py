"""Who is fastest on which network."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from decomp.cost.links import Links, lan
from decomp.cost.model import time_to_target
from decomp.cost.workloads import Workload


class WinnerMap(NamedTuple):
  """The time to the target over a grid of networks.

  Attributes:
    bandwidth: [b] bits per second.
    latency: [l] seconds.
    names: [a], of the algorithms.
    seconds: [a, l, b] to the target.
  """

  bandwidth: np.ndarray
  latency: np.ndarray
  names: tuple[str, ...]
  seconds: np.ndarray

  @property
  def winner(self) -> np.ndarray:
    """[l, b]: the number of the fastest algorithm."""
    return self.seconds.argmin(0)


def winner_map(
  works: Sequence[Workload], bandwidth: Any, latency: Any, links: Links | None = None
) -> WinnerMap:
  """Who is fastest where.

  Args:
    works: one for each algorithm.
    bandwidth: [b] bits per second.
    latency: [l] seconds.
    links: everything else about the network; by default that of `lan()`.
  """
  if not works:
    raise ValueError('works is empty: there is no algorithm to compare')
  bandwidth, latency = np.asarray(bandwidth, float), np.asarray(latency, float)
  grid = dataclasses.replace(links or lan(), bandwidth=bandwidth[None], latency=latency[:, None])
  times = np.stack([time_to_target(work, grid) for work in works])
  return WinnerMap(bandwidth, latency, tuple(work.name for work in works), times)


def faster_where(
  work: Workload, other: Workload, links: Links, between: tuple[float, float] = (1e3, 1e12)
) -> list[tuple[float, float]]:
  """The bandwidths at which one workload is done before another.

  Args:
    work: which should be faster.
    other: than this one.
    links: the rest of the network: its latency is used, its bandwidth is not.
    between: where to look, bits per second.

  Returns:
    Intervals of bandwidth whose ends are the break-even points; 0 and infinity stand for the ends
    of `between`. Empty if `work` is nowhere faster.
  """
  from scipy import optimize  # here, because it takes long to import

  def lead(bandwidth: Any) -> Any:
    at = dataclasses.replace(links, bandwidth=bandwidth)
    return time_to_target(other, at) - time_to_target(work, at)

  grid = np.geomspace(*between, 400)
  signs = lead(grid) > 0
  changes = np.flatnonzero(signs[1:] != signs[:-1])
  points = [float(optimize.brentq(lead, grid[k], grid[k + 1])) for k in changes]
  ends = [0.0] * bool(signs[0]) + points + [math.inf] * bool(signs[-1])
  return list(zip(ends[::2], ends[1::2], strict=True))
