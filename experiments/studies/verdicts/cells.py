"""The runs whose verdicts are checked: 82 by hand, 180 drawn at random, 16 of rates just too high.

Those by hand are on quadratics. Those at random are divided into two halves by a seed, before any
rule was fitted to them: the rules may be made with the first half, and the second is held out.
"""

from typing import NamedTuple

import numpy as np

from decomp import compressors, spec, topology
from decomp.theory.rules.choco_sgd import tried

QUADRATIC = 'quadratic'

QUANTIZERS = ['stochastic_quantizer(8)', 'stochastic_quantizer(4)', 'stochastic_quantizer(2)']
STRONG = ['stochastic_quantizer(2, bucket=32)', 'qsgd(4)', 'qsgd(2)', 'random_k(0.2)']
GRIDS = ['fixed_grid(8, limit=100.0)', 'fixed_grid(4, limit=100.0)', 'fixed_grid(8, limit=8.0)']
BIASED = ['top_k(0.1)', 'sign_norm()']

# By hand: compressors for each algorithm and topology, from harmless to hopeless.
BY_HAND = {
  'dcd_psgd({})': {
    'ring(8)': [*QUANTIZERS, *STRONG, *GRIDS[2:], *BIASED, 'natural()', 'random_k(0.8)'],
    'ring(16)': QUANTIZERS + STRONG[:3],
    'torus(4, 4)': QUANTIZERS + STRONG[:3],
    'star(8)': QUANTIZERS + STRONG,
  },
  'ecd_psgd({})': {
    'ring(8)': [*QUANTIZERS, 'qsgd(12)', 'random_k(0.2)', *GRIDS],
    'torus(4, 4)': [*QUANTIZERS, 'qsgd(12)', *GRIDS[:1]],
  },
  'naive({})': {'ring(8)': QUANTIZERS + BIASED[:1], 'torus(4, 4)': QUANTIZERS},
  'compressed_allreduce({})': {'ring(8)': [*QUANTIZERS[1:], 'qsgd(4)', 'random_k(0.2)']},
  'choco_sgd({}, consensus_rate=0.05)': {
    'ring(8)': [*QUANTIZERS[1:], *BIASED, 'random_k(0.2)', 'random_k(0.2, unbiased=False)'],
    'star(8)': QUANTIZERS[1:] + BIASED,
  },
  'choco_sgd({}, consensus_rate=0.3)': {
    'ring(8)': [*QUANTIZERS[1:], *BIASED, 'random_k(0.2, unbiased=False)'],
    'star(8)': QUANTIZERS[1:] + BIASED,
  },
  'choco_sgd({}, consensus_rate=1.0)': {
    'ring(8)': QUANTIZERS[1:] + BIASED,
    'star(8)': QUANTIZERS[1:] + BIASED,
  },
}

# At random: how many of each algorithm, and what its compressor and rate are drawn from.
DRAWS = {
  'allreduce': 4,
  'd_psgd': 14,
  'naive({})': 20,
  'compressed_allreduce({})': 18,
  'dcd_psgd({})': 40,
  'ecd_psgd({})': 30,
  'choco_sgd({}, consensus_rate=[])': 54,
}
COMPRESSORS = {
  'naive': [*QUANTIZERS, 'qsgd(8)', 'natural()', 'random_k(0.5)', 'fixed_grid(8, limit=2.0)'],
  'compressed_allreduce': [
    *QUANTIZERS[1:],
    'qsgd(8)',
    'qsgd(4)',
    'qsgd(2)',
    'random_k(0.2)',
    'natural()',
    'top_k(0.1)',
  ],
  'dcd_psgd': [
    *QUANTIZERS,
    'stochastic_quantizer(3)',
    *STRONG,
    'qsgd(8)',
    'random_k(0.8)',
    'random_k(0.5)',
    'natural()',
    *BIASED,
    'fixed_grid(8, limit=1.0)',
  ],
  'ecd_psgd': [
    *QUANTIZERS[:2],
    'qsgd(12)',
    'qsgd(8)',
    'natural()',
    'random_k(0.5)',
    'fixed_grid(8, limit=8.0)',
    'fixed_grid(8, limit=64.0)',
    'fixed_grid(6, limit=64.0)',
  ],
  'choco_sgd': [
    *QUANTIZERS,
    'contractive(qsgd(4))',
    'contractive(qsgd(2))',
    'top_k(0.1)',
    'top_k(0.01)',
    'sign_norm()',
    'random_k(0.2, unbiased=False)',
  ],
}
RATES = ['0.02', '0.1', '0.3', '1.0']
TOO_FAST = 16
TOPOLOGIES = [
  'ring(8)',
  'torus(4, 4)',
  'star(10)',
  'path(8)',
  'complete(10)',
  'hypercube(8)',
  'erdos_renyi(8, p=0.5)',
]
DATA = ['iid', 'dirichlet(alpha=0.1)', 'by_label']
OPTIMIZERS = ['sgd(0.2)', 'sgd(0.03, momentum=0.9)', 'adam(0.003)']


class Cell(NamedTuple):
  """One run: `data` is how examples are divided, or 'quadratic'."""

  algorithm: str
  topology: str
  data: str
  optimizer: str

  def __str__(self) -> str:
    return f'{self.algorithm} on {self.topology}, {self.data}, {self.optimizer}'


def by_hand() -> list[Cell]:
  """The cells on quadratics, by topology."""
  cells = [
    Cell(call.format(compressor), graph, QUADRATIC, 'sgd(0.1)')
    for call, graphs in BY_HAND.items()
    for graph, chosen in graphs.items()
    for compressor in chosen
  ]
  return sorted(cells, key=lambda cell: cell.topology)


def at_random() -> tuple[list[Cell], list[Cell]]:
  """The cells on digits: the half that rules may be made with, and the one that is held out."""
  rng = np.random.default_rng(2018)
  cells: list[Cell] = []
  for call, count in DRAWS.items():
    wanted = len(cells) + count
    while len(cells) < wanted:
      compressor = str(rng.choice(COMPRESSORS.get(call.partition('(')[0], [''])))
      algorithm = call.format(compressor).replace('[]', str(rng.choice(RATES)))
      cell = Cell(algorithm, *(str(rng.choice(x)) for x in (TOPOLOGIES, DATA, OPTIMIZERS)))
      if cell not in cells:
        cells.append(cell)
  order = rng.permutation(len(cells))
  halves = np.split(order, 2)
  made, held_out = ([cells[i] for i in sorted(half)] for half in halves)
  return made, held_out


def too_fast() -> list[Cell]:
  """CHOCO at 1.1 to 2 times the largest consensus rate at which its graph comes together.

  There errors grow so slowly that the first steps of a run look well. The four rates above, a
  factor of 3 to 5 apart, leave that band nearly empty.
  """
  rng = np.random.default_rng(2019)
  found: list[Cell] = []
  while len(found) < TOO_FAST:
    compressor, graph, optimizer = (
      str(rng.choice(x)) for x in (COMPRESSORS['choco_sgd'], TOPOLOGIES, OPTIMIZERS)
    )
    rate = rng.uniform(1.1, 2) * largest_rate(compressor, graph)
    if rate < 1:
      algorithm = f'choco_sgd({compressor}, consensus_rate={rate:.2g})'
      found.append(Cell(algorithm, graph, 'iid', optimizer))
  return found


def largest_rate(compressor: str, graph: str) -> float:
  """The consensus rate of `tried`, for a model as large as that of the digits."""
  made = spec.build(compressor, compressors, kind='compressor')
  return tried(spec.build(graph, topology, kind='topology'), made, size=2410)
