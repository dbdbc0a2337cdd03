"""A small English text for character models, found inside every Python installation."""

import math

import numpy as np

from decomp import checks
from decomp.tasks.data.dataset import Dataset

VOCABULARY = '\n' + ''.join(map(chr, range(32, 127)))  # printable ASCII: the same everywhere
_ASCII = str.maketrans('‘’“”–—', '\'\'""--')


def text(length: int = 64, test_fraction: float = 0.1) -> Dataset:
  """Loads the Python language reference as sequences of characters; no download.

  The text is what Python's `help('assert')` shows, from the standard library's
  `pydoc_data.topics` (PSF licence): all topics in alphabetical order, about 0.5 million
  characters. It is fixed for one version of Python and differs a little between versions.

  Args:
    length: Characters in a sequence.
    test_fraction: Share of the text, at its end, that is held out; between 0 and 1.

  Returns:
    A `Dataset` with inputs int32 [N, length], positions in `VOCABULARY`, and as labels
    int32 [N, length] the character that follows each of them.

  Example:
    >>> data = text(length=20)
    >>> decode(data.train['input'][0]), decode(data.train['label'][0])
    ('The "assert" stateme', 'he "assert" statemen')
  """
  from pydoc_data.topics import topics

  if not 0 < test_fraction < 1:
    raise ValueError(f'test_fraction={test_fraction}: must lie between 0 and 1')
  tokens = encode('\n\n'.join(topics[name] for name in sorted(topics)))
  length = checks.whole('length', length, 1, len(tokens) // 100)
  count = (len(tokens) - 1) // length
  num_test = math.ceil(test_fraction * count)
  inputs = tokens[: count * length].reshape(count, length)
  labels = tokens[1 : count * length + 1].reshape(count, length)
  return Dataset(
    train={'input': inputs[:-num_test], 'label': labels[:-num_test]},
    test={'input': inputs[-num_test:], 'label': labels[-num_test:]},
    name='text',
    num_classes=len(VOCABULARY),
  )


def encode(string: str) -> np.ndarray:
  """Turns a string into int32 positions in `VOCABULARY`.

  Control characters become a newline, and others that are not in it '?'.
  """
  known = string.translate(_ASCII).encode('ascii', 'replace')
  codes = np.frombuffer(known, np.uint8).astype(np.int32)
  return np.where(codes < 32, 0, np.where(codes > 126, ord('?'), codes) - 31).astype(np.int32)


def decode(tokens: np.ndarray) -> str:
  """Turns positions in `VOCABULARY` back into a string."""
  return ''.join(VOCABULARY[token] for token in tokens)
