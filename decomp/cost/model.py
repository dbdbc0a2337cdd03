"""The seconds of a workload on a network: the model that `decomp.cost` explains."""

import math
from typing import Any, NamedTuple

import numpy as np

from decomp.cost.links import Links
from decomp.cost.workloads import Workload


class Round(NamedTuple):
  """Messages that are sent at once.

  Attributes:
    bytes: (n, n), to each receiver (row) from each sender.
    repeats: how many times in a step; a fraction for one of the rounds of a varying graph.
  """

  bytes: np.ndarray
  repeats: float


def rounds(work: Workload, allreduce: str = 'ring') -> list[Round]:
  """The rounds of messages that make up one step's exchanges."""
  n = work.topology.num_workers
  if n == 1:
    return []
  made: list[Round] = []
  for kind, size in work.exchanges:
    if kind == 'mix':
      edges = (work.topology.matrices != 0) & ~np.eye(n, dtype=bool)
      made += [Round(size * e.astype(float), float(e.any()) / len(edges)) for e in edges]
    elif kind == 'all-reduce' and allreduce == 'ring':
      made.append(Round(size / n * _hop(n, 1), 2 * (n - 1)))
    elif kind == 'all-reduce':
      made += _recursive_doubling(n, size)
    elif allreduce == 'ring':
      made.append(Round(size * _hop(n, 1), n - 1))
    else:  # all that one has so far goes 1, 2, 4, ... workers ahead
      hops = [2**k for k in range(math.ceil(math.log2(n)))]
      made += [Round(size * min(hop, n - hop) * _hop(n, hop), 1) for hop in hops]
  return made


def communication_seconds(work: Workload, links: Links) -> Any:
  """Seconds of one step in which messages are under way.

  Returns:
    A number, or an array if the links' bandwidth or latency is one.
  """
  n = work.topology.num_workers
  if links.paths is not None and links.paths.shape != (n, n):
    raise ValueError(f'paths has shape {links.paths.shape}: the {n} workers need ({n}, {n})')
  total: Any = np.zeros(np.broadcast_shapes(np.shape(links.bandwidth), np.shape(links.latency)))
  for sent, repeats in rounds(work, links.allreduce):
    total = total + repeats * (links.latency + _transfer(8 * sent, links))
  return total


def step_seconds(work: Workload, links: Links) -> Any:
  """Seconds of one step: compute + codec + communication. See `decomp.cost`."""
  return work.compute + work.codec + communication_seconds(work, links)


def time_to_target(work: Workload, links: Links) -> Any:
  """Seconds until the target is reached: `work.steps` steps."""
  return work.steps * step_seconds(work, links)


def _hop(n: int, hop: int) -> np.ndarray:
  """(n, n): everyone sends to the worker `hop` places ahead."""
  return np.roll(np.eye(n), hop, axis=0)


def _recursive_doubling(n: int, size: int) -> list[Round]:
  """Rounds in which partners 1, 2, 4, ... apart exchange whole arrays.

  Workers beyond the largest power of two first add theirs to a partner's, and get the sum at last.
  """
  power = 2 ** int(math.log2(n))
  made = []
  for k in range(int(math.log2(power))):
    pairs = np.zeros((n, n))
    pairs[np.arange(power), np.arange(power) ^ 2**k] = size
    made.append(Round(pairs, 1))
  if n > power:
    fold = np.zeros((n, n))
    fold[np.arange(n - power), np.arange(power, n)] = size
    made = [Round(fold, 1), *made, Round(fold.T, 1)]
  return made


def _transfer(bits: np.ndarray, links: Links) -> Any:
  """Seconds of a round's busiest worker, latency left out."""
  # As seconds per bit, infinite bandwidths and windows need no special case.
  pace = np.maximum(1 / (links.efficiency * links.bandwidth), links.latency / (4 * links.window))
  pace = np.asarray(pace)[..., None, None]
  if links.paths is not None:  # nobody sends to itself, whatever the diagonal holds
    paths = np.where(np.eye(len(links.paths), dtype=bool), np.inf, links.paths)
    pace = np.maximum(pace, 1 / paths)
  times = pace * bits
  received, sent = times.sum(-1), times.sum(-2)
  return (np.maximum(received, sent) if links.duplex == 'full' else received + sent).max(-1)
