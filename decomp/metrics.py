"""Measures over all workers' parameters, leaves [n, ...]."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from decomp.base import PyTree
from decomp.tree import norm


def mean_over_workers(tree: PyTree) -> PyTree:
  """The average over the leading axis, e.g. the mean model of `state.params`."""

  def average(x: jax.Array) -> jax.Array:
    # As a product: XLA's CPU reduction over a leading axis is an order of magnitude slower.
    n = x.shape[0]
    rows = x.reshape(n, -1).astype(jnp.float32)
    return (jnp.full(n, 1 / n, jnp.float32) @ rows).reshape(x.shape[1:]).astype(x.dtype)

  return jax.tree.map(average, tree)


def consensus_distance(params: PyTree) -> jax.Array:
  """How far workers are from agreeing: sqrt(mean_i |x_i - x̄|²)."""
  mean = mean_over_workers(params)
  apart = jax.tree.map(lambda x, m: x - m[None], params, mean)
  return norm(apart) / jnp.sqrt(jnp.float32(jax.tree.leaves(params)[0].shape[0]))


def gradient_norm(grads: PyTree) -> jax.Array:
  """|mean_i g_i|: near 0 where the average model has arrived."""
  return optax.tree.norm(optax.tree.cast(mean_over_workers(grads), jnp.float32))
