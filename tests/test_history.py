"""What a history can be made into, and how it looks in a notebook."""

import itertools
import math
import sys
import xml.etree.ElementTree as ET

import pandas
import pytest

import decomp

ROWS = [
  {'step': 0, 'test_loss': 2.0, 'bytes_sent': 0},
  *[
    {'step': step, 'train_loss': 2.0**-step, 'test_loss': 1 / step, 'bytes_sent': 1000 * step}
    for step in range(1, 9)
  ],
]


def history(rows=ROWS, diverged=None):
  found = decomp.History(rows)
  found.diverged, found.steps_per_second = diverged, 123.4
  return found


def parsed(found):
  return ET.fromstring(f'<div>{found._repr_html_()}</div>')


def test_the_last_rows_and_the_curve():
  page = parsed(history())
  table = [[cell.text or '' for cell in row] for row in page.find('table')]
  assert table[0] == ['step', 'train loss', 'test loss', 'bytes sent']
  assert [row[0] for row in table[1:]] == ['4', '5', '6', '7', '8']
  assert table[-1] == ['8', '0.003906', '0.125', '8,000']
  assert page.find('p').text == 'step 8, 123.4 steps per second'
  points = [point.split(',') for point in page.find('svg/polyline').get('points').split()]
  heights = [float(y) for _, y in points]
  falls = [after - before for before, after in itertools.pairwise(heights)]
  assert len(points) == 8
  assert falls == pytest.approx([82 / 7] * 7, abs=0.11)  # halving is a line on this scale
  assert (float(points[0][0]), float(points[-1][0])) == (4, 356)


@pytest.mark.parametrize('rows', [[], ROWS[:1], [*ROWS, {'step': 9, 'train_loss': math.nan}]])
def test_histories_that_have_hardly_begun_or_went_wrong(rows):
  page = parsed(history(rows, 'diverged at step 9: <a> & b'))
  assert page.find('p').text == 'diverged at step 9: <a> & b'
  assert len(page.find('table')) == 1 + min(5, len(rows))
  assert (page.find('svg') is None) == (len(rows) < 2)


def test_a_flat_curve_and_one_below_zero():
  for losses in ([1.0, 1.0], [1.0, -1.0]):
    rows = [{'step': step, 'train_loss': loss} for step, loss in enumerate(losses)]
    assert 'nan' not in parsed(history(rows)).find('svg/polyline').get('points')


def test_pandas():
  frame = history().to_pandas()
  assert isinstance(frame, pandas.DataFrame)
  assert list(frame.columns) == ['step', 'test_loss', 'bytes_sent', 'train_loss']
  assert frame['test_loss'].tolist() == [row['test_loss'] for row in ROWS]
  assert math.isnan(frame['train_loss'][0])


def test_without_pandas(monkeypatch):
  monkeypatch.setitem(sys.modules, 'pandas', None)
  with pytest.raises(ImportError, match='not installed: pip install pandas'):
    history().to_pandas()
