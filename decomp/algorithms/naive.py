"""D-PSGD with compressed models: the counter-example."""

import jax
import optax

from decomp import base
from decomp.algorithms import common
from decomp.algorithms.d_psgd import DPSGDState, d_psgd
from decomp.engine import tree
from decomp.theory.rules.naive import theory


def naive(optimizer: optax.GradientTransformation, compressor: base.Compressor) -> base.Algorithm:
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
  common.check_parts(optimizer, compressor)

  def step(
    key: jax.Array, grads: base.PyTree, state: DPSGDState, net: base.Network
  ) -> tuple[DPSGDState, base.Info]:
    updates, opt_state = common.local_update(optimizer, grads, state)
    message = tree.compress(compressor, key, state.params, net)
    params = optax.tree.add(net.mix(message.payload, message.decode), updates)
    return DPSGDState(params, opt_state), message.info

  init, needs, name = d_psgd(optimizer).init, base.Needs(connected=True), f'naive({compressor})'
  return base.Algorithm(init, step, needs, name=name, theory=theory(optimizer, compressor))
