"""The device's side of training: everything that is compiled, for one run or for many at once.

Steps run in chunks inside one `while_loop` with donated buffers. On one device the loop leaves at
the very step where a loss fails. Workers on a mesh learn of each other's losses only between
chunks: inside one nothing travels but the algorithm's own messages and, for a row, the mean
gradient.

Runs that differ in numbers only, the members of a sweep, are one program by `vmap`. All share the
number of the step: what depends on it alone (which graph, whether a row is due) is decided once for
all. A member whose loss fails makes the loop pause for its last row, and goes on unheeded; no
operation mixes members, so the others don't notice.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from decomp.base import PyTree
from decomp.engine import platforms
from decomp.engine.simulation import State
from decomp.tasks import Task
from decomp.tasks.data.partition import Partition
from decomp.training import metrics
from decomp.training.evaluation import batched_tests
from decomp.training.steps import Carry, Data, Steps, Totals, reset

# What of a carry is one for all members (None), and what has their axis in front.
_AXES: Any = Carry(State(None, 0), 0, Totals(None, None, 0, 0, 0, 0), 0, 0)  # type: ignore[arg-type]


class Members(NamedTuple):
  """What tells the runs of a sweep apart; every leaf has their axis in front.

  Attributes:
    seed: int32.
    numbers: name -> value.
    shards: the data of each worker.
  """

  seed: Any
  numbers: dict[str, Any]
  shards: Partition


class Program:
  """The compiled functions of one run, or of as many members as it is given.

  Args:
    steps_of: a member's arithmetic; called with None where there is but one run.
    data: from `place`.
    members: those of the first group, for their shapes; None for one run.
    begin: parameters and model state, with the members' axis in front where there are members.
    mesh: the devices that share the workers; None for one.
    watch: whether the loop leaves at the step where a loss fails.
  """

  def __init__(
    self,
    steps_of: Callable[[Any], Steps],
    data: Data,
    members: Members | None,
    begin: PyTree,
    mesh: Mesh | None = None,
    watch: bool = True,
  ):
    self.steps_of, self.data, self._members, self._watch = steps_of, data, members, watch
    self.size = 1 if members is None else len(members.seed)
    self._shapes: Any = jax.eval_shape(self._start, members, begin)
    everywhere = split = None
    device = mesh.devices.flat[0] if mesh else jax.local_devices()[0]
    self._options = platforms.of(device).options
    self._mesh = mesh
    if mesh:
      everywhere = NamedSharding(mesh, PartitionSpec())
      split_over = _split_over(mesh, () if members is None else (None,))
      self._shapes = jax.tree.map(split_over, self._shapes)
      split = jax.tree.map(lambda x: x.sharding, self._shapes)
    self.start = jax.jit(self._start, out_shardings=split)
    self.reset = jax.jit(self._each(reset, (_AXES,), _AXES), donate_argnums=0, out_shardings=split)
    self.follow = jax.jit(self._follow, out_shardings=split)
    self._outcome = jax.jit(lambda carry: (carry.losses, carry.failed), out_shardings=everywhere)
    self._advancing = jax.jit(self._advance, donate_argnums=0, out_shardings=split)
    self._measuring = jax.jit(self._measure, out_shardings=everywhere)
    self._averaging = jax.jit(self._average, out_shardings=everywhere)
    self._everywhere = everywhere
    self.loop: Any = None
    """The compiled loop."""

  def compile(self) -> None:
    """Compiles ahead, so that compiling counts neither as training time nor as a stall."""
    if self.loop is None:
      self.loop = self.trace().lower().compile(self._options)
      measured = self._measuring.lower(self._shapes, self._members, self._tests)
      self._measured = measured.compile()

  def trace(self) -> Any:
    """The loop before it is compiled, of `jax.stages.Traced`."""
    zero, limits = np.int32(0), np.zeros(self.size, np.float32)
    numbers = zero, zero, self._own(limits), self._own(np.zeros(self.size, bool))
    return self._advancing.trace(self._shapes, self._members, *numbers, self.data)

  def bytes(self) -> int:
    """The memory that the compiled functions need."""
    return max(_bytes(self.loop), _bytes(self._measured))

  def advance(
    self,
    carry: Carry,
    members: Members | None,
    until: int,
    row_at: int,
    limits: np.ndarray,
    known: np.ndarray,
  ) -> Carry:
    """Steps up to number `until`, or to a loss above its limit of a run not `known` to fail."""
    numbers = np.int32(until), np.int32(row_at), self._own(limits), self._own(known)
    return self.loop(carry, members, *numbers, self.data)

  def outcome(self, carry: Carry) -> tuple[np.ndarray, np.ndarray]:
    """Each run's `losses` and `failed`, [runs, n]."""
    losses, failed = (np.asarray(x) for x in self._outcome(carry))
    return losses.reshape(self.size, -1), failed.reshape(self.size, -1)

  def measure(self, carry: Carry, members: Members | None) -> dict[str, np.ndarray]:
    """The metrics of a row that come from the device, [runs]."""
    found = self._measured(carry, members, self._tests)
    return {name: np.asarray(value).reshape(-1) for name, value in found.items()}

  @property
  def _tests(self) -> Data:
    """The data that rows are measured on."""
    return self.data._replace(train=())

  def end(self, carry: Carry, number: jax.typing.ArrayLike) -> tuple[State, PyTree]:
    """The state and the model state of one of the runs."""
    return (carry.state, carry.model_state) if self._members is None else _member(carry, number)

  @property
  def end_shape(self) -> tuple[State, PyTree]:
    """The shapes of `end`."""
    shapes = jax.eval_shape(lambda carry: self.end(carry, 0), self._shapes)
    return shapes if self._mesh is None else jax.tree.map(_split_over(self._mesh), shapes)

  def mean(self, carry: Carry, number: int) -> tuple[PyTree, PyTree]:
    """The parameters and the model state of the mean model of one of the runs."""
    return self._averaging(carry, np.int32(number))

  @property
  def mean_shape(self) -> tuple[PyTree, PyTree]:
    """The shapes of `mean`."""
    shapes = jax.eval_shape(lambda carry: self._average(carry, 0), self._shapes)
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._everywhere), shapes
    )

  def _average(self, carry: Carry, number: jax.typing.ArrayLike) -> tuple[PyTree, PyTree]:
    state, model_state = self.end(carry, number)
    return metrics.mean_over_workers((state.params, model_state))

  def _start(self, members: Members | None, begin: PyTree) -> Carry:
    start = self._each(lambda member, begin: self.steps_of(member).start(*begin), (0, 0), _AXES)
    return start(members, begin)

  def _follow(self, members: Members | None, carry: Carry) -> Carry:
    """A carry that was made on other devices, as these need it."""
    follow = self._each(
      lambda member, carry: self.steps_of(member).follow(carry), (0, _AXES), _AXES
    )
    return follow(members, carry)

  def _advance(
    self,
    carry: Carry,
    members: Members | None,
    until: jax.Array,
    row_at: jax.Array,
    limits: jax.Array,
    known: jax.Array,
    data: Data,
  ) -> Carry:
    keys = self._each(lambda member: self.steps_of(member).keys(), (0,), 0)(members)

    def going(carry: Carry) -> jax.Array:
      fails = (carry.failed.any(-1) & ~known).any() if self._watch else False
      return (carry.state.round < until) & ~jnp.asarray(fails)

    def step(member: Any, keys: jax.Array, limit: jax.Array, carry: Carry) -> Carry:
      return self.steps_of(member).step(keys, row_at, limit, data.train, carry)

    steps = self._each(step, (0, 0, 0, _AXES), _AXES)
    return jax.lax.while_loop(going, lambda carry: steps(members, keys, limits, carry), carry)

  def _measure(self, carry: Carry, members: Members | None, data: Data) -> dict[str, jax.Array]:
    def measure(carry: Carry, member: Any) -> dict[str, jax.Array]:
      return self.steps_of(member).measure(carry, data)

    return self._each(measure, (_AXES, 0), 0)(carry, members)

  def _each(self, function: Callable[..., Any], in_axes: Any, out_axes: Any) -> Callable[..., Any]:
    """A function of one run for all members; as it is where there is but one run."""
    return function if self._members is None else jax.vmap(function, in_axes, out_axes)

  def _own(self, values: np.ndarray) -> Any:
    """What each run has of its own; without an axis where there is but one run."""
    return values[0] if self._members is None else values


def _split_over(mesh: Mesh, before: tuple[None, ...] = ()) -> Callable[[Any], Any]:
  """Shapes with shardings: what has a worker axis, after those `before`, is split over the mesh."""

  def split(x: Any) -> jax.ShapeDtypeStruct:
    spec = PartitionSpec(*before, 'worker') if x.ndim > len(before) else PartitionSpec()
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

  return split


def place(
  task: Task, worker_examples: int, mesh: Mesh | None = None, shards: Partition | None = None
) -> Data:
  """The examples on the devices: each worker's own with `shards`, else all of them everywhere."""
  everywhere = NamedSharding(mesh, PartitionSpec()) if mesh else None
  tests = jax.tree.map(lambda x: _put(x, everywhere), batched_tests(task, worker_examples))
  if mesh and shards:
    split = NamedSharding(mesh, PartitionSpec('worker'))
    return Data({k: _of_workers(x, shards, split) for k, x in task.train.items()}, *tests)
  return Data({k: _put(x, everywhere) for k, x in task.train.items()}, *tests)


def _put(x: Any, sharding: NamedSharding | None) -> jax.Array:
  """An array of the host on devices; each process takes what its own devices need."""
  if sharding is None:
    return jnp.asarray(x)
  return jax.make_array_from_callback(np.shape(x), sharding, lambda index: x[index])


def _of_workers(x: np.ndarray, shards: Partition, split: NamedSharding) -> jax.Array:
  """Examples [N, ...] as [n, longest, ...]; a process reads those of its own workers only."""

  def rows(index: Any) -> np.ndarray:
    return x[np.maximum(shards.indices[index[0]], 0)]

  return jax.make_array_from_callback((*shards.indices.shape, *x.shape[1:]), split, rows)


@jax.jit
def _member(carry: Carry, number: jax.typing.ArrayLike) -> tuple[State, PyTree]:
  workers, model_state = jax.tree.map(lambda x: x[number], (carry.state.workers, carry.model_state))
  return State(carry.state.round, workers), model_state


def _bytes(compiled: Any) -> int:
  used = compiled.memory_analysis()
  return (
    used.argument_size_in_bytes
    + used.output_size_in_bytes
    + used.temp_size_in_bytes
    - used.alias_size_in_bytes
  )
