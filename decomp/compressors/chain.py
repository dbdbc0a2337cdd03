"""A sparsifier whose values are quantized."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from decomp.base import Compressor, Decode, Encode, PyTree
from decomp.compressors.common import check_scales, decoded
from decomp.engine.cpu import keys

Bound = Callable[[int], float]


def chain(sparsifier: Compressor, quantizer: Compressor) -> Compressor:
  """Sends what `sparsifier` keeps of a leaf as `quantizer` codes it.

  With S the sparsifier, Q the quantizer and v the values that S keeps, the receiver puts Q(v) in
  their places: C(x) = S⁻¹(Q(v)). All values of a leaf are one array to Q, so that
  `stochastic_quantizer(bits=4, bucket=64)` has a scale for each chunk of `chunk_top_k(64, 4096)`.

  Unbiased if both are, with α² = (1 + α_S²)(1 + α_Q²) - 1: E|C(x) - x|² is E|Q(v) - v|² <=
  α_Q² E|v|² and E|S(x) - x|², since Q's error is 0 on average, and |v|² is (1 + α_S²)|x|² at most.

  A biased S that keeps elements as they are loses |x|² - |v|² <= (1 - δ_S)|x|² in other places than
  Q, so that E|C(x) - x|² <= |x|² - δ_Q |v|²: contractive with δ = δ_S δ_Q, where δ_Q may be
  1 - α_Q². If that is below 0, so is δ = δ_Q: the bound says nothing.

  Args:
    sparsifier: `top_k`, `chunk_top_k`, `random_k`, or another one whose payload is a NamedTuple
      with a field `values`: the elements that it keeps, a flat float32 array. They are as they are
      in x, or in E C(x) = x with a factor that makes it unbiased.
    quantizer: any `Compressor` that scales with its input.

  Returns:
    A `Compressor` whose message has the quantizer's message in the place of values.

  >>> from decomp.compressors.chunk_top_k import chunk_top_k
  >>> from decomp.compressors.stochastic_quantizer import stochastic_quantizer
  >>> compressor = chain(chunk_top_k(64, 4096), stochastic_quantizer(bits=2))
  >>> payload = compressor.encode(jax.random.key(0), jnp.arange(4096.0))
  >>> payload.values.codes.nbytes, payload.values.scale.nbytes, payload.indices.nbytes
  (16, 4, 64)

  References: Basu et al., Qsparse-local-SGD, arXiv 1906.02367.
  """
  check_scales('quantizer', quantizer)
  if sparsifier.correlated or quantizer.correlated:
    raise ValueError(
      f'compressor=chain({sparsifier}, {quantizer}): workers keep other elements, and cannot share '
      'dithers'
    )

  @functools.lru_cache
  def values_of(shape: tuple[int, ...]) -> Any:
    """The shape of the values that are kept of a leaf; None if there are none."""
    key, x = jax.eval_shape(lambda: jax.random.key(0)), jax.ShapeDtypeStruct(shape, jnp.float32)
    values: Any = getattr(jax.eval_shape(sparsifier.encode, key, x), 'values', None)
    flat = isinstance(values, jax.ShapeDtypeStruct) and len(values.shape) == 1
    return values if flat and values.dtype == jnp.float32 else None

  if values_of((64,)) is None:
    raise ValueError(
      f'sparsifier={sparsifier}: its payload must have a field `values`, a flat float32 array, as '
      'that of top_k, chunk_top_k and random_k has'
    )

  def pair(encode_values: Encode, decode_values: Decode) -> tuple[Encode, Decode]:
    def encode(key: jax.Array, x: jax.Array) -> PyTree:
      first, second = keys.fold_in(key, jnp.arange(2))
      payload = sparsifier.encode(first, x)
      return payload._replace(values=encode_values(second, payload.values))

    def decode(payload: PyTree, like: Any) -> jax.Array:
      values = decode_values(payload.values, values_of(like.shape))
      return sparsifier.decode(payload._replace(values=values), like)

    return encode, decode

  def kept(size: int) -> int:
    return math.prod(values_of((size,)).shape)

  unbiased = sparsifier.unbiased and quantizer.unbiased
  return Compressor(
    *pair(quantizer.encode, quantizer.decode),
    unbiased=unbiased,
    alpha2=_alpha2(sparsifier.alpha2, quantizer.alpha2, kept) if unbiased else None,
    delta=_delta(sparsifier.delta, quantizer, kept),
    quick=sparsifier.quick and quantizer.quick and decoded(*pair(*quantizer.quick)),
    name=f'chain({sparsifier}, {quantizer})',
  )


def _alpha2(first: Bound | None, second: Bound | None, kept: Callable[[int], int]) -> Bound | None:
  if first is None or second is None:
    return None
  return lambda size: (1 + first(size)) * (1 + second(kept(size))) - 1


def _delta(first: Bound | None, quantizer: Compressor, kept: Callable[[int], int]) -> Bound | None:
  second = quantizer.delta or _complement(quantizer.alpha2)
  if first is None or second is None:
    return None

  def delta(size: int) -> float:
    part = second(kept(size))
    return min(part, first(size) * part)

  return delta


def _complement(bound: Bound | None) -> Bound | None:
  return None if bound is None else lambda size: 1 - bound(size)
