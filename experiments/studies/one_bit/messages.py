"""α² of what is sent: where grids of the largest element suffer, and whether a rotation does."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.linalg

from decomp import topology
from decomp.base import Compressor, PyTree
from decomp.engine import tree
from experiments.studies.codecs import inputs
from experiments.studies.one_bit import gossip
from experiments.studies.one_bit.kept import Kept, Row

CODECS = [
  *(f'eden({bits})' for bits in (1, 2, 3, 4)),
  *(f'stochastic_quantizer({bits})' for bits in (1, 2, 3, 4, 8)),
  'stochastic_quantizer(4, bucket=512)',
]
SIZE, DRAWS, SAMPLES = 16384, 4, 16
ROUNDS = (1, 2, 5, 10, 20, 40, 60)
LENGTHS = (32, 128, 1024, 4096)


def kinds(rng: np.random.Generator) -> dict[str, np.ndarray]:
  """Vectors of light and heavy tails."""
  normal = rng.normal(size=SIZE)
  return {
    'Gaussian': normal,
    'Laplace': rng.laplace(size=SIZE),
    'Student t(3)': rng.standard_t(3, size=SIZE),
    'Student t(2)': rng.standard_t(2, size=SIZE),
    'Gaussian, one in 100': np.where(rng.random(SIZE) < 0.01, normal, 0),
    'Gaussian, 8 elements': np.where(np.arange(SIZE) % (SIZE // 8) == 5, normal, 0),
  }


def structured(length: int) -> dict[str, np.ndarray]:
  """Vectors that a rotation of signs and Hadamard transforms could fail on."""
  hot = np.eye(length)
  return {
    'one element': hot[0],
    'two equal': hot[0] + hot[1],
    'two opposite': hot[0] - hot[length // 2],
    'eight equal': hot[:8].sum(0),
    'all equal': np.ones(length),
    'row of Hadamard': scipy.linalg.hadamard(length)[3].astype(float),
    'ramp': np.linspace(-1, 1, length),
    'powers of two': 2.0 ** -np.arange(length),
    'one large on all': np.ones(length) + 30 * hot[0],
  }


@functools.partial(jax.jit, static_argnums=(0, 3))
def noise(codec: Compressor, inputs: PyTree, key: jax.Array, samples: int) -> Any:
  """(α², |mean error|² / |x|²) of each input, in lines of the leaves."""

  def one(x: PyTree) -> tuple[jax.Array, jax.Array]:
    def draw(sums: PyTree, key: jax.Array) -> tuple[PyTree, jax.Array]:
      error = optax.tree.sub(tree.compress(codec, key, x).value, x)
      return optax.tree.add(sums, error), optax.tree.norm(error, squared=True)

    start = optax.tree.zeros_like(x)
    sums, squares = jax.lax.scan(draw, start, jax.random.split(key, samples))
    energy = optax.tree.norm(x, squared=True)
    mean = optax.tree.scale(1 / samples, sums)
    return squares.mean() / energy, optax.tree.norm(mean, squared=True) / energy

  return jax.lax.map(one, inputs)


def measure(kept: Kept, smoke: bool) -> None:
  """Each codec on vectors of many kinds, on real differences, and in gossip from heavy tails."""
  codecs = CODECS[:1] if smoke else CODECS
  for codec in codecs:
    _show(codec, kept.of(codec, functools.partial(_on_vectors, codec)))
  for length in LENGTHS[:1] if smoke else LENGTHS:
    for codec in codecs[:4]:
      name = f'{codec}, structured, {length} elements'
      _show(name, kept.of(name, functools.partial(_on_structured, codec, length)))
  for task in [] if smoke else inputs.TASKS:
    _show(
      f'differences of {task}', kept.of(f'differences of {task}', functools.partial(_on_task, task))
    )
  for codec in codecs[:1] if smoke else ['eden(1)', *gossip.GRIDS]:
    name = f'{codec}, gossip'
    _show(name, kept.of(name, functools.partial(_in_gossip, codec)))


def _show(name: str, row: Row) -> None:
  shown = ', '.join(f'{key} {value:.3g}' for key, value in row.items() if isinstance(value, float))
  print(f'messages {name}: {shown}', flush=True)


def _on_vectors(text: str) -> Row:
  """α² of each kind, the mean over draws of the vector."""
  codec = gossip.codec_of(text)
  drawn = [kinds(np.random.default_rng(seed)) for seed in range(DRAWS)]
  lines = np.stack([vector for found in drawn for vector in found.values()]).astype(np.float32)
  alpha2, _ = noise(codec, jnp.asarray(lines), jax.random.key(0), SAMPLES)
  means = np.asarray(alpha2, float).reshape(DRAWS, -1).mean(0)
  return dict(zip(drawn[0], means.tolist(), strict=True))


def _on_structured(text: str, length: int) -> Row:
  """α² of each, and the bias: the square of the mean error over what chance leaves of it."""
  samples = 1000
  lines = np.stack([*structured(length).values()]).astype(np.float32)
  alpha2, mean2 = noise(gossip.codec_of(text), jnp.asarray(lines), jax.random.key(0), samples)
  bias = np.asarray(mean2, float) * samples / np.asarray(alpha2, float)
  return {
    'largest alpha2': float(alpha2.max()),
    'largest bias': float(bias.max()),
    'alpha2': dict(zip(structured(length), np.asarray(alpha2, float).tolist(), strict=True)),
    'bias': dict(zip(structured(length), bias.tolist(), strict=True)),
  }


def _on_task(name: str) -> Row:
  """α² of all codecs on real differences, the mean over workers; and how heavy their tails are."""
  _, found = inputs.of_run(name)

  def of(text: str) -> float:
    return float(noise(gossip.codec_of(text), found, jax.random.key(0), SAMPLES)[0].mean())

  leaves = [np.asarray(leaf, float).reshape(len(leaf), -1) for leaf in jax.tree.leaves(found)]
  large = [leaf for leaf in leaves if leaf.shape[1] >= 1000]
  peaks = [abs(leaf).max(1) / np.sqrt((leaf**2).mean(1)) for leaf in large]
  return {'largest over rms': float(np.max(peaks)), **{text: of(text) for text in CODECS}}


def _in_gossip(text: str) -> Row:
  """|x - x̄|² after some rounds on a ring of 8 over that at the start, from t(2) and Gaussian."""
  codec, graph, rng = gossip.codec_of(text), topology.ring(8), np.random.default_rng(0)
  keys, row = jax.random.split(jax.random.key(0), gossip.SEEDS), {}
  for kind, start in {
    'Gaussian': rng.normal(size=(8, gossip.SIZE)),
    't(2)': rng.standard_t(2, size=(8, gossip.SIZE)),
    'an element each': 100 * np.eye(8, gossip.SIZE) + rng.normal(size=(8, gossip.SIZE)),
  }.items():
    logs, noises = gossip.simulate(graph, codec, ROUNDS[-1], keys, jnp.asarray(start, jnp.float32))
    course = np.exp(np.asarray(logs, float).cumsum(1)).mean(0)
    row[kind] = course[np.array(ROUNDS) - 1].tolist()
    row[f'{kind}, first alpha2'] = float(np.asarray(noises)[:, 0].mean())
    row[f'{kind}, at the end'] = float(course[-1])
  return row
