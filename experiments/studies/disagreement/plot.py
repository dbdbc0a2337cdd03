"""The figure of `experiments.studies.disagreement`, from its results.json."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from decomp import spec, topology
from decomp.theory.rules.common import noise_gain
from experiments.studies.disagreement import theory
from experiments.studies.disagreement.runs import BOTH

Row = dict[str, Any]

COLORS = {'dcd_psgd': 'C0', 'ecd_psgd': 'C1'}
TITLES = {
  'qsgd': 'scaled by the L2 norm of the leaf (QSGD)',
  'max': 'scaled by the maximum of the leaf',
  'bucket': 'scaled by the maximum of {bucket} elements',
  'dcd_grid': "fixed grid that holds DCD's messages",
  'ecd_grid': "fixed grid that holds ECD's messages",
}
PROBLEMS = {
  'quadratic': 'quadratics: f(x̄) - f* over that of D-PSGD',
  'digits': 'perceptron on digits: training loss over that of D-PSGD',
}
LEAF = 4096
"""Elements in the perceptron's largest leaf, and in the quadratics of a full run."""


def figure(found: Row) -> Any:
  """Loss against bits for every quantizer, and below why."""
  import matplotlib.pyplot as plt

  whole = plt.figure(figsize=(19, 12), layout='constrained')
  lines: Any = whole.subfigures(3, 1, height_ratios=(1, 1, 1.1))
  for line, (problem, title) in zip(lines, PROBLEMS.items(), strict=False):
    line.suptitle(title, x=0.01, ha='left', fontsize=12, weight='bold')
    panels = line.subplots(1, len(TITLES), sharey=True)
    for ax, family in zip(panels, TITLES, strict=True):
      against_bits(ax, found, problem, family)
    panels[0].set_ylabel('times D-PSGD')
  lines[2].suptitle('why', x=0.01, ha='left', fontsize=12, weight='bold')
  drawings: list[Callable[[Any, Row], None]] = [threshold, mechanism, limits, directions, network]
  for ax, draw in zip(lines[2].subplots(1, len(drawings)), drawings, strict=True):
    draw(ax, found)
    ax.grid(alpha=0.25)
  return whole


def against_bits(ax: Any, found: Row, problem: str, family: str) -> None:
  """Both algorithms on both rings; dashes for what theory says of the smaller ring."""
  rows = [r for r in _plain(found, problem) if r['family'] == family and r['bits'] % 1 == 0]
  references = _references(found, problem)
  graphs = list(references)
  top = max(reference['start_ratio'] for reference in references.values())
  lost = top**1.12
  for graph, style in zip(graphs, ('o-', 's:'), strict=False):
    for name, color in COLORS.items():
      own = [r for r in rows if (r['topology'], r['algorithm']) == (graph, name)]
      bits = [r['bits'] for r in own]
      diverged = [r['outcome'] == 'diverged' for r in own]
      shown = [lost if d else r['ratio'] for d, r in zip(diverged, own, strict=True)]
      filled = 'none' if style[0] == 's' else color
      label = f'{_short(name)}, {graph}'
      ax.plot(bits, shown, style, color=color, mfc=filled, ms=5, lw=1.3, label=label)
      if graph == graphs[0] and any(r.get('predicted') for r in own):
        said = [_shown(r.get('predicted'), top, lost, r) for r in own]
        ax.plot(bits, said, 'k--', lw=0.8, label='expected' if name == 'dcd_psgd' else None)
  ax.axhspan(top, top**1.25, color='0.88', lw=0)
  ax.axhline(2, color='0.6', lw=0.8, ls=':')
  _last_bits_of_dcd(ax, found, family, graphs[0])
  ax.set(yscale='log', ylim=(0.6, top**1.25), title=TITLES[family].format(**found))
  ax.title.set_fontsize(9.5)
  ax.set_xlabel('bits (and a sign)' if family == 'qsgd' else 'bits')
  ax.set_xticks(sorted({r['bits'] for r in rows if family != 'qsgd' or r['bits'] % 2 == 0}))
  ax.invert_xaxis()
  ax.grid(alpha=0.25)
  if family == 'qsgd':
    ax.text(0.02, 0.965, 'diverged', transform=ax.transAxes, va='top', fontsize=8, color='0.3')
    ax.legend(fontsize=7.5, loc='center left', bbox_to_anchor=(0.0, 0.62))
  if family == 'dcd_grid':
    clipped = [r['clipped'] for r in rows if r['algorithm'] == 'ecd_psgd']
    note = f'ECD: {100 * min(clipped):.0f} % or more of z is beyond the limit'
    ax.text(0.5, 0.62, note, transform=ax.transAxes, ha='center', fontsize=8, color='0.25')


def _last_bits_of_dcd(ax: Any, found: Row, family: str, graph: str) -> None:
  """A line at the bits where α² of Gaussian messages reaches DCD's limit."""
  scale = {
    'qsgd': math.sqrt(LEAF),
    'max': theory.largest(LEAF),
    'bucket': theory.largest(found['bucket']),
  }.get(family)
  if scale:
    levels = scale / theory.coarsest_cell(1 / _gain(graph))
    bits = math.log2(levels + 1) + (family != 'qsgd')
    ax.axvline(bits, color='C0', lw=0.9, ls=(0, (1, 2)))


def threshold(ax: Any, found: Row) -> None:
  """DCD against the α² of its messages."""
  rows = [r for r in found['rows'] if r['algorithm'] == 'dcd_psgd' and r['variant'] == 'constant']
  gain = _gain(rows[0]['topology'])
  styles = {
    ('quadratic', False): ('o', 'C0', 'quadratics, scaled'),
    ('digits', False): ('^', 'C2', 'digits, scaled'),
    ('quadratic', True): ('o', 'C4', 'quadratics, fixed grid'),
    ('digits', True): ('^', 'C5', 'digits, fixed grid'),
  }
  for (problem, fixed), (marker, color, label) in styles.items():
    own = [r for r in rows if r['problem'] == problem and ('grid' in r['family']) == fixed]
    own = [r for r in own if r['alpha2']]
    y = [3e5 if r['outcome'] == 'diverged' else r['ratio'] for r in own]
    face = 'none' if fixed else color
    ax.plot([r['alpha2'] for r in own], y, marker, color=color, mfc=face, ms=5, label=label)
  alpha2 = np.geomspace(1e-2, 0.999 / gain, 300)
  ax.plot(alpha2, theory.dcd_ratio(alpha2, gain), 'k--', lw=0.9, label='1 + α²(1 + K)/(1 - α²K)')
  ax.axvline(1 / gain, color='k', lw=0.9, ls=':')
  ax.annotate(f'1/K = {1 / gain:.3f}', (1.15 / gain, 2), fontsize=8)
  ax.axhspan(1e5, 1e6, color='0.88', lw=0)
  ax.text(0.02, 0.975, 'diverged', transform=ax.transAxes, va='top', fontsize=8, color='0.3')
  ax.set(xscale='log', yscale='log', xlim=(1e-2, 20), ylim=(0.6, 1e6))
  ax.set(xlabel='α² of the messages, median over the run', ylabel='times D-PSGD')
  ax.set_title('DCD ends where α²K = 1', fontsize=9.5)
  ax.legend(fontsize=7.5, loc='center left', bbox_to_anchor=(0.0, 0.6))


def mechanism(ax: Any, found: Row) -> None:
  """The error of ECD's estimates over time, with bounded noise and with noise that scales."""
  gain = _gain(next(iter(_references(found, 'quadratic'))))
  change2 = (found['rate'] * found['noise']) ** 2 * (1 + gain)
  chosen = {
    ('ecd_grid', 4): ('C3', 'fixed grid'),
    ('ecd_grid', 8): ('C1', 'fixed grid'),
    ('qsgd', 8): ('C8', 'L2 norm'),
    ('max', 8): ('C9', 'maximum'),
  }
  t = np.geomspace(2, found['steps'], 100)
  for (family, bits), (color, name) in chosen.items():
    row = _one(found, family, bits, 'ecd_psgd')
    if row is None:
      continue
    ax.plot(row['steps'], row['error2_at'], 'o-', ms=3.5, color=color, label=f'{name}, {bits} bits')
    if family == 'ecd_grid':
      said = theory.ecd_error_bounded((row['limit'] / row['levels']) ** 2 / 6, t)
    else:
      said = theory.ecd_error_scaled(row['predicted_alpha2'], 1.0, change2, t)
    ax.plot(t, said, 'k--', lw=0.9)
  ax.plot([], [], 'k--', lw=0.9, label='expected')
  ax.set(xscale='log', yscale='log', xlabel='step t', ylabel='mean square of x̃ - x')
  ax.set_title('ECD: error of the estimates (quadratics)', fontsize=9.5)
  ax.legend(fontsize=7.5)


def limits(ax: Any, found: Row) -> None:
  """Fixed grids with 4 bits and any limit."""
  reference = next(iter(_references(found, 'quadratic').values()))
  top = reference['start_ratio']
  rows = [r for r in found['rows'] if r.get('swept')]
  for name, color in COLORS.items():
    own = [r for r in rows if r['algorithm'] == name]
    x = [r['limit'] for r in own]
    label = _short(name)
    ax.plot(x, [r['ratio'] for r in own], 'o-', color=color, ms=4, lw=1.3, label=label)
    said = [math.nan if r['predicted'] is None else r['predicted'] for r in own]
    ax.plot(x, said, 'k--', lw=0.9, label='expected' if name == 'dcd_psgd' else None)
    largest = reference['limits'][name]
    ax.axvline(largest, color=color, lw=0.9, ls=':')
    place, text = (largest * 0.95, 0.75), f'largest z of {label}'
    ax.annotate(text, place, fontsize=8, rotation=90, ha='right', color=color)
  ax.axhline(top, color='0.5', lw=0.8)
  ax.annotate('at the start', (rows[0]['limit'], top * 1.3), fontsize=8, color='0.3')
  ax.set(xscale='log', yscale='log', xlabel='limit of the grid', ylabel='times D-PSGD')
  ax.set_ylim(bottom=0.6)
  ax.set_title('fixed grid, 4 bits: its limit decides (quadratics)', fontsize=9.5)
  ax.legend(fontsize=7.5, loc='center left', bbox_to_anchor=(0.0, 0.55))


def directions(ax: Any, found: Row) -> None:
  """Where ECD's error is below DCD's on the same grid: in each direction, at each time."""
  reference = next(iter(_references(found, 'quadratic').values()))
  dcd, ecd = (_one(found, 'ecd_grid', 8, name) for name in COLORS)
  if dcd is None or ecd is None:
    return
  curvatures = np.geomspace(0.1, 1, len(reference['parts_at'][0]))
  x = found['rate'] * curvatures[None] * np.array(reference['looks'])[:, None]

  def ratio(which: str) -> np.ndarray:
    exact = np.array(reference[which])
    with np.errstate(divide='ignore', invalid='ignore'):
      return (np.array(ecd[which]) - exact) / (np.array(dcd[which]) - exact)

  colors = np.broadcast_to(curvatures, x.shape)
  marks = ax.scatter(x, ratio('parts_at'), c=colors, s=12, cmap='viridis')
  for number in (0, len(curvatures) - 1):
    said = ratio('predicted_parts_at')[:, number]
    ax.plot(x[:, number], said, 'k--', lw=0.9, label=None if number else 'expected')
  far = np.array([3.0, 100.0])
  share = _fixed_point_ratio(found)
  ax.plot(far, 8 / 3 * share / far, 'r:', lw=1.3, label=f'{8 / 3 * share:.2g}/(γht)')
  ax.axhline(1, color='0.5', lw=0.8)
  inset = ax.inset_axes((0.66, 0.93, 0.3, 0.03))
  bar = ax.figure.colorbar(marks, cax=inset, orientation='horizontal')
  bar.ax.tick_params(labelsize=7)
  bar.set_label('curvature h', fontsize=7)
  ax.set(xscale='log', yscale='log', xlabel='γht', ylabel='error of ECD / error of DCD')
  ax.set_ylim(0.01, 10)
  ax.set_title('same fixed grid, 8 bits: ECD wins from γht = 3 on', fontsize=9.5)
  ax.legend(fontsize=7.5, loc='lower left')


def network(ax: Any, found: Row) -> None:
  """The perceptron where γht is above 3 in every direction, and messages are held by the grid."""
  references = _references(found, 'digits', BOTH)
  for graph, style in zip(references, ('o-', 's:'), strict=False):
    for name, color in COLORS.items():
      rows = [r for r in found['rows'] if r['variant'] == BOTH and r['family'] == 'ecd_grid']
      own = [r for r in rows if (r['topology'], r['algorithm']) == (graph, name)]
      bits, accuracy = [r['bits'] for r in own], [100 * r['accuracy'] for r in own]
      filled = 'none' if style[0] == 's' else color
      label = f'{_short(name)}, {graph}'
      ax.plot(bits, accuracy, style, color=color, mfc=filled, ms=5, lw=1.3, label=label)
  if references:
    best = 100 * next(iter(references.values()))['accuracy']
    ax.axhline(best, color='0.5', lw=0.8)
    ax.annotate('D-PSGD', (8, best + 0.8), fontsize=8, color='0.3')
    ax.legend(fontsize=7.5, loc='lower left')
    ax.set_ylim(0, 105)
  ax.set(xlabel='bits', ylabel='test accuracy, %')
  ax.invert_xaxis()
  ax.set_title("digits, momentum + weight decay, ECD's grid", fontsize=9.5)


def _fixed_point_ratio(found: Row) -> float:
  """v/v*: noise of ECD on a fixed grid, Δ²/6, over that at which DCD's keeps itself alive.

  DCD's messages shrink until α² = 1/K, where the cell is r times their RMS: v* = Δ²/(K r²).
  """
  gain = _gain(next(iter(_references(found, 'quadratic'))))
  return gain * theory.coarsest_cell(1 / gain) ** 2 / 6


def _shown(said: float | None, top: float, lost: float, row: Row) -> float:
  """What is expected, as high as 'diverged' at most; nothing where all that is known is failure."""
  if said is None:
    return math.nan if (row.get('predicted_clipped') or 0) > 0 else lost
  return lost if said > top else said


def _plain(found: Row, problem: str) -> list[Row]:
  rows = [r for r in found['rows'] if r['problem'] == problem and not r.get('swept')]
  return [r for r in rows if r['variant'] == 'constant']


def _references(found: Row, problem: str, variant: str = 'constant') -> dict[str, Row]:
  """By topology, the smallest first."""
  rows = [r for r in found['references'] if r['problem'] == problem]
  return {r['topology']: r for r in rows if r['variant'] == variant}


def _short(name: str) -> str:
  return name.removesuffix('_psgd').upper()


def _one(found: Row, family: str, bits: int, name: str) -> Row | None:
  graph = next(iter(_references(found, 'quadratic')))
  cell = (family, bits, name, graph)
  rows: Sequence[Row] = _plain(found, 'quadratic')
  keys = ('family', 'bits', 'algorithm', 'topology')
  return next((r for r in rows if tuple(r[key] for key in keys) == cell), None)


def _gain(graph: str) -> float:
  return noise_gain(spec.build(graph, topology, kind='topology'))
