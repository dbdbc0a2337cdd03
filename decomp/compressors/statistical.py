"""A uniform grid over six standard deviations, and the mean of what is found in each cell."""

import jax
import jax.numpy as jnp

from decomp.base import Compressor
from decomp.compressors.common import check_bits, coder, safe_divide
from decomp.engine.cpu.loops import largest


def statistical(bits: int) -> Compressor:
  """Rounds to the nearest of 2**bits points around the mean, and decodes each as a mean.

  With mean μ, standard deviation σ, n = 2**bits and step s = 6σ/n, an element's code is

    k_i = round((x_i - μ) / s) + n/2, at least 0 and at most n - 1,

  and C(x)_i is the mean of all elements with the same code, of which there is a table in the
  message. Biased: |C(x) - x|² is what elements vary within cells, never more than |x - μ|². α² is
  3.0e-4 at 8 bits, 0.012 at 4 and 0.18 at 2 on 65,536 Gaussian elements. No δ is declared: many
  large elements of different sizes in the cell at an end may bring it close to 0.

  Args:
    bits: bits per element, 2 to 8.

  Returns:
    A `Compressor` with `bits` bits per element and 4 * 2**bits bytes per leaf.

  >>> x = jnp.array([-3.0, -3.5, 4.0, 3.0, 0.0, 0.0])
  >>> payload = statistical(bits=2).encode(jax.random.key(0), x)
  >>> payload.codes.nbytes, payload.scale.nbytes
  (2, 16)
  >>> statistical(bits=2).decode(payload, x)
  Array([-3.25, -3.25,  3.5 ,  3.5 ,  0.  ,  0.  ], dtype=float32)

  References:
    Learning@home team, Hivemind: Decentralized Deep Learning in PyTorch, 2020 (with 8 bits).
    Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo, arXiv 2508.15706.
  """
  bits = check_bits(bits, 2, 8)
  count = 2**bits

  def quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Squares of large or small elements leave the range of float32; those of x / max do not.
    most = largest(x)
    x = safe_divide(x, most)
    mean = x.sum() / max(1, x.size)
    x -= mean
    step = 6 / count * jnp.sqrt((x**2).sum() / max(1, x.size))
    grid = jnp.clip(safe_divide(x, step) + count // 2, 0, count - 1)
    sums, members = _totals(_nearest(grid), x, count)
    return grid, most * (mean + sums / jnp.maximum(members, 1))

  def code(grid: jax.Array, draws: jax.Array) -> jax.Array:
    return _nearest(grid)

  name = f'statistical(bits={bits})'
  return coder(quantize, code, _entries, bits, dither=None, unbiased=False, name=name)


def _nearest(grid: jax.Array) -> jax.Array:
  return jnp.round(grid).astype(jnp.int32)


def _totals(codes: jax.Array, x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """The sum of the elements with each code, and how many they are."""

  def added(codes: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    zeros = jnp.zeros(count)
    return zeros.at[codes].add(x), zeros.at[codes].add(1)

  def compared(codes: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    hits = codes[None] == _along(jnp.arange(count), codes)
    axes = tuple(range(1, hits.ndim))
    return jnp.where(hits, x[None], 0).sum(axes), hits.astype(jnp.float32).sum(axes)

  return jax.lax.platform_dependent(codes, x, cpu=added, default=compared)


def _entries(codes: jax.Array, table: jax.Array) -> jax.Array:
  """table[codes], without a gather where that is slow."""

  def compared(codes: jax.Array, table: jax.Array) -> jax.Array:
    hits = codes[None] == _along(jnp.arange(table.size, dtype=codes.dtype), codes)
    return jnp.where(hits, _along(table, codes), 0).sum(0)

  return jax.lax.platform_dependent(
    codes, table, cpu=lambda codes, table: table[codes], default=compared
  )


def _along(x: jax.Array, other: jax.Array) -> jax.Array:
  """A vector along an axis in front of those of another array."""
  return x.reshape(-1, *[1] * other.ndim)
