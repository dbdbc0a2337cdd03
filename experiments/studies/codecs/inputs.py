"""What codecs are measured on."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

import decomp
from decomp import algorithms, tasks, theory, topology
from decomp.base import PyTree
from decomp.tasks.data import partition

SIZE = 65_536
TASKS: Mapping[str, tuple[Callable[[], decomp.Task], optax.GradientTransformation, int]] = {
  'digits': (tasks.digits, optax.sgd(0.2), 200),
  'text': (tasks.text, optax.adam(0.003), 40),
}
"""Task, optimizer, and the step whose differences are looked at."""


def messages(smoke: bool) -> dict[str, Any]:
  """Pytrees by name."""
  found: dict[str, Any] = {'Gaussian': jax.random.normal(jax.random.key(0), (SIZE,))}
  for name in list(TASKS)[: 1 if smoke else None]:
    gradients, differences = jax.tree.map(lambda x: x[0], of_run(name))
    found |= {f'gradients of {name}': gradients, f'differences of {name}': differences}
  return found


def of_run(name: str) -> tuple[PyTree, PyTree]:
  """Everyone's (gradients at the start, x' - x in a later step), of D-PSGD on a ring."""
  make, optimizer, steps = TASKS[name]
  task, graph = make(), topology.ring(4)
  sim = decomp.simulate(algorithms.d_psgd(optimizer), graph)
  params, model_state = jax.jit(task.init)(jax.random.key(0))
  shards = partition.iid(task.train['label'], graph.num_workers)
  gradients = theory.task_gradients(task, model_state, shards, batch_size=16)

  @jax.jit
  def step(state: decomp.State, t: jax.Array) -> tuple[decomp.State, PyTree]:
    key = jax.random.fold_in(jax.random.key(1), t)
    found = gradients(key, state.params)
    return sim.step(key, found, state, False)[0], found

  before, (state, first) = (start := sim.init(params)), step(start, jnp.int32(0))
  for t in range(1, steps):
    before, state = state, step(state, jnp.int32(t))[0]
  return first, optax.tree.sub(state.params, before.params)
