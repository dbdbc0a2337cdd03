"""DCD-PSGD: difference compression."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import optax

from decomp import tree
from decomp.algorithms.common import check_parts, local_update, warn_if_biased
from decomp.base import Algorithm, Compressor, Info, Needs, Network, PyTree


class DCDState(NamedTuple):
  """One worker's state.

  Attributes:
    params: x_i, of which every neighbour holds an exact replica.
    mixed: sum_j W_ij x_j, kept up to date from the compressed differences instead of one replica
      for each neighbour.
    opt_state: the optimizer's.
  """

  params: PyTree
  mixed: PyTree
  opt_state: Any


def dcd_psgd(optimizer: optax.GradientTransformation, compressor: Compressor) -> Algorithm:
  """Sends the compressed difference of two models, and applies it to the own model as well.

    z_i = sum_j W_ij x_j + u(g_i(x_i)) - x_i
    x_i ← x_i + C(z_i)                             (the sender too: replicas stay exact)

  The compression error is a fraction of z, which shrinks as the run settles. Use it with moderate
  compression: it converges like full-precision SGD while the noise-to-signal ratio α of C is small
  (α < (1-ρ)/(2μ) suffices; on a ring α² < 1.37 is the limit where noise outgrows averaging), and
  it explodes beyond that. `info.compression_error` is this step's α².

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
    return DCDState(params, net.mix(params), optimizer.init(params))

  def step(key: jax.Array, grads: PyTree, state: DCDState, net: Network) -> tuple[DCDState, Info]:
    updates, opt_state = local_update(optimizer, grads, state)
    difference = optax.tree.sub(optax.tree.add(state.mixed, updates), state.params)
    message = tree.compress(compressor, key, difference)
    params = optax.tree.add(state.params, message.value)
    mixed = optax.tree.add(state.mixed, net.mix(message.payload, message.decode))
    return DCDState(params, mixed, opt_state), message.info

  needs = Needs(connected=True, symmetric=True, fixed=True)
  return Algorithm(init, step, needs, name=f'dcd_psgd({compressor})')
