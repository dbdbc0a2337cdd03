"""Who talks to whom, and with which weights.

A `Topology` is a doubly stochastic mixing matrix W with receivers as rows: one gossip step replaces
x_i by sum_j W_ij x_j. A time-varying topology has several matrices and uses number
`round % period` in each round.
"""

from decomp.topology.graphs import (
  complete,
  erdos_renyi,
  exponential,
  from_graph,
  from_matrix,
  hypercube,
  one_peer_exponential,
  path,
  ring,
  star,
  torus,
)
from decomp.topology.mixing import Topology as Topology

# The families: flags, tables and tests go by this list.
__all__ = [
  'complete',
  'erdos_renyi',
  'exponential',
  'from_graph',
  'from_matrix',
  'hypercube',
  'one_peer_exponential',
  'path',
  'ring',
  'star',
  'torus',
]
