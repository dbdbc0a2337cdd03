"""No compression."""

from decomp.base import Compressor


def identity() -> Compressor:
  """C(x) = x: the full-precision message, and the control in every experiment.

  >>> identity().unbiased
  True
  """
  return Compressor(
    encode=lambda key, x: x,
    decode=lambda payload, like: payload,
    unbiased=True,
    alpha2=lambda size: 0.0,
    delta=lambda size: 1.0,
    name='identity()',
  )
