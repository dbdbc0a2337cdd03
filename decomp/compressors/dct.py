"""The cosine transform of chunks, before any other compressor."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.fft

from decomp.base import Compressor, Decode, Encode, PyTree
from decomp.checks import whole
from decomp.compressors.common import check_scales, decoded

MOST = 4096
"""The longest chunk: its transform is a matrix."""


def dct(compressor: Compressor, chunk: int) -> Compressor:
  """Compresses the cosine coefficients of every `chunk` elements of a leaf.

  What is smooth along a leaf has few large coefficients, and a sparsifier then keeps more of it.
  With T the orthonormal DCT-II of a chunk of n elements,

    T[j, i] = √(2/n) cos(π j (2 i + 1) / 2 n),   T[0, i] = √(1/n),

  C(x) = Tᵀ C'(T x). The last chunk, which may be shorter, has a transform of its own length, so
  that there are as many coefficients as elements. Lengths and errors do not change under T: α² and
  δ are those of the compressor, and it is unbiased if that is.

  Args:
    compressor: for the coefficients, which are one flat array; such as `chunk_top_k(8, chunk)`.
    chunk: the length of a chunk, 4096 at most.

  Returns:
    A `Compressor` with the same number of bytes.

  >>> from decomp.compressors.top_k import top_k
  >>> x, compressor = jnp.ones(64), dct(top_k(0.02), chunk=64)
  >>> compressor.decode(compressor.encode(jax.random.key(0), x), x)[:3].round(5)
  Array([1., 1., 1.], dtype=float32)

  Reference: Peng et al., DeMo: Decoupled Momentum Optimization, arXiv 2411.19870; there with a
  transform of both axes of a matrix.
  """
  check_scales('compressor', compressor)
  chunk = whole('chunk', chunk, 1, MOST)

  def pair(encode_flat: Encode, decode_flat: Decode) -> tuple[Encode, Decode]:
    def encode(key: jax.Array, x: jax.Array) -> PyTree:
      return encode_flat(key, _transform(x.astype(jnp.float32).reshape(-1), chunk))

    def decode(payload: PyTree, like: Any) -> jax.Array:
      flat = decode_flat(payload, jax.ShapeDtypeStruct((like.size,), jnp.float32))
      return _transform(flat, chunk, back=True).reshape(like.shape).astype(like.dtype)

    return encode, decode

  encode, decode = pair(compressor.encode, compressor.decode)
  return compressor._replace(
    encode=encode,
    decode=decode,
    quick=compressor.quick and decoded(*pair(*compressor.quick)),
    name=f'dct({compressor}, chunk={chunk})',
  )


def _transform(x: jax.Array, chunk: int, back: bool = False) -> jax.Array:
  """The coefficients of a flat array's chunks in order, or the elements again."""
  whole = x.size // chunk * chunk
  parts = x[:whole].reshape(-1, chunk), x[whole:][None]
  return jnp.concatenate([_product(part, back).reshape(-1) for part in parts])


def _product(rows: jax.Array, back: bool) -> jax.Array:
  """Every row's transform."""
  if not rows.size:
    return rows
  matrix = scipy.fft.dct(np.eye(rows.shape[1]), norm='ortho').astype(np.float32)
  return jnp.matmul(rows, matrix.T if back else matrix, precision='highest')
