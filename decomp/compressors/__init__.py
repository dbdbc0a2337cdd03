"""Lossy codes for messages: each is a factory that returns a `decomp.Compressor`."""

from decomp.compressors.affine import affine
from decomp.compressors.block_float import block_float
from decomp.compressors.chain import chain
from decomp.compressors.chunk_top_k import chunk_top_k
from decomp.compressors.contractive import contractive
from decomp.compressors.correlated import correlated
from decomp.compressors.dct import dct
from decomp.compressors.dynamic_map import dynamic_map
from decomp.compressors.eden import eden
from decomp.compressors.fixed_grid import fixed_grid
from decomp.compressors.identity import identity
from decomp.compressors.low_rank import low_rank
from decomp.compressors.measuring import Measurement as Measurement
from decomp.compressors.measuring import measure as measure
from decomp.compressors.natural import natural
from decomp.compressors.qsgd import qsgd
from decomp.compressors.random_k import random_k
from decomp.compressors.sign_norm import sign_norm
from decomp.compressors.statistical import statistical
from decomp.compressors.stochastic_quantizer import stochastic_quantizer
from decomp.compressors.ternary import ternary
from decomp.compressors.top_k import top_k

# The factories: flags, tables and tests go by this list.
__all__ = [
  'affine',
  'block_float',
  'chain',
  'chunk_top_k',
  'contractive',
  'correlated',
  'dct',
  'dynamic_map',
  'eden',
  'fixed_grid',
  'identity',
  'low_rank',
  'natural',
  'qsgd',
  'random_k',
  'sign_norm',
  'statistical',
  'stochastic_quantizer',
  'ternary',
  'top_k',
]
