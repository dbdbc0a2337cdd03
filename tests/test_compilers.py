"""What the compilers of TPUs and GPUs make of a step, without a device: nothing is run.

`make test` brings the compiler of TPUs along; `make test-gpu-compiler` fetches that of GPUs.
"""

import os

import jax
import jax.numpy as jnp
import optax
import pytest
from tables import make_algorithms

from decomp import algorithms, compressors, cost, topology
from decomp.engine import platforms
from experiments.benchmark import accelerators

GPU = 'gpu a100 x8'
TARGET = GPU if os.environ.get('DECOMP_COMPILER') == 'gpu' else 'tpu v5e:2x4'
SMALL = [
  {
    'kernel': jax.ShapeDtypeStruct((48, 32), jnp.float32),
    'bias': jax.ShapeDtypeStruct((32,), jnp.float32),
  }
] * 3
LARGE = accelerators.leaf(700_000) | {'bias': jax.ShapeDtypeStruct((300,), jnp.float32)}

# Memory traffic in multiples of allreduce's, ring(8), of LARGE: what was aimed at, and is reached.
ON_EIGHT = {'d_psgd': 3, 'dcd_psgd': 4, 'ecd_psgd': 4, 'choco_sgd': 8}
ON_ONE = {'d_psgd': 1.3, 'dcd_psgd': 3, 'ecd_psgd': 3, 'choco_sgd': 6}


@pytest.fixture(scope='module')
def machine():
  try:
    return cost.machine(TARGET)
  except ValueError as missing:
    if 'is not installed' not in str(missing):
      raise
    pytest.skip(str(missing))


def those():
  """Every algorithm, all-reduce first."""
  table = make_algorithms(compressor=compressors.stochastic_quantizer(4))
  table['choco_sgd'] = algorithms.choco_sgd(optax.sgd(0.1), compressors.top_k(0.01), 0.05)
  return {'allreduce': table.pop('allreduce'), **table}


@pytest.mark.parametrize('stacked', [False, True], ids=['on eight', 'on one'])
@pytest.mark.parametrize('model', ['small', 'large'])
def test_every_algorithm(machine, model, stacked):
  params = SMALL if model == 'small' else LARGE
  limits = ON_ONE if stacked else ON_EIGHT
  table = those()
  if model == 'small' and not stacked:  # rotations take the compiler long
    table['dcd_psgd, eden'] = algorithms.dcd_psgd(optax.sgd(0.1), compressors.eden(1))
  for row in accelerators.compare(machine, params, stacked, table):
    name = row['algorithm']
    if not stacked and name not in ('allreduce', 'compressed_allreduce'):
      assert row['sends'] == row['bytes_per_step'], name
      # While a message is under way there is something else to do, but for the first or last.
      assert TARGET == GPU or 0 < row['messages'] <= row['overlapped'] + 1, name
    if name != 'choco_sgd':  # it gathers what top_k keeps
      assert row['gathers'] == 0, name
    if model == 'large' and TARGET != GPU:
      assert row['x allreduce'] <= limits.get(name, 8), name
      assert row['temporary / models'] <= (8 if name == 'compressed_allreduce' else 2), name


@pytest.mark.parametrize('name', ['d_psgd', 'dcd_psgd'])
def test_the_start_exchanges_floats_as_floats(machine, name):
  algorithm = those()[name]
  _, found = accelerators.step(machine, LARGE, False, algorithm, what='start')
  assert found.temporary <= 2 * 4 * 700_300
  expected = [] if name == 'd_psgd' else [2 * 4 * 700_300]
  assert [sum(sizes) for sizes in found.sends.values()] == expected


def test_workers_are_mixed_by_a_product_on_tpus(machine):
  """As one matrix product where CPUs gather rows: the program asks where it is going to run."""
  graph = topology.ring(40)
  assert not platforms.CPU.product(graph.num_workers, graph.degree)
  algorithm = algorithms.d_psgd(optax.sgd(0.1))
  _, found = accelerators.step(machine, accelerators.leaf(1024), True, algorithm, graph)
  assert found.operations.get('gather', 0) == 0
