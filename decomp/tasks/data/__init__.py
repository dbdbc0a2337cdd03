"""Datasets, their division among workers, and batches drawn inside jit."""

from decomp.data import batches, partition
from decomp.data.corpus import text
from decomp.data.dataset import Dataset
from decomp.data.images import digits, tfds_images
from decomp.data.partition import Partition
from decomp.data.synthetic import (
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
  'text',
  'tfds_images',
]
