"""Machines to compile for, whether they are there or not."""

import importlib.metadata
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax

GB = 1e9


class Kind(NamedTuple):
  """A kind of device, by its maker's figures.

  Attributes:
    memory: bytes.
    bandwidth: of the memory, bytes a second.
    flops: of float32 in full precision, a second; where a matrix unit needs several passes for it,
      so much less than its peak.
  """

  memory: float
  bandwidth: float
  flops: float


TPUS = {
  # Peak in bfloat16 / 6 passes of full float32.
  'v4': Kind(32 * GB, 1228 * GB, 275e12 / 6),
  'v5e': Kind(16 * GB, 819 * GB, 197e12 / 6),
  'v5p': Kind(95 * GB, 2765 * GB, 459e12 / 6),
  'v6e': Kind(32 * GB, 1640 * GB, 918e12 / 6),
}
GPUS = {'a100': Kind(42.3 * GB, 1555 * GB, 19.5e12)}

_A100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 167936 threads_per_core_limit: 2048 core_count: 108 fpus_per_core: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 1555200000000 l2_cache_size: 41943040 clock_rate_ghz: 1.41
  device_memory_size: 42331013120 shared_memory_per_block_optin: 166912
  cuda_compute_capability { major: 8 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 }
device_description_str: "A100-SXM4-40GB"
"""


class Machine(NamedTuple):
  """Devices of one kind that a program may be compiled for.

  Attributes:
    name: as it was asked for.
    devices: as a `jax.sharding.Mesh` takes them.
    kind: what is known of each; None of this machine's own.
  """

  name: str
  devices: list[Any]
  kind: Kind | None = None

  def at_least(self, traffic: float | None, flops: float | None) -> float | None:
    """The seconds that memory and arithmetic take at their peak; None where that is not known."""
    if self.kind is None or traffic is None:
      return None
    return max(traffic / self.kind.bandwidth, (flops or 0) / self.kind.flops)


def machine(name: str) -> Machine:
  """The devices of 'tpu v5e:2x4', 'gpu a100 x8', 'cpu' or 'cpu x8'.

  The compilers of TPUs and GPUs need no device. They come with the extras `tpu` (Linux on x86-64
  only) and `gpu` of this package.

  >>> machine('cpu').devices[0].platform
  'cpu'
  """
  grid, count = r'\d{1,3}(?:x\d{1,3}){0,2}', r'x([1-9]\d{0,3})'
  found = re.fullmatch(rf'(tpu) ([^: ]+):({grid})|(gpu) (\S+) {count}|(cpu)(?: {count})?', name)
  if found is None:
    raise ValueError(f"target={name!r}: must be like 'tpu v5e:2x4', 'gpu a100 x8' or 'cpu x8'")
  _, tpu, grid, _, gpu, gpus, _, cpus = found.groups()
  if tpu:
    return Machine(name, _tpus(name, tpu, grid), TPUS[tpu])
  if gpu:
    return Machine(name, _gpus(name, gpu, int(gpus)), GPUS[gpu])
  devices = jax.devices('cpu')
  if int(cpus or 1) > len(devices):
    raise ValueError(
      f'target={name!r}: there are {len(devices)} CPU devices; jax_num_cpu_devices makes them'
    )
  return Machine(name, devices[: int(cpus or 1)])


def _tpus(name: str, kind: str, grid: str) -> list[Any]:
  _check_kind(name, kind, TPUS)
  library = Path(sys.prefix, 'tpu', 'libtpu', 'libtpu.so')  # where `make test` puts it
  if 'TPU_LIBRARY_PATH' not in os.environ and library.exists():
    os.environ['TPU_LIBRARY_PATH'] = str(library)
  if 'TPU_LIBRARY_PATH' not in os.environ and importlib.util.find_spec('libtpu') is None:
    raise ValueError(
      f"target={name!r}: the compiler is not installed: pip install 'decomp[tpu]' (about 210 MB; "
      'it exists for Linux on x86-64 only)'
    )
  # Nothing is started: several may compile at once, and there is no host to ask for its devices.
  for variable, value in {
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
    'TPU_SKIP_MDS_QUERY': '1',
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'TPU_ACCELERATOR_TYPE': 'v5litepod-8',
    'TPU_STDERR_LOG_LEVEL': '3',
    'TPU_MIN_LOG_LEVEL': '3',
  }.items():
    os.environ.setdefault(variable, value)
  return _described(name, platform='tpu', topology_name=f'{kind}:{grid}')


def _gpus(name: str, kind: str, count: int) -> list[Any]:
  _check_kind(name, kind, GPUS)
  try:
    importlib.metadata.version('jax-cuda12-plugin')
  except importlib.metadata.PackageNotFoundError:
    raise ValueError(
      f"target={name!r}: the compiler is not installed: pip install 'decomp[gpu]' (about 6 GB; it "
      'exists for Linux only)'
    ) from None
  os.environ.setdefault('JAX_SKIP_CUDA_CONSTRAINTS_CHECK', '1')
  jax.devices()  # plugins are registered then
  return _described(
    name, topology_name='', platform='cuda', target_config=_A100, topology=f'1x1x{count}'
  )


def _check_kind(name: str, kind: str, kinds: dict[str, Kind]) -> None:
  if kind not in kinds:
    raise ValueError(f'target={name!r}: {kind} is unknown; known are {", ".join(kinds)}')


def _described(name: str, **options: Any) -> list[Any]:
  from jax.experimental import topologies

  try:
    return list(topologies.get_topology_desc(**options).devices)
  except (RuntimeError, ValueError) as error:
    reason = str(error).splitlines()[0]
    raise ValueError(f'target={name!r}: the compiler knows no such machine ({reason})') from error
