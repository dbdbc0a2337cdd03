"""One worker's algorithm, lifted to all workers."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from decomp.base import Algorithm, PyTree, Shared
from decomp.engine import checks, sharded, stacked
from decomp.engine.cpu import keys
from decomp.engine.meter import Meter
from decomp.engine.stacked import Moment
from decomp.topology import Topology


class State(NamedTuple):
  """The state of all workers.

  Attributes:
    round: the number of steps taken, int32.
    workers: the algorithm's state with a leading axis [n, ...] on every leaf.
  """

  round: jax.Array
  workers: Any

  @property
  def params(self) -> PyTree:
    """Everyone's parameters, leaves [n, ...]: where the next gradients are taken."""
    return self.workers.params


class Simulation:
  """An algorithm on a topology: `init`, `step` and `bytes_per_step`. Made by `simulate`."""

  def __init__(self, algorithm: Algorithm, topology: Topology, mesh: Mesh | None = None):
    self.algorithm = algorithm
    self.topology = topology
    self.mesh = mesh
    self._jitted_init = jax.jit(self._init)
    self._jitted_step = jax.jit(self._step)

  def init(self, params: PyTree, stacked: bool = False) -> State:
    """The state before the first step.

    Args:
      params: one worker's parameters, where all workers start; or, if `stacked`, one start for each
        worker, leaves [n, ...].
      stacked: whether `params` has the worker axis already.
    """
    n = self.topology.num_workers
    params = jax.tree.map(_strong, params)
    checks.check_params(params)
    checks.check_precision(self.algorithm, params)
    if stacked:
      checks.check_leading_axis('params', params, n)
    else:
      params = jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *x.shape)), params)
    return self._jitted_init(params)

  def step(
    self, key: jax.Array, grads: PyTree, state: State, observed: jax.typing.ArrayLike = True
  ) -> tuple[State, Any]:
    """One step of all workers; a pure function to use under jit, vmap and scan.

    Args:
      key: the key of the whole run; step and worker numbers are folded in here.
      grads: each worker's gradient at its `state.params`, leaves [n, ...].
      state: from `init` or the step before.
      observed: whether anyone looks at the diagnostics, which take time; if not, they are NaN.

    Returns:
      The next state, and the algorithm's diagnostics with leaves [n, ...].
    """
    return self._jitted_step(key, grads, state, observed)

  def follow(self, state: State) -> State:
    """The state of another executor as this one's: what workers share is told anew, exactly."""

    def one(workers: Any, net: Any) -> Any:
      def told(x: Any) -> Any:
        return net.share(x.value) if isinstance(x, Shared) else x

      return jax.tree.map(told, workers, is_leaf=lambda x: isinstance(x, Shared))

    return state._replace(
      workers=self._lift(one)(Moment(state.round, jnp.array(False)), state.workers)
    )

  def bytes_per_step(self, params: PyTree) -> int:
    """Bytes that a worker sends in one step, to all its neighbours together.

    The size of the packed messages, not a formula. Where workers have different numbers of
    neighbours it is the busiest one's; where the graph varies, the average round's. A
    full-precision all-reduce counts as the ring algorithm: 2 (n-1)/n times the array.

    Args:
      params: one worker's parameters, or their shapes and dtypes.
    """
    params = jax.eval_shape(lambda p: jax.tree.map(_strong, p), params)
    checks.check_params(params)
    checks.check_precision(self.algorithm, params)
    meter = Meter(self.topology)
    state = jax.eval_shape(lambda p: self.algorithm.init(p, meter), params)
    meter.bytes = 0  # the start is not part of a step
    key = jax.eval_shape(lambda: jax.random.key(0))
    jax.eval_shape(lambda k, g, s: self.algorithm.step(k, g, s, meter), key, params, state)
    return meter.bytes

  def __repr__(self) -> str:
    return f'simulate({self.algorithm}, {self.topology})'

  def _init(self, params: PyTree) -> State:
    round = jnp.zeros((), jnp.int32)
    start = Moment(round, jnp.array(False))
    return State(round, self._lift(self.algorithm.init)(start, params))

  def _step(
    self, key: jax.Array, grads: PyTree, state: State, observed: jax.Array
  ) -> tuple[State, Any]:
    checks.check_grads(grads, state.params, self.topology.num_workers)
    n, step_key = self.topology.num_workers, keys.fold_in(key, state.round)
    moment = Moment(state.round, observed, keys.fold_in(step_key, n))  # n is nobody's number
    step = self._lift(self.algorithm.step)
    workers, info = step(moment, keys.fold_in(step_key, jnp.arange(n)), grads, state.workers)
    return State(state.round + 1, workers), info

  def _lift(self, function: Any) -> Any:
    """`function(*args, net)` of one worker, for a `Moment` and stacked arguments."""
    if self.mesh is None:
      return stacked.lift(function, self.topology)
    return sharded.lift(function, self.topology, self.mesh)


def simulate(algorithm: Algorithm, topology: Topology, mesh: Mesh | None = None) -> Simulation:
  """Runs one worker's algorithm on every worker of a topology.

  Args:
    algorithm: such as `decomp.algorithms.dcd_psgd(...)`.
    topology: such as `decomp.topology.ring(8)`.
    mesh: a mesh with the one axis 'worker', such as `decomp.worker_mesh(8)`: workers are split
      evenly over its devices, which exchange packed bytes. None: all workers on one device.

  Returns:
    A `Simulation`.

  >>> import optax
  >>> from decomp import algorithms, compressors, topology
  >>> optimizer, compressor = optax.sgd(0.1), compressors.stochastic_quantizer(bits=8)
  >>> sim = simulate(algorithms.dcd_psgd(optimizer, compressor), topology.ring(8))
  >>> state = sim.init({'w': jnp.ones(1000)})
  >>> grads = {'w': jnp.ones((8, 1000))}
  >>> state, info = sim.step(jax.random.key(0), grads, state)
  >>> state.params['w'].shape, sim.bytes_per_step({'w': jnp.ones(1000)})
  ((8, 1000), 2008)
  """
  checks.check_topology(algorithm, topology)
  checks.check_mesh(topology, mesh)
  return Simulation(algorithm, topology, mesh)


def _strong(x: Any) -> jax.Array:
  """An array that is not weakly typed, so that the state keeps its dtypes from step to step."""
  x = jnp.asarray(x)
  return jax.lax.convert_element_type(x, x.dtype)
