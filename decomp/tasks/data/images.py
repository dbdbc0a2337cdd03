"""Image classification: scikit-learn's embedded digits, and any image set of TFDS."""

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from decomp import checks
from decomp.tasks.data.dataset import Dataset


def digits(test_fraction: float = 0.2, seed: int = 0) -> Dataset:
  """Loads the 1,797 real 8x8 handwritten digits that scikit-learn carries; no download.

  Args:
    test_fraction: Share of the examples that is held out, strictly between 0 and 1.
    seed: Decides which examples are held out.

  Returns:
    A `Dataset` with inputs float32 [N, 8, 8, 1] in [0, 1].
  """
  from sklearn import datasets

  if not 0 < test_fraction < 1:
    raise ValueError(f'test_fraction={test_fraction}: must lie between 0 and 1')
  raw = datasets.load_digits()
  images = (raw.images / 16).astype(np.float32)[..., None]
  labels = raw.target.astype(np.int32)
  order = np.random.default_rng(seed).permutation(len(labels))
  num_test = min(max(round(test_fraction * len(labels)), 1), len(labels) - 1)
  test, train = np.split(order, [num_test])
  return Dataset(
    train={'input': images[train], 'label': labels[train]},
    test={'input': images[test], 'label': labels[test]},
    name='digits',
    num_classes=10,
  )


def tfds_images(name: str, data_dir: str | None = None) -> Dataset:
  """Loads an image classification set of TensorFlow Datasets, without TensorFlow.

  Reads array_record files only, and never the network. Decoding 60,000 images takes a quarter
  of a minute, so the decoded arrays are kept next to the files they come from.

  Args:
    name: Its name in the TFDS catalogue: `cifar10`, `mnist`, `fashion_mnist`, ...
    data_dir: Where TFDS keeps its data; None means `TFDS_DATA_DIR`, or else TFDS's default.

  Returns:
    A `Dataset` with inputs uint8 [N, h, w, c].

  Raises:
    FileNotFoundError: The set is not there in array_record form.
  """
  import tensorflow_datasets as tfds

  try:
    builder = tfds.builder(name, data_dir=data_dir)
  except (ValueError, TypeError):  # its own is a page
    raise ValueError(f'name={name!r}: TensorFlow Datasets knows no such image set') from None
  return Dataset(
    train=_load(builder, 'train'),
    test=_load(builder, 'test'),
    name=name,
    num_classes=builder.info.features['label'].num_classes,
  )


def shrink(dataset: Dataset, size: int) -> Dataset:
  """The same images with `size` × `size` pixels, each the mean of a block of the old ones.

  Args:
    dataset: With inputs uint8 [N, h, h, c].
    size: A divisor of h.

  >>> image = np.arange(16, dtype=np.uint8).reshape(1, 4, 4, 1)
  >>> arrays = {'input': image, 'label': np.zeros(1, np.int32)}
  >>> shrink(Dataset(arrays, arrays, 'ramp', 1), 2).train['input'][0, :, :, 0].tolist()
  [[2, 4], [10, 12]]
  """
  old = dataset.train['input'].shape[1]
  if not checks.is_whole(size) or size < 1 or old % size:
    raise ValueError(f'size={size!r}: must divide the {old} pixels of {dataset.name}')

  def smaller(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    images = arrays['input']
    blocks = images.reshape(len(images), size, old // size, size, old // size, -1)
    return {**arrays, 'input': np.rint(blocks.mean((2, 4), np.float32)).astype(images.dtype)}

  return dataset._replace(train=smaller(dataset.train), test=smaller(dataset.test))


def tfds_source(builder: Any, split: str) -> Sequence[Any]:
  """Opens one split of a TFDS builder for reading, or says how to get the data."""
  if builder.info.splits and split not in builder.info.splits:
    found = ', '.join(builder.info.splits)
    raise ValueError(f'{builder.name} has no split {split!r}, only: {found}')
  try:
    return builder.as_data_source(split, file_format='array_record')
  # TFDS has no error of its own for this. Which of these it raises depends on what it finds: a
  # kind of RuntimeError where the data are there in another format.
  except (AssertionError, KeyError, RuntimeError, ValueError) as error:
    raise FileNotFoundError(
      f'{builder.name} is not prepared as array_record files in {builder.data_dir}. Either\n'
      f'  * run `python -m experiments.prepare_data --dataset={builder.name}`, which '
      "downloads it (needs `pip install 'decomp[prepare]'`), or\n"
      '  * set TFDS_DATA_DIR to a directory that has it.'
    ) from error


def _load(builder: Any, split: str) -> dict[str, np.ndarray]:
  source = tfds_source(builder, split)
  # The length is in the name so that mocked data never pass for the real ones.
  cache = Path(builder.data_dir, f'decomp-{split}-{len(source)}')
  paths = {name: cache.with_name(f'{cache.name}-{name}.npy') for name in ('input', 'label')}
  if all(path.exists() for path in paths.values()):
    # Mapped, so that one of several processes reads its own workers' images only.
    return {name: np.load(path, mmap_mode='r') for name, path in paths.items()}
  arrays = _decode(source)
  for name, path in paths.items():
    _write(path, arrays[name])
  return arrays


def _decode(source: Any) -> dict[str, np.ndarray]:
  try:
    examples = source.__getitems__(list(range(len(source))))
  except TypeError:  # tfds.testing.mock_data cannot read many at once
    examples = list(source)
  return {
    'input': np.stack([example['image'] for example in examples]),
    'label': np.array([example['label'] for example in examples], np.int32),
  }


def _write(path: Path, array: np.ndarray) -> None:
  """Saves an array in one atomic step, or not at all where writing is not possible."""
  partial = path.with_suffix(f'.{uuid.uuid4().hex}.tmp')
  try:
    with partial.open('wb') as file:
      np.save(file, array)
    partial.replace(path)
  except OSError:
    partial.unlink(missing_ok=True)
