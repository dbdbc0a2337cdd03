"""Seconds of encoding and decoding, and the networks on which they pay."""

import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import decomp
from decomp import compressors, cost, spec, topology
from decomp.base import Compressor
from experiments.studies.one_bit.kept import Kept, Row

SIZES = (100_000, 1_000_000)
REPEATS = 7
ALGORITHMS = [
  'd_psgd',
  *(f'dcd_psgd(eden({bits}))' for bits in (1, 2, 3, 4)),
  *(f'dcd_psgd(stochastic_quantizer({bits}))' for bits in (2, 3, 4, 8)),
  'choco_sgd(sign_norm(), consensus_rate=0.4)',
]
GRAPH = topology.ring(8)
BANDWIDTHS = np.geomspace(1e6, 1e11, 501)
LATENCY = '0.1ms'


def measure(kept: Kept, smoke: bool) -> None:
  """Each algorithm with models of some sizes."""
  for size in (1000,) if smoke else SIZES:
    for text in ALGORITHMS[:1] if smoke else ALGORITHMS:
      row = kept.of(f'{text}, {size} elements', functools.partial(seconds, text, size))
      shown = f'{row["nanoseconds"]:.3g} ns and {row["bytes"]:.3g} bytes per element'
      print(f'codec {text}, {size} elements: {shown}', flush=True)


def seconds(text: str, size: int) -> Row:
  """Processor seconds of one worker's messages in a step, and the bytes to one neighbour.

  That is one message encoded and packed, and three decoded and added: one's own and those of two
  neighbours. Seconds of the processor, all cores together, are about the same if other programs
  run beside this one; seconds of a clock are not.
  """
  codec, like = _codec(text), jnp.zeros(size)
  key = jax.random.key(0)

  def step(number: jax.Array, x: jax.Array) -> jax.Array:
    message = codec.encode(jax.random.fold_in(key, number), x)
    total = jnp.zeros_like(x)
    for _ in range(1 + GRAPH.degree):
      # The barrier keeps the compiler from decoding equal messages only once.
      message, total = jax.lax.optimization_barrier((message, total))
      total += codec.decode(message, like)
    return total / (1 + GRAPH.degree)

  loop = jax.jit(lambda x, steps: jax.lax.fori_loop(0, steps, step, x))
  x, steps = jax.random.normal(key, (size,)), 10
  loop(x, 1).block_until_ready()
  times = []
  for _ in range(REPEATS):
    began = time.process_time()
    loop(x, steps).block_until_ready()
    times.append((time.process_time() - began) / steps)
  sent = decomp.simulate(_build(text), GRAPH).bytes_per_step(like) / GRAPH.degree
  return {'nanoseconds': 1e9 * statistics.median(times) / size, 'bytes': sent / size}


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


def _codec(text: str) -> Compressor:
  """The compressor of an algorithm, `identity` if it has none."""
  inside = text.partition('(')[2].removesuffix(')').removesuffix(', consensus_rate=0.4')
  return spec.build(inside or 'identity()', compressors, kind='codec')


def _build(text: str) -> decomp.Algorithm:
  return spec.build(text, [spec.algorithms(optax.sgd(0.1)), compressors], kind='algorithm')
