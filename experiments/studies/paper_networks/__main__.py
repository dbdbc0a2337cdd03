r"""Figures 2 and 3 of Tang et al. (2018): finished runs against time on the networks of the paper.

  python -m experiments.compare --flagfile=experiments/flags/figure2_short.flags --output=runs/fig2
  python -m experiments.studies.paper_networks --runs=runs/fig2 \
      --measured=experiments/studies/network_bench/results/results.json

Loss per epoch (2a), and against the time that decomp.cost predicts on the paper's best network
(2b), with high latency (2c) and with low bandwidth (2d); and the seconds of an epoch against
bandwidth and latency (3a to 3d). Seconds of a gradient (--compute) and of compression are measured
on this machine unless given. --measured adds the steps that the study network_bench has
measured on real links, as points. Results go to one folder: plot.png and results.json.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app, flags

import decomp
from decomp import cost, plots
from experiments import plan
from experiments.common import output, report, settings

for name in ('runs', 'compute', 'measured', 'output'):
  flags.declare_key_flag(name)

BEST, SLOW = '1.4Gbps', '5Mbps'
NEAR, FAR = '0.13ms', '20ms'
NETWORKS = {
  '2b: 1.4 Gbit/s, 0.13 ms': (BEST, NEAR),
  '2c: 1.4 Gbit/s, 20 ms': (BEST, FAR),
  '2d: 5 Mbit/s, 0.13 ms': (SLOW, NEAR),
}
CORNERS = {**NETWORKS, '5 Mbit/s, 20 ms': (SLOW, FAR)}
BANDWIDTHS = np.geomspace(5e6, 1.4e9, 41)
LATENCIES = np.geomspace(0.13e-3, 20e-3, 41)
NEAR_ENOUGH = 1.5
"""A network is shown in a panel whose latency or bandwidth is at most so many times its own."""
TOLERANCE = 0.02
"""How much longer or shorter measured messages may be than those of the task."""

Histories = dict[str, list[dict[str, Any]]]


class Panel(NamedTuple):
  """A part of figure 3: an epoch against bandwidth at one latency, or the other way round."""

  title: str
  against: str
  links: Callable[[Any], cost.Links]


PANELS = (
  Panel('3a: latency 0.13 ms', 'bandwidth', lambda bandwidth: cost.lan(bandwidth, NEAR)),
  Panel('3b: latency 20 ms', 'bandwidth', lambda bandwidth: cost.lan(bandwidth, FAR)),
  Panel('3c: bandwidth 1.4 Gbit/s', 'latency', lambda latency: cost.lan(BEST, latency)),
  Panel('3d: bandwidth 5 Mbit/s', 'latency', lambda latency: cost.lan(SLOW, latency)),
)
AXES = {
  'bandwidth': (BANDWIDTHS, 1e-6, 'bandwidth (Mbit/s)'),
  'latency': (LATENCIES, 1e3, 'latency (ms)'),
}

Measured = Mapping[str, list[tuple[cost.Links, float]]]
"""Networks and the seconds of a step's exchange on them, by the algorithm's name."""


def main(argv: Sequence[str]) -> None:
  """Runs the program."""
  settings.start(argv)
  with settings.mistakes_in_one_line():
    if not plan.RUNS.value:
      raise ValueError('--runs is missing: give the folder of a comparison by experiments.compare')
    folder = Path(plan.RUNS.value[0])
    chosen, setup, histories = read(folder)
    path = output.choose_folder('paper_networks')
    measured = read_measured(Path(plan.MEASURED.value), setup) if plan.MEASURED.value else {}
    step = [cost.Reached(1, 0.0)]
    works = plan.measure([plan.Entry(setup, algorithm, step) for algorithm in chosen])
  steps = float(setup.shards.lengths.mean()) / setup.batch_size
  rows = table(works, steps)
  title = f'{setup.task.name} on {setup.topology.name}: predicted seconds of an epoch'
  found = {
    'runs': str(folder),
    'compute': works[0].compute,
    'codec': {work.name: work.codec for work in works},
    'steps of an epoch': steps,
    'seconds of an epoch': rows,
    'environment': settings.environment(),
  }
  output.write_json(path / 'results.json', found)
  output.save_plot(draw(works, histories, steps, setup.task.name, measured), path / 'plot.png')
  report.print_table(rows, title)
  print(f'plot: {path / "plot.png"}')


def read(folder: Path) -> tuple[list[decomp.Algorithm], settings.Setup, Histories]:
  """The algorithms of a comparison, its setting, and everyone's rows."""
  texts = plan.restore(output.read_json(folder / 'config.json'))
  setup = settings.build_setup()
  chosen = [settings.build_algorithm(text, setup.steps) for text in texts]
  return chosen, setup, {a.name: output.read_metrics(folder, a.name) for a in chosen}


def read_measured(path: Path, setup: settings.Setup) -> Measured:
  """The rows of the study network_bench, whose messages must be about as long as the task's."""
  rows, config = output.read_json(path), output.read_json(path.with_name('config.json'))
  params, _ = jax.eval_shape(setup.task.init, jax.random.key(0))
  size = sum(leaf.size for leaf in jax.tree.leaves(params))
  if abs(config['size'] / size - 1) > TOLERANCE:
    raise ValueError(
      f'--measured={path} has {config["size"]} parameters and {setup.task.name} has {size}: run '
      f'experiments.studies.network_bench --size={size}'
    )
  found: dict[str, list[tuple[cost.Links, float]]] = {}
  for row in rows:
    name = settings.build_algorithm(row['algorithm'], steps=1).name
    links = cost.lan(row['bandwidth'] * 1e6, row['latency'] * 1e-3)
    found.setdefault(name, []).append((links, row['seconds']))
  return found


def table(works: Sequence[cost.Workload], steps: float) -> list[dict[str, Any]]:
  """The seconds of an epoch at the corners of the paper's range."""
  return [
    {'algorithm': work.name}
    | {
      name.split(': ')[-1]: steps * float(cost.step_seconds(work, cost.lan(*network)))
      for name, network in CORNERS.items()
    }
    for work in works
  ]


def draw(
  works: Sequence[cost.Workload], histories: Histories, steps: float, title: str, measured: Measured
) -> Any:
  """Figure 2 in the first row, figure 3 in the second."""
  import matplotlib.pyplot as plt

  figure, axes = plt.subplots(2, 4, figsize=(18, 8), layout='constrained')
  said = 'predicted; points: steps measured on shaped links' if measured else 'predicted'
  figure.suptitle(f'{title}: the same runs on the networks of the paper ({said})')
  plots.curves(histories, 'epoch', 'train_loss', ax=axes[0, 0])
  axes[0, 0].set_title('2a: per epoch')
  for ax, (name, network) in zip(axes[0, 1:], NETWORKS.items(), strict=True):
    plots.curves(on(histories, works, cost.lan(*network)), 'minutes', 'train_loss', ax=ax)
    ax.set_title(name)
  for ax, panel in zip(axes[1], PANELS, strict=True):
    values, scale, label = AXES[panel.against]
    for work in works:
      seconds = [steps * float(cost.step_seconds(work, panel.links(value))) for value in values]
      (line,) = ax.loglog(values * scale, seconds, label=work.name)
      points = on_panel(panel, measured.get(work.name, ()))
      epochs = [steps * (work.compute + seconds) for _, seconds in points]
      ax.plot([x * scale for x, _ in points], epochs, 'o', color=line.get_color(), ms=5)
    ax.set(title=panel.title, xlabel=label, ylabel='seconds of an epoch')
    ax.grid(alpha=0.3)
  figure.legend(*axes[1, 0].get_legend_handles_labels(), loc='outside lower center', ncols=4)
  return figure


def on_panel(
  panel: Panel, measured: Sequence[tuple[cost.Links, float]]
) -> list[tuple[float, float]]:
  """What was measured near the panel's latency or bandwidth: where on its axis, and seconds."""
  other = 'latency' if panel.against == 'bandwidth' else 'bandwidth'
  found = []
  for links, seconds in measured:
    place = getattr(links, panel.against)
    ratio = getattr(links, other) / getattr(panel.links(place), other)
    if 1 / NEAR_ENOUGH < ratio < NEAR_ENOUGH:
      found.append((place, seconds))
  return found


def on(
  histories: Histories, works: Sequence[cost.Workload], links: cost.Links
) -> Mapping[str, list[dict[str, Any]]]:
  """The rows with the minutes they would have taken on a network."""
  minutes = {work.name: float(cost.step_seconds(work, links)) / 60 for work in works}
  return {
    name: [{**row, 'minutes': row['step'] * minutes[name]} for row in rows]
    for name, rows in histories.items()
  }


if __name__ == '__main__':
  app.run(main)
