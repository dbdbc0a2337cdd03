r"""Measures seconds per step on links of chosen bandwidth and latency: the paper's figure 3.

One process for each worker of a ring, each in a network namespace of its own, exchanges through a
switch (Linux, root). The links' bandwidth is set with tc tbf, their latency with netem or, where
the kernel has none, by a process that holds packets back. Steps hold no gradient work: what is
measured is compressing, exchanging and mixing. For example:

  python -m experiments.studies.network_bench --bandwidths=1000,100,20 --latencies=0.1,5 \
    --algorithm=d_psgd --algorithm='dcd_psgd(stochastic_quantizer(4))'

Results go to one folder: results.json (a row for each measurement) and plot.png. Bytes are those
that the interfaces have sent, beside what sim.bytes_per_step says. Namespaces and processes vanish
with the program, also when it is interrupted. Where namespaces are not permitted it says so.
"""

import contextlib
import json
import math
import platform
import selectors
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from absl import app, flags

from experiments.common import output, report, settings
from experiments.studies.network_bench import shaped_network
from experiments.studies.network_bench.shaped_network import ShapedNetwork
from experiments.studies.network_bench.worker import build_algorithm

ALGORITHM = flags.DEFINE_multi_string(
  'algorithm',
  ['allreduce', 'd_psgd', 'dcd_psgd(stochastic_quantizer(8))', 'dcd_psgd(stochastic_quantizer(4))'],
  'What to measure, each with its compressor.',
)
BANDWIDTHS = flags.DEFINE_list(
  'bandwidths', ['1000', '100', '20', '5'], 'Of every link in each direction, in Mbit/s.'
)
LATENCIES = flags.DEFINE_list(
  'latencies', ['0.1', '1', '5', '20'], 'From one worker to another, one way, in ms.'
)
WORKERS = flags.DEFINE_integer('workers', 4, 'Workers on the ring, one process each.', 2)
SIZE = flags.DEFINE_integer('size', 272_474, 'Parameters, by default as many as ResNet-20 has.', 1)
SECONDS = flags.DEFINE_float(
  'seconds', 0.5, 'What a repeat should take: it has as many steps as that needs, 1 to 200.', 0.0
)
REPEATS = flags.DEFINE_integer('repeats', 3, 'Repeats; the median counts.', 1)
flags.declare_key_flag('output')
flags.declare_key_flag('smoke')

_PORT = 9000
_MOST_STEPS = 200

Row = dict[str, Any]


class Link(NamedTuple):
  """Bandwidth in Mbit/s, and one-way latency in ms."""

  bandwidth: float
  latency: float


class Workers:
  """The processes of all workers; a context manager."""

  def __init__(self, network: ShapedNetwork, size: int):
    self._network = network
    self._size = size

  def __enter__(self) -> Self:
    n = self._network.num_workers
    command = [sys.executable, '-m', 'experiments.studies.network_bench.worker']
    with contextlib.ExitStack() as stack:
      self._log = stack.enter_context(tempfile.TemporaryFile('w+'))
      self._processes: list[Any] = []
      stack.callback(shaped_network.end, self._processes)
      for worker in range(n):
        self._processes.append(self._network.start(worker, command, stderr=self._log))
      coordinator = f'{self._network.address(0)}:{_PORT}'
      for worker in range(n):
        who = {'coordinator': coordinator, 'num_workers': n, 'index': worker}
        self._tell(worker, {**who, 'size': self._size})
      self._stack = stack.pop_all()
    return self

  def __exit__(self, *_: Any) -> None:
    self._stack.close()

  def run(self, algorithm: str, steps: int, repeats: int) -> list[dict[str, Any]]:
    """Lets all workers take the same steps; returns the answer of each."""
    for worker in range(self._network.num_workers):
      self._tell(worker, {'algorithm': algorithm, 'steps': steps, 'repeats': repeats})
    with selectors.DefaultSelector() as selector:
      for process in self._processes:
        selector.register(process.stdout, selectors.EVENT_READ)
      answers: list[dict[str, Any]] = []
      while len(answers) < len(self._processes):
        for ready, _ in selector.select():
          answers.append(self._answer(ready.fileobj))
          selector.unregister(ready.fileobj)
    return answers

  def _tell(self, worker: int, message: Mapping[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # `_answer` tells why
      print(json.dumps(message), file=self._processes[worker].stdin, flush=True)

  def _answer(self, stream: Any) -> dict[str, Any]:
    line = stream.readline()
    if not line:
      self._log.seek(0)
      raise RuntimeError(f'a worker has ended; the last it said:\n{self._log.read()[-2000:]}')
    return json.loads(line)


def main(argv: Sequence[str]) -> None:
  """Runs the program."""
  settings.start(argv)
  try:
    links = [Link(b, ms) for ms in _numbers(LATENCIES) for b in _numbers(BANDWIDTHS)]
    for text in ALGORITHM.value:
      build_algorithm(text)
    if problem := shaped_network.problem():
      print(f'nothing measured: {problem}')
      return
    path = output.choose_folder('network_bench')
    for number in (signal.SIGINT, signal.SIGTERM):
      signal.signal(number, lambda *_: sys.exit('\nstopped'))
    rows = bench(links[:1] if settings.SMOKE.value else links, path)
  except (ValueError, RuntimeError) as error:
    sys.exit(f'error: {error}')
  output.save_plot(draw(rows), path / 'plot.png')
  report.print_table(time_table(rows), f'ms per step, {WORKERS.value} workers on a ring')
  report.print_table(byte_table(rows), 'bytes that a worker sends in a step')
  print(f'plot: {path / "plot.png"}')


def bench(links: Sequence[Link], path: Path) -> list[Row]:
  """Measures every algorithm on every kind of link; what is done is in `path` at any time."""
  rows: list[Row] = []
  with ShapedNetwork(WORKERS.value) as network, Workers(network, SIZE.value) as workers:
    print(f'latency by {network.latency_method} -> {path}', flush=True)
    output.write_json(path / 'config.json', _config(network))
    for text in ALGORITHM.value:
      start = time.perf_counter()
      workers.run(text, 1, 1)
      print(f'compiled {text} in {time.perf_counter() - start:.1f} s', flush=True)
    for number, link in enumerate(links, start=1):
      network.shape(*link)
      where, times = {**link._asdict(), 'round_trip_ms': network.round_trip()}, []
      for text in ALGORITHM.value:
        row = measure(text, workers.run, network.bytes_sent)
        rows.append({'algorithm': text, **where, **row})
        times.append(f'{text} {1e3 * row["seconds"]:.4g} ms')
      output.write_json(path / 'results.json', rows)
      name = f'{link.bandwidth:g} Mbit/s, {link.latency:g} ms'
      print(f'[{number}/{len(links)}] {name}: {", ".join(times)}', flush=True)
  return rows


def measure(
  text: str,
  run: Callable[[str, int, int], list[dict[str, Any]]],
  bytes_sent: Callable[[], list[int]],
) -> Row:
  """Seconds and bytes of a step, with as many steps as make a repeat long enough.

  Args:
    text: the algorithm.
    run: see `Workers.run`.
    bytes_sent: what each worker has sent so far.
  """

  def enough(steps: int) -> int:
    seconds = max(answer['seconds'][0] for answer in run(text, steps, 1)) / steps
    return min(_MOST_STEPS, math.ceil(SECONDS.value / seconds)) or 1

  # Twice, because TCP takes a while to find its pace after the link has changed.
  steps = enough(enough(1))
  repeats = 1 if settings.SMOKE.value else REPEATS.value
  before = bytes_sent()
  answers = run(text, steps, repeats)
  # Everyone has received everything, so everything has been sent.
  sent = statistics.mean(b - a for a, b in zip(before, bytes_sent(), strict=True))
  # A repeat is over when its last worker is done.
  times = [max(each) / steps for each in zip(*(a['seconds'] for a in answers), strict=True)]
  return {
    'seconds': statistics.median(times),
    'repeats': times,
    'steps': steps,
    'bytes_sent': sent / (steps * repeats),
    'bytes_per_step': answers[0]['bytes'],
  }


def time_table(rows: Sequence[Row]) -> list[Row]:
  """A row for each kind of link: ms per step of every algorithm."""
  table: dict[Link, Row] = {}
  for row in rows:
    link = Link(row['bandwidth'], row['latency'])
    start = {'Mbit/s': link.bandwidth, 'ms': link.latency, 'round trip': row['round_trip_ms']}
    table.setdefault(link, start)[row['algorithm']] = 1e3 * row['seconds']
  return list(table.values())


def byte_table(rows: Sequence[Row]) -> list[Row]:
  """A row for each algorithm: bytes by the simulation's account, and the median on the wire."""
  return [
    {
      'algorithm': name,
      'bytes_per_step': float(mine[0]['bytes_per_step']),
      'on the interface': statistics.median(row['bytes_sent'] for row in mine),
    }
    for name in dict.fromkeys(row['algorithm'] for row in rows)
    if (mine := [row for row in rows if row['algorithm'] == name])
  ]


def draw(rows: Sequence[Row]) -> Any:
  """Time per step against bandwidth, at the least and most latency, and the other way round."""
  import matplotlib.pyplot as plt

  panels = []
  for x, fixed, units in (
    ('bandwidth', 'latency', ('Mbit/s', 'ms')),
    ('latency', 'bandwidth', ('ms', 'Mbit/s')),
  ):
    values = sorted({row[fixed] for row in rows}, reverse=fixed == 'bandwidth')
    panels += [(x, fixed, value, units) for value in dict.fromkeys((values[0], values[-1]))]
  figure, axes = plt.subplots(
    1, len(panels), figsize=(4 * len(panels), 3.8), sharey=True, layout='constrained'
  )
  for ax, (x, fixed, value, (unit, fixed_unit)) in zip(axes, panels, strict=True):
    for name in dict.fromkeys(row['algorithm'] for row in rows):
      points = [
        (row[x], 1e3 * row['seconds'])
        for row in rows
        if row['algorithm'] == name and row[fixed] == value
      ]
      ax.plot(*zip(*sorted(points), strict=True), 'o-', label=name, linewidth=1.6, markersize=4)
    ax.set(xscale='log', yscale='log', xlabel=f'{x} ({unit})')
    ax.set_title(f'{fixed} {value:g} {fixed_unit}', fontsize=10)
    ax.grid(alpha=0.3)
    if x == 'bandwidth':
      ax.invert_xaxis()  # the network gets worse to the right, as in the paper
  axes[0].set_ylabel('ms per step')
  axes[0].legend(fontsize=7)
  return figure


def _config(network: ShapedNetwork) -> dict[str, Any]:
  ours = [ALGORITHM, BANDWIDTHS, LATENCIES, WORKERS, SIZE, SECONDS, REPEATS]
  devices = f'{WORKERS.value} processes with a CPU device each'
  return {
    **{holder.name: holder.value for holder in ours},
    'latency method': network.latency_method,
    'environment': {**settings.environment(), 'devices': devices, 'kernel': platform.release()},
  }


def _numbers(holder: flags.FlagHolder[Any]) -> list[float]:
  try:
    numbers = [float(text) for text in holder.value]
  except ValueError:
    numbers = []
  if not numbers or not all(0 < number < math.inf for number in numbers):
    given = ','.join(holder.value)
    raise ValueError(f'--{holder.name}={given}: give positive numbers with commas, such as 20,5')
  return numbers


if __name__ == '__main__':
  app.run(main)
