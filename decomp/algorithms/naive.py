"""D-PSGD with compressed models: the counter-example."""

from __future__ import annotations

import jax
import optax

from decomp import tree
from decomp.algorithms.common import check_parts, judge_noise, local_update, noise_ratio
from decomp.algorithms.d_psgd import DPSGDState, d_psgd
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


def naive(optimizer: optax.GradientTransformation, compressor: Compressor) -> Algorithm:
  """D-PSGD whose workers simply compress the models they send. It does not converge.

    x_i ← sum_j W_ij C(x_j) + u(g_i(x_i))

  The error C(x) - x does not shrink as x settles, and it enters every step: with noise of
  variance v, curvature h and step size γ the average model keeps a variance near v/(2nγh), which
  gets WORSE with smaller steps. Use it only to see what difference and extrapolation compression
  are for.

  Args:
    optimizer: each worker's own optax optimizer.
    compressor: applied to the model.

  Returns:
    An `Algorithm`.

  >>> import decomp, jax.numpy as jnp
  >>> algorithm = naive(optax.sgd(0.1), decomp.compressors.natural())
  >>> sim = decomp.simulate(algorithm, decomp.topology.ring(2))
  >>> sim.step(jax.random.key(0), jnp.zeros(2), sim.init(jnp.array(4.0)))[0].params
  Array([4., 4.], dtype=float32)

  Reference: Tang et al., Communication Compression for Decentralized Training, arXiv 1803.06443,
  section 3 and figure 1.
  """
  check_parts(optimizer, compressor)

  def step(
    key: jax.Array, grads: PyTree, state: DPSGDState, net: Network
  ) -> tuple[DPSGDState, Info]:
    updates, opt_state = local_update(optimizer, grads, state)
    message = tree.compress(compressor, key, state.params, net)
    params = optax.tree.add(net.mix(message.payload, message.decode), updates)
    return DPSGDState(params, opt_state), message.info

  def judge(evidence: Evidence) -> Finding:
    """Noise of variance α²|x|² enters every step, where SGD's own has γ²σ²."""
    problem, alpha2 = evidence.problem, evidence.alpha2
    advice = 'use dcd_psgd or choco_sgd, whose errors shrink as the run settles'
    source = f'compressing models, with α² = {alpha2:.3g} however settled they are,'
    if problem is None:
      return Finding('at risk', f'{source} adds noise to every step', advice)
    variance = alpha2 * evidence.message_norm**2
    return judge_noise(noise_ratio(variance, problem), source, advice, proven=not variance)

  return Algorithm(
    d_psgd(optimizer).init,
    step,
    Needs(connected=True),
    name=f'naive({compressor})',
    theory=Theory(judge, optimizer, compressor),
  )
