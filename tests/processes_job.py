"""One of the two processes of test_distributed: address, number, output file."""

import sys

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import decomp
from decomp import algorithms, data, topology
from decomp.training import checksums, processes
from decomp.training.steps import Sampling, Steps, initial
from decomp.training.streaming import Windows
from decomp.training.train import program_of_one_run


def main(address, number, output):
  jax.config.update('jax_num_cpu_devices', 4)
  jax.distributed.initialize(address, 2, int(number))
  import dyadic

  mesh = decomp.worker_mesh(8)
  assert mesh.size == 8
  found = {
    name: dyadic.final(algorithm, graph, mesh, start, grads)
    for name, algorithm, graph, start, grads in dyadic.cases()
  }
  found = {k: multihost_utils.process_allgather(v, tiled=True) for k, v in found.items()}

  assert processes.agree(1.0 + int(number), -int(number)) == [2.0, 0.0]
  assert processes.first_says(f'process {number}') == 'process 0'

  values = np.arange(24, dtype=np.float32).reshape(8, 3)
  split = jax.device_put(values, NamedSharding(mesh, PartitionSpec('worker')))
  assert not split.is_fully_addressable
  one, other = checksums.checksums({'split': split, 'whole': values}).values()
  assert one == other != 0

  # Only the rows of this process's workers are read.
  task = decomp.tasks.logistic_regression(64, 3)
  shards = data.partition.iid(task.train['label'], 8)
  counted = Counted(task.train['input'])
  task = task._replace(train={**task.train, 'input': counted})
  sim = decomp.simulate(algorithms.d_psgd(optax.sgd(0.1)), topology.ring(8), mesh)
  program_of_one_run(
    task, sim, Sampling(shards, 2), 0, initial(task, 0), 'auto', worker_examples=10
  )
  own = np.concatenate([shards.shard(worker) for worker in range(8) if worker // 4 == int(number)])
  assert set(counted.rows) == set(own.tolist())
  # So it is with windows; one of four steps with two examples is what a worker has, in all epochs.
  counted.rows.clear()
  steps = Steps(task, sim, Sampling(shards, 2), 0, 'vmap', mesh)
  window = Windows(task.train, steps, 8, 4, 8, mesh).of(0)
  assert window['input'].shape == (8, 8, 3)
  assert set(counted.rows) == set(own.tolist())
  if processes.is_first():
    np.savez(output, **found)


class Counted:
  """An array that remembers which rows were read."""

  def __init__(self, values):
    self.values, self.shape, self.dtype, self.rows = values, values.shape, values.dtype, []

  def __getitem__(self, index):
    self.rows += np.arange(len(self.values))[index].ravel().tolist()
    return self.values[index]


if __name__ == '__main__':
  main(*sys.argv[1:])
