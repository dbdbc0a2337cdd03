"""What is trained: data, a model and a loss, independent of any library for models.

A `Task` needs only functions; the factories here make one from `decomp.data` and `decomp.models`,
and `from_arrays` one from a model and arrays of your own.
"""

import functools
from collections.abc import Callable

from decomp.tasks.builtin import IMAGE_SETS as IMAGE_SETS
from decomp.tasks.builtin import classification as classification
from decomp.tasks.builtin import digits, images, logistic_regression, quadratic, text
from decomp.tasks.records import Records as Records
from decomp.tasks.supervised import from_arrays as from_arrays
from decomp.tasks.task import Batch as Batch
from decomp.tasks.task import Task as Task
from decomp.tasks.task import hold_out as hold_out

# What --task can name: flags and tests go by this list.
__all__ = ['digits', 'images', 'logistic_regression', 'quadratic', 'text']


def named() -> dict[str, Callable[..., Task]]:
  """All that --task, and the configuration of a run, can name."""
  sets = {name: functools.partial(images, name) for name in IMAGE_SETS}
  return {**{name: globals()[name] for name in __all__}, **sets}
