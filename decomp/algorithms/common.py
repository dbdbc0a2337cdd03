"""What the algorithms share."""

import warnings
from typing import Any

import optax

from decomp.base import Compressor, PyTree


def check_parts(optimizer: Any, *compressors: Any) -> None:
  """Whether an algorithm is made of what it needs."""
  if not (hasattr(optimizer, 'init') and hasattr(optimizer, 'update')):
    raise ValueError(f'optimizer={optimizer!r}: must be an optax optimizer, such as optax.sgd(0.1)')
  for compressor in compressors:
    if not isinstance(compressor, Compressor):
      raise ValueError(
        f'compressor={compressor!r}: must be a decomp.Compressor, such as '
        'compressors.stochastic_quantizer(bits=8)'
      )


def local_update(
  optimizer: optax.GradientTransformation, grads: PyTree, state: Any
) -> tuple[PyTree, Any]:
  """The worker's own step u = optimizer(g), in the parameters' dtypes, and its new state."""
  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  return optax.tree.cast_like(updates, state.params), opt_state


def warn_if_biased(algorithm: str, compressor: Compressor) -> None:
  """Both of the paper's theorems need E C(z) = z; biased compressors sometimes work."""
  if not compressor.unbiased:
    warnings.warn(
      f'{algorithm} with compressor={compressor}, which is biased: its theory needs an unbiased '
      'one, such as stochastic_quantizer; choco_sgd is made for biased ones',
      stacklevel=3,
    )
