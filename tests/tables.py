"""One instance of everything public: a new factory is picked up, or its absence here fails."""

import networkx as nx
import numpy as np
import optax

from decomp import algorithms, compressors, topology

COMPRESSORS = {
  'identity': [compressors.identity()],
  'stochastic_quantizer': [
    *(compressors.stochastic_quantizer(bits) for bits in (1, 2, 3, 4, 8)),
    compressors.stochastic_quantizer(4, bucket=16),
    compressors.stochastic_quantizer(1, bucket=7),
  ],
  'fixed_grid': [compressors.fixed_grid(bits, limit=4.0) for bits in (2, 5, 8)],
  'qsgd': [compressors.qsgd(bits) for bits in (1, 4, 16)],
  'sign_norm': [compressors.sign_norm()],
  'top_k': [compressors.top_k(0.25)],
  'random_k': [
    compressors.random_k(0.3),
    compressors.random_k(0.3, unbiased=False),
  ],
  'natural': [compressors.natural()],
}

TOPOLOGIES = {
  'ring': [topology.ring(n) for n in (1, 2, 3, 4, 5, 8)],
  'path': [topology.path(n) for n in (1, 2, 5)],
  'torus': [topology.torus(4, 4), topology.torus(2, 3), topology.torus(1, 4), topology.torus(3, 5)],
  'hypercube': [topology.hypercube(n) for n in (1, 2, 8, 16)],
  'star': [topology.star(n) for n in (1, 2, 8)],
  'complete': [topology.complete(n) for n in (1, 2, 8)],
  'exponential': [topology.exponential(n) for n in (1, 2, 5, 8, 12)],
  'one_peer_exponential': [topology.one_peer_exponential(n) for n in (2, 6, 8)],
  'erdos_renyi': [topology.erdos_renyi(8, p=0.5, seed=0), topology.erdos_renyi(20, 0.3, seed=1)],
  'from_matrix': [topology.from_matrix(np.array([[0.5, 0.5, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]]))],
  'from_graph': [topology.from_graph(nx.petersen_graph())],
}


def make_algorithms(optimizer=None, compressor=None):
  """Every public algorithm."""
  optimizer = optimizer or optax.sgd(0.1)
  compressor = compressor or compressors.stochastic_quantizer(bits=8)
  return {
    'allreduce': algorithms.allreduce(optimizer),
    'choco_sgd': algorithms.choco_sgd(optimizer, compressor, consensus_rate=0.5),
    'compressed_allreduce': algorithms.compressed_allreduce(optimizer, compressor),
    'd_psgd': algorithms.d_psgd(optimizer),
    'dcd_psgd': algorithms.dcd_psgd(optimizer, compressor),
    'ecd_psgd': algorithms.ecd_psgd(optimizer, compressor),
    'naive': algorithms.naive(optimizer, compressor),
  }


def flat(table):
  """All instances in a row, with their names as test ids."""
  return [pytest_param(item) for items in table.values() for item in items]


def pytest_param(item):
  import pytest

  return pytest.param(item, id=getattr(item, 'name', repr(item)))
