"""The tables of the study, each from the results of its parts."""

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from experiments.common import report
from experiments.studies.one_bit import codec, floor, messages
from experiments.studies.one_bit.kept import Row, read
from experiments.studies.one_bit.training import EDEN, Cell, grouped

NETWORKS = {'10 Mbit/s': 1e7, '100 Mbit/s': 1e8, '1 Gbit/s': 1e9, '10 Gbit/s': 1e10}


def write(path: Path) -> Path:
  """Writes tables.md with every table whose part is there."""
  found = [f'{title}\n\n{report.markdown(rows)}' for title, rows in tables(path) if rows]
  (path / 'tables.md').write_text('\n'.join(found))
  return path / 'tables.md'


def tables(path: Path) -> Iterator[tuple[str, list[Row]]]:
  """Titles and rows."""
  yield 'what graphs bear', bears(read(path, 'theory'))
  yield 'agreement', agreement(read(path, 'gossip'))
  yield 'error at the floor, over that of d_psgd', floors(read(path, 'floor'))
  for task in ('digits', 'cifar10', 'text'):
    cells = grouped(task, read(path, task))
    for setting in dict.fromkeys(cell[1:] for cell in cells):
      yield f'{task}, {", ".join(setting)}', trained(cells, setting)
  found = read(path, 'messages')
  yield 'messages', of_kinds(found)
  yield 'structured messages', of_structure(found)
  yield 'agreement from heavy tails', from_tails(found)
  yield 'codecs', costs(read(path, 'codec'))
  yield 'bandwidths below which a codec is faster than another', crossings(read(path, 'codec'))


def bears(found: Row) -> list[Row]:
  """What each graph bears, and the bits for agreement."""
  return [
    {
      'graph': name,
      '1/K': row['limit'],
      'eden': f'{row["eden bits"]}',
      'largest element': f'{row["grid bits"]}',
      'least part of a bit': row['fractions']['1'] if row['fractions']['1'] < 1 else '–',
      'factor of a round, full precision': row['rates']['full'] or 0.0,
      'eden(1)': row['rates']['1'],
      'eden(2)': row['rates']['2'],
      **{
        f'bits to agree, {name}': '–' if bits is None else f'{bits:.0f}'
        for name, bits in row['bits for agreement'].items()
      },
    }
    for name, row in found.items()
  ]


def agreement(found: Row) -> list[Row]:
  """Rates, expected and measured."""
  return [
    {
      'graph and codec': name,
      '1/K': row['limit'],
      'α²': row['alpha2 measured'],
      'uncompressed': f'{row["uncompressed"]:.4f}',
      'expected': f'{row["expected"]:.4f}' if row['expected'] else '–',
      'measured': f'{row["measured"]:.4f} ± {row["deviation"]:.4f}',
    }
    for name, row in found.items()
  ]


def floors(found: Row) -> list[Row]:
  """Errors at the floor of gradients' noise."""
  rows = []
  for name, row in found.items():
    graph, _, codec_text = name.rpartition(', ')
    said = floor.expected(graph, codec_text) if 'eden' in codec_text else []
    rows.append(
      {
        'graph and codec': name,
        'expected for small steps': f'{said[0]:.2f}' if said else '–',
        'with curvature': f'{said[1]:.2f}' if said else '–',
        'measured': f'{row["measured"]:.2f}',
        'seeds': ', '.join(f'{value:.2f}' for value in row['seeds']),
      }
    )
  return rows


def trained(cells: dict[Cell, list[Row]], setting: Sequence[str]) -> list[Row]:
  """Accuracies at the end, and where eden(1) with all its bytes is."""
  chosen = {cell.algorithm: rows for cell, rows in cells.items() if cell[1:] == tuple(setting)}
  budget = max((row['megabytes'] for row in chosen.get(EDEN[0], [])), default=math.nan)
  return [
    {
      'algorithm': algorithm,
      'seeds': f'{len(rows)}',
      'accuracy': _spread([row['accuracy'] for row in rows], rows),
      'worst worker': _spread([row['worst'] for row in rows], rows),
      'at equal bytes': _spread([at_bytes(row, budget) for row in rows], rows),
      'MB': max(row['megabytes'] for row in rows),
      'α²': float(np.median([row['alpha2'] or 0.0 for row in rows])),
    }
    for algorithm, rows in chosen.items()
  ]


def at_bytes(row: Row, megabytes: float) -> float:
  """The accuracy in the first row by which so much has been sent; the last one if less was sent."""
  sent = np.array(row['steps']) * row['megabytes'] / row['steps'][-1]
  return row['accuracies'][min(int(np.searchsorted(sent, 0.999 * megabytes)), len(sent) - 1)]


def _spread(values: Sequence[float | None], rows: Sequence[Row]) -> str:
  """Mean and deviation over seeds, in per cent; or where runs diverged."""
  diverged = [row['diverged'] for row in rows if row['diverged']]
  if diverged:
    return f'{len(diverged)} of {len(rows)} diverged, from step {min(diverged)} on'
  percent = 100 * np.array(values, float)
  spread = f' ± {percent.std(ddof=1):.2f}' if len(percent) > 1 else ''
  return f'{percent.mean():.2f}{spread}'


def of_kinds(found: Row) -> list[Row]:
  """α² of each codec on vectors of each kind, and on real differences."""
  tasks = {name: row for name, row in found.items() if name.startswith('differences')}
  return [
    {
      'codec': text,
      **{kind: alpha2 for kind, alpha2 in found[text].items() if kind != 'seconds'},
      **{name: row[text] for name, row in tasks.items()},
    }
    for text in messages.CODECS
    if text in found
  ]


def of_structure(found: Row) -> list[Row]:
  """The worst of the structured vectors by length."""
  rows = []
  for name, row in found.items():
    if ', structured, ' in name:
      text, _, length = name.split(', ')
      worst, biased = (max(row[key], key=row[key].get) for key in ('alpha2', 'bias'))
      rows.append(
        {
          'codec': text,
          'length': length,
          'largest α²': f'{row["alpha2"][worst]:.3f} ({worst})',
          'largest bias': f'{row["bias"][biased]:.2f} ({biased})',
        }
      )
  return rows


def from_tails(found: Row) -> list[Row]:
  """Disagreement over that at the start, from Gaussian and from heavy-tailed starts."""
  rows = []
  for name, row in found.items():
    if name.endswith(', gossip'):
      for start, course in row.items():
        if isinstance(course, list):
          rounds = dict(zip(messages.ROUNDS, course, strict=True))
          first = {'codec': name.removesuffix(', gossip'), 'start': start}
          alpha2 = {'first α²': row[f'{start}, first alpha2']}
          rows.append({**first, **alpha2, **{f'after {r}': v for r, v in rounds.items()}})
  return rows


def costs(found: Row) -> list[Row]:
  """Time and bytes of each codec, and a step on some networks."""
  rows = []
  for name, row in found.items():
    text, _, size = name.rpartition(', ')
    elements = int(size.partition(' ')[0])
    seconds = codec.step_seconds(text, elements, row, np.array([*NETWORKS.values()]))
    shown = {f'ms at {k}': 1e3 * v for k, v in zip(NETWORKS, seconds.tolist(), strict=True)}
    facts = {'ns per element': row['nanoseconds'], 'bytes per element': row['bytes']}
    rows.append({'algorithm': text, 'elements': f'{elements:,}', **facts, **shown})
  return rows


def crossings(found: Row) -> list[Row]:
  """The bandwidth below which the algorithm that sends less is the faster one."""
  if not found:
    return []
  size, named = codec.of_largest(found)
  times = {
    text: codec.step_seconds(text, size, row, codec.BANDWIDTHS) for text, row in named.items()
  }
  rows = []
  for text, other in itertools.product(EDEN, named):
    if text in named and named[other]['bytes'] > named[text]['bytes']:
      faster = codec.BANDWIDTHS[times[text] < times[other]]
      shown = f'{faster.max() / 1e6:,.0f} Mbit/s' if len(faster) else 'never'
      rows.append({'faster': text, 'than': other, 'below': shown})
  return rows
