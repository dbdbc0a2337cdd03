"""An unbiased compressor made contractive."""

from decomp.base import Compressor, Decode


def contractive(compressor: Compressor) -> Compressor:
  """C(x) / (1 + α²), with α² the compressor's own bound for leaves of that size.

  An unbiased C with α² >= 1 may move away from x, and estimates that follow it do not settle.
  Scaled down, E|C(x)/(1 + α²) - x|² <= (1 - δ)|x|² with δ = 1/(1 + α²). This is how `qsgd` with few
  bits is used with CHOCO-SGD. The message is the same; the receiver scales.

  Args:
    compressor: an unbiased one that has a bound, such as `qsgd(bits=4)`.

  Returns:
    A biased, contractive `Compressor`.

  >>> import jax, jax.numpy as jnp
  >>> from decomp.compressors.random_k import random_k
  >>> x = jnp.ones(8)
  >>> payload = contractive(random_k(0.25)).encode(jax.random.key(0), x)
  >>> contractive(random_k(0.25)).decode(payload, x).sum()
  Array(2., dtype=float32)

  Reference: Koloskova et al., arXiv 1902.00340, section 3.5.
  """
  bound = compressor.alpha2
  if not compressor.unbiased or bound is None:
    raise ValueError(
      f'compressor={compressor}: must be unbiased with a bound on its noise, such as qsgd(bits=4)'
    )

  def shrunk(decode: Decode) -> Decode:
    return lambda payload, like: decode(payload, like) * (1 / (1 + bound(like.size)))

  quick = compressor.quick
  return Compressor(
    compressor.encode,
    shrunk(compressor.decode),
    unbiased=False,
    delta=lambda size: 1 / (1 + bound(size)),
    quick=quick and (quick[0], shrunk(quick[1])),
    name=f'contractive({compressor})',
  )
