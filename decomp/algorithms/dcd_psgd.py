"""DCD-PSGD: difference compression."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import optax

from decomp import tree
from decomp.algorithms.common import (
  check_parts,
  judge_biased,
  judge_noise,
  local_update,
  noise_gain,
  noise_ratio,
  warn_if_biased,
)
from decomp.base import (
  Algorithm,
  Compressor,
  Evidence,
  Finding,
  Info,
  Needs,
  Network,
  PyTree,
  Theory,
)

MARGIN = 1.2
"""α² is measured on a few messages, and drifts as the run goes on: a fifth above the limit is left
undecided."""


class DCDState(NamedTuple):
  """One worker's state.

  Attributes:
    params: x_i, of which every neighbour holds an exact replica.
    pull: sum_j W_ij x_j - x_i, kept up to date from the compressed differences instead of one
      replica for each neighbour.
    opt_state: the optimizer's.
  """

  params: PyTree
  pull: PyTree
  opt_state: Any

  @property
  def mixed(self) -> PyTree:
    """sum_j W_ij x_j."""
    return optax.tree.add(self.params, self.pull)


def dcd_psgd(optimizer: optax.GradientTransformation, compressor: Compressor) -> Algorithm:
  """Sends the compressed difference of two models, and applies it to the own model as well.

    z_i = sum_j W_ij x_j + u(g_i(x_i)) - x_i
    x_i ← x_i + C(z_i)                             (the sender too: replicas stay exact)

  The compression error is a fraction of z, which shrinks as the run settles. Use it with moderate
  compression: it converges like full-precision SGD while the noise-to-signal ratio α of C is small
  (α < (1-ρ)/(2μ) suffices; on a ring α² < 1.37 is the limit where noise outgrows averaging), and
  it explodes beyond that. `info.compression_error` is this step's α². The sum over neighbours is
  carried on, and its roundings add up like a random walk.

  Args:
    optimizer: each worker's own optax optimizer.
    compressor: applied to the difference; should be unbiased.

  Returns:
    An `Algorithm`. It needs a fixed, symmetric and connected graph.

  >>> import decomp, jax.numpy as jnp
  >>> algorithm = dcd_psgd(optax.sgd(1.0), decomp.compressors.identity())
  >>> sim = decomp.simulate(algorithm, decomp.topology.complete(4))
  >>> state, _ = sim.step(jax.random.key(0), jnp.arange(4.0), sim.init(jnp.array(0.0)))
  >>> state.params
  Array([ 0., -1., -2., -3.], dtype=float32)

  Reference: Tang et al., Communication Compression for Decentralized Training, arXiv 1803.06443,
  algorithm 1.
  """
  check_parts(optimizer, compressor)
  warn_if_biased('dcd_psgd', compressor)

  def init(params: PyTree, net: Network) -> DCDState:
    return DCDState(params, optax.tree.sub(net.mix(params), params), optimizer.init(params))

  def step(key: jax.Array, grads: PyTree, state: DCDState, net: Network) -> tuple[DCDState, Info]:
    updates, opt_state = local_update(optimizer, grads, state)
    difference = optax.tree.add(state.pull, updates)
    message = tree.compress(compressor, key, difference, net)
    params = optax.tree.add(state.params, message.value)
    change = optax.tree.sub(net.mix(message.payload, message.decode), message.value)
    return DCDState(params, optax.tree.add(state.pull, change), opt_state), message.info

  needs = Needs(connected=True, symmetric=True, fixed=True)
  theory = Theory(lambda evidence: _judge(evidence, compressor), optimizer, compressor)
  return Algorithm(init, step, needs, name=f'dcd_psgd({compressor})', theory=theory)


def _judge(evidence: Evidence, compressor: Compressor) -> Finding:
  """Disagreement contracts in the mean square while α² < 1/K, with K from `noise_gain`.

  Below that limit every worker's noise settles at α²(1 + K)/(1 - α²K) times that of its gradients,
  since the difference z holds one gradient step and K times all noise injected.
  """
  graph, alpha2 = evidence.topology, evidence.alpha2
  if not compressor.unbiased:
    return judge_biased(compressor)
  advice = 'use more bits, smaller buckets or a larger fraction, or choco_sgd'
  if math.isfinite(compressor.limit):
    source = 'a fixed grid, whose error does not shrink with the differences,'
    advice = 'use stochastic_quantizer, or a smaller limit'
    if evidence.problem is None:
      return Finding('at risk', f'{source} adds noise to every step', advice)
    ratio = noise_ratio(alpha2 * evidence.message_norm**2, evidence.problem)
    return judge_noise(ratio, source, advice)
  gain = noise_gain(graph)
  limit = 1 / gain if gain else math.inf
  sufficient = ((1 - graph.rho) / (2 * graph.mu)) ** 2 if graph.mu else math.inf
  numbers = {'limit of alpha²': limit, 'sufficient alpha²': sufficient}
  if alpha2 > MARGIN * limit:
    reason = f'α² = {alpha2:.3g} is above {limit:.3g}, where noise outgrows averaging on this graph'
    return Finding('will diverge', reason, advice, numbers)
  ratio = alpha2 * (1 + gain) / (1 - alpha2 * gain) if alpha2 < limit else math.inf
  if ratio == math.inf:
    reason = f'α² = {alpha2:.3g} is about {limit:.3g}, where noise outgrows averaging on this graph'
    return Finding('at risk', reason, advice, numbers)
  source = f'α² = {alpha2:.3g} of the differences (noise outgrows averaging from {limit:.3g} on)'
  found = judge_noise(ratio, source, advice, proven=alpha2 < sufficient, numbers=numbers)
  if found.verdict == 'will stall':  # smaller steps make this noise smaller, so it need not
    return found._replace(verdict='at risk', advice=f'{advice}; or take smaller steps')
  return found
