"""Workers that round together."""

import jax
import jax.numpy as jnp

from decomp.base import Compressor, SharedKey


def correlated(compressor: Compressor) -> Compressor:
  """Workers share the dithers of a quantizer, each shifted by another part of a turn.

  Worker i rounds up where u_i < frac(x / Δ), with u_i = frac(u + a i / n): u is uniform on [0, 1)
  and the same for all, a is a whole number near 0.618 n without a divisor in common with it. Each
  u_i is uniform as well, so that E C(x) = x as before, and of n equal elements between two points
  of the grid as many are rounded up as should be, or one more. Their mean has the variance
  Δ² f (1 - f) / n² with f = frac(n x / Δ), not Δ² f (1 - f) / n with f = frac(x / Δ). Elements that
  differ by less than Δ, on grids that are nearly alike, gain as well; others lose nothing.

  Use it where messages are averaged: with `compressed_allreduce`, and where a worker mixes what its
  neighbours send. A single message has the same error as before.

  Args:
    compressor: an unbiased one that rounds at random, such as `stochastic_quantizer(bits=4)`.

  Returns:
    A `Compressor` with the same messages.

  >>> from decomp.compressors.stochastic_quantizer import stochastic_quantizer
  >>> keys = [SharedKey(jax.random.key(0), jnp.int32(2**14 * i)) for i in range(4)]
  >>> x, compressor = jnp.array([0.25, 1.0]), correlated(stochastic_quantizer(bits=2))
  >>> float(sum(compressor.decode(compressor.encode(key, x), x)[0] for key in keys))
  1.0

  Reference: Suresh et al., Correlated quantization for distributed mean estimation and
  optimization, arXiv 2203.04925; there with shared permutations in place of the shifts.
  """
  try:
    jax.eval_shape(
      lambda x: compressor.encode(SharedKey(jax.random.key(0), jnp.int32(0)), x), jnp.zeros(64)
    )
  except TypeError:
    rounds = False
  else:
    rounds = compressor.unbiased
  if not rounds:
    raise ValueError(
      f'compressor={compressor}: must be unbiased and round at random, such as '
      'stochastic_quantizer(bits=4)'
    )
  return compressor._replace(correlated=True, name=f'correlated({compressor})')
