r"""Checks the verdicts of decomp.theory against what happens, on a grid of runs to the end.

  python -m experiments.studies.verdicts --output=runs/verdicts

Each cell is an algorithm with a compressor on a topology. Its verdict is asked for first, then it
is run for STEPS steps on quadratics with known optimum: one for each worker, with noisy gradients
and a constant step size. What happened is decided by the average of f(x̄) - f* over the last fifth
of the steps:

  converged  at most twice that of d_psgd on the same topology, with the same gradients' noise
  diverged   not finite, or above f(x̄) - f* at the start
  stalled    anything else

'converges' and 'likely' agree with converged, 'will stall' with stalled and diverged, 'will
diverge' with diverged; 'at risk' promises nothing and is counted apart. Prints both tables, and
writes results.json and results.md.
"""

import collections
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

import decomp
from decomp import algorithms, compressors, data, metrics, spec, theory, topology
from decomp.theory import Problem, Verdict
from experiments.common import output, report, settings

flags.declare_key_flag('output')
flags.declare_key_flag('seed')

STEPS = 2000
DIMENSION = 128
STEP_SIZE = 0.1
NOISE = 4.0

QUANTIZERS = ['stochastic_quantizer(8)', 'stochastic_quantizer(4)', 'stochastic_quantizer(2)']
STRONG = ['stochastic_quantizer(2, bucket=32)', 'qsgd(4)', 'qsgd(2)', 'random_k(0.2)']
GRIDS = ['fixed_grid(8, limit=100.0)', 'fixed_grid(4, limit=100.0)', 'fixed_grid(8, limit=8.0)']
BIASED = ['top_k(0.1)', 'sign_norm()']

# Compressors for each algorithm and topology, from harmless to hopeless.
GRID = {
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

AGREES = {
  'converges': ('converged',),
  'likely': ('converged',),
  'will stall': ('stalled', 'diverged'),
  'will diverge': ('diverged',),
}
"""What must happen for a verdict to be right; 'at risk' promises nothing."""
OUTCOMES = ('converged', 'stalled', 'diverged')


class Result(NamedTuple):
  """A cell's verdict, and what happened; `excess` is f(x̄) - f* at the end over d_psgd's."""

  algorithm: str
  topology: str
  verdict: Verdict
  reason: str
  outcome: str
  excess: float

  @property
  def agrees(self) -> bool | None:
    """Whether what happened is what was said; None if nothing was."""
    return self.outcome in AGREES[self.verdict] if self.verdict in AGREES else None


def grid() -> list[tuple[str, str]]:
  """The cells, algorithm and topology, by topology."""
  cells = [
    (call.format(compressor), graph)
    for call, graphs in GRID.items()
    for graph, chosen in graphs.items()
    for compressor in chosen
  ]
  return sorted(cells, key=lambda cell: cell[1])


class Lab:
  """The quadratics of one topology: the same gradients for every algorithm."""

  def __init__(self, graph: str, seed: int):
    self.graph: decomp.Topology = spec.build(graph, topology, kind='topology')
    n = self.graph.num_workers
    self._quadratic = data.quadratic(n, DIMENSION, heterogeneity=1.0, noise=NOISE, seed=seed)
    self._key, start, estimates = jax.random.split(jax.random.key(seed), 3)
    self._start = jax.random.normal(start, (DIMENSION,))
    self._optimizer = optax.sgd(STEP_SIZE)
    self.problem: Problem = theory.estimate(
      self._gradients, self._start, n, self._optimizer, estimates
    )
    self.at_start = float(self._quadratic.suboptimality(self._start))
    self.reference = self._run(algorithms.d_psgd(self._optimizer))

  def judge(self, text: str) -> Result:
    """Asks for the verdict, and then looks."""
    makers = spec.algorithms(self._optimizer)
    with warnings.catch_warnings():
      warnings.filterwarnings('ignore', '.* which is biased')
      algorithm = spec.build(text, [makers, compressors], kind='algorithm')
    said = theory.preflight(
      algorithm, self.graph, self._start, self._gradients, self.problem, steps=STEPS
    )
    end = self._run(algorithm)
    outcome, excess = self._outcome(end), end / self.reference
    return Result(text, self.graph.name, said.verdict, said.reason, outcome, excess)

  def _outcome(self, end: float) -> str:
    if not end <= self.at_start:  # also where it is not a number
      return 'diverged'
    return 'converged' if end <= 2 * self.reference else 'stalled'

  def _gradients(self, key: jax.Array, params: jax.Array) -> jax.Array:
    workers = jnp.arange(self.graph.num_workers)
    keys = jax.random.split(key, self.graph.num_workers)
    return jax.vmap(self._quadratic.gradient)(keys, params, workers)

  def _run(self, algorithm: decomp.Algorithm) -> float:
    """The average of f(x̄) - f* over the last fifth of the steps."""
    sim = decomp.simulate(algorithm, self.graph)
    step_key, noise_key = jax.random.split(self._key)

    @jax.jit
    def run() -> jax.Array:
      def step(state: decomp.State, t: jax.Array) -> tuple[decomp.State, jax.Array]:
        grads = self._gradients(jax.random.fold_in(noise_key, t), state.params)
        state, _ = sim.step(step_key, grads, state)
        return state, self._quadratic.suboptimality(metrics.mean_over_workers(state.params))

      return jax.lax.scan(step, sim.init(self._start), jnp.arange(STEPS))[1]

    return float(np.asarray(run(), np.float64)[-STEPS // 5 :].mean())


def check(cells: Sequence[tuple[str, str]], seed: int) -> Iterator[Result]:
  """Verdict and outcome of each cell; cells of one topology should follow each other."""
  lab = None
  for text, graph in cells:
    if lab is None or lab.graph.name != graph:
      lab = Lab(graph, seed)
    yield lab.judge(text)


def confusion(results: Sequence[Result]) -> list[dict[str, Any]]:
  """How often each outcome followed each verdict."""
  counts = collections.Counter((r.verdict, r.outcome) for r in results)
  return [
    {'verdict': verdict} | {o: float(counts[verdict, o]) for o in OUTCOMES}
    for verdict in get_args(Verdict)
  ]


def agreement(results: Sequence[Result]) -> str:
  """In how many of the cells that are not at risk the verdict was right."""
  judged = [r.agrees for r in results if r.agrees is not None]
  return f'{sum(judged)} of {len(judged)} verdicts agree; {len(results) - len(judged)} are at risk'


def main(argv: Sequence[str]) -> None:
  """Runs the program."""
  settings.start(argv)
  path = Path(settings.OUTPUT.value or 'runs/verdicts')
  results = []
  for number, result in enumerate(check(cells := grid(), settings.SEED.value), start=1):
    results.append(result)
    mark = {True: 'agrees', False: 'DISAGREES', None: '-'}[result.agrees]
    line = f'{result.algorithm} on {result.topology}: {result.verdict}, {result.outcome}'
    print(f'[{number}/{len(cells)}] {line} ({result.excess:.3g}): {mark}', flush=True)
  report.print_table(confusion(results), agreement(results))
  rows = [r._asdict() | {'agrees': r.agrees} for r in results]
  found = {'seed': settings.SEED.value, 'agreement': agreement(results), 'cells': rows}
  output.write_json(path / 'results.json', output.for_json(found))
  short = [{k: v for k, v in r._asdict().items() if k != 'reason'} for r in results]
  text = f'{agreement(results)}.\n\n{report.markdown(confusion(results))}\n{report.markdown(short)}'
  (path / 'results.md').write_text(text)


if __name__ == '__main__':
  app.run(main)
