"""Centralised SGD with compressed gradients."""

from __future__ import annotations

import jax
import optax

from decomp import tree
from decomp.algorithms.allreduce import AllReduceState, allreduce
from decomp.algorithms.common import (
  SAFETY,
  check_parts,
  judge_biased,
  judge_noise,
  local_update,
  noise_ratio,
)
from decomp.base import (
  Algorithm,
  Compressor,
  Evidence,
  Finding,
  Info,
  Network,
  PyTree,
  Theory,
)


def compressed_allreduce(
  optimizer: optax.GradientTransformation, compressor: Compressor
) -> Algorithm:
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
  check_parts(optimizer, compressor)

  def step(
    key: jax.Array, grads: PyTree, state: AllReduceState, net: Network
  ) -> tuple[AllReduceState, Info]:
    message = tree.compress(compressor, key, grads, net)
    average = net.mean(message.payload, message.decode)
    updates, opt_state = local_update(optimizer, average, state)
    return AllReduceState(optax.tree.add(state.params, updates), opt_state), message.info

  def judge(evidence: Evidence) -> Finding:
    """C(g) has α²|g|² more variance than g, and |g|² tends to σ² + ζ²."""
    alpha2, problem = evidence.alpha2, evidence.problem
    if not compressor.unbiased:
      return judge_biased(compressor)
    advice = 'use more bits, smaller buckets or a larger fraction'
    if problem is None:
      return judge_noise(alpha2, f'α² = {alpha2:.3g}', advice, proven=True)
    # On a quadratic the error's second moment contracts while γL(1 + α²/n) < 2.
    stretch = problem.step_size * problem.smoothness * (1 + alpha2 / evidence.topology.num_workers)
    if stretch > 2 * SAFETY:
      reason = f'γL(1 + α²/n) = {stretch:.3g} is above 2: noise outgrows the steps'
      return Finding('will diverge', reason, f'{advice}, or a smaller step size')
    variance = alpha2 * problem.step_size**2 * (problem.noise**2 + problem.heterogeneity**2)
    ratio = noise_ratio(variance, problem)
    return judge_noise(ratio, f'α² = {alpha2:.3g} of the gradients', advice, proven=True)

  name = f'compressed_allreduce({compressor})'
  theory = Theory(judge, optimizer, compressor)
  return Algorithm(allreduce(optimizer).init, step, name=name, theory=theory)
