"""Decentralised training with compressed communication, in JAX.

>>> import jax, optax, decomp
>>> from decomp import algorithms, compressors, topology
>>> algorithm = algorithms.dcd_psgd(optax.sgd(0.1), compressors.stochastic_quantizer(bits=8))
>>> sim = decomp.simulate(algorithm, topology.ring(8))
"""

from decomp import algorithms, compressors, topology, wire
from decomp.base import Algorithm, Compressor, Info, Needs, Network
from decomp.simulate import Simulation, State, simulate
from decomp.topology import Topology

__all__ = [
  'Algorithm',
  'Compressor',
  'Info',
  'Needs',
  'Network',
  'Simulation',
  'State',
  'Topology',
  'algorithms',
  'compressors',
  'simulate',
  'topology',
  'wire',
]
__version__ = '0.1.0'
