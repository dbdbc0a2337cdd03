"""Decentralised training with compressed communication, in JAX.

>>> import jax, optax, decomp
>>> from decomp import algorithms, compressors, topology
>>> algorithm = algorithms.dcd_psgd(optax.sgd(0.1), compressors.stochastic_quantizer(bits=8))
>>> sim = decomp.simulate(algorithm, topology.ring(8))
"""

import importlib
from typing import TYPE_CHECKING, Any

from decomp import algorithms, compressors, topology
from decomp.base import Algorithm, Compressor, Info, Needs, Network, Shared
from decomp.engine import wire
from decomp.engine.sharded import worker_mesh
from decomp.engine.simulation import Simulation, State, simulate
from decomp.topology import Topology

__all__ = [
  'Algorithm',
  'Compressor',
  'Info',
  'Needs',
  'Network',
  'Shared',
  'Simulation',
  'State',
  'Topology',
  'algorithms',
  'compressors',
  'load',
  'simulate',
  'sweep',
  'topology',
  'train',
  'wire',
  'worker_mesh',
]
__version__ = '0.1.0'

# What needs flax and data libraries is loaded when it is first asked for, to keep `import decomp`
# quick and the core usable without them.
_LATER = {
  'History': 'training.history',
  'Sweep': 'training.sweep',
  'Task': 'tasks',
  'load': 'training.loading',
  'sweep': 'training.sweep',
  'train': 'training.train',
}
_MODULES = {
  'checkpoint': 'training.checkpoint',
  'cost': 'cost',
  'data': 'tasks.data',
  'mapping': 'engine.mapping',
  'metrics': 'training.metrics',
  'models': 'tasks.models',
  'plots': 'plots',
  'schedules': 'training.schedules',
  'spec': 'spec',
  'tasks': 'tasks',
  'theory': 'theory',
  'tree': 'engine.tree',
}

if TYPE_CHECKING:
  from decomp.tasks import Task as Task
  from decomp.training.history import History as History
  from decomp.training.loading import load
  from decomp.training.sweep import Sweep as Sweep
  from decomp.training.sweep import sweep
  from decomp.training.train import train


def __dir__() -> list[str]:
  return sorted({*globals(), *_LATER, *_MODULES})


def __getattr__(name: str) -> Any:
  if name in _MODULES:
    return importlib.import_module(f'decomp.{_MODULES[name]}')
  if name in _LATER:
    return getattr(importlib.import_module(f'decomp.{_LATER[name]}'), name)
  raise AttributeError(f'module decomp has no attribute {name!r}')
