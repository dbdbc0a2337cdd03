"""Pictures of training histories. Every function draws on given axes, or makes its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from decomp.cost import WinnerMap

Histories = Mapping[str, Sequence[Mapping[str, Any]]]
"""Label -> rows of metrics, as `decomp.train` returns them or metrics.jsonl holds them."""


def curves(
  histories: Histories, x: str = 'epoch', y: str = 'train_loss', ax: Any = None, log: bool = True
) -> Any:
  """One metric against another, a line for each history.

  Args:
    histories: label -> rows.
    x: 'epoch', 'step', 'megabytes' (sent by one worker), 'seconds', or any column.
    y: any column.
    ax: matplotlib axes.
    log: whether y is logarithmic.
  """
  ax = ax or _axes()
  for number, (label, rows) in enumerate(histories.items()):
    points = [(_value(row, x), _value(row, y)) for row in rows if math.isfinite(_value(row, y))]
    if points:
      ax.plot(*zip(*points, strict=True), label=label, color=f'C{number}', linewidth=1.6)
  if log and ax.lines:
    ax.set_yscale('log')
  ax.set_xlabel(x.replace('megabytes', 'MB sent by a worker').replace('_', ' '))
  ax.set_ylabel(y.replace('_', ' '))
  ax.grid(alpha=0.3)
  return ax


def bars(histories: Histories, column: str = 'test_accuracy', ax: Any = None) -> Any:
  """The last value of one metric, a bar for each history; runs that diverged say so instead."""
  ax = ax or _axes()
  values = [_last(rows, column) for rows in histories.values()]
  finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
  # Bars that begin at 0 hide differences of a few per cent.
  margin = 0.5 * (max(finite) - min(finite)) + 0.02 * abs(max(finite))
  left = max(0.0, min(finite) - margin)
  for place, value in enumerate(values):
    width, text = (value, f'{value:.4g}') if math.isfinite(value) else (0, 'diverged')
    ax.barh(place, width, color=f'C{place}')
    ax.annotate(f' {text}', (max(width, left), place), va='center', fontsize=8)
  ax.set_xlim(left, max(finite) + margin)
  ax.set_yticks(range(len(values)), list(histories))
  ax.invert_yaxis()
  ax.tick_params(axis='y', labelsize=7)
  ax.set_xlabel(column.replace('_', ' '))
  return ax


def overview(histories: Histories, title: str = '') -> Any:
  """Loss against epochs, MB sent and simulated seconds (if any), and accuracy bars.

  Where the optimum is known, loss is f(x) - f*.
  """
  import matplotlib.pyplot as plt

  last = [rows[-1] for rows in histories.values() if rows]
  columns = {column for row in last for column in row}
  loss = 'test_suboptimality' if 'test_suboptimality' in columns else 'train_loss'
  final = 'test_accuracy' if 'test_accuracy' in columns else 'test_loss'
  timed = 'simulated_seconds' in columns
  figure, axes = plt.subplots(1, 3 + timed, figsize=(15 + 5 * timed, 4.2), layout='constrained')
  curves(histories, 'epoch', loss, axes[0])
  sent = {label: [row for row in rows if row['bytes_sent']] for label, rows in histories.items()}
  curves(sent, 'megabytes', loss, axes[1])
  if timed:
    curves(sent, 'simulated_seconds', loss, axes[2])
  bars(histories, final, axes[-1])
  starts = [line.get_ydata()[0] for line in axes[0].lines]
  if starts:
    axes[0].legend(fontsize=7)
    # One run that diverges would make all others flat.
    for ax in axes[:-1]:
      ax.set_ylim(top=min(ax.get_ylim()[1], 3 * max(starts)))
  for ax in axes[1:-1]:
    if ax.lines:
      ax.set_xscale('log')
  figure.suptitle(title)
  return figure


def _axes() -> Any:
  import matplotlib.pyplot as plt

  return plt.subplots(figsize=(5, 4), layout='constrained')[1]


def _value(row: Mapping[str, Any], column: str) -> float:
  if column == 'megabytes':
    return row['bytes_sent'] / 1e6
  value = row.get(column)
  return math.nan if value is None else float(value)


def _last(rows: Sequence[Mapping[str, Any]], column: str) -> float:
  return _value(rows[-1], column) if rows and not getattr(rows, 'diverged', None) else math.nan


def winner_map(times: WinnerMap, baseline: str, ax: Any = None) -> Any:
  """Which algorithm is fastest where, over bandwidth and latency.

  Args:
    times: see `decomp.cost.winner_map`.
    baseline: one of its algorithms; lines tell how many times faster than that the fastest is.
    ax: matplotlib axes.
  """
  import numpy as np
  from matplotlib.colors import ListedColormap
  from matplotlib.patches import Patch
  from matplotlib.ticker import EngFormatter

  ax = ax or _axes()
  colors = ListedColormap([f'C{number}' for number in range(len(times.names))])
  extent = {'vmin': -0.5, 'vmax': len(times.names) - 0.5}
  ax.pcolormesh(
    times.bandwidth, times.latency, times.winner, cmap=colors, alpha=0.65, linewidth=0, **extent
  )
  lead = times.seconds[times.names.index(baseline)] / times.seconds.min(0)
  levels = [
    level for level in (1.1, 1.5, 2, 3, 5, 10, 20, 50, 100) if lead.min() < level < lead.max()
  ]
  if levels:
    lines = ax.contour(times.bandwidth, times.latency, lead, levels, colors='black', linewidths=0.6)
    ax.clabel(lines, fmt='%g×', fontsize=7)
    ax.set_title(f'lines: times faster than {baseline}', fontsize=9)
  ax.set(xscale='log', yscale='log', xlabel='bandwidth', ylabel='latency')
  ax.xaxis.set_major_formatter(EngFormatter('bps'))
  ax.yaxis.set_major_formatter(EngFormatter('s'))
  shown = [Patch(color=f'C{k}', alpha=0.65, label=times.names[k]) for k in np.unique(times.winner)]
  ax.legend(handles=shown, fontsize=7, loc='upper center', bbox_to_anchor=(0.5, -0.14))
  return ax


def heat_map(
  rows: Sequence[Mapping[str, Any]], x: str, y: str | None = None, ax: Any = None
) -> Any:
  """The mean of a metric over seeds, a cell for each pair of settings.

  Of several settings in one cell, which differ in a third number, the best is shown; cells where
  seeds diverged say how many.

  Args:
    rows: of one table of `decomp.Sweep`.
    x: the grid along the horizontal axis.
    y: the grid along the vertical axis; None if there is only one.
    ax: matplotlib axes.
  """
  import numpy as np
  from matplotlib.colors import LogNorm, Normalize

  ax = ax or _axes()
  percent = rows[0]['metric'].endswith('accuracy')
  columns = [*dict.fromkeys(row[x] for row in rows)]
  lines = [*dict.fromkeys(row[y] for row in rows)] if y else [0.0]
  shown: dict[tuple[int, int], Mapping[str, Any]] = {}
  sign = -1 if percent else 1  # the best come last, over the others
  for row in sorted(rows, key=lambda row: (row['diverged'], sign * row['mean']), reverse=True):
    shown[lines.index(row[y]) if y else 0, columns.index(row[x])] = row
  means = np.full((len(lines), len(columns)), math.nan)
  for place, row in shown.items():
    means[place] = math.nan if row['diverged'] else row['mean']
  finite = means[np.isfinite(means)]
  scale = Normalize if percent or not np.all(finite > 0) else LogNorm
  colors = 'viridis' if percent else 'viridis_r'
  image = ax.imshow(means, cmap=colors, norm=scale() if len(finite) else None, aspect='auto')
  for (line, column), row in shown.items():
    text = f'{row["mean"]:.3g}\n± {row["std"]:.1g}'
    if percent:
      text = f'{100 * row["mean"]:.1f}\n± {100 * row["std"]:.1f} %'
    if row['diverged']:
      text = f'{row["diverged"]} of {row["seeds"]}\ndiverged'
    box = {'facecolor': 'white', 'alpha': 0.7, 'linewidth': 0}
    ax.annotate(text, (column, line), ha='center', va='center', fontsize=8, bbox=box)
  ax.set_xticks(range(len(columns)), [f'{value:g}' for value in columns])
  ax.set_yticks(range(len(lines)) if y else [], [f'{value:g}' for value in lines] if y else [])
  ax.set(xlabel=x.replace('_', ' '), ylabel=(y or '').replace('_', ' '))
  if len(finite):
    ax.figure.colorbar(image, ax=ax, label=rows[0]['metric'].replace('_', ' '))
  return ax
