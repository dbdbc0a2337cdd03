"""Downloads an image set with TFDS and prepares it for `decomp.data.tfds_images`.

    python -m experiments.prepare_data --dataset=cifar10 [--data_dir=DIR]

This is the only program that needs TensorFlow: pip install 'decomp[prepare]'.
"""

import importlib.util
import sys
import urllib.error
import urllib.request
from typing import Any

from absl import app, flags

from decomp.tasks.data import images

_DATASET = flags.DEFINE_string('dataset', 'cifar10', 'Name of the set in the TFDS catalogue.')
_DATA_DIR = flags.DEFINE_string(
  'data_dir', None, 'Where to put it; by default TFDS_DATA_DIR, or else the default of TFDS.'
)


def main(argv: list[str]) -> None:
  """Prepares the dataset named by the flags, unless it is there already."""
  del argv
  sys.exit(prepare(_DATASET.value, _DATA_DIR.value))


def prepare(name: str, data_dir: str | None) -> str | None:
  """Prepares a dataset.

  Args:
    name: Its name in the TFDS catalogue.
    data_dir: Where to put it; None means the default of TFDS.

  Returns:
    None if it is there afterwards, otherwise a sentence that says what to do.
  """
  import tensorflow_datasets as tfds

  try:
    builder = tfds.builder(name, data_dir=data_dir)
  except tfds.core.registered.DatasetNotFoundError:
    return f'TFDS knows no dataset {name!r}; see https://www.tensorflow.org/datasets/catalog'
  if _is_there(builder):
    print(f'{name} is already prepared in {builder.data_dir}')
    return None
  if builder.data_path.exists():
    return f'{builder.data_dir} holds {name} in another format; choose another --data_dir'
  if importlib.util.find_spec('tensorflow') is None:
    return "Preparing a dataset needs TensorFlow: pip install 'decomp[prepare]'"
  if problem := _connection_problem(builder):
    return f'{name} cannot be downloaded from here: {problem}'
  tfds.builder(name, data_dir=data_dir, file_format='array_record').download_and_prepare()
  print(f'{name} is prepared in {builder.data_dir}')
  return None


def _is_there(builder: Any) -> bool:
  try:
    images.tfds_source(builder, 'train')
  except FileNotFoundError:
    return False
  return True


def _connection_problem(builder: Any) -> str | None:
  """Tries to reach the first file to download, because TFDS itself retries for minutes."""
  for url in list(builder.url_infos)[:1]:
    try:
      urllib.request.urlopen(url, timeout=10).close()
    except (OSError, urllib.error.URLError) as error:
      return f'{url}: {error}'
  return None


if __name__ == '__main__':
  app.run(main)
