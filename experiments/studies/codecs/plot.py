"""The picture of all codecs."""

from collections.abc import Mapping, Sequence
from typing import Any

MARKERS = 'osD^v<>PX*hdp8sD^v'


def figure(rows: Sequence[Mapping[str, Any]]) -> Any:
  """Bits against α², a panel for each input and a line for each family."""
  import matplotlib.pyplot as plt

  names = [name for name in rows[0] if isinstance(rows[0][name], dict)]
  families = list(dict.fromkeys(row['family'] for row in rows))
  colors = plt.get_cmap('tab20')
  columns = min(3, len(names))
  lines = -(-len(names) // columns)
  size = (4.2 * columns + 2.4, 4 * lines)
  fig, axes = plt.subplots(lines, columns, figsize=size, layout='constrained', squeeze=False)
  for ax in axes.flat[len(names) :]:
    ax.axis('off')
  for ax, name in zip(axes.flat, names, strict=False):
    for number, family in enumerate(families):
      own = [row for row in rows if row['family'] == family]
      unbiased = own[0]['unbiased']
      ax.plot(
        [row[name]['bits'] for row in own],
        [row[name]['alpha2'] for row in own],
        f'{MARKERS[number]}{"-" if unbiased else ":"}',
        color=colors(number % 20),
        markerfacecolor=None if unbiased else 'white',
        linewidth=1,
        markersize=5,
        label=family,
      )
    ax.axhline(1.366, color='black', linewidth=0.8)
    ax.set(xscale='log', yscale='log', title=name, ylim=(5e-5, 30))
    ax.set_xlabel('bits per element')
    ax.set_ylabel('α²')
    ax.grid(alpha=0.3)
  handles, labels = axes.flat[0].get_legend_handles_labels()
  fig.legend(handles, labels, loc='outside right center', fontsize=8)
  return fig
