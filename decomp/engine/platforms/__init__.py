"""What the compilers of the platforms want: a file each, and the one way to ask for it.

A program may be compiled for devices that are not the default ones, or not there at all. With a
mesh its devices are asked (`of`), without one the program's lowering (`dependent`), never the
default backend. Numbers are the same on all platforms, up to rounding.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from decomp.engine.platforms.cpu import CPU
from decomp.engine.platforms.gpu import GPU
from decomp.engine.platforms.tpu import TPU
from decomp.engine.platforms.wants import Wants

__all__ = ['ALL', 'CPU', 'GPU', 'TPU', 'Wants', 'dependent', 'of']

ALL = (CPU, GPU, TPU)
"""In the order of their names."""

T = TypeVar('T')


def of(device: jax.Device) -> Wants:
  """What a device wants; all devices of a mesh are of one kind.

  >>> of(jax.devices('cpu')[0]).name
  'cpu'
  """
  return {'cpu': CPU, 'tpu': TPU}.get(device.platform, GPU)


def dependent(
  choice: Callable[[Wants], Any], function: Callable[[Any], Callable[..., T]], *args: Any
) -> T:
  """function(choice(wants))(*args), of the platform that the program is lowered for.

  >>> dependent(lambda wants: wants.name, lambda name: lambda x: [x, name][name != 'cpu'], 1.0)
  1.0
  """
  chosen = [choice(wants) for wants in ALL]
  branches = {value: function(value) for value in chosen}  # each is traced once
  if len(branches) == 1:
    return branches[chosen[0]](*args)
  cpu, gpu, tpu = (branches[value] for value in chosen)
  return jax.lax.platform_dependent(*args, cpu=cpu, tpu=tpu, default=gpu)
