"""Several processes that run one program: what they must agree on.

All processes of a `jax.distributed` job run the same steps in the same order. Whatever they decide
by a clock, a signal or a file must be decided alike, or they would wait for each other for ever.
"""

import jax
import numpy as np


def is_first() -> bool:
  """Whether this is the process that talks and writes files."""
  return jax.process_index() == 0


def gather(values: np.ndarray) -> np.ndarray:
  """The values of each process, [processes, ...]."""
  if jax.process_count() == 1:
    return values[None]
  from jax.experimental import multihost_utils

  return multihost_utils.process_allgather(values)


def agree(*values: float) -> list[float]:
  """The largest of each value over all processes."""
  if jax.process_count() == 1:
    return list(values)
  return gather(np.array(values, np.float32)).max(0).tolist()


def first_says(text: str) -> str:
  """The text that the first process gives."""
  if jax.process_count() == 1:
    return text
  from jax.experimental import multihost_utils

  data = text.encode()
  size = int(agree(len(data) if is_first() else 0)[0])
  own = np.frombuffer(data[:size].ljust(size, b'\0'), np.uint8)
  return bytes(multihost_utils.broadcast_one_to_all(own)).decode()
