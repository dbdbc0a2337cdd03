"""Where cells are judged and run: quadratics with a known optimum, and real digits."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import decomp
from decomp import algorithms, compressors, data, metrics, models, spec, tasks, theory, topology
from decomp.training import arguments
from experiments.studies.verdicts.cells import QUADRATIC, Cell

ROWS = 20
"""How often the loss of the mean model is taken; its end is the mean of the last fifth."""


class Lab:
  """A problem, a topology and an optimizer: the same gradients for every algorithm.

  Attributes:
    graph: the topology.
    optimizer: every worker's.
    steps: the length of a run.
    start: where everyone starts.
    gradients: (key, everyone's parameters) -> everyone's stochastic gradients.
    loss: the mean model -> f, or f - f* where the optimum is known.
    reference: the algorithm that the others are measured by.
    converged: (f at the start, at the end, at the end of the reference) -> whether that is as good.
  """

  graph: decomp.Topology
  optimizer: optax.GradientTransformation
  steps: int
  start: Any
  gradients: theory.Gradients
  loss: Callable[[Any], jax.Array]
  reference: Callable[[optax.GradientTransformation], decomp.Algorithm]
  converged: Callable[[float, float, float], bool]

  @functools.cached_property
  def problem(self) -> theory.Problem:
    """What is measured of the task."""
    n = self.graph.num_workers
    return theory.estimate(self.gradients, self.start, n, self.optimizer, jax.random.key(2))

  def judge(self, text: str) -> theory.Preflight:
    """The verdict on an algorithm."""
    arguments = self._build(text), self.graph, self.start, self.gradients, self.problem
    return theory.preflight(*arguments, loss=self.loss, steps=self.steps)

  def run(self, text: str, seed: int) -> tuple[str, float, float]:
    """What happens: 'converged', 'stalled' or 'diverged'; f at the end, and the reference's."""
    begin = float(self.loss(self.start))
    end, reference = self._end(self._build(text), seed), self._reference_end(seed)
    if not end <= begin:  # also where it is not a number
      return 'diverged', end, reference
    return 'converged' if self.converged(begin, end, reference) else 'stalled', end, reference

  @functools.cache  # noqa: B019
  def _reference_end(self, seed: int) -> float:
    return self._end(self.reference(self.optimizer), seed)

  def _build(self, text: str) -> decomp.Algorithm:
    with warnings.catch_warnings():
      warnings.filterwarnings('ignore', '.* which is biased')
      made: Any = [spec.algorithms(self.optimizer), compressors]
      return spec.build(text, made, kind='algorithm')

  def _end(self, algorithm: decomp.Algorithm, seed: int) -> float:
    """The average of f over the last fifth of the steps."""
    sim = decomp.simulate(algorithm, self.graph)
    step_key, noise_key = jax.random.split(jax.random.key(seed))

    @jax.jit
    def run() -> jax.Array:
      def step(state: decomp.State, t: jax.Array) -> tuple[decomp.State, None]:
        grads = self.gradients(jax.random.fold_in(noise_key, t), state.params)
        return sim.step(step_key, grads, state, False)[0], None

      def row(state: decomp.State, times: jax.Array) -> tuple[decomp.State, jax.Array]:
        state, _ = jax.lax.scan(step, state, times)
        return state, self.loss(metrics.mean_over_workers(state.params))

      times = jnp.arange(self.steps).reshape(ROWS, -1)
      return jax.lax.scan(row, sim.init(self.start), times)[1]

    return float(np.asarray(run(), np.float64)[-ROWS // 5 :].mean())


class Quadratics(Lab):
  """One quadratic for each worker, SGD with noise at its floor.

  Converged: at most twice the f(x̄) - f* of `d_psgd`.
  """

  steps = 2000
  reference = staticmethod(algorithms.d_psgd)

  def __init__(self, cell: Cell):
    self.graph, self.optimizer = _graph(cell), _optimizer(cell)
    n, size = self.graph.num_workers, 128
    quadratic = data.quadratic(n, size, heterogeneity=1.0, noise=4.0, seed=0)
    self.start = jax.random.normal(jax.random.key(0), (size,))
    self.loss = quadratic.suboptimality

    def gradients(key: jax.Array, params: jax.Array) -> jax.Array:
      return jax.vmap(quadratic.gradient)(jax.random.split(key, n), params, jnp.arange(n))

    self.gradients = gradients

  @staticmethod
  def converged(begin: float, end: float, reference: float) -> bool:
    """Whether compression at most doubles the error."""
    return end <= 2 * reference


class Digits(Lab):
  """An MLP with 32 hidden units on real handwritten digits, 1000 steps of 16 examples each.

  Converged: the training loss of the mean model fell at least 95 % as far as with `allreduce`, on
  the same data with the same optimizer.
  """

  steps = 1000
  reference = staticmethod(algorithms.allreduce)

  def __init__(self, cell: Cell):
    self.graph, self.optimizer = _graph(cell), _optimizer(cell)
    task = tasks.digits(models.mlp(10, hidden=(32,)))
    shards = arguments.deal(cell.data, task, self.graph.num_workers, seed=0)
    self.start, state = task.init(jax.random.key(0))
    self.gradients = theory.task_gradients(task, state, shards, batch_size=16)
    everything = {name: jnp.asarray(values) for name, values in task.train.items()}
    self.loss = jax.jit(lambda params: task.evaluate(params, state, everything)['loss'].mean())

  @staticmethod
  def converged(begin: float, end: float, reference: float) -> bool:
    """Whether the loss fell nearly as far."""
    return begin - end >= 0.95 * (begin - reference)


@functools.lru_cache(maxsize=4)
def _made(kind: type[Any], cell: Cell) -> Lab:
  return kind(cell)


def lab(cell: Cell) -> Lab:
  """The lab of a cell, shared by cells that differ in their algorithm only."""
  return _made(Quadratics if cell.data == QUADRATIC else Digits, cell._replace(algorithm=''))


def _graph(cell: Cell) -> decomp.Topology:
  return spec.build(cell.topology, topology, kind='topology')


def _optimizer(cell: Cell) -> optax.GradientTransformation:
  return spec.build(cell.optimizer, spec.optimizers(), kind='optimizer')
