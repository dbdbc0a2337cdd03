"""Decentralised (and two centralised) algorithms: factories that return a `decomp.Algorithm`."""

from decomp.algorithms.allreduce import allreduce
from decomp.algorithms.choco_sgd import choco_sgd
from decomp.algorithms.compressed_allreduce import compressed_allreduce
from decomp.algorithms.d_psgd import d_psgd
from decomp.algorithms.dcd_psgd import dcd_psgd
from decomp.algorithms.ecd_psgd import ecd_psgd
from decomp.algorithms.naive import naive

# The factories: flags, tables and tests go by this list.
__all__ = [
  'allreduce',
  'choco_sgd',
  'compressed_allreduce',
  'd_psgd',
  'dcd_psgd',
  'ecd_psgd',
  'naive',
]
