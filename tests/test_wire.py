import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decomp import wire

FLOATS = ['float32', 'bfloat16', 'float16', 'float8_e4m3fn']
DTYPES = [*FLOATS, 'uint8', 'int8', 'int32', 'uint32', 'int16', 'bool']


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 32), st.integers(0, 70), st.integers(0, 2**31))
def test_codes_survive_and_take_no_more_bytes_than_said(width, count, seed):
  rng = np.random.default_rng(seed)
  codes = rng.integers(0, 2**width, count, dtype=np.uint64).astype(np.uint32)

  @jax.jit
  def run(codes):
    packed = wire.pack_bits(codes, width)
    return packed, wire.unpack_bits(packed, width, count)

  packed, back = run(codes)
  assert packed.dtype == jnp.uint8
  assert packed.shape == (wire.packed_size(count, width),)
  np.testing.assert_array_equal(back, codes)


@pytest.mark.parametrize('width', range(1, 18))
def test_packing_is_tight(width):
  for count in (1, 7, 8, 1000, 36_864):
    ideal = math.ceil(count * width / 8)
    assert ideal <= wire.packed_size(count, width) <= ideal + 2
  assert wire.packed_size(36_864, width) == 36_864 * width // 8


def test_the_common_widths_have_their_natural_size():
  assert wire.packed_size(9, 4) == 5
  assert wire.packed_size(9, 2) == 3
  assert wire.packed_size(9, 1) == 2
  assert wire.packed_size(9, 8) == 9


def random_array(rng, shape, dtype):
  if dtype == 'bool':
    return jnp.array(rng.random(shape) < 0.5)
  return jnp.array(rng.normal(size=shape) * 50).astype(dtype)


@settings(deadline=None, max_examples=25)
@given(
  st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=4),
  st.integers(0, 2**31),
)
def test_any_tree_survives_as_one_byte_vector(leaves, seed):
  rng = np.random.default_rng(seed)
  tree = {f'leaf{k}': random_array(rng, tuple(s), d) for k, (d, s) in enumerate(leaves)}
  shapes = jax.eval_shape(lambda: tree)
  buffer, back = jax.jit(lambda t: (wire.pack(t), wire.unpack(wire.pack(t), shapes)))(tree)
  assert buffer.dtype == jnp.uint8
  assert buffer.shape == (wire.size(tree),)
  assert jax.tree.structure(back) == jax.tree.structure(tree)
  for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_pack_works_under_jit_and_vmap():
  tree = {'a': jnp.arange(6.0).reshape(3, 2), 'b': jnp.arange(3, dtype=jnp.int16)}
  buffers = jax.jit(jax.vmap(wire.pack))(tree)
  assert buffers.shape == (3, 10)
  one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)
  back = jax.vmap(lambda buffer: wire.unpack(buffer, one))(buffers)
  np.testing.assert_array_equal(back['a'], tree['a'])


def test_what_has_no_whole_bytes_is_refused():
  with pytest.raises(ValueError, match='int4'):
    wire.pack({'a': jnp.zeros(3, jnp.int4)})
  with pytest.raises(ValueError, match='key'):
    wire.size(jax.random.key(0))
