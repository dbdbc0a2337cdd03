"""Centralised parallel SGD: the baseline."""

from typing import Any, NamedTuple

import jax
import optax

from decomp import base
from decomp.algorithms import common
from decomp.engine import tree
from decomp.theory.rules.allreduce import theory


class AllReduceState(NamedTuple):
  """The same on every worker."""

  params: base.PyTree
  opt_state: Any


def allreduce(optimizer: optax.GradientTransformation) -> base.Algorithm:
  """Everyone steps along the average gradient, with exact averaging.

    x ← x + u(mean_j g_j)

  The graph is not used. Use it as the yardstick: it is what decentralised algorithms must match in
  steps and beat in communication.

  Args:
    optimizer: any optax optimizer; its state is the same on every worker.

  Returns:
    An `Algorithm`. A step costs an all-reduce of the gradient, counted as the ring algorithm's
    2 (n-1)/n times its bytes.

  >>> import decomp, jax.numpy as jnp
  >>> sim = decomp.simulate(allreduce(optax.sgd(1.0)), decomp.topology.ring(4))
  >>> state, _ = sim.step(jax.random.key(0), jnp.arange(4.0), sim.init(jnp.array(0.0)))
  >>> state.params
  Array([-1.5, -1.5, -1.5, -1.5], dtype=float32)
  """
  common.check_parts(optimizer)

  def init(params: base.PyTree, net: base.Network) -> AllReduceState:
    return AllReduceState(params, optimizer.init(params))

  def step(
    key: jax.Array, grads: base.PyTree, state: AllReduceState, net: base.Network
  ) -> tuple[AllReduceState, base.Info]:
    updates, opt_state = common.local_update(optimizer, net.mean(grads), state)
    params = optax.tree.add(state.params, updates)
    return AllReduceState(params, opt_state), tree.exact(grads, net)

  return base.Algorithm(init, step, name='allreduce', theory=theory(optimizer))
