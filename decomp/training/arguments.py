"""Arguments of `train` and `sweep`: checks, and what they stand for."""

import functools
import os
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from decomp import checks, cost, spec
from decomp.engine.simulation import Simulation
from decomp.tasks import Task
from decomp.tasks.data import partition
from decomp.tasks.data.partition import Partition
from decomp.topology import Topology
from decomp.training.steps import Sampling

MOST_STEPS = 2**31 - 1
"""Steps are counted in int32."""


def check(
  task: Any,
  checkpoint_dir: str | None,
  resume: bool,
  seeds: Sequence[Any],
  checkpoint_seconds: Any,
  patience: int | None,
  **counts: int | None,
) -> None:
  """Whether there is a task, something to resume, and numbers are what they should be."""
  check_task(task)
  if patience is not None and task.validation is None:
    raise ValueError(
      f'patience={patience!r}: task={task.name} must have a validation set, such as '
      'decomp.tasks.hold_out makes of some training examples'
    )
  for name, value in {'patience': patience, **counts}.items():
    if value is not None:
      checks.whole(name, value, 1, MOST_STEPS)
  for value in seeds:
    checks.seed(value)
  if not checks.is_number(checkpoint_seconds) or not checkpoint_seconds >= 0:
    raise ValueError(f'checkpoint_seconds={checkpoint_seconds!r}: must be a number of at least 0')
  if resume and checkpoint_dir is None:
    raise ValueError('resume=True: needs the checkpoint_dir of the run to continue')


def check_task(task: Any) -> None:
  """Whether it is one."""
  if not isinstance(task, Task):
    raise ValueError(f'task={task!r}: must be a decomp.Task, such as decomp.tasks.digits()')


def deal(text: str, task: Task, num_workers: int, seed: int) -> Partition:
  """The shards that a text such as 'dirichlet(0.1)' stands for."""
  labels: Any = task.train.get('label')
  examples = len(next(iter(task.train.values())))
  if labels is None and spec.parse(text).name != 'iid':
    raise ValueError(f"task={task.name} has no train['label'] to go by")
  families = {
    'iid': functools.partial(partition.iid, np.zeros(examples), num_workers),
    'by_label': functools.partial(partition.by_label, labels, num_workers),
    'dirichlet': functools.partial(partition.dirichlet, labels, num_workers),
  }
  return spec.build(text, families, kind='partition', seed=seed)


def divide(shards: Partition | str, task: Task, topology: Topology, seed: int) -> Partition:
  """The shards that a run's arguments mean."""
  n, examples = topology.num_workers, len(next(iter(task.train.values())))
  if isinstance(shards, str):
    try:
      return deal(shards, task, n, seed)
    except ValueError as error:
      raise ValueError(f'shards={shards!r}: {error}') from error
  if not isinstance(shards, Partition):
    raise ValueError(
      f"shards={shards!r}: must be 'iid', 'by_label', a text such as 'dirichlet(0.1)', or a "
      'Partition'
    )
  if len(shards.lengths) != n:
    raise ValueError(
      f'shards has {len(shards.lengths)} workers, but topology={topology.name} has {n}'
    )
  if int(np.sum(shards.lengths)) != examples:
    raise ValueError(
      f'shards divides {int(np.sum(shards.lengths))} examples, but task={task.name} has {examples}'
    )
  return shards


def interval(eval_every: int | None, steps: int) -> tuple[int, tuple[str, ...]]:
  """Steps between two rows, and which facts may differ where the run is continued.

  A run that is to be longer has another default.
  """
  return (eval_every, ()) if eval_every else (max(1, steps // 20), ('eval_every',))


def facts(
  task: Task,
  topology: Topology,
  sampling: Sampling,
  eval_every: int,
  worker_examples: int,
  patience: int | None,
) -> dict[str, Any]:
  """What a run that is continued must share with the one before, as JSON."""
  shards, validation = sampling.shards, {}
  if task.validation is not None:
    held = b''.join(np.asarray(x).tobytes() for x in task.validation.values())
    validation = {'checksum of the validation set': zlib.crc32(held), 'patience': patience}
  return {
    'task': task.name,
    'topology': topology.name,
    'weights': zlib.crc32(topology.matrices.tobytes()),
    'batch size': sampling.batch_size,
    'examples of each worker': np.asarray(shards.lengths).tolist(),
    'checksum of the shards': zlib.crc32(np.ascontiguousarray(shards.indices).tobytes()),
    'reshuffle': sampling.reshuffle,
    'replacement': sampling.replacement,
    'eval_every': eval_every,
    'test examples of a worker': worker_examples,
    **validation,
  }


def memory_of_a_device(count: int) -> float:
  """Bytes of one of `count` devices, which on CPU share those of the machine."""
  statistics = jax.local_devices()[0].memory_stats() or {}
  machine = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  return statistics.get('bytes_limit') or machine / count


def check_network(network: Any) -> None:
  """Whether it is one network."""
  if not isinstance(network, cost.Links):
    raise ValueError(f"network={network!r}: must be such as decomp.cost.lan('100Mbps', '5ms')")
  if np.ndim(network.bandwidth) or np.ndim(network.latency):
    raise ValueError('network must have one bandwidth and one latency: arrays are to compare')


def wire_seconds(task: Task, sim: Simulation, network: cost.Links) -> float:
  """The seconds that one step's messages would take on a network."""
  check_network(network)
  params, _ = jax.eval_shape(task.init, jax.random.key(0))
  work = cost.workload(sim.algorithm, sim.topology, params, compute=0.0, codec=0.0)
  return float(cost.communication_seconds(work, network))
