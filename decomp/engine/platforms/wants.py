"""What may differ from platform to platform."""

import math
from collections.abc import Callable
from typing import NamedTuple


class Wants(NamedTuple):
  """A platform's preferences. None of them changes what is computed, or how many bytes are sent.

  Attributes:
    name: as JAX calls it.
    product: (number of workers, neighbours) -> whether stacked workers are mixed by a product with
      W, rather than by gathering the rows of neighbours.
    joined: parts of a message of at most so many bytes travel together, larger ones by themselves;
      None: the whole message is one vector of bytes.
    stacked: leaves of one shape and at most so many elements are encoded as one stack.
    looped: so many or more larger leaves of one shape are encoded by one loop: they take longer,
      but a program for each of hundreds takes minutes to compile.
    options: compiler options of a training loop.
  """

  name: str
  product: Callable[[int, int], bool]
  joined: int | None
  stacked: int
  looped: float = math.inf
  options: dict[str, str | bool] | None = None
