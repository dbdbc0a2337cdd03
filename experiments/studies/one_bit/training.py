"""Training with one bit and with more: which runs there are, and what is kept of each."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import decomp
from decomp import compressors, models, schedules, spec, tasks
from decomp.theory.rules.choco_sgd import recommended_rate
from experiments.studies.one_bit.kept import Kept, Row
from experiments.studies.one_bit.theory import graph_of

EDEN = [f'dcd_psgd(eden({bits}))' for bits in (1, 2, 3, 4)]
GRIDS = [f'dcd_psgd(stochastic_quantizer({bits}))' for bits in (2, 3, 4)]
CHOCO = ['choco_sgd(sign_norm())', 'choco_sgd(contractive(eden(1)))']
ECD = [f'ecd_psgd(eden({bits}))' for bits in (1, 4)]
ALL = ['d_psgd', *EDEN, *GRIDS, *CHOCO, *ECD]
RING = 'ring(8)'
OTHER_GRAPHS = ('lazy_ring(16, 0.05)', 'lazy_ring(16, 0.2)', 'star(32)', 'ring(32)')

SGD = 'sgd(0.2)'
MOMENTUM = 'sgd(0.02, momentum=0.9)'
ADAM = 'adam(0.003)'
FALLING = 'chain(add_decayed_weights(1e-4), sgd(warmup_step_decay(0.1, warmup=0.05), momentum=0.9))'
SIGNS = 2 / math.pi
"""δ of signs on Gaussian numbers, and of `contractive(eden(1))` on any: CHOCO's rate goes by it."""
SEEDS = (0, 1, 2)
FIRST = 5
"""Cells that are run with all seeds before any other."""
POINTS = 25
"""Rows that are kept of a run."""


class Bench(NamedTuple):
  """What all runs of a task share.

  Attributes:
    task: makes it.
    batch_size: examples per worker and step.
    length: steps, or epochs where `reshuffle`.
    reshuffle: whether the data are dealt anew every epoch.
    seeds_at_once: whether one program runs all seeds: small models gain by it.
    rows: how often metrics are taken.
    worker_examples: test examples that single workers are evaluated on.
  """

  task: Callable[[], decomp.Task]
  batch_size: int
  length: int
  reshuffle: bool = False
  seeds_at_once: bool = False
  rows: int = 10
  worker_examples: int = 2000


BENCHES = {
  'digits': Bench(tasks.digits, 16, 1000, seeds_at_once=True, rows=50),
  'cifar10': Bench(
    lambda: tasks.images('cifar10', models.resnet8(10), size=16), 16, 3, True, worker_examples=500
  ),
  'text': Bench(tasks.text, 16, 150, rows=5, worker_examples=200),
}


class Cell(NamedTuple):
  """One run for each seed."""

  algorithm: str
  optimizer: str
  data: str = 'iid'
  graph: str = RING

  def named(self, seed: int) -> str:
    """Its name in the results, with a seed."""
    return ', '.join([self.algorithm, self.optimizer, self.data, self.graph, f'seed {seed}'])


def cells(task: str) -> list[Cell]:
  """What is run, most important first."""
  if task == 'digits':
    plain = [Cell(a, o, d) for d in ('iid', 'by_label') for o in (SGD, MOMENTUM, ADAM) for a in ALL]
    others = [Cell(a, SGD, 'iid', graph) for graph in OTHER_GRAPHS for a in ('d_psgd', EDEN[0])]
    half = len(plain) // 2
    return plain[:half] + others + plain[half:]
  if task == 'cifar10':
    first = ['d_psgd', EDEN[0], GRIDS[0], GRIDS[2], EDEN[1], GRIDS[1], *CHOCO[::-1], ECD[1]]
    by_label = ['d_psgd', EDEN[0], GRIDS[2]]
    return [Cell(a, FALLING) for a in first] + [Cell(a, FALLING, 'by_label') for a in by_label]
  first = ['d_psgd', EDEN[0], GRIDS[2], EDEN[1], GRIDS[1], CHOCO[1]]
  return [Cell(a, ADAM, 'iid', 'ring(4)') for a in first]


def grouped(task: str, found: Row) -> dict[Cell, list[Row]]:
  """The finished runs of each cell, a row for each seed."""
  rows = {cell: [found.get(cell.named(seed)) for seed in SEEDS] for cell in cells(task)}
  return {cell: [r for r in runs if r] for cell, runs in rows.items() if any(runs)}


def run(bench: Bench, cell: Cell, seeds: Sequence[int]) -> list[Row]:
  """Trains with each seed."""
  task, graph = bench.task(), graph_of(cell.graph)
  steps = bench.length
  if bench.reshuffle:
    examples = len(task.train['label'])
    steps = round(bench.length * examples / graph.num_workers / bench.batch_size)

  rate = consensus_rate(cell.algorithm, graph, task)

  def algorithm() -> decomp.Algorithm:
    return build(cell, steps, rate)

  found = decomp.sweep(
    task,
    algorithm,
    graph,
    steps,
    bench.batch_size,
    seeds,
    shards=cell.data,
    reshuffle=bench.reshuffle and cell.data == 'iid',
    eval_every=max(1, steps // bench.rows),
    worker_examples=bench.worker_examples,
  )
  name = algorithm().name  # tells CHOCO's rate
  return [{'algorithm': name, **summary(history)} for history in found.histories]


def build(cell: Cell, steps: int, rate: float | None = None) -> decomp.Algorithm:
  """The algorithm of a cell, with CHOCO's consensus rate."""
  decay = schedules.warmup_step_decay
  named = {**spec.optimizers(), 'warmup_step_decay': lambda *a, **k: decay(*a, steps=steps, **k)}
  optimizer = spec.build(cell.optimizer, named, kind='optimizer')
  known: Any = [spec.algorithms(optimizer), compressors]
  return spec.build(cell.algorithm, known, kind='algorithm', consensus_rate=rate)


def consensus_rate(text: str, graph: decomp.Topology, task: decomp.Task) -> float | None:
  """What the preflight recommends to CHOCO for δ = 2/π and the largest leaf; None for others."""
  if not text.startswith('choco_sgd('):
    return None
  inside = text.removeprefix('choco_sgd(').removesuffix(')')
  codec = spec.build(inside, compressors, kind='compressor')
  params, _ = jax.eval_shape(task.init, jax.random.key(0))
  largest = max(leaf.size for leaf in jax.tree.leaves(params))
  return recommended_rate(graph, codec, largest, SIGNS)


def summary(history: decomp.History) -> Row:
  """The end of a run, and some of its rows.

  `alpha2` is the median over rows of the messages' measured α².
  """
  last, rows = history[-1], history[:: max(1, len(history) // POINTS)]
  if rows[-1] is not last:
    rows = [*rows, last]
  noise = history.column('compression_error')
  return {
    'diverged': last['step'] if history.diverged else None,
    'accuracy': math.nan if history.diverged else last['test_accuracy'],
    'worst': math.nan if history.diverged else last['worst_accuracy'],
    'train_loss': last.get('train_loss', math.nan),
    'distance': last['consensus_distance'],
    'alpha2': float(np.nanmedian(noise)) if np.isfinite(noise).any() else math.nan,
    'megabytes': last['bytes_sent'] / 1e6,
    'steps': [row['step'] for row in rows],
    'accuracies': [row['test_accuracy'] for row in rows],
  }


def train(task: str, kept: Kept, smoke: bool) -> None:
  """All cells of a task with all seeds, the most important cells first."""
  bench, chosen = BENCHES[task], cells(task)
  if smoke:
    bench, chosen = bench._replace(length=4, rows=2), chosen[:1]
  groups = [SEEDS] if bench.seeds_at_once else [(seed,) for seed in SEEDS]
  halves = [itertools.product(groups, part) for part in (chosen[:FIRST], chosen[FIRST:])]
  for number, (seeds, cell) in enumerate(itertools.chain(*halves), start=1):
    found = _found(bench, cell, seeds, kept)
    shown = ', '.join(
      f'diverged at {r["diverged"]}' if r['diverged'] else f'{r["accuracy"]:.2%}' for r in found
    )
    name = cell.named(seeds[0])
    print(f'{task} [{number}/{len(groups) * len(chosen)}] {name}: {shown}', flush=True)


def _found(bench: Bench, cell: Cell, seeds: Sequence[int], kept: Kept) -> list[Row]:
  results: list[Row] = []  # of all seeds, once one of them is asked for

  def result(number: int) -> Row:
    if not results:
      results.extend(run(bench, cell, seeds))
    return results[number]

  return [kept.of(cell.named(s), functools.partial(result, k)) for k, s in enumerate(seeds)]
