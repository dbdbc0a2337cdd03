"""A live line for long work."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from decomp.training.processes import is_first


class Progress:
  """A bar with steps, steps per second, time left and the last metrics.

  Nothing off a terminal, and in several processes only the first shows it.
  """

  def __init__(self, show: bool | None, label: str, steps: int):
    self._show = is_first() and (sys.stderr.isatty() if show is None else show)
    self._label, self._total = label, steps

  def __enter__(self) -> Progress:
    if self._show:
      from rich import progress
      from rich.console import Console

      self._bar = progress.Progress(
        progress.TextColumn('{task.description}'),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn('{task.fields[pace]}'),
        progress.TimeRemainingColumn(),
        progress.TextColumn('{task.fields[metrics]}'),
        console=Console(stderr=True),
      )
      self._task = self._bar.add_task(self._label, total=self._total, pace='compiling', metrics='')
      self._bar.start()
    return self

  def start_at(self, step: int) -> None:
    """Starts the clock, once everything is compiled."""
    if self._show:
      self._bar.reset(self._task, completed=step, total=self._total, pace='', metrics='')

  def update(self, step: int, row: Mapping[str, Any]) -> None:
    """Shows how far the run is, and the last row's metrics."""
    if self._show:
      speed = self._bar.tasks[0].speed  # None at first
      pace = f'{speed:,.{0 if speed > 10 else 2}f} steps/s' if speed else ''
      shown = [f'{k[5:]} {row[k]:.3f}' for k in ('test_loss', 'test_accuracy') if k in row]
      self._bar.update(self._task, completed=step, pace=pace, metrics=' '.join(shown))

  def __exit__(self, *_: Any) -> None:
    if self._show:
      self._bar.stop()
