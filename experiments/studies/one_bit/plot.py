"""The figures of the study, each from the results of its parts."""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import output
from experiments.studies.one_bit import codec, theory
from experiments.studies.one_bit.kept import Row, read
from experiments.studies.one_bit.training import FALLING, grouped

RING_LIMIT = theory.ring_limit(1 / 3)
# Blues and round marks for rotation, oranges and square ones for grids: they differ in lightness.
STYLES: dict[str, Row] = {
  'd_psgd': {'color': 'black', 'linestyle': '-', 'marker': ''},
  'dcd_psgd(eden(1))': {'color': '#08306b', 'linestyle': '-', 'marker': 'o'},
  'dcd_psgd(eden(2))': {'color': '#2b8cbe', 'linestyle': '-', 'marker': 'o'},
  'dcd_psgd(eden(3))': {'color': '#7bb6d9', 'linestyle': '-', 'marker': 'o'},
  'dcd_psgd(eden(4))': {'color': '#b5d4e9', 'linestyle': '-', 'marker': 'o'},
  'dcd_psgd(stochastic_quantizer(2))': {'color': '#7f2704', 'linestyle': '--', 'marker': 's'},
  'dcd_psgd(stochastic_quantizer(3))': {'color': '#d94801', 'linestyle': '--', 'marker': 's'},
  'dcd_psgd(stochastic_quantizer(4))': {'color': '#fdae6b', 'linestyle': '--', 'marker': 's'},
  'dcd_psgd(stochastic_quantizer(8))': {'color': '#c9a227', 'linestyle': '--', 'marker': 's'},
  'choco_sgd(sign_norm())': {'color': '#6a3d9a', 'linestyle': ':', 'marker': '^'},
  'choco_sgd(contractive(eden(1)))': {'color': '#c51b8a', 'linestyle': ':', 'marker': '^'},
  'ecd_psgd(eden(1))': {'color': '#1b7837', 'linestyle': '-.', 'marker': 'x'},
  'ecd_psgd(eden(4))': {'color': '#7fbf7b', 'linestyle': '-.', 'marker': 'x'},
}


def draw(path: Path) -> list[Path]:
  """Every figure whose parts are there."""
  found = {part: read(path, part) for part in ('theory', 'gossip', 'messages', 'codec')}
  runs = {task: read(path, task) for task in ('digits', 'cifar10', 'text')}
  figures: dict[str, Callable[[], Any]] = {}
  if found['theory'] and found['gossip']:
    figures['limits'] = lambda: limits(found['theory'], found['gossip'])
  if any(runs.values()):
    figures['training'] = lambda: training({k: v for k, v in runs.items() if v})
  if found['messages']:
    figures['messages'] = lambda: messages(found['messages'])
  if found['codec']:
    figures['codec'] = lambda: networks(found['codec'])
  for name, make in figures.items():
    output.save_plot(make(), path / f'{name}.png')
  return [path / f'{name}.png' for name in figures]


def limits(predicted: Row, measured: Row) -> Any:
  """What graphs bear; and rates of agreement, expected and measured."""
  import matplotlib.pyplot as plt

  figure, (left, right) = plt.subplots(1, 2, figsize=(14, 6.4), layout='constrained')
  names = sorted(predicted, key=lambda name: predicted[name]['limit'])
  left.plot([predicted[name]['limit'] for name in names], range(len(names)), 'kD', ms=5)
  lines = {
    **{f'eden({bits})': (theory.eden_alpha2(bits), '#08306b', '-') for bits in (1, 2, 3)},
    **{f'largest element, {b} bits': (theory.grid_alpha2(b), '#d94801', '--') for b in (2, 3)},
  }
  for text, (alpha2, color, style) in lines.items():
    left.axvline(alpha2, color=color, ls=style, lw=1.4)
    left.annotate(text, (alpha2, len(names) - 0.2), rotation=90, ha='right', va='top', fontsize=8)
  left.set_yticks(range(len(names)), names, fontsize=8)
  left.set(xscale='log', xlabel='α²', xlim=(0.02, 4), ylim=(-1, len(names)))
  left.set_title('1/K of graphs (diamonds): a codec converges left of it', fontsize=10)
  left.grid(alpha=0.25)
  kinds = {
    'eden(1)': ('o', '#08306b'),
    'eden(2)': ('s', '#2b8cbe'),
    'sampled': ('^', '#d94801'),
  }
  for kind, (marker, color) in kinds.items():
    rows = [row for name, row in measured.items() if _kind(name) == kind and row['expected']]
    x, y = ([row[key] for row in rows] for key in ('expected', 'measured'))
    label = 'part of the elements, eden(1)' if kind == 'sampled' else kind
    right.plot(x, y, marker, color=color, mfc='none', ms=7, label=label)
  ends = np.array(right.get_xlim())
  right.plot(ends, ends, 'k-', lw=0.8, label='as expected')
  for line in (right.axhline, right.axvline):
    line(1, color='0.5', ls=':', lw=1.2)
  right.annotate('diverges', (0.03, 1.02), xycoords=('axes fraction', 'data'))
  right.set(xlabel='factor of |x - x̄|² in a round, expected', ylabel='measured')
  right.set_title('agreement without gradients', fontsize=10)
  right.legend(loc='lower right')
  right.grid(alpha=0.25)
  return figure


def _kind(name: str) -> str:
  """The codec of a cell of the part gossip, without its numbers where it has a fraction."""
  return 'sampled' if 'sampled' in name else name.rpartition(', ')[2]


def training(runs: Mapping[str, Row]) -> Any:
  """Test error of the mean model against the bytes that a worker has sent; crosses diverged."""
  import matplotlib.pyplot as plt

  panels = [
    (f'{task}: {optimizer}, {data}', rows)
    for task, found in runs.items()
    for (optimizer, data), rows in _settings(task, found)
  ]
  columns = min(3, len(panels))
  lines = math.ceil(len(panels) / columns)
  figure, axes = plt.subplots(
    lines, columns, figsize=(5.6 * columns, 3.9 * lines + 1.4), layout='constrained', squeeze=False
  )
  for ax, (title, rows) in zip(axes.flat, panels, strict=False):
    _errors(ax, rows)
    ax.set_title(title.replace(FALLING, 'momentum 0.9, falling rate'), fontsize=9)
  for ax in axes.flat[len(panels) :]:
    ax.set_visible(False)
  shown = {
    text: line
    for ax in axes.flat
    for line, text in zip(*ax.get_legend_handles_labels(), strict=True)
  }
  order = [text for text in STYLES if text in shown]
  figure.legend([shown[t] for t in order], order, loc='outside lower center', ncols=4, fontsize=9)
  return figure


def _settings(task: str, found: Row) -> Iterator[tuple[tuple[str, str], dict[str, list[Row]]]]:
  """Runs on the usual graph by optimizer and data: algorithm -> a row for each seed."""
  groups: dict[tuple[str, str], dict[str, list[Row]]] = {}
  for cell, rows in grouped(task, found).items():
    if cell.graph in ('ring(8)', 'ring(4)'):
      groups.setdefault((cell.optimizer, cell.data), {})[cell.algorithm] = rows
  yield from groups.items()


def _errors(ax: Any, rows: Mapping[str, list[Row]]) -> None:
  """The mean over seeds of the part that is wrong; a cross where the first seed diverged."""
  for text, style in STYLES.items():
    ended = [row for row in rows.get(text, []) if not row['diverged']]
    for row in rows.get(text, [])[:1]:
      if row['diverged']:
        cross = {'linestyle': '', 'marker': 'X', 'ms': 9, 'color': style['color']}
        ax.plot([row['megabytes']], [100 * (1 - row['accuracies'][-1])], **cross)
        ax.plot([], [], label=text, **style)
    if ended:
      steps, last = np.array(ended[0]['steps'][1:], float), ended[0]['steps'][-1]
      wrong = 100 * (1 - np.mean([row['accuracies'][1:] for row in ended], axis=0))
      ax.plot(steps * ended[0]['megabytes'] / last, wrong, label=text, ms=3.5, lw=1.4, **style)
  ax.set(xscale='log', yscale='log', xlabel='MB sent by a worker', ylabel='test error, %')
  ax.yaxis.set_major_formatter('{x:g}')
  ax.yaxis.set_minor_formatter('{x:g}')
  ax.tick_params(axis='y', which='minor', labelsize=7)
  ax.grid(alpha=0.25, which='both')


def messages(found: Row) -> Any:
  """α² by kind of vector, and of real differences."""
  import matplotlib.pyplot as plt

  rows = {name: dict(row) for name, row in found.items() if ',' not in name or 'bucket' in name}
  tasks = {name: rows.pop(name) for name in list(rows) if name.startswith('differences')}
  kinds = [kind for kind in next(iter(rows.values())) if kind != 'seconds']
  figure, ax = plt.subplots(figsize=(10, 5.4), layout='constrained')
  for text, row in rows.items():
    if text in ('stochastic_quantizer(1)',):
      continue
    style = STYLES.get(f'dcd_psgd({text})', {'color': '#7a7a00', 'linestyle': '--', 'marker': 'D'})
    y = [row[kind] for kind in kinds] + [task[text] for task in tasks.values()]
    ax.plot(range(len(y)), y, label=text, ms=6, lw=1.0, **style)
  ax.axhline(RING_LIMIT, color='black', lw=1.2, ls=':')
  ax.annotate('limit of a ring', (4.4, RING_LIMIT * 1.15), fontsize=9)
  ax.set_xticks(
    range(len(kinds) + len(tasks)), [*kinds, *tasks], rotation=18, ha='right', fontsize=9
  )
  # One element in each bucket is exact, and would make all the rest flat.
  ax.set(yscale='log', ylabel='α²', ylim=(1e-5, 60))
  ax.legend(fontsize=8, loc='center left', bbox_to_anchor=(1, 0.5))
  ax.grid(alpha=0.25)
  return figure


def networks(found: Row) -> Any:
  """Seconds of a step against the bandwidth."""
  import matplotlib.pyplot as plt
  from matplotlib.ticker import EngFormatter

  figure, ax = plt.subplots(figsize=(9, 5.2), layout='constrained')
  size, named = codec.of_largest(found)
  for text, row in named.items():
    y = codec.step_seconds(text, size, row, codec.BANDWIDTHS)
    known = next((s for t, s in STYLES.items() if text.startswith(t.removesuffix(')'))), {})
    ax.plot(codec.BANDWIDTHS, y, label=text, lw=1.6, **{**known, 'marker': ''})
  ax.set(xscale='log', yscale='log', xlabel='bandwidth of a card', ylabel='seconds of a step')
  ax.xaxis.set_major_formatter(EngFormatter('bit/s'))
  ax.legend(fontsize=8, loc='center left', bbox_to_anchor=(1, 0.5))
  ax.set_title(f'{size:,} elements, ring of 8, gradients left out', fontsize=10)
  ax.grid(alpha=0.25)
  return figure
