r"""Figures 2 and 3 of Tang et al. (2018): finished runs against time on the networks of the paper.

  python -m experiments.compare --flagfile=experiments/flags/figure2_short.flags --output=runs/fig2
  python -m experiments.paper_networks --runs=runs/fig2

Loss per epoch (2a), and against the time that decomp.cost predicts on the paper's best network
(2b), with high latency (2c) and with low bandwidth (2d); and the seconds of an epoch against
bandwidth and latency (3a to 3d). Seconds of a gradient (--compute) and of compression are measured
on this machine unless given. Results go to one folder: plot.png and results.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

import decomp
from decomp import cost, plots
from experiments import output, plan, report, settings

flags.declare_key_flag('runs')
flags.declare_key_flag('compute')
flags.declare_key_flag('output')

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

Histories = dict[str, list[dict[str, Any]]]


def main(argv: Sequence[str]) -> None:
  """Runs the program."""
  settings.start(argv)
  with settings.mistakes_in_one_line():
    if not plan.RUNS.value:
      raise ValueError('--runs is missing: give the folder of a comparison by experiments.compare')
    folder = Path(plan.RUNS.value[0])
    chosen, setup, histories = read(folder)
    path = output.choose_folder('paper_networks')
    works = plan.measure(setup, dict.fromkeys(chosen, 1))
  steps = float(setup.shards.lengths.mean()) / setup.batch_size
  rows = table(works, steps)
  title = f'{setup.task.name} on {setup.topology.name}: predicted seconds of an epoch'
  path.mkdir(parents=True, exist_ok=True)
  output.save_plot(draw(works, histories, steps, setup.task.name), path / 'plot.png')
  found = {
    'runs': str(folder),
    'compute': works[0].compute,
    'codec': {work.name: work.codec for work in works},
    'steps of an epoch': steps,
    'seconds of an epoch': rows,
    'environment': settings.environment(),
  }
  (path / 'results.json').write_text(json.dumps(found, indent=2) + '\n')
  report.print_table(rows, title)
  print(f'plot: {path / "plot.png"}')


def read(folder: Path) -> tuple[list[decomp.Algorithm], settings.Setup, Histories]:
  """The algorithms of a comparison, its setting, and everyone's rows."""
  texts = plan.restore(plan.read_json(folder / 'config.json'))
  setup = settings.build_setup()
  chosen = [settings.build_algorithm(text, setup.steps) for text in texts]
  return chosen, setup, {a.name: plan.read_metrics(folder, a.name) for a in chosen}


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


def draw(works: Sequence[cost.Workload], histories: Histories, steps: float, title: str) -> Any:
  """Figure 2 in the first row, figure 3 in the second."""
  import matplotlib.pyplot as plt

  figure, axes = plt.subplots(2, 4, figsize=(18, 8), layout='constrained')
  figure.suptitle(f'{title}: the same runs on the networks of the paper (predicted)')
  plots.curves(histories, 'epoch', 'train_loss', ax=axes[0, 0])
  axes[0, 0].set_title('2a: per epoch')
  for ax, (name, network) in zip(axes[0, 1:], NETWORKS.items(), strict=True):
    plots.curves(on(histories, works, cost.lan(*network)), 'minutes', 'train_loss', ax=ax)
    ax.set_title(name)
  panels: list[tuple[str, np.ndarray, str, Callable[[Any], cost.Links]]] = [
    ('3a: latency 0.13 ms', BANDWIDTHS, 'bandwidth (Mbit/s)', lambda b: cost.lan(b, NEAR)),
    ('3b: latency 20 ms', BANDWIDTHS, 'bandwidth (Mbit/s)', lambda b: cost.lan(b, FAR)),
    ('3c: bandwidth 1.4 Gbit/s', LATENCIES, 'latency (ms)', lambda t: cost.lan(BEST, t)),
    ('3d: bandwidth 5 Mbit/s', LATENCIES, 'latency (ms)', lambda t: cost.lan(SLOW, t)),
  ]
  for ax, (name, values, label, links) in zip(axes[1], panels, strict=True):
    scale = 1e-6 if 'bandwidth' in label else 1e3
    for work in works:
      seconds = [steps * float(cost.step_seconds(work, links(value))) for value in values]
      ax.loglog(values * scale, seconds, label=work.name)
    ax.set(title=name, xlabel=label, ylabel='seconds of an epoch')
    ax.grid(alpha=0.3)
  figure.legend(*axes[1, 0].get_legend_handles_labels(), loc='outside lower center', ncols=4)
  return figure


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
