"""Checks before the first step: each failure is one sentence that says what would be right."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from decomp.base import Algorithm, PyTree
from decomp.topology import Topology


def check_topology(algorithm: Algorithm, topology: Topology) -> None:
  """Whether the topology is what the algorithm needs."""
  if not isinstance(algorithm, Algorithm):
    raise ValueError(f'algorithm={algorithm!r}: must be a decomp.Algorithm, such as dcd_psgd(...)')
  if not isinstance(topology, Topology):
    raise ValueError(f'topology={topology!r}: must come from decomp.topology, such as ring(8)')
  needs = algorithm.needs
  problem = None
  if needs.fixed and topology.period > 1:
    problem = (
      'varies in time, but workers carry sums of their neighbours’ messages, which needs a fixed '
      'one: use ring, torus or hypercube, or d_psgd, which carries none'
    )
  elif needs.symmetric and not topology.is_symmetric:
    problem = (
      'is not symmetric, which the theory needs: use an undirected graph, or d_psgd; to try it all '
      'the same, pass algorithm._replace(needs=algorithm.needs._replace(symmetric=False))'
    )
  elif needs.connected and not topology.is_connected:
    problem = 'is not connected, so that workers would never agree: add edges'
  if problem:
    raise ValueError(
      f'topology={topology.name} does not suit {algorithm.name}: the graph {problem}'
    )


def check_mesh(topology: Topology, mesh: Any) -> None:
  """Whether the workers can be split evenly over the mesh."""
  if mesh is None:
    return
  if not isinstance(mesh, jax.sharding.Mesh) or mesh.axis_names != ('worker',):
    raise ValueError(
      f"mesh={mesh!r}: must be a jax.sharding.Mesh with the one axis 'worker', such as "
      f'decomp.worker_mesh({topology.num_workers}), or None'
    )
  if topology.num_workers % mesh.size:
    raise ValueError(
      f'mesh has {mesh.size} devices, which do not divide the {topology.num_workers} workers of '
      f'topology={topology.name}: use decomp.worker_mesh({topology.num_workers})'
    )


def check_params(params: PyTree) -> None:
  """Whether there is something to train, and all of it floating point."""
  leaves = jax.tree_util.tree_leaves_with_path(params)
  if not any(math.prod(leaf.shape) for _, leaf in leaves):
    raise ValueError('params holds no numbers: pass a pytree with at least one non-empty array')
  for path, leaf in leaves:
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
      raise ValueError(
        f'params{jax.tree_util.keystr(path)} has dtype {leaf.dtype}: parameters must '
        'be floating point; keep counters and indices in the model state'
      )


def check_precision(algorithm: Algorithm, params: PyTree) -> None:
  """Whether sums of messages, carried from step to step, can be exact enough."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    if algorithm.needs.fixed and leaf.dtype.itemsize < 4:
      raise ValueError(
        f'params{jax.tree_util.keystr(path)} is {leaf.dtype}, in which the sums that '
        f'{algorithm.name} carries would drift away: keep parameters in float32, and cast them in '
        'the model'
      )


def check_grads(grads: PyTree, params: PyTree, num_workers: int) -> None:
  """Whether there is a gradient for every parameter of every worker."""
  found: Any = jax.tree.structure(grads)
  expected: Any = jax.tree.structure(params)
  if found != expected:
    raise ValueError(f'grads is {found}, but params is {expected}: they must have one structure')
  check_leading_axis('grads', grads, num_workers)
  for (path, g), p in zip(
    jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(params), strict=True
  ):
    if g.shape != p.shape or g.dtype != p.dtype:
      raise ValueError(
        f'grads{jax.tree_util.keystr(path)} is {g.dtype}{list(g.shape)}, but the parameters there '
        f'are {p.dtype}{list(p.shape)}'
      )


def check_leading_axis(argument: str, tree: PyTree, num_workers: int) -> None:
  """Whether every leaf has the worker axis in front."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    if leaf.shape[:1] != (num_workers,):
      raise ValueError(
        f'{argument}{jax.tree_util.keystr(path)} has shape {leaf.shape}: its first axis must be '
        f'the {num_workers} workers'
      )
