"""Decentralised parallel SGD in full precision."""

from typing import Any, NamedTuple

import jax
import optax

from decomp import base
from decomp.algorithms import common
from decomp.engine import tree
from decomp.theory.rules.d_psgd import theory


class DPSGDState(NamedTuple):
  """A worker's model x_i and its optimizer's state."""

  params: base.PyTree
  opt_state: Any


def d_psgd(optimizer: optax.GradientTransformation) -> base.Algorithm:
  """Everyone averages with the neighbours and adds its own step, taken at the old point.

    x_i ← sum_j W_ij x_j + u(g_i(x_i))

  Use it where latency hurts more than bandwidth: one exchange with a few neighbours instead of an
  all-reduce, but whole models on the wire. It carries no copies of others, so any doubly stochastic
  graph will do, also directed and time-varying ones.

  Args:
    optimizer: each worker's own optax optimizer.

  Returns:
    An `Algorithm`.

  >>> import decomp, jax.numpy as jnp
  >>> sim = decomp.simulate(d_psgd(optax.sgd(1.0)), decomp.topology.complete(4))
  >>> state, _ = sim.step(jax.random.key(0), jnp.arange(4.0), sim.init(jnp.array(0.0)))
  >>> state.params
  Array([ 0., -1., -2., -3.], dtype=float32)

  Reference: Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?,
  arXiv 1705.09056.
  """
  common.check_parts(optimizer)

  def init(params: base.PyTree, net: base.Network) -> DPSGDState:
    return DPSGDState(params, optimizer.init(params))

  def step(
    key: jax.Array, grads: base.PyTree, state: DPSGDState, net: base.Network
  ) -> tuple[DPSGDState, base.Info]:
    updates, opt_state = common.local_update(optimizer, grads, state)
    params = optax.tree.add(net.mix(state.params), updates)
    return DPSGDState(params, opt_state), tree.exact(state.params, net)

  needs = base.Needs(connected=True)
  return base.Algorithm(init, step, needs, name='d_psgd', theory=theory(optimizer))
