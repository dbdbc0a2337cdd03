"""CHOCO-SGD: compressed gossip with a consensus step size."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from decomp import tree
from decomp.algorithms.common import SAFETY, check_parts, local_update
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
  Verdict,
)
from decomp.topology import Topology


class ChocoState(NamedTuple):
  """One worker's state.

  Attributes:
    params: x_i.
    estimate: x̂_i, what the neighbours know of x_i.
    mixed: sum_j W_ij x̂_j.
    opt_state: the optimizer's.
  """

  params: PyTree
  estimate: PyTree
  mixed: PyTree
  opt_state: Any


def choco_sgd(
  optimizer: optax.GradientTransformation, compressor: Compressor, consensus_rate: float
) -> Algorithm:
  """Neighbours track compressed estimates of each other, and a small step is taken towards them.

    h_i = x_i + u(g_i(x_i))
    x̂_i ← x̂_i + C(h_i - x̂_i)                     (x̂_i = 0 at the start)
    x_i ← h_i + γ (sum_j W_ij x̂_j - x̂_i)

  The average model is not disturbed by compression at all. Use it with biased or very strong
  compression (`top_k`, `sign_norm`), with a consensus rate γ to match: any contractive C works
  with γ small enough. An unbiased C needs α² < 1 here, or no γ helps.

  Args:
    optimizer: each worker's own optax optimizer.
    compressor: applied to h - x̂; must be contractive.
    consensus_rate: γ, above 0 and at most 1; smaller for stronger compression.

  Returns:
    An `Algorithm`. It needs a fixed, symmetric and connected graph.

  >>> import decomp, jax.numpy as jnp
  >>> algorithm = choco_sgd(optax.sgd(1.0), decomp.compressors.identity(), consensus_rate=1.0)
  >>> sim = decomp.simulate(algorithm, decomp.topology.complete(4))
  >>> state, _ = sim.step(jax.random.key(0), jnp.arange(4.0), sim.init(jnp.array(0.0)))
  >>> state.params
  Array([-1.5, -1.5, -1.5, -1.5], dtype=float32)

  Reference: Koloskova et al., Decentralized Stochastic Optimization and Gossip Algorithms with
  Compressed Communication, arXiv 1902.00340.
  """
  check_parts(optimizer, compressor)
  known = not isinstance(consensus_rate, jax.core.Tracer)
  if known and (np.asarray(consensus_rate).dtype.kind not in 'iuf' or not 0 < consensus_rate <= 1):
    raise ValueError(f'consensus_rate={consensus_rate!r}: must be above 0 and at most 1')

  def init(params: PyTree, net: Network) -> ChocoState:
    zeros = optax.tree.zeros_like(params)
    return ChocoState(params, zeros, zeros, optimizer.init(params))

  def step(
    key: jax.Array, grads: PyTree, state: ChocoState, net: Network
  ) -> tuple[ChocoState, Info]:
    updates, opt_state = local_update(optimizer, grads, state)
    half = optax.tree.add(state.params, updates)
    message = tree.compress(compressor, key, optax.tree.sub(half, state.estimate), net)
    estimate = optax.tree.add(state.estimate, message.value)
    mixed = optax.tree.add(state.mixed, net.mix(message.payload, message.decode))
    params = tree.add_scaled(half, consensus_rate, optax.tree.sub(mixed, estimate))
    return ChocoState(params, estimate, mixed, opt_state), message.info

  needs = Needs(connected=True, symmetric=True, fixed=True)
  name = f'choco_sgd({compressor}, consensus_rate={consensus_rate})'
  theory = Theory(
    lambda evidence: _judge(evidence, compressor, consensus_rate), optimizer, compressor
  )
  return Algorithm(init, step, needs, name=name, theory=theory)


def proven_rate(topology: Topology, delta: float) -> float:
  """The consensus rate of the convergence theorem for a compressor with contraction δ.

  γ = g²δ / (16g + g² + 4β² + 2gβ² - 8gδ),   g = 1 - ρ, β = |I - W|₂
  """
  gap, beta2 = topology.spectral_gap, topology.mu**2
  return gap**2 * delta / (16 * gap + gap**2 + 4 * beta2 + 2 * gap * beta2 - 8 * gap * delta)


def stable_rate(topology: Topology, delta: float) -> float:
  """The consensus rate up to which the estimates keep up: γβ < 1/sqrt(1-δ) - 1, β = |I - W|₂.

  With x̂ off by ε, a gossip step moves the fastest mode of x by γβ(ε - x), so that what is to be
  compressed next holds (1 + γβ)ε, of which compression leaves 1 - δ of the energy. An estimate:
  errors are taken as uncorrelated with the models. For ResNet-20 on a ring of 8 it gives 0.50 for
  signs (δ = 2/π) and 0.033 for the top 1 % (δ = 0.08); tuning found 0.45 and 0.0375.
  """
  if delta >= 1 or not topology.mu:
    return 1.0
  return min(1.0, (1 / math.sqrt(1 - delta) - 1) / topology.mu)


def _judge(evidence: Evidence, compressor: Compressor, rate: float) -> Finding:
  """Errors never reach the average model: what matters is that estimates follow, and agreement."""
  graph, delta = evidence.topology, 1 - evidence.alpha2
  bounded = math.isfinite(compressor.limit)
  if delta <= 0 and not bounded:
    reason = f'α² = {1 - delta:.3g} is not below 1: {compressor} is no contraction, no rate helps'
    advice = 'use more bits, smaller buckets, or a biased compressor such as top_k'
    return Finding('will diverge', reason, advice, {'contraction': delta})
  # On a fixed grid estimates are off by the grid at most, whatever the rate.
  proven = 0.0 if bounded else proven_rate(graph, delta)
  stable = 1.0 if bounded else stable_rate(graph, delta)
  lag = _lag(evidence, rate)
  numbers = {'contraction': delta, 'proven rate': proven, 'recommended rate': stable, 'lag': lag}
  reason = f'the contraction δ = {delta:.3g} bears consensus rates up to about {stable:.3g}'
  if rate > stable:
    verdict: Verdict = 'at risk' if rate < 2 * SAFETY * stable else 'will diverge'
    return Finding(verdict, reason, f'use consensus_rate={stable:.2g}', numbers)
  if lag > SAFETY:
    reason = f'workers, which differ, learn {lag:.2g} times as fast as they come to agree'
    advice = f'use a consensus_rate up to {stable:.2g}, a denser graph or smaller steps'
    return Finding('at risk', reason, advice, numbers)
  return Finding('converges' if rate <= proven else 'likely', reason, '', numbers)


def _lag(evidence: Evidence, rate: float) -> float:
  """How far workers go their own ways before they agree: γh τ ζ²/(σ² + ζ²).

  Disagreement lives for τ = the mean over modes of 1/(rate (1-λ)) steps, in which a worker goes
  γhτ of the way to its own optimum. That matters in so far as it is workers that differ, and not
  batches, whose noise averages out.
  """
  problem = evidence.problem
  if problem is None or not problem.heterogeneity:
    return 0.0
  eigenvalues = np.linalg.eigvalsh(evidence.topology.matrix)[:-1]
  lifetime = (1 / (1 - eigenvalues)).sum() / max(1, len(eigenvalues)) / rate
  share = 1 / (1 + (problem.noise / problem.heterogeneity) ** 2)
  return float(problem.step_size * problem.curvature * lifetime * share)
