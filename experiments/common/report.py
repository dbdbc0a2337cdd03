"""Tables for people."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

import decomp


def summary(history: decomp.History, algorithm: str) -> dict[str, Any]:
  """One run in one row."""
  last = history[-1]
  name, _, rest = algorithm.partition('(')
  how = 'diverged at ' if history.diverged else 'stopped at ' if history.stopped else ''
  metric = next(m for m in ('test_suboptimality', 'test_accuracy', *last) if m in last)
  return {
    'algorithm': name,
    'compressor': rest.removesuffix(')') or 'none',
    metric.replace('_', ' '): last[metric],
    'train loss': last.get('train_loss', math.nan),
    'consensus distance': last['consensus_distance'],
    'MB per worker': last['bytes_sent'] / 1e6,
    'steps/s': history.steps_per_second,
    'end': f'{how}step {last["step"]}',
  }


def print_table(rows: Sequence[Mapping[str, Any]], title: str) -> None:
  """Prints rows as a table."""
  table = Table(title=title, title_justify='left')
  for column in rows[0]:
    justify: Any = 'left' if isinstance(rows[0][column], str) else 'right'
    table.add_column(column, justify=justify, overflow='fold')
  for row in rows:
    table.add_row(*(text(column, value) for column, value in row.items()))
  console = Console()
  # A pipe has no width of its own, and 80 characters would break the lines.
  console.width = console.width if console.is_terminal else 160
  console.print(table)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
  """Rows as a table."""
  lines = [list(rows[0]), ['---'] * len(rows[0])]
  lines += [[v if isinstance(v, str) else f'{v:.3g}' for v in row.values()] for row in rows]
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines) + '\n'


def text(column: str, value: Any) -> str:
  """What a cell of a table says."""
  if isinstance(value, str):
    return value
  if not math.isfinite(value):
    return 'not finite'
  if column == 'test accuracy':
    return f'{100 * value:.2f} %'
  return f'{value:,.0f}' if value >= 1000 else f'{value:.4g}'
