"""Training on examples that stay on the host, or in files: devices hold a window of batches.

A window is the batches of some steps, of all workers, [n, window * batch, ...]. To a step they are
each worker's own examples, of which it takes those of its place in the window; so all that differs
from training on arrays is who picks the examples. They are picked by the same numbers: batches are
the same bit for bit, and a run is continued from its step alone.
"""

import functools
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from decomp.tasks.records import Records
from decomp.training.program import Members, Program
from decomp.training.steps import Carry, Steps

LENGTH = 32
"""Steps in a window, where nothing else is said."""


class Windows:
  """The batches of so many steps at a time; a process reads those of its own workers only.

  Args:
    train: the training examples.
    steps: which examples a step takes, among all.
    num_workers: of the run.
    size: steps in a window.
    until: steps of the run, after which nothing is read ahead.
    mesh: the devices that share the workers; None for one.
  """

  def __init__(
    self,
    train: Mapping[str, Any],
    steps: Steps,
    num_workers: int,
    size: int,
    until: int,
    mesh: Mesh | None,
  ):
    self.size, self._until, self._train = size, until, train
    key, batch_size = steps.keys()[0], steps.sampling.batch_size
    self._sharding = NamedSharding(mesh, PartitionSpec('worker')) if mesh else None
    self._draw = jax.jit(
      lambda first, worker: jax.vmap(lambda step: steps.sample(key, step, worker))(
        first + jnp.arange(size)
      )
    )
    self.shapes = {
      name: jax.ShapeDtypeStruct(
        (num_workers, size * batch_size, *x.shape[1:]), x.dtype, sharding=self._sharding
      )
      for name, x in train.items()
    }
    self._thread = ThreadPoolExecutor(1)
    self._next: tuple[int, Future[dict[str, jax.Array]] | None] = -1, None

  def of(self, step: int) -> dict[str, jax.Array]:
    """The window that holds a step; the one after it is then read in the background."""
    number = step // self.size
    known, reading = self._next
    window = reading.result() if reading and known == number else self._read(number)
    if (number + 1) * self.size < self._until:
      self._next = number + 1, self._thread.submit(self._read, number + 1)
    return window

  def _read(self, number: int) -> dict[str, jax.Array]:
    @functools.cache  # an array for each name asks for the same workers
    def rows(worker: int) -> dict[str, np.ndarray]:
      chosen = np.asarray(self._draw(jnp.int32(number * self.size), jnp.int32(worker))).ravel()
      if isinstance(self._train, Records):
        return self._train.rows(chosen)
      return {name: x[chosen] for name, x in self._train.items()}

    def array(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
      def some(index: Any) -> np.ndarray:
        return np.stack([rows(worker)[name] for worker in range(like.shape[0])[index[0]]])

      if self._sharding is None:
        return jax.device_put(some((slice(None),)))
      return jax.make_array_from_callback(like.shape, self._sharding, some)

    return {name: array(name, like) for name, like in self.shapes.items()}


class StreamedSteps(Steps):
  """A run's arithmetic on windows: a step's batch stands at its place in the window."""

  def __init__(self, size: int, *args: Any, **options: Any):
    super().__init__(*args, **options)
    self._size = size

  def sample(self, key: jax.Array, step: jax.Array, worker: jax.Array) -> jax.Array:
    """The positions of a batch in the worker's part of the window."""
    batch_size = self.sampling.batch_size
    return step % self._size * batch_size + jnp.arange(batch_size)


class StreamedProgram(Program):
  """The compiled functions of one run, given windows in turn; see `Program`."""

  def __init__(self, windows: Windows, *args: Any, **options: Any):
    super().__init__(*args, **options)
    self._windows, self._held = windows, -1

  def advance(
    self,
    carry: Carry,
    members: Members | None,
    until: int,
    row_at: int,
    limits: np.ndarray,
    known: np.ndarray,
  ) -> Carry:
    """As `Program.advance`, from window to window."""
    size, step = self._windows.size, int(carry.state.round)
    while step < until:
      if self._held != step // size:
        self.data = self.data._replace(train=self._windows.of(step))
        self._held = step // size
      end = min(until, (self._held + 1) * size)
      carry = super().advance(carry, members, end, row_at, limits, known)
      step = int(carry.state.round)
      if step < end:  # a loss has failed
        break
    return carry
