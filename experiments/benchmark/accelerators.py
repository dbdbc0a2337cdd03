"""What the compilers of accelerators make of the exchange, in multiples of all-reduce.

  python -m experiments.benchmark.accelerators

compiles one step (optimizer and exchange, gradients given, no diagnostics) of each algorithm for
eight TPU v5e with a worker on each, and for one with all eight workers. It prints a table and
writes results/accelerators_tpu.json, or _gpu with --target='gpu a100 x8'. Nothing is run, so that
the numbers are the same on every machine with these versions. Loops are counted once, as the
compiler does.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import decomp
from decomp import algorithms, compressors, cost, models, topology
from decomp.cost import compiled
from experiments.common import report, settings

TARGET = flags.DEFINE_string('target', 'tpu v5e:2x4', 'The machine to compile for.')
RESULTS = Path(__file__).parent / 'results'


def main(argv: Sequence[str]) -> None:
  """Runs the program."""
  del argv
  jax.config.update('jax_platforms', 'cpu')
  with settings.mistakes_in_one_line(stopped='stopped'):
    machine = cost.machine(TARGET.value)
  rows = []
  for model, params in shapes().items():
    for stacked in (False, True):
      for row in compare(machine, params, stacked, several()):
        rows.append({'model': model, **row})
        print({k: v if isinstance(v, str) else round(v, 2) for k, v in rows[-1].items()})
  report.print_table(rows, f'one step on {machine.name}, ring(8)')
  facts = {'target': machine.name, 'jax': jax.__version__, 'rows': rows}
  path = RESULTS / f'accelerators_{TARGET.value.split()[0]}.json'
  path.write_text(json.dumps(facts, indent=1) + '\n')


def several() -> dict[str, decomp.Algorithm]:
  """Those that the goals are about, and all-reduce first."""
  sgd, grid = optax.sgd(0.1), compressors.stochastic_quantizer
  return {
    'allreduce': algorithms.allreduce(sgd),
    'd_psgd': algorithms.d_psgd(sgd),
    'dcd_psgd, 8 bits': algorithms.dcd_psgd(sgd, grid(8)),
    'dcd_psgd, 4 bits': algorithms.dcd_psgd(sgd, grid(4)),
    'dcd_psgd, eden 1 bit': algorithms.dcd_psgd(sgd, compressors.eden(1)),
    'ecd_psgd, 8 bits': algorithms.ecd_psgd(sgd, grid(8)),
    'ecd_psgd, 4 bits': algorithms.ecd_psgd(sgd, grid(4)),
    'choco_sgd, top 1 %': algorithms.choco_sgd(sgd, compressors.top_k(0.01), 0.05),
  }


def shapes() -> dict[str, Any]:
  """One worker's parameters of three kinds: many small leaves, one large one, many large ones."""
  resnet = jax.eval_shape(
    lambda key: models.resnet20(10).init(key, jnp.zeros((1, 32, 32, 3)), train=False),
    jax.random.key(0),
  )
  return {'ResNet-20': resnet['params'], 'one leaf of 1 M': leaf(1_000_000), 'MLP': mlp()}


def leaf(size: int) -> Any:
  """One leaf."""
  return {'w': jax.ShapeDtypeStruct((size,), jnp.float32)}


def mlp(layers: int = 12, width: int = 256) -> Any:
  """24 leaves."""
  one = {
    'kernel': jax.ShapeDtypeStruct((width, width), jnp.float32),
    'bias': jax.ShapeDtypeStruct((width,), jnp.float32),
  }
  return [one] * layers


def compare(
  machine: cost.Machine, params: Any, stacked: bool, those: Mapping[str, decomp.Algorithm]
) -> Iterator[dict[str, Any]]:
  """A row for each algorithm; traffic in multiples of the first one's."""
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
  first = None
  for name, algorithm in those.items():
    began = time.perf_counter()
    sim, found = step(machine, params, stacked, algorithm)
    took = time.perf_counter() - began
    traffic = found.traffic or math.nan  # GPUs' compiler tells none
    first = first or traffic
    yield {
      'workers': 'on one device' if stacked else 'on eight',
      'algorithm': name,
      'traffic MB': traffic / 1e6,
      'x allreduce': traffic / first,
      'temporary / models': found.temporary / size / (sim.topology.num_workers if stacked else 1),
      'kernels': float(found.kernels),
      'gathers': float(found.operations.get('gather', 0)),
      'sends': float(sum(found.sends.get('collective-permute', ()))),
      'overlapped': float(sum(many > 0 for many in found.meanwhile)),
      'messages': float(len(found.meanwhile)),
      'bytes_per_step': float(sim.bytes_per_step(params)),
      'compiled in s': took,
    }


def step(
  machine: cost.Machine,
  params: Any,
  stacked: bool,
  algorithm: decomp.Algorithm,
  graph: decomp.Topology | None = None,
  what: str = 'step',
) -> tuple[decomp.Simulation, compiled.Compiled]:
  """One compiled step, or the start, of eight workers."""
  graph = graph or topology.ring(8)
  n = graph.num_workers
  mesh = Mesh(
    np.array(machine.devices[: 1 if stacked else n]), ('worker',), axis_types=(AxisType.Auto,)
  )
  sim = decomp.simulate(algorithm, graph, None if stacked else mesh)

  def placed(x: Any) -> jax.ShapeDtypeStruct:
    spec = PartitionSpec('worker') if x.ndim else PartitionSpec()
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

  everyone = jax.tree.map(lambda x: placed(jax.ShapeDtypeStruct((n, *x.shape), x.dtype)), params)
  if what == 'start':
    start = jax.jit(lambda params: sim.init(params, stacked=True))
    return sim, compiled.read(start.lower(everyone).compile())
  state = jax.tree.map(placed, jax.eval_shape(sim.init, params))
  key = placed(jax.eval_shape(lambda: jax.random.key(0)))
  one = jax.jit(lambda key, grads, state: sim.step(key, grads, state, False)[0], donate_argnums=2)
  return sim, compiled.read(one.lower(key, everyone, state).compile())


if __name__ == '__main__':
  app.run(main)
