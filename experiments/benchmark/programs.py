"""The programs that experiments.benchmark times, and those it compares them with."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import decomp
from decomp import algorithms, compressors, data, models, tasks, topology
from decomp.engine import platforms
from decomp.training.steps import Carry, Sampling, initial
from decomp.training.train import program_of_one_run


def loop(step: Callable[[jax.Array, Any], Any], start: Any, steps: int) -> Callable[[], Any]:
  """A program of many steps in one loop, compiled as training is, that goes on where it stopped.

  It works in its own copy of `start`: a new one at each call would take as long as some steps.
  """
  carry = [jax.tree.map(jnp.copy, start)]
  many = jax.jit(lambda carry: jax.lax.fori_loop(0, steps, step, carry), donate_argnums=0)
  run = many.lower(*carry).compile(platforms.CPU.options)

  def program() -> Any:
    carry[0] = run(carry[0])
    return carry[0]

  return program


def quantized(bits: int = 8, name: str = 'dcd_psgd', **options: Any) -> decomp.Algorithm:
  """An algorithm with a stochastic quantizer."""
  compressor = compressors.stochastic_quantizer(bits, **options)
  return getattr(algorithms, name)(optax.sgd(0.01), compressor)


def synthetic_images(n: int, shape: tuple[int, ...], model: Any) -> decomp.Task:
  """Classification of noise, 32 images a worker: speed does not depend on what they show."""
  rng = np.random.default_rng(0)
  examples: dict[str, np.ndarray] = {
    'input': rng.integers(0, 256, (32 * n, *shape)).astype(np.uint8),
    'label': rng.integers(0, 10, 32 * n).astype(np.int32),
  }
  dataset = data.Dataset(examples, {k: v[:10] for k, v in examples.items()}, 'noise', 10)
  half = ((0.5,) * shape[-1], (0.25,) * shape[-1])
  return tasks.classification(dataset, model, normalize=lambda x: data.batches.normalize(x, half))


def mlp_task(n: int) -> decomp.Task:
  """784-256-10."""
  return synthetic_images(n, (28, 28, 1), models.mlp(10, hidden=(256,)))


def resnet_task(n: int) -> decomp.Task:
  """ResNet-20."""
  return synthetic_images(n, (32, 32, 3), models.resnet20(10))


class Training:
  """A training run as `decomp.train` compiles it, and parts of its step."""

  def __init__(self, task: decomp.Task, n: int, batch_size: int, algorithm: decomp.Algorithm):
    shards = data.partition.iid(task.train['label'], n)
    sim = decomp.simulate(algorithm, topology.ring(n))
    self.begin = initial(task, 0)
    sampling = Sampling(shards, batch_size)
    self.program = program_of_one_run(
      task, sim, sampling, 0, self.begin, 'auto', worker_examples=10
    )
    self.task, self.n, self.batch_size = task, n, batch_size
    self._model_state = self.start().model_state
    began = time.perf_counter()
    self.program.compile()
    self.compile_seconds = time.perf_counter() - began

  def start(self) -> Carry:
    """The carry before the first step."""
    return self.program.start(None, self.begin)

  def steps(self, count: int) -> Callable[[], Any]:
    """Whole steps: batches, gradients, algorithm and sums."""
    carries, known = [self.start()], np.zeros(1, bool)
    limit = np.full(1, np.inf, np.float32)

    def program() -> Any:
      carry = carries.pop()
      until = int(carry.state.round) + count
      carries.append(self.program.advance(carry, None, until, until, limit, known))
      return carries[0].losses

    return program

  def gradients(self, count: int) -> Callable[[], Any]:
    """Batches and gradients of all workers, and a plain step of SGD so that each differs."""

    def step(number: jax.Array, params: Any) -> Any:
      return optax.tree.add_scale(params, -0.01, self._gradients(number, params))

    return loop(step, self.start().state.params, count)

  def uncompressed(self, count: int) -> Callable[[], Any]:
    """DCD on a ring without compression, written out for stacked workers."""

    def step(number: jax.Array, carry: Any) -> Any:
      params, pull = carry
      z = optax.tree.add_scale(pull, -0.01, self._gradients(number, params))
      change = jax.tree.map(lambda z: (jnp.roll(z, 1, 0) + jnp.roll(z, -1, 0) - 2 * z) / 3, z)
      return optax.tree.add(params, z), optax.tree.add(pull, change)

    params = self.start().state.params
    return loop(step, (params, optax.tree.zeros_like(params)), count)

  def plain(self, count: int) -> Callable[[], Any]:
    """One gradient of the same total batch for one model, with XLA's own convolutions."""
    params, state = jax.jit(self.task.init)(jax.random.key(0))
    total = self.n * self.batch_size
    batch = {k: jnp.asarray(v[:total]) for k, v in self.task.train.items()}
    gradient = jax.grad(self.task.loss, has_aux=True)

    # Not in a loop: there XLA's own convolutions would be slower than they need to be.
    @jax.jit
    def step(params: Any) -> Any:
      grads, _ = gradient(params, state, batch, jax.random.key(0))
      return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)

    def program() -> Any:
      found = params
      for _ in range(count):
        found = step(found)
      return found

    return program

  def _gradients(self, number: jax.Array, params: Any) -> Any:
    """Everyone's gradients in step `number`, as training takes them."""
    steps, everyone = self.program.steps_of(None), jnp.arange(self.n)
    keys = jax.random.split(jax.random.key(0), 2)
    chosen = jax.vmap(lambda w: steps.sample(keys[0], number, w))(everyone)
    losses = jax.vmap(lambda w: jax.random.fold_in(keys[1], w))(everyone)
    batch = steps.pick(self.program.data.train, chosen)
    return steps.gradients(params, self._model_state, batch, losses)[1]


def by_hand(n: int, batch_size: int, steps: int) -> Callable[[], Any]:
  """DCD with 8 bits for logistic regression, written out for stacked workers: the reference."""
  train = {k: jnp.asarray(v) for k, v in tasks.logistic_regression(64 * n, 123).train.items()}
  inputs = train['input'].reshape(n, 64, 123)
  signs = (2 * train['label'] - 1).astype(jnp.float32).reshape(n, 64)
  rows = jnp.arange(n)[:, None]

  def step(carry: Any, key: jax.Array) -> Any:
    x, pull = carry
    pick, dither = jax.random.split(key)
    chosen = jax.random.randint(pick, (n, batch_size), 0, 64)
    a, b = inputs[rows, chosen], signs[rows, chosen]
    weight = -b * jax.nn.sigmoid(-b * jnp.einsum('nbd,nd->nb', a, x)) / batch_size
    gradient = jnp.einsum('nb,nbd->nd', weight, a) + 0.01 * x
    z = pull - 0.01 * gradient
    scale = jnp.abs(z).max(1, keepdims=True) / 127 + 1e-30
    message = jnp.floor(z / scale + jax.random.uniform(dither, z.shape)) * scale
    change = (jnp.roll(message, 1, 0) + jnp.roll(message, -1, 0) - 2 * message) / 3
    return (x + message, pull + change), None

  @jax.jit
  def run(carry: Any) -> Any:
    return jax.lax.scan(step, carry, jax.random.split(jax.random.key(0), steps))[0]

  return lambda: run((jnp.zeros((n, 123)), jnp.zeros((n, 123))))
