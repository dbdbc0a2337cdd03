"""ECD-PSGD: extrapolation compression."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from decomp import tree
from decomp.algorithms.common import (
  SAFETY,
  check_parts,
  judge_biased,
  judge_noise,
  local_update,
  noise_gain,
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
  Problem,
  PyTree,
  Theory,
)
from decomp.compressors.measuring import measure
from decomp.topology import Topology

_ADVICE = 'use fixed_grid, whose noise is bounded, more bits, or dcd_psgd'


class ECDState(NamedTuple):
  """One worker's state.

  Attributes:
    params: x_i, in full precision, known to its owner only.
    mixed: sum_j W_ij x̃_j, where x̃_j is the estimate of x_j that all its neighbours share.
    opt_state: the optimizer's.
  """

  params: PyTree
  mixed: PyTree
  opt_state: Any


def ecd_psgd(optimizer: optax.GradientTransformation, compressor: Compressor) -> Algorithm:
  """Sends a compressed extrapolation, of which the neighbours keep a running average.

  With t = 1, 2, ...

    x_i' = sum_j W_ij x̃_j + u(g_i(x_i))
    z_i  = x_i + (t/2) (x_i' - x_i)
    x̃_i ← (1 - 2/t) x̃_i + (2/t) C(z_i),     x_i ← x_i'

  If C's noise has variance v WHATEVER its input is (`fixed_grid` within its limit), the estimate's
  error has variance v 2(2t-1)/(3t(t-1)), falling as 1/t. Use it with such a compressor, under
  compression too strong for DCD. With a compressor whose noise grows with its input (all that scale
  by a norm) the extrapolation makes z, and with it the error, grow with t at a constant step size:
  watch `info.message_norm`. With `fixed_grid` it is the limit that must hold z, which grows like
  tγ|g|/2: watch `info.clipped`, as clipping one element in a thousand late in a run is too much.

  Args:
    optimizer: each worker's own optax optimizer.
    compressor: applied to the extrapolation; should be unbiased.

  Returns:
    An `Algorithm`. It needs a fixed, symmetric and connected graph.

  >>> import decomp, jax.numpy as jnp
  >>> algorithm = ecd_psgd(optax.sgd(1.0), decomp.compressors.identity())
  >>> sim = decomp.simulate(algorithm, decomp.topology.complete(4))
  >>> state, _ = sim.step(jax.random.key(0), jnp.arange(4.0), sim.init(jnp.array(0.0)))
  >>> state.params
  Array([ 0., -1., -2., -3.], dtype=float32)

  Reference: Tang et al., Communication Compression for Decentralized Training, arXiv 1803.06443,
  algorithm 2.
  """
  check_parts(optimizer, compressor)
  warn_if_biased('ecd_psgd', compressor)

  def init(params: PyTree, net: Network) -> ECDState:
    return ECDState(params, net.mix(params), optimizer.init(params))

  def step(key: jax.Array, grads: PyTree, state: ECDState, net: Network) -> tuple[ECDState, Info]:
    t = (net.round + 1).astype(float)
    updates, opt_state = local_update(optimizer, grads, state)
    moved = optax.tree.sub(optax.tree.add(state.mixed, updates), state.params)
    z = tree.add_scaled(state.params, t / 2, moved)
    message = tree.compress(compressor, key, z, net)
    # By way of z, so that z may take the place of the gradients, and x' that of x.
    params = tree.add_scaled(state.params, 2 / t, optax.tree.sub(z, state.params))
    received = net.mix(message.payload, message.decode)
    mixed = tree.add_scaled(state.mixed, 2 / t, optax.tree.sub(received, state.mixed))
    return ECDState(params, mixed, opt_state), message.info

  needs = Needs(connected=True, symmetric=True, fixed=True)
  theory = Theory(lambda evidence: _judge(evidence, compressor), optimizer, compressor)
  return Algorithm(init, step, needs, name=f'ecd_psgd({compressor})', theory=theory)


def _judge(evidence: Evidence, compressor: Compressor) -> Finding:
  """The average model settles where its gradient is e/γ, with e the mean error of the estimates.

  So |e|²/γ² stands against the γhσ²/2 of SGD itself, both over n.
  """
  problem, alpha2 = evidence.problem, evidence.alpha2
  bounded = math.isfinite(compressor.limit)
  if not compressor.unbiased:
    return judge_biased(compressor)
  if problem is None:
    if bounded:
      return Finding('likely', f'noise is bounded while |z| < {compressor.limit:g}; z grows with t')
    return Finding('at risk', f'α² = {alpha2:.3g} of z, and z grows with t', _ADVICE)
  # A model changes by w in one step: its own update, and what comes back from the neighbours.
  change2 = (problem.step_size * problem.noise) ** 2 * (1 + noise_gain(evidence.topology))
  if bounded:
    error2 = _bounded_error(evidence, compressor, change2)
    numbers, advice = {}, 'use more bits, or a limit that holds z, which grows with t; or dcd_psgd'
  else:
    feedback = alpha2 * _memory(evidence.topology, problem)
    numbers, advice = {'feedback': feedback}, _ADVICE
    if feedback > SAFETY and evidence.steps * alpha2 > 4:  # before, estimates forget too fast
      reason = f'errors come back {feedback:.3g} times in the z of later steps, which grows with t'
      return Finding('will diverge', reason, advice, numbers)
    error2 = _growing_error(evidence, change2) / max(1 - feedback, 1 / SAFETY)
  own = problem.step_size**3 * problem.curvature * problem.noise**2 / 2
  ratio = error2 / own if own else math.inf if error2 else 0.0
  source = f'the error of the estimates, {math.sqrt(error2):.3g} at step {evidence.steps},'
  return judge_noise(ratio, source, advice, proven=bounded or not alpha2, numbers=numbers)


def _bounded_error(evidence: Evidence, compressor: Compressor, change2: float) -> float:
  """|e|² = (4/3) v/T, with v measured on Gaussian z of the size it has at the end, x + (T/2)w."""
  size = math.sqrt((evidence.message_norm**2 + change2 * evidence.steps**2 / 4) / evidence.size)
  z = size * jax.random.normal(jax.random.key(0), (evidence.size,))
  alpha2 = measure(compressor, z, jax.random.key(1), samples=4).alpha2
  return 4 / 3 * alpha2 * size**2 * evidence.size / evidence.steps


def _growing_error(evidence: Evidence, change2: float) -> float:
  """|e|² = (4/3) α²|x|²/T + α²|w|²T/5, from e ← (1-2/t)e + (2/t)n with |n|² = α²|x + (t/2)w|²."""
  start2 = 4 / 3 * evidence.message_norm**2 / evidence.steps
  return evidence.alpha2 * (start2 + change2 * evidence.steps / 5)


def _memory(topology: Topology, problem: Problem) -> float:
  """M = (1/n) (sum_{j>=2} λ_j²/(1-λ_j²) + 1/(2γh)): for how long a change of e changes the models.

  Late in a run a change of e by α|w| changes the models, w ← (λ - γh)w + λ(change of e), and with
  them the next z: from α²M = 1 on that explodes.
  """
  squares = np.linalg.eigvalsh(topology.matrix)[:-1] ** 2
  pace = problem.step_size * problem.curvature
  mean_mode = 1 / (2 * pace) if pace else math.inf
  return float((squares / (1 - squares)).sum() + mean_mode) / topology.num_workers
