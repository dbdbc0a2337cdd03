"""Seconds of encoding and decoding, and the networks on which they pay."""

import functools

import jax.numpy as jnp
import numpy as np
import optax

import decomp
from decomp import compressors, cost, spec, topology
from experiments.studies.one_bit.kept import Kept, Row

SIZES = (100_000, 1_000_000)
ALGORITHMS = [
  'd_psgd',
  *(f'dcd_psgd(eden({bits}))' for bits in (1, 2, 3, 4)),
  *(f'dcd_psgd(stochastic_quantizer({bits}))' for bits in (2, 3, 4, 8)),
  'choco_sgd(sign_norm(), consensus_rate=0.4)',
]
GRAPH = topology.ring(8)
BANDWIDTHS = np.geomspace(1e6, 1e11, 501)
LATENCY = '1ms'


def measure(kept: Kept, smoke: bool) -> None:
  """Each algorithm with models of some sizes."""
  for size in (1000,) if smoke else SIZES:
    for text in ALGORITHMS[:1] if smoke else ALGORITHMS:
      row = kept.of(f'{text}, {size} elements', functools.partial(seconds, text, size))
      shown = f'{row["nanoseconds"]:.3g} ns and {row["bytes"]:.3g} bytes per element'
      print(f'codec {text}, {size} elements: {shown}', flush=True)


def seconds(text: str, size: int) -> Row:
  """One worker's part of a step without its gradient, and the bytes to one neighbour."""
  algorithm = _build(text)
  own = cost.measure_codec(algorithm, GRAPH, jnp.zeros(size))
  sent = decomp.simulate(algorithm, GRAPH).bytes_per_step(jnp.zeros(size)) / GRAPH.degree
  return {'nanoseconds': 1e9 * own / size, 'bytes': sent / size}


def of_largest(found: Row) -> tuple[int, dict[str, Row]]:
  """The largest size there is, and the results of each algorithm with it."""
  named = {tuple(name.rsplit(', ', 1)): row for name, row in found.items()}
  size = max(int(elements.partition(' ')[0]) for _, elements in named)
  return size, {text: row for (text, at), row in named.items() if at == f'{size} elements'}


def step_seconds(text: str, size: int, row: Row, bandwidth: np.ndarray) -> np.ndarray:
  """Seconds of a step on networks of these bandwidths, gradients left out: decomp.cost's model."""
  codec = row['nanoseconds'] * 1e-9 * size
  work = cost.workload(_build(text), GRAPH, jnp.zeros(size), compute=0.0, codec=codec)
  return np.asarray(cost.step_seconds(work, cost.lan(bandwidth, LATENCY)))


def _build(text: str) -> decomp.Algorithm:
  return spec.build(text, [spec.algorithms(optax.sgd(0.1)), compressors], kind='algorithm')
