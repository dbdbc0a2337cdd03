"""Places of kept elements: exact, and as few bits as the code of Elias and Fano needs."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decomp import compressors, wire
from decomp.compressors import places


@functools.lru_cache
def round_trip(count, size):
  return jax.jit(lambda indices: places.decode(places.encode(indices, size), count, size))


def packed(count, size):
  """Bytes that the places of `count` of `size` elements make."""
  indices = jax.ShapeDtypeStruct((count,), 'int32')
  return jax.eval_shape(lambda indices: places.encode(indices, size), indices).size


# Few pairs, each compiled once, for many draws: none, one, few, many and all.
PAIRS = [(0, 5), (1, 1), (1, 300), (9, 300), (60, 300), (100, 300), (300, 300)]


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(PAIRS), st.randoms(use_true_random=False))
def test_round_trip(pair, random):
  """Also where places crowd: at the start, at the end, or in one block of the high bits."""
  count, size = pair
  start = random.randint(0, size - count)
  end = random.choice([size, start + count, random.randint(start + count, size)])
  indices = np.array(sorted(random.sample(range(start, end), count)), np.int32)
  found = round_trip(count, size)(jnp.array(indices))
  assert found.dtype == jnp.int32
  np.testing.assert_array_equal(found, indices)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 10**7), st.floats(0, 1))
def test_size(size, fraction):
  """Never longer than plain packing or a bit for each; within l + 3 bits a place, and rounding."""
  count = round(fraction * size)
  low = int(math.log2(size / count)) if count else 0
  exact = count * (low + 1) + math.ceil(size / 2**low)
  most = min(exact / 8 + 4, math.ceil(size / 8), wire.packed_size(count, (size - 1).bit_length()))
  assert packed(count, size) <= most


@pytest.mark.parametrize(
  ('count', 'size', 'bits'), [(10**4, 10**6, 8.5625), (64, 4096, 8.0), (640, 40960, 8.0)]
)
def test_bits_of_a_place(count, size, bits):
  assert packed(count, size) == math.ceil(count * bits / 8)


def test_a_message_of_top_k_is_a_fifth_shorter_than_with_plain_places():
  shapes = jax.eval_shape(lambda: jax.random.key(0)), jax.ShapeDtypeStruct((10**6,), 'float32')
  message = wire.size(jax.eval_shape(compressors.top_k(0.01).encode, *shapes))
  assert message == 4 * 10**4 + math.ceil(8.5625 * 10**4 / 8)
  assert message / (4 * 10**4 + wire.packed_size(10**4, 20)) == pytest.approx(0.78, abs=0.005)
