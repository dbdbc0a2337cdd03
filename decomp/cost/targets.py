"""When a run has reached what it was to reach."""

import math
import operator
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Target(NamedTuple):
  """What a run is to reach, such as test_accuracy >= 0.9."""

  column: str
  relation: str
  value: float

  def __str__(self) -> str:
    return f'{self.column}{self.relation}{self.value:g}'


def parse_target(text: str) -> Target:
  """Reads a target.

  >>> parse_target('test_accuracy>=0.9')
  Target(column='test_accuracy', relation='>=', value=0.9)
  """
  found = re.fullmatch(r'\s*(\w+)\s*(>=|<=)\s*(\S+)\s*', text)
  try:
    return Target(found[1], found[2], float(found[3]))  # type: ignore[index]
  except (TypeError, ValueError):
    raise ValueError(
      f"target={text!r}: must be a column, >= or <=, and a number, such as 'test_accuracy>=0.9'"
    ) from None


class Reached(NamedTuple):
  """When a target was reached.

  Attributes:
    steps: the number of steps, between two rows of metrics where a straight line would meet it.
    row: the steps between these rows: it may have been that much sooner or later.
  """

  steps: float
  row: float


def steps_to(rows: Iterable[Mapping[str, Any]], target: Target) -> Reached:
  """From when on the target stays met.

  What is met once and lost again, such as an accuracy that falls back, has not been reached.

  >>> rows = [{'step': 0, 'train_loss': 2.0}, {'step': 50, 'train_loss': 0.0}]
  >>> steps_to(rows, parse_target('train_loss<=0.2'))
  Reached(steps=45.0, row=50.0)
  """
  rows = list(rows)
  if not rows:
    raise ValueError('the metrics are empty: the run has not begun')
  # What the start meets already would be reached in no time, by anyone.
  later = [row for row in rows if row['step'] > 0]
  if not any(target.column in row for row in later):
    columns = ', '.join(rows[-1])
    raise ValueError(f'the metrics have no column {target.column!r} to reach; there are: {columns}')
  meets = operator.ge if target.relation == '>=' else operator.le
  reached = None
  for before, row in zip(reversed(rows[:-1]), reversed(rows), strict=False):
    value, start = row.get(target.column), before.get(target.column)
    if value is None or not meets(value, target.value):
      break
    length = row['step'] - before['step']
    part = 1.0
    if start is not None and not meets(start, target.value):
      part = (target.value - start) / (value - start)
    reached = Reached(before['step'] + part * length, float(length))
  if reached is None:
    values = [row[target.column] for row in later if row.get(target.column) is not None]
    best = (max if target.relation == '>=' else min)(values, default=math.nan)
    last, step = values[-1] if values else math.nan, rows[-1]['step']
    raise ValueError(
      f'{target} is not reached: {target.column} is {last:.4g} at the end, step {step}, and was '
      f'{best:.4g} at best; choose an easier target, or train longer'
    )
  return reached
