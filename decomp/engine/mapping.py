"""How one worker's function is run for all workers.

A function of one worker becomes a function of all, whose arguments and results have a leading
worker axis. The mappings give the same numbers (up to rounding) and differ in speed:

========== ==================================================== =================================
mapping    what it does                                         best for
========== ==================================================== =================================
'vmap'     all workers at once, `jax.vmap`                      no convolutions; GPU and TPU
'scan'     one worker after another, `jax.lax.map`              convolutions on one CPU device
'devices'  workers split over devices, each scanning its own    convolutions on CPU with a device
                                                                per core (`jax_num_cpu_devices`)
========== ==================================================== =================================

A vmapped convolution with a kernel per worker is a grouped convolution, slow on CPU. A scanned one
is fast if it is `decomp.engine.cpu.convolution.conv`; the usual gradient is slower still in a scan.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AxisType, Mesh, PartitionSpec

from decomp.engine.cpu import convolution

MAPPINGS = ('vmap', 'scan', 'devices')


def lift(fn: Callable[..., Any], mapping: str, mesh: Mesh | None = None) -> Callable[..., Any]:
  """Lift one worker's function to all workers.

  Args:
    fn: Function of one worker's arrays (pytrees) giving one worker's arrays.
    mapping: 'vmap', 'scan' or 'devices'; see the top of this module.
    mesh: Mesh with the one axis 'worker' over which workers are split, whatever the mapping;
      each device then runs 'vmap' or 'scan' on its share. None: all on one device, except that
      'devices' takes all local devices.

  Returns:
    The function of all workers: every array among the arguments and results has a leading axis
    of num_workers.

  Example:
    >>> import jax.numpy as jnp
    >>> lift(lambda x, y: x @ y, 'scan')(jnp.ones((2, 3)), jnp.ones((2, 3)))
    Array([3., 3.], dtype=float32)
  """
  if mapping not in MAPPINGS:
    raise ValueError(f'mapping={mapping!r} is unknown: use one of {", ".join(MAPPINGS)}')
  if mesh is not None and mesh.axis_names != ('worker',):
    raise ValueError(f"mesh has axes {mesh.axis_names}: use one with the one axis 'worker'")

  def one_after_another(*args: Any) -> Any:
    return lax.map(lambda worker_args: fn(*worker_args), args)

  local = jax.vmap(fn) if mapping == 'vmap' else one_after_another
  if mapping != 'devices' and mesh is None:
    return local

  def split_over_devices(*args: Any) -> Any:
    devices, num_workers = mesh or local_mesh(), _num_workers(args)
    if num_workers % devices.size:
      raise ValueError(
        f'num_workers={num_workers} is not divisible by the {devices.size} devices: change '
        f"num_workers, pass a mesh of fewer devices, or use mapping='scan'"
      )
    spec = PartitionSpec('worker')
    # The types that check_vma tracks would ask loops inside fn for casts it need not have.
    return jax.shard_map(local, mesh=devices, in_specs=spec, out_specs=spec, check_vma=False)(*args)

  return split_over_devices


def choose(
  fn: Callable[..., Any],
  *example_args: Any,
  platform: str | None = None,
  num_devices: int | None = None,
) -> str:
  """Choose the fastest mapping for a function, by the convolutions in it.

  Args:
    fn: One worker's function, its gradient included; it is traced, not run.
    *example_args: The arguments of the LIFTED function (leading axis num_workers), or their
      `jax.ShapeDtypeStruct`.
    platform: 'cpu', 'gpu' or 'tpu'. None: that of the local devices.
    num_devices: Number of devices to split over. None: all local ones.

  Returns:
    'vmap' on GPU and TPU, and for functions without convolutions or with XLA's own gradient of
    one; else 'devices' if there are several and they divide num_workers, or 'scan'.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((8, 5), jnp.float32)
    >>> choose(jax.grad(lambda x: jnp.sum(x**2)), x)
    'vmap'
  """
  num_workers = _num_workers(example_args)
  one_worker = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), example_args)
  found = set(layouts(jax.make_jaxpr(fn)(*one_worker)))
  if (platform or jax.local_devices()[0].platform) != 'cpu' or found != {convolution.LAYOUT}:
    return 'vmap'
  num_devices = num_devices or jax.local_device_count()
  return 'devices' if num_devices > 1 and num_workers % num_devices == 0 else 'scan'


def layouts(jaxpr: ClosedJaxpr | Jaxpr) -> Iterator[lax.ConvDimensionNumbers]:
  """Yield the layout of every convolution, at any depth, as the program is on CPU."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'conv_general_dilated':
      yield equation.params['dimension_numbers']
    nested = list(equation.params.values())
    if platforms := equation.params.get('branches_platforms'):
      on_cpu = [names is None or 'cpu' in names for names in platforms].index(True)
      nested = equation.params['branches'][on_cpu]
    for value in jax.tree.leaves(nested):
      if isinstance(value, ClosedJaxpr | Jaxpr):
        yield from layouts(value)


def _num_workers(args: Any) -> int:
  """Return the size of the leading axis, the same in all arrays."""
  sizes = {np.shape(x)[:1] for x in jax.tree.leaves(args)}
  if len(sizes) != 1 or sizes == {()}:
    raise ValueError(
      f'arguments have leading axes {sorted(sizes)}: give every array the same leading worker axis'
    )
  ((num_workers,),) = sizes
  return num_workers


def local_mesh() -> Mesh:
  """A mesh with the one axis 'worker' over all local devices."""
  return Mesh(np.asarray(jax.local_devices()), ('worker',), axis_types=(AxisType.Auto,))
