"""What training would take on a network: seconds from messages, bytes, latency and bandwidth.

A synchronous step is local work, then rounds of messages in which everyone sends at once:

  step = compute + codec + Σ_rounds (latency + busiest worker's messages)

A worker sends its messages of a round one after another, and receives them likewise, both at once
if its network card is full duplex. M bytes take M / b seconds, where b is the least of

  bandwidth of the cards × efficiency,   bandwidth of the path,   window / (2 latency).

For M bytes on n workers, and the algorithms of `lan(allreduce=)`:

==================== ====================== =======================================
exchange             latencies              seconds on the wire
==================== ====================== =======================================
mix, degree k        1                      k M / b
all-reduce, ring     2 (n-1)                2 (n-1)/n M / b
all-reduce, doubling log₂ n                 log₂ n M / b
all-gather, ring     n-1                    (n-1) M / b
all-gather, doubling ⌈log₂ n⌉               (n-1) M / b
==================== ====================== =======================================

A half duplex card takes twice the seconds on the wire. Nothing overlaps with the computation.

>>> import jax.numpy as jnp, optax
>>> from decomp import algorithms, compressors, topology
>>> params = {'w': jnp.zeros(270_000)}
>>> algorithm = algorithms.dcd_psgd(optax.sgd(0.1), compressors.stochastic_quantizer(bits=8))
>>> work = workload(algorithm, topology.ring(8), params, compute='20ms', codec='1ms')
>>> round(float(step_seconds(work, lan(bandwidth='100Mbps', latency='5ms'))), 4)
0.0692
"""

from decomp.cost.comparing import WinnerMap, faster_where, winner_map
from decomp.cost.links import Links, lan
from decomp.cost.machines import Machine, machine
from decomp.cost.measuring import fit_transport, measure_codec, measure_compute
from decomp.cost.model import Round, communication_seconds, rounds, step_seconds, time_to_target
from decomp.cost.targets import Reached, Target, parse_target, steps_to
from decomp.cost.units import BANDWIDTHS, SECONDS
from decomp.cost.workloads import Exchange, Workload, slowest, straggling, workload

__all__ = [
  'BANDWIDTHS',
  'SECONDS',
  'Exchange',
  'Links',
  'Machine',
  'Reached',
  'Round',
  'Target',
  'WinnerMap',
  'Workload',
  'communication_seconds',
  'faster_where',
  'fit_transport',
  'lan',
  'machine',
  'measure_codec',
  'measure_compute',
  'parse_target',
  'rounds',
  'slowest',
  'step_seconds',
  'steps_to',
  'straggling',
  'time_to_target',
  'winner_map',
  'workload',
]
