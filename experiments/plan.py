r"""Says which algorithm is fastest on which network.

From finished runs, whose steps to a target are counted:

  python -m experiments.plan --runs=experiments/studies/demo/results \
    --target='test_accuracy>=0.95' --bandwidth=100Mbps --latency=5ms

or from numbers of steps, for any task (bytes need only its model):

  python -m experiments.plan --task=digits --topology='ring(8)' --compute=20ms \
    --algorithm=allreduce=900 --algorithm='dcd_psgd(stochastic_quantizer(bits=4))=1000'

With several folders of --runs that differ in their seed, steps are means over the seeds. They may
be off by a row of metrics, or by their standard deviation if that is more. The seconds of a
gradient, and of a worker's other work on its messages and its model, are measured on this machine,
unless --compute gives the former, or --compiled both: for another machine, as experiments.compile
found them. Results go to one folder: plan.json, and winners.png with the
fastest algorithm over a grid of bandwidths and latencies. The model is explained in decomp/cost;
how well it predicts what experiments.studies.network_bench has measured is told by

  python -m experiments.plan --measured=runs/network_bench-1/results.json
"""

import dataclasses
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app, flags

import decomp
from decomp import cost, plots, spec, topology
from experiments.common import output, report, settings

RUNS = flags.DEFINE_multi_string(
  'runs', None, 'A folder of experiments.compare or experiments.train; may be given repeatedly.'
)
TARGET = flags.DEFINE_string(
  'target', 'test_accuracy>=0.95', 'What --runs are to reach: a column of metrics, >= or <=.'
)
ALGORITHM = flags.DEFINE_multi_string(
  'algorithm',
  None,
  'Without --runs: an algorithm and its steps to the target, such as "d_psgd=1000".',
)
BANDWIDTH = flags.DEFINE_string('bandwidth', '1Gbps', 'The point to answer for.')
LATENCY = flags.DEFINE_string('latency', '0.1ms', 'The point to answer for.')
LINKS = flags.DEFINE_string(
  'links',
  'lan',
  'More about the network: \'lan(duplex="half", allreduce="recursive_doubling")\', or '
  "'lan(paths=...)' with a matrix of bandwidths for links that differ.",
)
COMPUTE = flags.DEFINE_string(
  'compute', None, "Seconds of a worker's gradient, such as 20ms; by default measured here."
)
STRAGGLING = settings.define_number(
  'straggling', 0.0, 'Mean delay of a gradient, exponential, in units of --compute.', most=1e6
)
COMPILED = flags.DEFINE_string(
  'compiled',
  None,
  'The compile.json of experiments.compile: seconds of that machine instead of this one, at its '
  'peak rates.',
)
MEASURED = flags.DEFINE_string(
  'measured', None, 'The results.json of the study network_bench, to compare the model with.'
)
flags.adopt_module_key_flags(settings)

GRID = {'bandwidth': np.geomspace(1e6, 1e10, 121), 'latency': np.geomspace(1e-5, 1e-1, 121)}


def main(argv: Sequence[str]) -> None:
  """Runs the program."""
  settings.start(argv)
  with settings.mistakes_in_one_line(stopped='stopped'):
    if MEASURED.value:
      with output.written_by('experiments.studies.network_bench', f'--measured={MEASURED.value}'):
        compare_with(Path(MEASURED.value))
      return
    point = {'bandwidth': BANDWIDTH.value, 'latency': LATENCY.value}
    links = spec.build(LINKS.value, {'lan': cost.lan}, kind='links', **point)
    entries = read_runs() if RUNS.value else given()
    works = measure(entries)
    path = output.choose_folder('plan')
    times = cost.winner_map(works, **GRID, links=links)
    rows = table(works, links)
    first = min(range(len(works)), key=lambda k: cost.time_to_target(works[k], links))
    verdict = output.look(entries[first].setup, [entries[first].algorithm], pilot=20)[0]
  found = {
    'answer': sentence(works, links),
    'preflight': verdict.headline,
    'target': TARGET.value if RUNS.value else None,
    'links': LINKS.value,
    'bandwidth': links.bandwidth,
    'latency': links.latency,
    'straggling': STRAGGLING.value,
    'table': rows,
    'exchanges': {work.name: [e._asdict() for e in work.exchanges] for work in works},
    'grid': {key: value.tolist() for key, value in GRID.items()},
    'algorithms': times.names,
    'winner': times.winner.tolist(),
    'environment': settings.environment(),
  }
  output.write_json(path / 'plan.json', found)
  output.save_plot(plots.winner_map(times, _baseline(works).name).figure, path / 'winners.png')
  report.print_table(rows, f'{works[0].topology.name} at {_at(links)}')
  print(found['answer'])
  print(f'preflight: {verdict.headline}')
  print(f'plot: {path / "winners.png"}')


class Entry(NamedTuple):
  """An algorithm, what it was run with, and when its runs, one for each seed, were there."""

  setup: settings.Setup
  algorithm: decomp.Algorithm
  reached: Sequence[cost.Reached]


def read_runs() -> list[Entry]:
  """An entry for every algorithm all of whose runs have reached the target; the others are told."""
  target = cost.parse_target(TARGET.value)
  entries: dict[tuple[str, str], Entry] = {}
  misses = {}
  for folder in map(Path, RUNS.value or ()):
    with output.written_by('experiments.train or experiments.compare', f'--runs={folder}'):
      texts = restore(output.read_json(folder / 'config.json'))
    setup = settings.build_setup()
    for algorithm in (settings.build_algorithm(text, setup.steps) for text in texts):
      name = algorithm.name, setup.topology.name
      try:
        reached = cost.steps_to(output.read_metrics(folder, algorithm.name), target)
      except ValueError as error:
        misses[name] = f'{algorithm.name} in {folder}: {error}'
      else:
        before = entries[name].reached if name in entries else ()
        entries[name] = Entry(setup, algorithm, (*before, reached))
  found = [entry for name, entry in entries.items() if name not in misses]
  if not found:
    raise ValueError(next(iter(misses.values())))
  print(*misses.values(), sep='\n', end='\n' * bool(misses))
  return found


def given() -> list[Entry]:
  """Entries from --algorithm and the flags of a run."""
  if not ALGORITHM.value:
    raise ValueError('nothing to plan: give --runs=FOLDER, or --algorithm=NAME=STEPS, repeatedly')
  setup, entries = settings.build_setup(), []
  for text in ALGORITHM.value:
    found = re.fullmatch(r'(.+)=(\d+)', text)
    if not found or int(found[2]) < 1:
      raise ValueError(
        f"--algorithm={text}: must end in its number of steps, such as '{text}=1000'"
      )
    steps = int(found[2])
    algorithm = settings.build_algorithm(found[1], steps)
    entries.append(Entry(setup, algorithm, [cost.Reached(steps, 0.0)]))
  return entries


def measure(entries: Sequence[Entry]) -> list[cost.Workload]:
  """The workloads of algorithms, timed on this machine.

  Their steps are means over seeds. They may be off by a row of metrics, or by the standard
  deviation over seeds if that is more.
  """
  works: list[cost.Workload] = []
  for number, entry in enumerate(entries):
    setup, graph = entry.setup, entry.setup.topology
    if number == 0 or setup is not entries[number - 1].setup:
      if not COMPILED.value:
        compute = COMPUTE.value or cost.measure_compute(setup.task, setup.batch_size)
      params, _ = jax.jit(setup.task.init)(jax.random.key(0))
    if COMPILED.value:
      compute, codec = compiled_seconds(Path(COMPILED.value), entry.algorithm.name)
    else:
      codec = cost.measure_codec(entry.algorithm, graph, params)
    steps = [reached.steps for reached in entry.reached]
    deviation = statistics.stdev(steps) if len(steps) > 1 else 0.0
    work = cost.workload(
      entry.algorithm,
      graph,
      params,
      compute=cost.straggling(compute, graph.num_workers, STRAGGLING.value),
      codec=codec,
      steps=statistics.mean(steps),
      spread=max(deviation, *(reached.row for reached in entry.reached)),
    )
    works.append(work)
  return works


def compiled_seconds(path: Path, name: str) -> tuple[float, float]:
  """Of a step on another machine: that of all-reduce, and what an algorithm takes beyond it."""
  with output.written_by('experiments.compile', f'--compiled={path}'):
    facts = dict(output.read_json(path)['algorithms'])
  for needed in ('allreduce', name):
    if needed not in facts or facts[needed]['at least'] is None:
      raise ValueError(
        f'--compiled={path}: knows no seconds of {needed}; run experiments.compile with '
        f'--algorithm={needed!r} for a TPU'
      )
  compute, own = (facts[one]['at least'] for one in ('allreduce', name))
  return compute, max(0.0, own - compute)


def restore(config: Mapping[str, Any]) -> list[str]:
  """Sets the flags as a run had them; returns its algorithms."""
  for name in settings.settings():
    if name in config:
      flags.FLAGS[name].value = config[name]
  chosen = config['algorithm']
  return [chosen] if isinstance(chosen, str) else chosen


def table(works: Sequence[cost.Workload], links: cost.Links) -> list[dict[str, Any]]:
  """A row for each algorithm."""
  baseline = _baseline(works)
  return [
    {
      'algorithm': work.name,
      'steps': float(work.steps),
      '±': work.spread,
      'compute (ms)': 1e3 * work.compute,
      'message and update (ms)': 1e3 * work.codec,
      'network (ms)': 1e3 * float(cost.communication_seconds(work, links)),
      'time to target (s)': float(cost.time_to_target(work, links)),
      f'speed-up over {baseline.name}': _ratio(baseline, work, links),
      'faster': '-' if work is baseline else _where(cost.faster_where(work, baseline, links)),
    }
    for work in works
  ]


def sentence(works: Sequence[cost.Workload], links: cost.Links) -> str:
  """Who wins, and by how much."""
  first, *others = sorted(works, key=lambda work: cost.time_to_target(work, links))
  baseline = _baseline(works)
  if first is baseline:
    if not others:
      return f'{first.name} is the only algorithm to compare'
    baseline = others[0]
  ratio = _ratio(baseline, first, links)
  low = ratio * (1 - baseline.spread / baseline.steps) / (1 + first.spread / first.steps)
  high = ratio * (1 + baseline.spread / baseline.steps) / max(1e-9, 1 - first.spread / first.steps)
  between = f' ({low:.2g} to {high:.2g})' if first.spread or baseline.spread else ''
  return f'{first.name}: {ratio:.3g}x{between} faster than {baseline.name} at {_at(links)}'


def compare_with(path: Path) -> None:
  """Prints what the model says beside what experiments.studies.network_bench has measured.

  Once with the network as it was set up, and once with an efficiency and a window that are fitted
  to the rows of all other algorithms.
  """
  rows, config = output.read_json(path), output.read_json(path.with_name('config.json'))
  if len({row['algorithm'] for row in rows}) < 2:
    raise ValueError(f'{path} must have rows of two algorithms at least, to fit one to the other')
  works = benchmarked(config)
  measured = []
  for row in rows:
    links = cost.lan(row['bandwidth'] * 1e6, row['round_trip_ms'] / 2e3)
    measured.append((works[row['algorithm']], links, row['seconds']))
  fitted = {
    work: cost.fit_transport([entry for entry in measured if entry[0] is not work])
    for work in works.values()
  }
  found = []
  for work, links, seconds in measured:
    efficiency, window = fitted[work]
    better = dataclasses.replace(links, efficiency=efficiency, window=window)
    given, fit = (float(cost.step_seconds(work, network)) for network in (links, better))
    found.append(
      {
        'algorithm': work.name,
        'network': _at(links),
        'measured (ms)': 1e3 * seconds,
        'predicted (ms)': 1e3 * given,
        'error (%)': 100 * (given / seconds - 1),
        'fitted (ms)': 1e3 * fit,
        'error of the fit (%)': 100 * (fit / seconds - 1),
      }
    )
  report.print_table(found, f'{path}: {config["workers"]} workers, {config["size"]} parameters')
  first, second = (
    statistics.median(abs(row[column]) for row in found)
    for column in ('error (%)', 'error of the fit (%)')
  )
  efficiency, window = cost.fit_transport(measured)
  print(f'median error {first:.0f} %; {second:.0f} % if fitted to the other algorithms')
  print(f'all rows together: --links="lan(efficiency={efficiency:.2g}, window={window:.2g})"')


def benchmarked(config: Mapping[str, Any]) -> dict[str, cost.Workload]:
  """The workloads of experiments.studies.network_bench, by the text of their algorithms.

  Its workers share one machine, so that they wait for each other's codecs.
  """
  graph, params = topology.ring(config['workers']), np.zeros(config['size'], np.float32)
  works = {}
  for text in config['algorithm']:
    algorithm = settings.build_algorithm(text, steps=1)
    codec = graph.num_workers * cost.measure_codec(algorithm, graph, params)
    works[text] = cost.workload(algorithm, graph, params, compute=0.0, codec=codec)
  return works


def _baseline(works: Sequence[cost.Workload]) -> cost.Workload:
  return next((work for work in works if work.name == 'allreduce'), works[0])


def _ratio(slow: cost.Workload, fast: cost.Workload, links: cost.Links) -> float:
  return float(cost.time_to_target(slow, links) / cost.time_to_target(fast, links))


def _where(intervals: Sequence[tuple[float, float]]) -> str:
  """The bandwidths of `cost.faster_where` in words."""

  def one(low: float, high: float) -> str:
    if low and math.isfinite(high):
      return f'from {_with_unit(low, "bps")} to {_with_unit(high, "bps")}'
    if low:
      return f'above {_with_unit(low, "bps")}'
    return f'below {_with_unit(high, "bps")}' if math.isfinite(high) else 'everywhere'

  return ', '.join(one(*interval) for interval in intervals) or 'nowhere'


def _at(links: cost.Links) -> str:
  return f'{_with_unit(links.bandwidth, "bps")}, {_with_unit(links.latency, "s")}'


def _with_unit(value: float, unit: str) -> str:
  from matplotlib.ticker import EngFormatter

  return EngFormatter(unit)(float(f'{value:.3g}'))


if __name__ == '__main__':
  app.run(main)
