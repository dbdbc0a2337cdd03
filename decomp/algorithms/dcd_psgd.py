"""DCD-PSGD: difference compression."""

from typing import Any, NamedTuple

import jax
import optax

from decomp import base
from decomp.algorithms import common
from decomp.engine import tree
from decomp.theory.rules.dcd_psgd import theory


class DCDState(NamedTuple):
  """One worker's state.

  Attributes:
    params: x_i, of which every neighbour holds an exact replica.
    pull: sum_j W_ij x_j - x_i, kept up to date from the compressed differences instead of one
      replica for each neighbour.
    opt_state: the optimizer's.
  """

  params: base.PyTree
  pull: base.PyTree
  opt_state: Any

  @property
  def mixed(self) -> base.PyTree:
    """sum_j W_ij x_j."""
    return optax.tree.add(self.params, self.pull)


def dcd_psgd(
  optimizer: optax.GradientTransformation, compressor: base.Compressor
) -> base.Algorithm:
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
  common.check_parts(optimizer, compressor)
  common.warn_if_biased('dcd_psgd', compressor)

  def init(params: base.PyTree, net: base.Network) -> DCDState:
    return DCDState(params, optax.tree.sub(net.mix(params), params), optimizer.init(params))

  def step(
    key: jax.Array, grads: base.PyTree, state: DCDState, net: base.Network
  ) -> tuple[DCDState, base.Info]:
    updates, opt_state = common.local_update(optimizer, grads, state)
    difference = optax.tree.add(state.pull, updates)
    message = tree.compress(compressor, key, difference, net)
    params = optax.tree.add(state.params, message.value)
    change = optax.tree.sub(net.mix(message.payload, message.decode), message.value)
    return DCDState(params, optax.tree.add(state.pull, change), opt_state), message.info

  needs = base.Needs(connected=True, symmetric=True, fixed=True)
  name = f'dcd_psgd({compressor})'
  return base.Algorithm(init, step, needs, name=name, theory=theory(optimizer, compressor))
