"""What training would take on a network: seconds from messages, bytes, latency and bandwidth.

A synchronous step is local work, then rounds of messages in which everyone sends at once:

  step = compute + codec + Σ_rounds (latency + busiest worker's messages)

A worker sends its messages of a round one after another, and receives them likewise, both at once
if its network card is full duplex. M bytes take M / b seconds, where b is the least of

  bandwidth of the cards × efficiency,   bandwidth of the path,   window / (2 latency).

For M bytes on n workers, and the algorithms of `lan(allreduce=)`:

==================== ====================== =======================================
exchange             latencies              seconds on the wire
==================== ====================== =======================================
mix, degree k        1                      k M / b
all-reduce, ring     2 (n-1)                2 (n-1)/n M / b
all-reduce, doubling log₂ n                 log₂ n M / b
all-gather, ring     n-1                    (n-1) M / b
all-gather, doubling ⌈log₂ n⌉               (n-1) M / b
==================== ====================== =======================================

A half duplex card takes twice the seconds on the wire. Nothing overlaps with the computation.

>>> import jax.numpy as jnp, optax
>>> from decomp import algorithms, compressors, topology
>>> params = {'w': jnp.zeros(270_000)}
>>> algorithm = algorithms.dcd_psgd(optax.sgd(0.1), compressors.stochastic_quantizer(bits=8))
>>> work = workload(algorithm, topology.ring(8), params, compute='20ms', codec='1ms')
>>> round(float(step_seconds(work, lan(bandwidth='100Mbps', latency='5ms'))), 4)
0.0692
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import optimize

from decomp import wire
from decomp.base import Algorithm, PyTree
from decomp.network import Meter
from decomp.topology import Topology

if TYPE_CHECKING:
  from decomp.tasks import Task

BANDWIDTHS = {'bps': 1.0, 'kbps': 1e3, 'Mbps': 1e6, 'Gbps': 1e9, 'Tbps': 1e12}
"""Bits, not bytes, per second."""
SECONDS = {'s': 1.0, 'ms': 1e-3, 'us': 1e-6, 'ns': 1e-9}


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
  window: float = math.inf


def lan(
  bandwidth: Any = '1Gbps',
  latency: Any = '0.1ms',
  duplex: str = 'full',
  allreduce: str = 'ring',
  paths: Any = None,
  efficiency: float = 1.0,
  window: float = math.inf,
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
    window: the bytes that may be under way to a receiver before it acknowledges them, as TCP has
      it; infinite if it never runs out.

  Returns:
    `Links`, for `step_seconds` and the rest of this module.
  """
  for argument, value, known in (
    ('duplex', duplex, ('full', 'half')),
    ('allreduce', allreduce, ('ring', 'recursive_doubling')),
  ):
    if value not in known:
      raise ValueError(f'{argument}={value!r} is unknown: use one of {", ".join(known)}')
  if not 0 < efficiency <= 1:
    raise ValueError(f'efficiency={efficiency}: must be above 0 and at most 1')
  if not window > 0:
    raise ValueError(f'window={window}: must be above 0 bytes')
  return Links(
    _above_zero('bandwidth', _quantity('bandwidth', bandwidth, BANDWIDTHS)),
    _seconds('latency', latency),
    duplex,
    allreduce,
    None if paths is None else _paths(paths),
    efficiency,
    window,
  )


class Exchange(NamedTuple):
  """One exchange between workers within a step.

  Attributes:
    kind: 'mix' (with the neighbours), 'all-reduce', or 'all-gather' (of codes that don't add up).
    bytes: of one worker's packed message; of the whole array for an all-reduce.
  """

  kind: str
  bytes: int


class Workload(NamedTuple):
  """What has to be done to reach a target: `steps` times the same step.

  Attributes:
    name: of the algorithm.
    topology: who exchanges with whom.
    exchanges: of one step, one after another.
    compute: seconds until the slowest worker has its gradient.
    codec: seconds of one worker's other work in a step: compression, mixing, the optimizer.
    steps: how many steps it takes.
  """

  name: str
  topology: Topology
  exchanges: tuple[Exchange, ...]
  compute: float
  codec: float
  steps: int = 1


class Round(NamedTuple):
  """Messages that are sent at once.

  Attributes:
    bytes: (n, n), to each receiver (row) from each sender.
    repeats: how many times in a step; a fraction for one of the rounds of a varying graph.
  """

  bytes: np.ndarray
  repeats: float


def workload(
  algorithm: Algorithm,
  topology: Topology,
  params: PyTree,
  *,
  compute: str | float,
  codec: str | float,
  steps: int = 1,
) -> Workload:
  """The workload of an algorithm, its exchanges found by tracing one step.

  Args:
    algorithm: such as `decomp.algorithms.dcd_psgd(...)`.
    topology: such as `decomp.topology.ring(8)`.
    params: one worker's parameters, or their shapes and dtypes.
    compute: of one gradient: '20ms' or seconds; see `measure_compute`, `straggling`, `slowest`.
    codec: of one worker's other work: '1ms' or seconds; see `measure_codec`.
    steps: to reach the target; see `steps_to`.
  """
  meter = _Recorder(topology)
  state = jax.eval_shape(lambda p: algorithm.init(p, meter), params)
  meter.exchanges.clear()  # the start is not part of a step
  key = jax.eval_shape(lambda: jax.random.key(0))
  jax.eval_shape(lambda k, g, s: algorithm.step(k, g, s, meter), key, params, state)
  local = _seconds('compute', compute), _seconds('codec', codec)
  return Workload(algorithm.name, topology, tuple(meter.exchanges), *local, steps)


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
  """Seconds of one step: compute + codec + communication. See the top of this module."""
  return work.compute + work.codec + communication_seconds(work, links)


def time_to_target(work: Workload, links: Links) -> Any:
  """Seconds until the target is reached: `work.steps` steps."""
  return work.steps * step_seconds(work, links)


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

  def lead(bandwidth: Any) -> Any:
    at = dataclasses.replace(links, bandwidth=bandwidth)
    return time_to_target(other, at) - time_to_target(work, at)

  grid = np.geomspace(*between, 400)
  signs = lead(grid) > 0
  changes = np.flatnonzero(signs[1:] != signs[:-1])
  points = [float(optimize.brentq(lead, grid[k], grid[k + 1])) for k in changes]
  ends = [0.0] * bool(signs[0]) + points + [math.inf] * bool(signs[-1])
  return list(zip(ends[::2], ends[1::2], strict=True))


def straggling(compute: str | float, num_workers: int, delay: float) -> float:
  """The expected time of the slowest of n workers, if delays are exponential.

  Each worker takes compute (1 + delay E) with independent E ~ Exp(1). The largest of n of them has
  the harmonic number as its mean:

    E max = compute (1 + delay H_n),   H_n = 1 + 1/2 + ... + 1/n ≈ ln n + 0.58

  In gossip a worker waits for its neighbours only, so that this is an upper bound there.

  >>> straggling(1.0, num_workers=4, delay=0.12)
  1.25

  Args:
    compute: of a worker that is not delayed.
    num_workers: n.
    delay: the mean delay, in units of `compute`.
  """
  if not (math.isfinite(delay) and delay >= 0):
    raise ValueError(f'delay={delay}: the mean delay must be a number of at least 0')
  return _seconds('compute', compute) * (1 + delay * sum(1 / k for k in range(1, num_workers + 1)))


def slowest(samples: Any, num_workers: int) -> float:
  """The expected largest of n independent draws from measured seconds.

  With the m samples in order, x_1 <= ... <= x_m: Σ_k x_k ((k/m)ⁿ - ((k-1)/m)ⁿ).

  >>> slowest([1.0, 2.0], num_workers=2)
  1.75
  """
  ordered = np.sort(np.asarray(samples, float).reshape(-1))
  if not ordered.size or not np.isfinite(ordered).all():
    raise ValueError('samples must be finite seconds, and at least one of them')
  return float(ordered @ np.diff(np.linspace(0, 1, ordered.size + 1) ** num_workers))


def fit_transport(measured: Sequence[tuple[Workload, Links, float]]) -> tuple[float, float]:
  """What measurements say of `efficiency` and `window`, which no data sheet tells.

  Least squares of log(predicted / measured), robust against single rows that are far off.

  Args:
    measured: workloads on networks with their seconds per step, on networks that differ.

  Returns:
    (efficiency, window in bytes), for `lan`.
  """

  def errors(logs: np.ndarray) -> np.ndarray:
    efficiency, window = np.exp(logs)
    predicted = [
      step_seconds(work, dataclasses.replace(links, efficiency=efficiency, window=window))
      for work, links, _ in measured
    ]
    return np.log(np.array(predicted) / [seconds for *_, seconds in measured])

  # Where a wide window changes nothing, a search for a narrow one would not begin; and where a
  # narrow one explains no more, the widest is to be believed.
  fits = [
    optimize.least_squares(errors, np.log([0.9, start]), bounds=([-3, 0], [0, 30]), loss='soft_l1')
    for start in (1e9, 1e6, 1e5, 1e4)
  ]
  efficiency, window = np.exp(min(fits, key=lambda fit: round(fit.cost, 6)).x)
  return float(efficiency), float(window)


def measure_codec(algorithm: Algorithm, topology: Topology, params: PyTree) -> float:
  """Seconds of one worker's part of a step on this machine, gradient and wire left out.

  That is: compressing and packing its message, unpacking and decoding those of its neighbours,
  mixing, and the optimizer. In a compiled loop; the median of five.
  """
  net, key = _Loopback(topology), jax.random.key(0)
  params = jax.tree.map(jnp.asarray, params)
  grads = optax.tree.random_like(key, params)

  def step(number: jax.Array, state: Any) -> Any:
    return algorithm.step(jax.random.fold_in(key, number), grads, state, net)[0]

  return _median_seconds(step, jax.jit(lambda p: algorithm.init(p, net))(params))


def measure_compute(task: Task, batch_size: int) -> float:
  """Seconds of one worker's gradient on this machine, in a compiled loop; the median of five."""
  key = jax.random.key(0)
  params, model_state = jax.jit(task.init)(key)
  batch = {name: jnp.asarray(values[:batch_size]) for name, values in task.train.items()}

  def step(_: Any, carry: Any) -> Any:
    params, model_state = carry
    grads, model_state = jax.grad(task.loss, has_aux=True)(params, model_state, batch, key)
    # The next gradient must differ, or the compiler would move it out of the loop.
    return jax.tree.map(lambda x, g: x - 1e-3 * g, params, grads), model_state

  return _median_seconds(step, (params, model_state))


class Target(NamedTuple):
  """What a run is to reach, such as test_accuracy >= 0.9."""

  column: str
  relation: str
  value: float

  def __str__(self) -> str:
    return f'{self.column}{self.relation}{self.value:g}'


def parse_target(text: str) -> Target:
  """Reads a target.

  >>> parse_target('test_accuracy>=0.9')
  Target(column='test_accuracy', relation='>=', value=0.9)
  """
  found = re.fullmatch(r'\s*(\w+)\s*(>=|<=)\s*(\S+)\s*', text)
  try:
    return Target(found[1], found[2], float(found[3]))  # type: ignore[index]
  except (TypeError, ValueError):
    raise ValueError(
      f"target={text!r}: must be a column, >= or <=, and a number, such as 'test_accuracy>=0.9'"
    ) from None


def steps_to(rows: Iterable[Mapping[str, Any]], target: Target) -> int:
  """The step of the first row of metrics from which on the target stays met.

  What is met once and lost again, such as an accuracy that falls back, has not been reached.

  >>> rows = [{'step': 0, 'train_loss': 2.0}, {'step': 50, 'train_loss': 0.1}]
  >>> steps_to(rows, parse_target('train_loss<=0.2'))
  50
  """
  rows = list(rows)
  if not rows:
    raise ValueError('the metrics are empty: the run has not begun')
  # What the start meets already would be reached in no time, by anyone.
  later = [row for row in rows if row['step'] > 0]
  if not any(target.column in row for row in later):
    columns = ', '.join(rows[-1])
    raise ValueError(f'the metrics have no column {target.column!r} to reach; there are: {columns}')
  meets = operator.ge if target.relation == '>=' else operator.le
  reached = None
  for row in reversed(later):
    value = row.get(target.column)
    if value is None or not meets(value, target.value):
      break
    reached = int(row['step'])
  if reached is None:
    values = [row[target.column] for row in later if row.get(target.column) is not None]
    best = (max if target.relation == '>=' else min)(values, default=math.nan)
    last, step = values[-1] if values else math.nan, rows[-1]['step']
    raise ValueError(
      f'{target} is not reached: {target.column} is {last:.4g} at the end, step {step}, and was '
      f'{best:.4g} at best; choose an easier target, or train longer'
    )
  return reached


def _seconds(argument: str, value: Any) -> Any:
  found = _quantity(argument, value, SECONDS)
  if not (np.isfinite(found) & (np.asarray(found) >= 0)).all():
    raise ValueError(f'{argument}={value!r}: must be finite and at least 0')
  return found


def _same(payload: PyTree) -> PyTree:
  return payload


class _Recorder(Meter):
  """A meter that notes each exchange."""

  def __init__(self, topology: Topology):
    super().__init__(topology)
    self.exchanges: list[Exchange] = []

  def mix(self, payload: PyTree, *args: Any, **kwargs: Any) -> PyTree:
    self.exchanges.append(Exchange('mix', wire.size(payload)))
    return super().mix(payload, *args, **kwargs)

  def mean(self, payload: PyTree, decode: Callable[[PyTree], PyTree] | None = None) -> PyTree:
    kind = 'all-gather' if decode else 'all-reduce'
    self.exchanges.append(Exchange(kind, wire.size(payload)))
    return super().mean(payload, decode)


class _Loopback(Meter):
  """A network of one worker who hears itself in place of the others, with all that costs."""

  packs = True

  def mix(self, payload: PyTree, decode: Callable[[PyTree], PyTree] = _same) -> PyTree:
    return _hear(payload, decode, self._topology.degree)

  def mean(self, payload: PyTree, decode: Callable[[PyTree], PyTree] | None = None) -> PyTree:
    # An all-reduce adds as many numbers as the array has, a little less than once.
    return _hear(payload, decode or _same, self._topology.num_workers - 1 if decode else 1)


def _hear(payload: PyTree, decode: Callable[[PyTree], PyTree], times: int) -> PyTree:
  total, buffer = decode(payload), wire.pack(payload)
  for _ in range(times):
    # The barrier keeps the compiler from decoding equal messages only once.
    total, buffer = jax.lax.optimization_barrier((total, buffer))
    total = optax.tree.add(total, decode(wire.unpack(buffer, payload)))
  return optax.tree.scale(1 / (times + 1), total)


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
  if links.paths is None:
    times = np.asarray(pace)[..., None, None] * bits
  else:
    times = np.maximum(np.asarray(pace)[..., None, None], 1 / links.paths) * bits
  received, sent = times.sum(-1), times.sum(-2)
  return (np.maximum(received, sent) if links.duplex == 'full' else received + sent).max(-1)


def _median_seconds(step: Callable[[Any, Any], Any], state: Any) -> float:
  """Seconds of a step in a compiled loop: the median of five loops of at least 20 ms."""
  loop = jax.jit(lambda state, steps: jax.lax.fori_loop(0, steps, step, state))

  def timed(steps: int) -> float:
    began = time.perf_counter()
    jax.block_until_ready(loop(state, np.int32(steps)))
    return (time.perf_counter() - began) / steps

  timed(1)  # compiles
  steps = math.ceil(0.02 / timed(10))
  return float(np.median([timed(steps) for _ in range(5)]))


def _quantity(argument: str, value: Any, units: Mapping[str, float]) -> Any:
  """A text with a unit, or a number or array in the base unit, as float(s)."""
  if not isinstance(value, str):
    return float(value) if np.ndim(value) == 0 else np.asarray(value, float)
  found = re.fullmatch(r'\s*([\d.]+(?:e[+-]?\d+)?)\s*([a-zA-Z/]*)\s*', value)
  try:
    return float(found[1]) * units[found[2]]  # type: ignore[index]
  except (TypeError, ValueError, KeyError):
    raise ValueError(
      f'{argument}={value!r}: must be a number and one of the units {", ".join(units)}, such as '
      f"'5{list(units)[2]}'"
    ) from None


def _above_zero(argument: str, value: Any) -> Any:
  if not (np.asarray(value) > 0).all():
    raise ValueError(f'{argument}={value!r}: must be above 0 bits per second, such as 100Mbps')
  return value


def _paths(rows: Any) -> np.ndarray:
  paths = np.array([[_quantity('paths', value, BANDWIDTHS) for value in row] for row in rows])
  if paths.ndim != 2 or paths.shape[0] != paths.shape[1]:
    raise ValueError(f'paths has shape {paths.shape}: must be square, a row for each receiver')
  _above_zero('paths', paths[~np.eye(len(paths), dtype=bool)])
  return paths
