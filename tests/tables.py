"""Instances of everything public, made from `__all__` and the names of parameters.

A new algorithm, compressor or topology is in these tables, and so in the protocol tests, as soon as
it is in its package's `__all__`.
"""

import inspect
import itertools

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
import pytest

from decomp import algorithms, compressors, topology
from decomp.base import Shared
from decomp.engine.meter import Meter

# What a required parameter of a name is tried with, of every factory or of one; values that a
# factory refuses are left out.
CANDIDATES = {
  'bits': [1, 3, 8],
  'format': ['nvfp4'],
  'fraction': [0.25],
  'limit': [4.0],
  'num_workers': [1, 2, 5, 8],
  'rows': [1, 4],
  'columns': [3, 4],
  'p': [0.5],
  'matrix': [np.array([[0.5, 0.5, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]])],
  'graph': [nx.petersen_graph()],
  'consensus_rate': [0.5],
  'compressor': [compressors.qsgd(3), compressors.random_k(0.3)],
  'sparsifier': [compressors.random_k(0.3)],
  'quantizer': [compressors.qsgd(3)],
  'k': [3],
  'chunk': [16],
  'rank': [1],
}

# Where one is enough: programs alike for all bits, or those of another compressor, turned.
FEWER = {
  'affine': {'bits': [3]},
  'statistical': {'bits': [3]},
  'dct': {'compressor': [compressors.qsgd(3)]},
}

COMPRESSORS = [
  compressors.stochastic_quantizer(2),
  compressors.stochastic_quantizer(4, bucket=16),
  compressors.stochastic_quantizer(1, bucket=7),
  compressors.qsgd(16),
  compressors.random_k(0.3, unbiased=False),
  compressors.block_float('mxfp4', stochastic=True),
]


def instances(factory, **fixed):
  """Every call of `factory` with candidates for its required parameters that it does not refuse."""
  required = [
    name
    for name, parameter in inspect.signature(factory).parameters.items()
    if parameter.default is parameter.empty and name not in fixed
  ]
  accepted = {k: v for k, v in fixed.items() if k in inspect.signature(factory).parameters}
  made, candidates = [], CANDIDATES | FEWER.get(factory.__name__, {})
  for values in itertools.product(*(candidates[name] for name in required)):
    try:
      made.append(factory(**dict(zip(required, values, strict=True)), **accepted))
    except ValueError:
      continue
  assert made, f'no candidates suit {factory.__name__}: add some to CANDIDATES'
  return made


def _all(module):
  return [item for name in module.__all__ for item in instances(getattr(module, name))]


COMPRESSORS += _all(compressors)
TOPOLOGIES = _all(topology)


def make_algorithms(optimizer=None, compressor=None):
  """Every public algorithm, by name."""
  parts = {
    'optimizer': optimizer or optax.sgd(0.1),
    'compressor': compressor or compressors.stochastic_quantizer(bits=8),
  }
  return {name: instances(getattr(algorithms, name), **parts)[0] for name in algorithms.__all__}


def shares(algorithm):
  """Whether its workers know values of each other, and carry sums of messages for that."""
  net = Meter(topology.ring(3))
  state = jax.eval_shape(lambda params: algorithm.init(params, net), jnp.zeros(4))
  leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Shared))
  return any(isinstance(leaf, Shared) for leaf in leaves)


REPLICAS = tuple(name for name, made in make_algorithms().items() if shares(made))
"""The algorithms that carry sums of their neighbours' messages."""


def equations(jaxpr, name):
  """The equations with a primitive of this name, at any depth."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == name:
      yield equation
    for value in jax.tree.leaves(list(equation.params.values())):
      inner = getattr(value, 'jaxpr', value)
      if hasattr(inner, 'eqns'):
        yield from equations(inner, name)


def params(items):
  """Items for `pytest.mark.parametrize`, with their names as test ids."""
  return [pytest.param(item, id=item.name) for item in items]
