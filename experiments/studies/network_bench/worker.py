"""One worker of experiments.studies.network_bench, which starts it: not a program to run by hand.

It reads lines of JSON and answers each with a line of JSON. The first line says who it is; each
following one names an algorithm, a number of steps and of repeats. It ends when its input does.
"""

import functools
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import decomp
from decomp import compressors, spec, topology


class Exchange(NamedTuple):
  """An algorithm that is ready to run.

  Attributes:
    run: takes a number of steps, and returns when they are done.
    bytes_per_step: what a worker sends in a step, by the simulation's account.
  """

  run: Callable[[int], None]
  bytes_per_step: int


def build_algorithm(text: str) -> decomp.Algorithm:
  """The algorithm of a flag such as 'dcd_psgd(stochastic_quantizer(4))', with plain SGD."""
  return spec.build(text, [spec.algorithms(optax.sgd(1e-3)), compressors], kind='algorithm')


def exchange(text: str, num_workers: int, size: int) -> Exchange:
  """Steps of `num_workers` workers on a ring, with gradients that cost next to nothing.

  Worker i minimises |x - t_i|²/2. (Were gradients the same in every step, the compiler would move
  their all-reduce out of the loop.)

  Args:
    text: the algorithm, see `build_algorithm`.
    num_workers: n, spread over all devices of all processes.
    size: the number of parameters, in one vector: an all-reduce is then one collective, as
      libraries that gather gradients into buckets have it.
  """
  mesh = decomp.worker_mesh(num_workers)
  sim = decomp.simulate(build_algorithm(text), topology.ring(num_workers), mesh=mesh)
  split = NamedSharding(mesh, PartitionSpec('worker'))
  # What spans processes has to come out of a compiled function.
  state = jax.jit(lambda: sim.init(jnp.zeros(size)))()
  targets = jax.jit(
    lambda: jax.random.normal(jax.random.key(1), (num_workers, size)), out_shardings=split
  )()

  @functools.partial(jax.jit, donate_argnums=0)
  def advance(state: decomp.State, targets: jax.Array, steps: jax.Array) -> decomp.State:
    def step(_: jax.Array, state: decomp.State) -> decomp.State:
      return sim.step(jax.random.key(0), state.params - targets, state)[0]

    return jax.lax.fori_loop(0, steps, step, state)

  def run(steps: int) -> None:
    nonlocal state
    state = jax.block_until_ready(advance(state, targets, np.int32(steps)))

  return Exchange(run, sim.bytes_per_step(jnp.zeros(size)))


def timed(run: Callable[[int], None], steps: int, repeats: int) -> list[float]:
  """Seconds of each of `repeats` runs of `steps` steps."""
  times = [time.perf_counter()]
  for _ in range(repeats):
    run(steps)
    times.append(time.perf_counter())
  return np.diff(times).tolist()


def main() -> None:
  """Takes part in the measurements that come as lines of input."""
  # Libraries write to the standard output too; the answers need a channel of their own.
  answers = os.fdopen(os.dup(1), 'w', buffering=1)
  os.dup2(2, 1)
  lines: queue.Queue[str] = queue.Queue()
  threading.Thread(target=_read, args=(lines,), daemon=True).start()
  who = json.loads(lines.get())
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', 1)
  jax.distributed.initialize(who['coordinator'], who['num_workers'], who['index'])
  prepare = functools.cache(lambda text: exchange(text, who['num_workers'], who['size']))
  while True:
    command = json.loads(lines.get())
    chosen = prepare(command['algorithm'])
    seconds = timed(chosen.run, command['steps'], command['repeats'])
    print(json.dumps({'seconds': seconds, 'bytes': chosen.bytes_per_step}), file=answers)


def _read(lines: queue.Queue[Any]) -> None:
  """Passes lines on; ends the process after the last, also while it waits for other workers."""
  for line in sys.stdin:
    lines.put(line)
  os._exit(0)


if __name__ == '__main__':
  main()
