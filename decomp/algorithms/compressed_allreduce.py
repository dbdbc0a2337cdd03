"""Centralised SGD with compressed gradients."""

import jax
import optax

from decomp import base
from decomp.algorithms import common
from decomp.algorithms.allreduce import AllReduceState, allreduce
from decomp.engine import tree
from decomp.theory.rules.compressed_allreduce import theory


def compressed_allreduce(
  optimizer: optax.GradientTransformation, compressor: base.Compressor
) -> base.Algorithm:
  """Everyone steps along the average of compressed gradients, as QSGD does.

    x ← x + u(mean_j C(g_j))

  The graph is not used. Codes with different scales don't add up inside a network, so every message
  goes to everyone (an all-gather): n - 1 messages per step instead of the two arrays' worth of
  an all-reduce. Use it as the baseline "quantised, but not decentralised".

  Args:
    optimizer: any optax optimizer; its state is the same on every worker.
    compressor: applied to the gradient. Without error feedback it should be unbiased.

  Returns:
    An `Algorithm`.

  >>> import decomp, jax.numpy as jnp
  >>> algorithm = compressed_allreduce(optax.sgd(1.0), decomp.compressors.natural())
  >>> sim = decomp.simulate(algorithm, decomp.topology.ring(2))
  >>> grads = jnp.array([2.0, 4.0])
  >>> sim.step(jax.random.key(0), grads, sim.init(jnp.array(0.0)))[0].params
  Array([-3., -3.], dtype=float32)

  Reference: Alistarh et al., QSGD, arXiv 1610.02132.
  """
  common.check_parts(optimizer, compressor)

  def step(
    key: jax.Array, grads: base.PyTree, state: AllReduceState, net: base.Network
  ) -> tuple[AllReduceState, base.Info]:
    message = tree.compress(compressor, key, grads, net)
    average = net.mean(message.payload, message.decode)
    updates, opt_state = common.local_update(optimizer, average, state)
    return AllReduceState(optax.tree.add(state.params, updates), opt_state), message.info

  name = f'compressed_allreduce({compressor})'
  rule = theory(optimizer, compressor)
  return base.Algorithm(allreduce(optimizer).init, step, name=name, theory=rule)
