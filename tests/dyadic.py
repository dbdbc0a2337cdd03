"""Runs in which nothing is rounded, so that every executor must give the same bits."""

import functools

import jax
import numpy as np
import optax
from tables import make_algorithms

import decomp
from decomp import compressors, topology


def cases():
  """Weights 1/2, 1/4, 1/4 and a quantum of 1/16: (name, algorithm, topology, start, grads)."""
  graph = topology.from_matrix((topology.ring(8).matrix > 0) * 0.25 + np.eye(8) * 0.25)
  compressor = compressors.fixed_grid(bits=4, limit=7 / 16)
  rng = np.random.default_rng(0)
  for name, algorithm in make_algorithms(optax.sgd(0.5), compressor).items():
    start = rng.integers(-16, 16, (1 if 'allreduce' in name else 8, 21)) / 16
    start = np.broadcast_to(start, (8, 21)).astype(np.float32)
    grads = (rng.integers(-16, 16, (3, 8, 21)) / 16).astype(np.float32)
    if name == 'ecd_psgd':  # its weights 2/t are dyadic for t = 1 and 2
      grads = grads[:2]
    yield name, algorithm, graph, start, grads


def final(algorithm, graph, mesh, start, grads):
  """Everyone's parameters after one step for each of `grads`, in one compiled program."""
  sim = decomp.simulate(algorithm, graph, mesh=mesh)

  @jax.jit
  def run(start, grads):
    state = sim.init(start, stacked=True)
    state, _ = jax.lax.scan(lambda s, g: sim.step(jax.random.key(3), g, s), state, grads)
    return state.params

  return run(start, grads)


@functools.cache
def on_one_device():
  """The final parameters of every case, by name."""
  return {name: np.asarray(final(a, g, None, start, gr)) for name, a, g, start, gr in cases()}
