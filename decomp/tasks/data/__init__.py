"""Datasets, their division among workers, and batches drawn inside jit."""

from decomp.tasks.data import batches, partition
from decomp.tasks.data.corpus import text
from decomp.tasks.data.dataset import Dataset
from decomp.tasks.data.images import digits, shrink, tfds_images
from decomp.tasks.data.partition import Partition
from decomp.tasks.data.synthetic import (
  LogisticRegression,
  Quadratic,
  logistic_regression,
  quadratic,
)

__all__ = [
  'Dataset',
  'LogisticRegression',
  'Partition',
  'Quadratic',
  'batches',
  'digits',
  'logistic_regression',
  'partition',
  'quadratic',
  'shrink',
  'text',
  'tfds_images',
]
