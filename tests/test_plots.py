"""Pictures: the right lines and bars, also for runs that failed."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

from decomp import plots
from decomp.training.history import History


def rows(losses, accuracies, **more):
  """As `decomp.train` returns them: the first row has no train loss."""
  first = {'step': 0, 'epoch': 0.0, 'bytes_sent': 0, 'test_accuracy': 0.1}
  later = [
    {'step': 10 * i, 'epoch': i / 2, 'bytes_sent': 500_000 * i, 'train_loss': loss, **more}
    | {'test_accuracy': accuracy}
    for i, (loss, accuracy) in enumerate(zip(losses, accuracies, strict=True), start=1)
  ]
  return [first, *later]


def diverged(losses, accuracies):
  history = History(rows(losses, accuracies))
  history.diverged = 'd_psgd diverged'
  return history


HISTORIES = {
  'good': rows([1.0, 0.5, 0.25], [0.5, 0.8, 0.9]),
  'exploded': diverged([2.0, 1e9], [0.2, 0.1]),
  'not a number': diverged([2.0, float('nan')], [0.2, float('nan')]),
  'read from a file': rows([2.0, None], [0.2, None]),
  'just begun': rows([], []),
}


def labels(ax):
  return [line.get_label() for line in ax.lines]


def test_curves():
  ax = plots.curves(HISTORIES, x='megabytes', y='train_loss')
  assert labels(ax) == ['good', 'exploded', 'not a number', 'read from a file']
  np.testing.assert_allclose(ax.lines[0].get_xydata(), [(0.5, 1), (1, 0.5), (1.5, 0.25)])
  assert [len(line.get_xdata()) for line in ax.lines] == [3, 2, 1, 1]
  assert ax.get_yscale() == 'log'
  assert (ax.get_xlabel(), ax.get_ylabel()) == ('MB sent by a worker', 'train loss')


def test_curves_on_given_axes():
  _, given = plt.subplots()
  ax = plots.curves({'good': HISTORIES['good']}, x='step', y='test_accuracy', ax=given, log=False)
  assert ax is given
  np.testing.assert_allclose(ax.lines[0].get_xydata(), [(0, 0.1), (10, 0.5), (20, 0.8), (30, 0.9)])
  assert ax.get_yscale() == 'linear'


def test_a_history_has_one_colour_everywhere():
  """Also behind one without a curve."""
  histories = {'just begun': HISTORIES['just begun'], 'good': HISTORIES['good']}
  curve = plots.curves(histories).lines[0].get_color()
  bar = plots.bars(histories).patches[1].get_facecolor()
  assert plt.matplotlib.colors.same_color(curve, bar)


def test_bars():
  ax = plots.bars(HISTORIES, 'test_accuracy')
  assert [text.get_text() for text in ax.get_yticklabels()] == list(HISTORIES)
  assert [bar.get_width() for bar in ax.patches] == [0.9, 0, 0, 0, 0.1]
  assert [text.get_text().strip() for text in ax.texts] == ['0.9', *['diverged'] * 3, '0.1']
  left, right = ax.get_xlim()
  assert left < 0.1 < 0.9 < right
  assert ax.get_xlabel() == 'test accuracy'


def test_bars_when_nothing_worked():
  ax = plots.bars({'exploded': HISTORIES['exploded']})
  assert [text.get_text().strip() for text in ax.texts] == ['diverged']


def test_overview(tmp_path):
  figure = plots.overview(HISTORIES, 'the title')
  by_epoch, by_bytes, accuracy = figure.axes
  assert labels(by_epoch) == labels(by_bytes)
  assert [text.get_text() for text in by_epoch.get_legend().get_texts()] == labels(by_epoch)
  assert by_epoch.get_ylim()[1] < 10  # the run that exploded is cut off
  assert len(accuracy.patches) == len(HISTORIES)
  assert figure.get_suptitle() == 'the title'
  figure.savefig(tmp_path / 'plot.png')


def test_overview_where_the_optimum_is_known():
  history = rows([1.0, 0.5], [0.5, 0.6], test_suboptimality=0.01)
  figure = plots.overview({'convex': history})
  assert figure.axes[0].get_ylabel() == 'test suboptimality'


@pytest.mark.parametrize('history', [HISTORIES['just begun'], diverged([np.inf], [0.1])])
def test_overview_of_runs_without_a_loss(tmp_path, history):
  figure = plots.overview({'nothing': history})
  assert figure.axes[0].get_legend() is None
  figure.savefig(tmp_path / 'plot.png')
