"""Workers that only agree: the rate per round, predicted and measured, on both sides of 1/K."""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import decomp
from decomp import compressors, spec
from decomp.base import Compressor
from decomp.compressors.common import kept as count_of
from decomp.compressors.random_k import Sampled
from decomp.engine import tree
from experiments.studies.one_bit import theory
from experiments.studies.one_bit.kept import Kept, Row

SIZE = 4096
SEEDS = 4
ROUNDS = 120
"""The rate is that of the second half."""

GRAPHS = (
  'ring(8)',
  'ring(64)',
  'path(16)',
  'torus(4, 4)',
  'star(8)',
  'star(64)',
  'hypercube(16)',
  'exponential(16)',
  'complete(16)',
  'erdos_renyi(16, p=0.3)',
  'bipartite(32)',
  *(f'lazy_ring(16, {own})' for own in (0.01, 0.05, 0.1, 0.12, 0.15, 0.2, 0.5)),
)
FRACTIONS = (0.9, 0.75, 0.7, 0.65, 0.6, 0.5)
GRIDS = [f'stochastic_quantizer({bits})' for bits in (2, 3, 4)]


def sampled(fraction: float, codec: Compressor) -> Compressor:
  """The values that unbiased `random_k` keeps, in a code of their own: less than a bit per element.

  >>> codec = sampled(0.5, compressors.eden(1))
  >>> jax.eval_shape(codec.encode, jax.random.key(0), jnp.ones(4096)).values.codes
  ShapeDtypeStruct(shape=(256,), dtype=uint8)
  """
  sampler = compressors.random_k(fraction)

  def encode(key: jax.Array, x: jax.Array) -> Any:
    place_key, key = jax.random.split(key)
    found = sampler.encode(place_key, x)
    return found._replace(values=codec.encode(key, found.values))

  def decode(payload: Any, like: Any) -> jax.Array:
    values = jax.ShapeDtypeStruct((count_of(like.size, fraction),), jnp.float32)
    return sampler.decode(Sampled(codec.decode(payload.values, values), payload.seed), like)

  return Compressor(encode, decode, unbiased=True, name=f'sampled({fraction}, {codec})')


def cells() -> list[tuple[str, str]]:
  """Graphs and codecs."""
  found = [(graph, f'eden({bits})') for graph in GRAPHS for bits in (1, 2)]
  found += [('ring(8)', f'sampled({fraction}, eden(1))') for fraction in FRACTIONS]
  return found + [(graph, grid) for graph in ('ring(8)', 'star(64)') for grid in GRIDS]


def measure(kept: Kept, smoke: bool) -> None:
  """The rate of every cell."""
  chosen = cells()[:1] if smoke else cells()
  for number, (graph, codec) in enumerate(chosen, start=1):
    row = kept.of(
      f'{graph}, {codec}', functools.partial(rates, graph, codec, 8 if smoke else ROUNDS)
    )
    said = f'expected {row["expected"]:.4f}' if row['expected'] else 'nothing expected'
    print(
      f'gossip [{number}/{len(chosen)}] {graph}, {codec}: {said}, '
      f'measured {row["measured"]:.4f} ± {row["deviation"]:.1g}',
      flush=True,
    )


def rates(graph_text: str, codec_text: str, rounds: int) -> Row:
  """The factor of |x - x̄|² in a round: expected, and measured with several seeds."""
  graph = theory.graph_of(graph_text)
  codec = codec_of(codec_text)
  alpha2 = _alpha2(codec_text, codec)
  half = rounds // 2
  logs, noise = simulate(graph, codec, rounds, jax.random.split(jax.random.key(0), SEEDS))
  measured = np.exp(logs[:, half:].mean(1))
  expected = math.nan if alpha2 is None else expected_rate(graph, alpha2, rounds)
  return {
    'expected': expected,
    'measured': float(measured.mean()),
    'deviation': float(measured.std(ddof=1)),
    'alpha2': alpha2,
    'alpha2 measured': float(noise[:, half:].mean()),
    'limit': 1 / theory.noise_gain(graph),
    'uncompressed': graph.rho**2,
  }


def expected_rate(graph: decomp.Topology, alpha2: float, rounds: int) -> float:
  """The factor in a round, over the second half of the rounds."""
  factors = np.array(list(itertools.islice(theory.moments(graph, alpha2), rounds)))
  return float(np.exp(np.log(factors[rounds // 2 :]).mean()))


def codec_of(text: str) -> Compressor:
  """A compressor of the library, or one of its values that are `sampled`."""
  library = {name: getattr(compressors, name) for name in compressors.__all__}
  return spec.build(text, {**library, 'sampled': sampled}, kind='codec')


def _alpha2(text: str, codec: Compressor) -> float | None:
  """Of messages of any kind; None for grids, whose α² depends on what they get."""
  if text.startswith('sampled('):
    count = count_of(SIZE, float(text.removeprefix('sampled(').partition(',')[0]))
    return theory.sampled_alpha2(count / SIZE, padded_alpha2(compressors.eden(1), count))
  return codec.alpha2(SIZE) if codec.alpha2 and 'eden' in text else None


def padded_alpha2(codec: Compressor, size: int) -> float:
  """α² of `eden(1)` on so many elements: what falls on the zeros that fill its rows up is lost.

  >>> [round(padded_alpha2(compressors.eden(1), size), 3) for size in (4096, 3686)]
  [0.571, 0.514]
  """
  shapes = jax.eval_shape(lambda: jax.random.key(0)), jax.ShapeDtypeStruct((size,), jnp.float32)
  payload: Any = jax.eval_shape(codec.encode, *shapes)
  assert codec.alpha2 is not None
  return codec.alpha2(size) * size / (8 * payload.codes.size)


def simulate(
  graph: decomp.Topology, codec: Compressor, rounds: int, keys: jax.Array, start: Any = None
) -> tuple[np.ndarray, np.ndarray]:
  """DCD's x ← x + C((W - I)x), measured: the log of the factor of |x - x̄|², and α², [seeds, T].

  What workers agree on does not matter to either, nor does the scale: both are taken out after
  each round, so that the rate can be followed as long as one likes.
  """
  matrix = jnp.asarray(graph.matrix - np.eye(graph.num_workers), jnp.float32)
  return _simulated(codec, rounds, matrix, keys, start)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _simulated(
  codec: Compressor, rounds: int, matrix: jax.Array, keys: jax.Array, start: Any
) -> Any:
  def unit(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = x - x.mean(0, keepdims=True)
    energy = (x**2).sum()
    return x / jnp.sqrt(energy), energy

  def one(key: jax.Array) -> Any:
    start_key, key = jax.random.split(key)
    n = matrix.shape[0]
    x = jax.random.normal(start_key, (n, SIZE)) if start is None else start

    def step(x: jax.Array, t: jax.Array) -> Any:
      own = jax.random.split(jax.random.fold_in(key, t), n)
      z = jnp.matmul(matrix, x, precision='highest')
      sent = jax.vmap(lambda k, z: tree.compress(codec, k, z).value)(own, z)
      noise = ((sent - z) ** 2).sum() / (z**2).sum()
      x, energy = unit(x + sent)
      return x, (jnp.log(energy), noise)

    return jax.lax.scan(step, unit(x)[0], jnp.arange(rounds))[1]

  return jax.lax.map(one, keys)
