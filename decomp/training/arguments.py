"""Arguments of `train` and `sweep`: checks, and what they stand for."""

import zlib
from typing import Any

import jax
import numpy as np

from decomp import cost
from decomp.engine.simulation import Simulation
from decomp.tasks import Task
from decomp.tasks.data import partition
from decomp.tasks.data.partition import Partition
from decomp.topology import Topology
from decomp.training.steps import Sampling


def check(task: Any, checkpoint_dir: str | None, resume: bool, **counts: int | None) -> None:
  """Whether there is a task, something to resume, and arguments that count something can do so."""
  if not isinstance(task, Task):
    raise ValueError(f'task={task!r}: must be a decomp.Task, such as decomp.tasks.digits()')
  for name, value in counts.items():
    if value is not None and (not isinstance(value, int | np.integer) or value < 1):
      raise ValueError(f'{name}={value!r}: must be a whole number of at least 1')
  if resume and checkpoint_dir is None:
    raise ValueError('resume=True: needs the checkpoint_dir of the run to continue')


def divide(shards: Partition | str, task: Task, topology: Topology, seed: int) -> Partition:
  """The shards that a run's arguments mean."""
  n, examples = topology.num_workers, len(next(iter(task.train.values())))
  if isinstance(shards, str):
    if shards == 'iid':
      return partition.iid(np.zeros(examples), n, seed)
    if shards == 'by_label':
      if 'label' not in task.train:
        raise ValueError(f"shards='by_label': task={task.name} has no train['label'] to go by")
      return partition.by_label(task.train['label'], n)
  if not isinstance(shards, Partition):
    raise ValueError(f"shards={shards!r}: must be 'iid', 'by_label' or a Partition")
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
  task: Task, topology: Topology, sampling: Sampling, eval_every: int, worker_examples: int
) -> dict[str, Any]:
  """What a run that is continued must share with the one before, as JSON."""
  shards = sampling.shards
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
  }


def wire_seconds(task: Task, sim: Simulation, network: cost.Links) -> float:
  """The seconds that one step's messages would take on a network."""
  params, _ = jax.eval_shape(task.init, jax.random.key(0))
  work = cost.workload(sim.algorithm, sim.topology, params, compute=0.0, codec=0.0)
  return float(cost.communication_seconds(work, network))
