"""How a history looks in a notebook."""

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

_COLUMNS = (
  'step',
  'train_loss',
  'test_suboptimality',
  'test_loss',
  'test_accuracy',
  'consensus_distance',
  'bytes_sent',
  'seconds',
  'simulated_seconds',
)
_ROWS = 5
_WIDTH, _HEIGHT = 360, 90


def table(rows: Sequence[Mapping[str, Any]], outcome: str) -> str:
  """The outcome, the curve of the loss, and the last rows, as HTML.

  >>> shown = table([{'step': 3, 'train_loss': 0.25}], 'diverged at <3>')
  >>> '<td>0.25</td>' in shown, 'diverged at &lt;3&gt;' in shown
  (True, True)
  """
  columns = [name for name in _COLUMNS if any(name in row for row in rows)]
  head = ''.join(f'<th>{name.replace("_", " ")}</th>' for name in columns)
  body = ''.join(
    '<tr>' + ''.join(f'<td>{_text(row.get(name))}</td>' for name in columns) + '</tr>'
    for row in rows[-_ROWS:]
  )
  caption = f'<p>{html.escape(outcome)}</p>'
  return f'{caption}{curve(rows)}<table><tr>{head}</tr>{body}</table>'


def curve(rows: Sequence[Mapping[str, Any]], name: str = 'train_loss') -> str:
  """A metric over steps as a small SVG, on a logarithmic scale if it is positive; '' for no curve.

  >>> curve([{'step': 1, 'train_loss': 0.5}])
  ''
  """
  points = [(row['step'], row[name]) for row in rows if math.isfinite(row.get(name, math.nan))]
  if len(points) < 2:
    return ''
  is_log = all(y > 0 for _, y in points)
  scaled = [(x, math.log10(y) if is_log else y) for x, y in points]
  (left, right), (low, high) = ((min(axis), max(axis)) for axis in zip(*scaled, strict=True))
  places = ' '.join(
    f'{4 + (_WIDTH - 8) * (x - left) / (right - left):.1f},'
    f'{4 + (_HEIGHT - 8) * (high - y) / ((high - low) or 1):.1f}'
    for x, y in scaled
  )
  how = f'{name.replace("_", " ")} {_text(points[0][1])} to {_text(points[-1][1])}'
  scale = ', logarithmic' if is_log else ''
  return (
    f'<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
    f'<title>{how} over steps{scale}</title>'
    f'<polyline points="{places}" fill="none" stroke="#1f77b4" stroke-width="1.6"/></svg>'
  )


def _text(value: Any) -> str:
  return '' if value is None else f'{value:,}' if isinstance(value, int) else f'{value:.4g}'
