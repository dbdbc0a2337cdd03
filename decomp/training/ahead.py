"""A training step compiled for a machine that need not be there."""

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from decomp.base import Algorithm, PyTree
from decomp.cost import compiled as compiling
from decomp.cost.machines import Machine
from decomp.cost.workloads import workload
from decomp.engine import platforms, wire
from decomp.engine.sharded import routes, worker_mesh
from decomp.engine.simulation import simulate
from decomp.tasks import Task
from decomp.tasks.data.partition import Partition
from decomp.topology import Topology
from decomp.training import steps as arithmetic
from decomp.training.evaluation import batched_tests
from decomp.training.steps import Data, Sampling, Steps


class Ahead(NamedTuple):
  """What is known of a run before there is a machine for it, for each of its devices.

  Attributes:
    step: gradients, exchange and diagnostics of one step.
    evaluation: the metrics of a row.
    workers: how many a device has.
    parts: bytes of memory: 'parameters', 'optimizer', 'replicas' (and what else an algorithm
      keeps), 'model state', 'data'.
    bytes: what a device gets from others in a step, as the algorithm says.
    messages: from how many, likewise.
    exact: whether the compiled step exchanges just these; None on one device.
    seconds: that compiling took.
  """

  step: compiling.Compiled
  evaluation: compiling.Compiled
  workers: int
  parts: dict[str, int]
  bytes: int
  messages: int
  exact: bool | None
  seconds: float


def compile_for(
  machine: Machine,
  task: Task,
  algorithm: Algorithm,
  topology: Topology,
  shards: Partition,
  batch_size: int,
  worker_examples: int = 2000,
  mapping: str = 'auto',
) -> Ahead:
  """Compiles a step of a run, and the metrics of a row, as they would run on a machine.

  Args:
    machine: from `decomp.cost.machine`; the most of its devices that divide the workers evenly.
    task: what is trained.
    algorithm: such as `decomp.algorithms.dcd_psgd(...)`.
    topology: who talks to whom.
    shards: who has which examples.
    batch_size: examples of a worker in a step.
    worker_examples: test examples that single workers are evaluated on.
    mapping: how gradients are computed, see `decomp.mapping`.
  """
  n = topology.num_workers
  mesh = worker_mesh(n, machine.devices)
  sim = simulate(algorithm, topology, mesh if mesh.size > 1 else None)
  key = jax.eval_shape(lambda: jax.random.key(0))
  begin: PyTree = jax.eval_shape(task.init, key)
  how, _ = arithmetic.choose_mapping(task, begin, n, batch_size, mapping, mesh)
  own = mesh.size > 1
  steps = Steps(task, sim, Sampling(shards, batch_size), 0, how, sim.mesh, own_examples=own)
  everywhere = NamedSharding(mesh, PartitionSpec())

  def placed(x: Any, split: bool) -> jax.ShapeDtypeStruct:
    spec = PartitionSpec('worker') if split and x.ndim else PartitionSpec()
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

  def examples(x: np.ndarray) -> jax.ShapeDtypeStruct:
    shape = (*shards.indices.shape, *x.shape[1:]) if own else x.shape
    return placed(jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(x.dtype)), own)

  tests = jax.tree.map(
    lambda x: placed(jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)), False),
    batched_tests(task, worker_examples),
  )
  data = Data({name: examples(x) for name, x in task.train.items()}, *tests)
  carry = jax.tree.map(lambda x: placed(x, True), jax.eval_shape(steps.start, *begin))
  split = jax.tree.map(lambda x: x.sharding, carry)

  def step(carry: arithmetic.Carry, train: PyTree) -> arithmetic.Carry:
    return steps.step(steps.keys(), jnp.int32(-1), jnp.float32(jnp.inf), train, carry)

  began = time.perf_counter()
  options = platforms.of(machine.devices[0]).options
  stepping = jax.jit(step, donate_argnums=0, out_shardings=split).lower(carry, data.train)
  measuring = jax.jit(steps.measure, out_shardings=everywhere).lower(carry, data)
  found = compiling.read(stepping.compile(options))
  evaluation = compiling.read(measuring.compile(options))
  took = time.perf_counter() - began

  expected = _expected(algorithm, topology, begin[0], mesh.size) if own else {}
  exact = _is_exact(found.sends, expected, _size(begin[0])) if own else None
  workers = carry.state.workers
  parts = {
    'parameters': _size(carry.state.params),
    'optimizer': _size(getattr(workers, 'opt_state', ())),
    'model state': _size(carry.model_state),
    'data': _size(data) if not own else 0,
  }
  parts['replicas'] = _size(workers) - parts['parameters'] - parts['optimizer']
  each = {name: size // mesh.size if name != 'data' else size for name, size in parts.items()}
  if own:
    each['data'] = _size(data.train) // mesh.size + _size(data._replace(train=()))
  return Ahead(
    found,
    evaluation,
    n // mesh.size,
    each,
    sum(map(sum, expected.values())),
    sum(map(len, expected.values())),
    exact,
    took,
  )


def _expected(
  algorithm: Algorithm, topology: Topology, params: PyTree, num_devices: int
) -> dict[str, list[int]]:
  """What the exchanges of a step should give a device, by their kind, as `Compiled.sends`."""
  work = workload(algorithm, topology, params, compute=0.0, codec=0.0)
  found: dict[str, list[int]] = {}
  for exchange in work.exchanges:
    if exchange.kind == 'mix':  # every round of a graph that varies is part of the program
      count = sum(len(route.pairs) for route in routes(topology, num_devices))
      found.setdefault('collective-permute', []).extend([exchange.bytes] * count)
    elif exchange.kind == 'all-gather':
      found.setdefault('all-gather', []).append(exchange.bytes * topology.num_workers)
    else:
      found.setdefault('all-reduce', []).append(exchange.bytes)
  return found


def _is_exact(sends: dict[str, list[int]], expected: dict[str, list[int]], gradient: int) -> bool:
  """Whether the bytes are those expected, of each kind.

  Besides, single numbers may travel, and the mean gradient, whose norm a row of metrics holds.
  """
  least = {'all-reduce': 64}
  found = {
    kind: sum(size for size in sizes if size > least.get(kind, 0)) for kind, sizes in sends.items()
  }
  wanted = {kind: sum(sizes) for kind, sizes in expected.items()}
  wanted['all-reduce'] = wanted.get('all-reduce', 0) + gradient
  return {kind: size for kind, size in found.items() if size} == wanted


def _size(tree: PyTree) -> int:
  return wire.size(tree)
