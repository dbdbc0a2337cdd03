"""The form in which every dataset is held: arrays on the host, a dict per split."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


class Dataset(NamedTuple):
  """A supervised dataset in host memory.

  Attributes:
    train: `'input'` [N, ...] and `'label'` int32 [N] (text: [N, length]).
    test: The same keys, held-out examples.
    name: What it is, for tables and plots.
    num_classes: Number of values a label can take.
  """

  train: Mapping[str, np.ndarray]
  test: Mapping[str, np.ndarray]
  name: str
  num_classes: int
