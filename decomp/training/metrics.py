"""Measures over all workers' parameters, leaves [n, ...]."""

import jax
import jax.numpy as jnp

from decomp.base import PyTree
from decomp.engine.stacked import weighted
from decomp.engine.tree import norm


def mean_over_workers(tree: PyTree) -> PyTree:
  """The average over the leading axis, e.g. the mean model of `state.params`.

  Leaves that are not floating point, such as a counter in a model's state, are the first worker's.
  """

  def average(x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
      return x[0]
    return weighted(jnp.full(x.shape[0], 1 / x.shape[0]), x)

  return jax.tree.map(average, tree)


def consensus_distance(params: PyTree) -> jax.Array:
  """How far workers are from agreeing: sqrt(mean_i |x_i - x̄|²)."""
  mean = mean_over_workers(params)
  apart = jax.tree.map(lambda x, m: x - m[None], params, mean)
  return _norm(apart) / jnp.sqrt(jnp.float32(jax.tree.leaves(params)[0].shape[0]))


def gradient_norm(grads: PyTree) -> jax.Array:
  """|mean_i g_i|: near 0 where the average model has arrived."""
  return _norm(mean_over_workers(grads))


def _norm(tree: PyTree) -> jax.Array:
  """The L2 norm, in parts of the largest element where squares would leave the range of float32."""
  leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(tree)]
  largest = jnp.stack([jnp.abs(leaf).max(initial=0) for leaf in leaves]).max()
  far = ((largest > 1e12) & (largest < jnp.inf)) | ((largest > 0) & (largest < 1e-12))
  unit = jnp.where(far, largest, 1)
  return norm([leaf / unit for leaf in leaves]) * unit
