"""ECD-PSGD: extrapolation compression."""

from typing import Any, NamedTuple

import jax
import optax

from decomp import base
from decomp.algorithms import common
from decomp.engine import tree
from decomp.theory.rules.ecd_psgd import theory


class ECDState(NamedTuple):
  """One worker's state.

  Attributes:
    params: x_i, in full precision, known to its owner only.
    estimate: x̃_i, what the neighbours, and the owner too, take x_i for.
    opt_state: the optimizer's.
  """

  params: base.PyTree
  estimate: base.Shared
  opt_state: Any


def ecd_psgd(
  optimizer: optax.GradientTransformation, compressor: base.Compressor
) -> base.Algorithm:
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
  In float32 the estimate itself stops improving at about t = 10^5, where 2/t of an error is what
  rounding takes away: with 8 bits and no gradient noise the mean model was then 1.2e-3 to 2.0e-3
  from the optimum at 1, on five graphs with γh = 0.01, and 3.5e-4 to 9e-4 in float64. (Estimates
  kept as compensated sums end at 4e-4 to 1.1e-3, but a step takes 1.6 times as long.)

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
  common.check_parts(optimizer, compressor)
  common.warn_if_biased('ecd_psgd', compressor)

  def init(params: base.PyTree, net: base.Network) -> ECDState:
    return ECDState(params, net.share(params), optimizer.init(params))

  def step(
    key: jax.Array, grads: base.PyTree, state: ECDState, net: base.Network
  ) -> tuple[ECDState, base.Info]:
    t = (net.round + 1).astype(float)
    updates, opt_state = common.local_update(optimizer, grads, state)
    mixed = optax.tree.add(state.estimate.value, net.pull(state.estimate))
    moved = optax.tree.sub(optax.tree.add(mixed, updates), state.params)
    z = tree.add_scaled(state.params, t / 2, moved)
    message = tree.compress(compressor, key, z, net)
    # By way of z, so that z may take the place of the gradients, and x' that of x.
    params = tree.add_scaled(state.params, 2 / t, optax.tree.sub(z, state.params))

    def average(estimate: base.PyTree, received: base.PyTree) -> base.PyTree:
      return tree.scale(2 / t, optax.tree.sub(received, estimate))

    return ECDState(params, net.update(state.estimate, message, average), opt_state), message.info

  needs = base.Needs(connected=True, symmetric=True, fixed=True)
  name = f'ecd_psgd({compressor})'
  return base.Algorithm(init, step, needs, name=name, theory=theory(optimizer, compressor))
