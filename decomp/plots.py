"""Pictures of training histories. Every function draws on given axes, or makes its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

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
  for label, rows in histories.items():
    points = [(_value(row, x), row[y]) for row in rows if row.get(y) is not None and y in row]
    if points:
      ax.plot(*zip(*points, strict=True), label=label, linewidth=1.6)
  if log and ax.lines:
    ax.set_yscale('log')
  ax.set_xlabel(x.replace('megabytes', 'MB sent by a worker').replace('_', ' '))
  ax.set_ylabel(y.replace('_', ' '))
  ax.grid(alpha=0.3)
  return ax


def bars(histories: Histories, column: str = 'test_accuracy', ax: Any = None) -> Any:
  """The last value of one metric, a bar for each history; failed runs are hatched and say so."""
  ax = ax or _axes()
  values = [_last(rows, column) for rows in histories.values()]
  shown = ax.barh(list(histories), np.nan_to_num(values))
  for bar, value, color in zip(shown, values, _colors(), strict=False):
    bar.set_color(color)
    ax.annotate(
      f' {value:.4g}' if np.isfinite(value) else ' diverged',
      (bar.get_width(), bar.get_y() + bar.get_height() / 2),
      va='center',
      fontsize=8,
    )
  finite = [v for v in values if np.isfinite(v)]
  if finite:
    # Bars that begin at 0 hide differences of a few per cent.
    low = min(finite)
    ax.set_xlim(max(0, low - 0.5 * (max(finite) - low) - 0.02), max(finite) * 1.02)
  ax.invert_yaxis()
  ax.tick_params(axis='y', labelsize=7)
  ax.set_xlabel(column.replace('_', ' '))
  return ax


def overview(histories: Histories, title: str = '') -> Any:
  """Loss against epochs, loss against MB sent, and accuracy bars, in one figure."""
  import matplotlib.pyplot as plt

  last = [rows[-1] for rows in histories.values() if rows]
  final = 'test_accuracy' if any('test_accuracy' in row for row in last) else 'test_loss'
  figure, axes = plt.subplots(1, 3, figsize=(15, 4.2), layout='constrained')
  curves(histories, 'epoch', 'train_loss', axes[0])
  curves(histories, 'megabytes', 'train_loss', axes[1])
  bars(histories, final, axes[2])
  axes[0].legend(fontsize=7)
  if all(_value(row, 'megabytes') > 0 for row in last):
    axes[1].set_xscale('log')
  figure.suptitle(title)
  return figure


def _axes() -> Any:
  import matplotlib.pyplot as plt

  return plt.subplots(figsize=(5, 4), layout='constrained')[1]


def _colors() -> Sequence[str]:
  import matplotlib.pyplot as plt

  return plt.rcParams['axes.prop_cycle'].by_key()['color'] * 10


def _value(row: Mapping[str, Any], column: str) -> float:
  return row['bytes_sent'] / 1e6 if column == 'megabytes' else row[column]


def _last(rows: Sequence[Mapping[str, Any]], column: str) -> float:
  value = rows[-1].get(column) if rows else None
  return float('nan') if value is None else float(value)
