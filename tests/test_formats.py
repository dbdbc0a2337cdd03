"""Dense codecs against their definitions in NumPy, and against numbers of others."""

import itertools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from decomp import compressors, wire

SIZE = 65536
RANDOM = np.random.default_rng(0)
GAUSSIAN = RANDOM.normal(size=SIZE).astype(np.float32)
WIDE = (GAUSSIAN * 2.0 ** RANDOM.integers(-20, 20, SIZE)).astype(np.float32)

# (elements of the format, block, α² to the nearest and at random on Gaussian input)
FORMATS = {
  'mxfp8': (ml_dtypes.float8_e4m3fn, 32, 8.7e-4, 1.41e-3),
  'mxfp8_e5m2': (ml_dtypes.float8_e5m2, 32, 2.9e-3, 5.6e-3),
  'mxfp6': (ml_dtypes.float6_e2m3fn, 32, 8.1e-4, 1.61e-3),
  'mxfp6_e3m2': (ml_dtypes.float6_e3m2fn, 32, 2.9e-3, 5.6e-3),
  'mxfp4': (ml_dtypes.float4_e2m1fn, 32, 0.0134, 0.0272),
  'nvfp4': (ml_dtypes.float4_e2m1fn, 16, 0.0090, 0.022),
  'fp8': (ml_dtypes.float8_e4m3fn, 1024, 7.0e-4, 1.40e-3),
  'e3m0': (None, 512, 0.038, 0.081),
}


def magnitudes(kind):
  """All finite ones that are not negative."""
  if kind is None:
    return np.array([0, *2.0 ** np.arange(-6, 1)])
  codes = np.arange(2 ** (ml_dtypes.finfo(kind).bits - 1), dtype=np.uint8)
  values = codes.view(kind).astype(np.float64)
  return values[np.isfinite(values)]


def scales(name, x, stochastic):
  """Of each block, by the definition, in the order of the elements."""
  kind, block, *_ = FORMATS[name]
  values = magnitudes(kind)
  top, most = np.float32(values[-1]), np.abs(x).reshape(-1, block).max(1)
  if name.startswith('mx'):
    exponent = np.floor(np.log2(most.astype(np.float64)))
    scale = 2.0 ** (exponent - np.floor(np.log2(top)))
    if stochastic:
      scale = np.where(most > top * scale, 2 * scale, scale)
  elif name == 'nvfp4':
    unit = most.max() / np.float32(6 * 448)
    wanted = most / np.float32(6) / unit
    e4m3 = magnitudes(ml_dtypes.float8_e4m3fn)
    above = e4m3[np.minimum(np.searchsorted(e4m3, wanted), len(e4m3) - 1)]
    near = wanted.astype(ml_dtypes.float8_e4m3fn)
    scale = (above if stochastic else near).astype(np.float32) * unit
  else:
    scale = most / top
  return np.repeat(scale.astype(np.float32), block)


def nearest(kind, x):
  """Ties to the even code, which is where ml_dtypes and IEEE 754 put them."""
  values = magnitudes(kind)
  if kind is None:
    number = np.searchsorted((values[1:] + values[:-1]) / 2, np.abs(x))
    return np.sign(x) * values[number]
  return np.clip(x, -values[-1], values[-1]).astype(kind).astype(np.float32)


@pytest.mark.parametrize('name', FORMATS)
def test_numbers_of_the_format(name):
  """To the nearest, bit by bit; at random, one of two neighbours with the right probabilities.

  Errors at random have no mean among all elements, nor among the largest of all blocks, which
  would be cut off where the scale is that of rounding to the nearest.
  """
  kind, block, *expected = FORMATS[name]
  values = magnitudes(kind)
  exact = np.resize(np.concatenate([values, -values]), (SIZE // block, block))
  exact[:, 0] = values[-1]
  inputs = np.stack([GAUSSIAN, WIDE, exact.astype(np.float32).reshape(-1)])

  @jax.jit
  @jax.vmap
  def both(key, x):
    pair = compressors.block_float(name), compressors.block_float(name, stochastic=True)
    return [c.decode(c.encode(key, x), x) for c in pair]

  keys = jax.random.split(jax.random.key(0), len(inputs))
  near, drawn = (np.asarray(y) for y in both(keys, inputs))
  for y in (near, drawn):
    np.testing.assert_allclose(y[2], inputs[2], rtol=1e-6)
  for y, alpha2 in zip((near, drawn), expected, strict=True):
    error = y[0] - GAUSSIAN.astype(np.float64)
    assert (error**2).sum() / (GAUSSIAN**2).sum() == pytest.approx(alpha2, rel=0.03)
  for x, y, z in zip(inputs[:2], near, drawn, strict=False):
    scale = scales(name, x, False)
    wanted = nearest(kind, np.divide(x, scale, out=np.zeros_like(x), where=scale > 0)) * scale
    # The last bit of a scale that is no power of two may put an element beyond the next edge.
    differ = np.abs(y - wanted) > (0 if name.startswith('mx') else 3e-7) * np.abs(wanted)
    assert differ.sum() <= (0 if name.startswith('mx') else 3)
    scale = scales(name, x, True).astype(np.float64)
    place = np.minimum(np.abs(x) / scale, values[-1])
    above = np.maximum(np.searchsorted(values, place), 1)
    low, high = values[above - 1], values[above]
    found = np.abs(z) / scale
    assert (np.minimum(np.abs(found - low), np.abs(found - high)) <= 1e-6 * high).all()
    error, variance = found - place, (high - place) * (place - low)
    largest = np.abs(x) == np.repeat(np.abs(x).reshape(-1, block).max(1), block)
    for part in (np.ones(SIZE, bool), largest):
      assert abs(error[part].sum()) <= 5 * math.sqrt(variance[part].sum()) + 1e-6 * part.sum()
    weight = scale**2 / np.abs(x)
    spread = math.sqrt((weight**2 * variance * high**2).sum())
    assert abs((weight * (error**2 - variance)).sum()) <= 5 * spread


def roundtrip(compressor, *several):
  run = jax.jit(jax.vmap(lambda key, x: compressor.decode(compressor.encode(key, x), x)))
  keys = jax.random.split(jax.random.key(0), len(several))
  return np.asarray(run(keys, np.stack(several).astype(np.float32))).astype(np.float64)


def test_what_is_not_finite_costs_one_block_of_the_mx_formats():
  x = GAUSSIAN[:96].copy()
  x[40] = np.inf
  [y] = roundtrip(compressors.block_float('mxfp4'), x)
  np.testing.assert_array_equal(np.isnan(y), np.arange(96) // 32 == 1)


def test_dynamic_map_against_its_book():
  book = [0.0, 1.0]
  for i in range(7):
    edges = np.linspace(0.1, 1, 2**i + 1)
    book += [sign * 10.0 ** (i - 6) * p for p in (edges[1:] + edges[:-1]) / 2 for sign in (-1, 1)]
  book = np.sort(book)
  assert len(book) == 256
  x = np.concatenate([GAUSSIAN, WIDE[: SIZE // 2], book, np.zeros(3840)]).astype(np.float32)
  [y] = roundtrip(compressors.dynamic_map(), x)
  most = np.repeat(np.abs(x).reshape(-1, 4096).max(1), 4096).astype(np.float64)
  place = x / most
  right = np.searchsorted(book, place).clip(1, 255)
  least = np.minimum(np.abs(book[right] - place), np.abs(book[right - 1] - place))
  assert (np.abs(np.abs(y / most - place) - least) <= 3e-7 * np.abs(place)).all()
  np.testing.assert_allclose(y[-4096:-3840], book, rtol=2e-7)
  error = ((y - x)[:SIZE] ** 2).sum() / (GAUSSIAN**2).sum()
  assert error == pytest.approx(1.74e-4, rel=0.03)


@pytest.mark.parametrize(('bits', 'expected'), [(2, 0.180), (4, 0.0124), (8, 3.0e-4)])
def test_statistical_against_its_definition(bits, expected):
  """Not centred, and some elements far out; float32 may put one next to an edge elsewhere."""
  count = 2**bits
  shifted = GAUSSIAN + np.where(np.arange(SIZE) % 500 == 0, 20 * GAUSSIAN, 3).astype(np.float32)
  constant = np.full(SIZE, 1e6)
  *several, unchanged = roundtrip(compressors.statistical(bits), GAUSSIAN, shifted, constant)
  np.testing.assert_allclose(unchanged, constant, rtol=1e-6)
  for x, y in zip((GAUSSIAN, shifted), several, strict=True):
    wide = x.astype(np.float64)
    codes = np.round((wide - wide.mean()) / (6 * wide.std() / count) + count / 2)
    codes = codes.clip(0, count - 1).astype(int)
    means = np.bincount(codes, wide, count) / np.maximum(np.bincount(codes, minlength=count), 1)
    assert (np.abs(y - means[codes]) > 2e-3 * wide.std() * 6 / count).mean() < 1e-3
    if x is GAUSSIAN:
      assert ((y - wide) ** 2).sum() / (wide**2).sum() == pytest.approx(expected, rel=0.02)


def test_ternary_has_exactly_the_noise_of_theory():
  [y] = roundtrip(compressors.ternary(), GAUSSIAN)
  most, x = np.abs(GAUSSIAN).max(), GAUSSIAN.astype(np.float64)
  assert set(np.unique(y)) == {-most, 0, most}
  assert (np.sign(y) * np.sign(x) >= 0).all()
  variance = most * np.abs(x) - x**2
  fourth = variance * ((most - np.abs(x)) ** 3 + np.abs(x) ** 3)  # E of the error's fourth power
  spread = 5 * math.sqrt((fourth / most).sum() * most)
  assert abs(((y - x) ** 2 - variance).sum()) <= spread
  assert abs((y - x).sum()) <= 5 * math.sqrt(variance.sum())


def test_affine_uses_all_codes_between_the_extremes():
  x = GAUSSIAN + np.float32(5)
  constant = np.full(SIZE, 0.3, np.float32)
  y, unchanged = roundtrip(compressors.affine(3), x, constant)
  np.testing.assert_array_equal(unchanged, constant)
  low, step = x.min(), (x.max() - x.min()) / 7
  number = (y - low) / step
  np.testing.assert_allclose(number, np.round(number), atol=1e-5)
  assert set(np.round(number)) == set(range(8))
  part = np.mod((x - low) / step, 1).astype(np.float64)
  assert ((y - x) ** 2).mean() == pytest.approx(step**2 * (part * (1 - part)).mean(), rel=0.02)
  assert abs((y - x).mean()) <= 5 * step * math.sqrt((part * (1 - part)).mean() / SIZE)


BYTES = {
  'mxfp8': (1000 + 32, 4096 + 128),
  'mxfp8_e5m2': (1000 + 32, 4096 + 128),
  'mxfp6': (750 + 32, 3072 + 128),
  'mxfp6_e3m2': (750 + 32, 3072 + 128),
  'mxfp4': (500 + 32, 2048 + 128),
  'nvfp4': (500 + 63 + 4, 2048 + 256 + 4),
  'fp8': (1000 + 4, 4096 + 16),
  'e3m0': (500 + 8, 2048 + 32),
  'dynamic_map': (1000 + 4, 4096 + 4),
  'statistical(2)': (250 + 16, 1024 + 16),
  'statistical(8)': (1000 + 1024, 4096 + 1024),
  'ternary': (200 + 4, 820 + 4),
  'affine(4)': (500 + 8, 2048 + 8),
}


@pytest.mark.parametrize('name', BYTES)
def test_bytes(name):
  call, _, bits = name.rstrip(')').partition('(')
  if name in FORMATS:
    several = [compressors.block_float(name, stochastic) for stochastic in (False, True)]
  else:
    several = [getattr(compressors, call)(*map(int, bits))]
  for compressor, (size, expected) in itertools.product(
    several, zip((1000, 4096), BYTES[name], strict=True)
  ):
    x = jax.ShapeDtypeStruct((size,), jnp.float32)
    assert wire.size(jax.eval_shape(compressor.encode, jax.random.key(0), x)) == expected


def test_trits():
  """Five runs of elements in a byte: those of the first are worth 1, the next ones 3, 9, ..."""
  shapes = [(0,), (1,), (11,), (10, 3), (3, 7)]
  several = [np.random.default_rng(0).integers(0, 3, shape, np.uint8) for shape in shapes]

  @jax.jit
  def there_and_back(several):
    packed = [wire.pack_trits(codes) for codes in several]
    return packed, [wire.unpack_trits(p, shape) for p, shape in zip(packed, shapes, strict=True)]

  for codes, packed, back in zip(several, *there_and_back(several), strict=True):
    assert len(packed) == -(-codes.size // 5)
    runs = np.append(codes, np.zeros(5 * len(packed) - codes.size)).reshape(5, -1)
    np.testing.assert_array_equal(packed, 3 ** np.arange(5) @ runs)
    np.testing.assert_array_equal(back, codes)


@pytest.mark.parametrize(
  ('make', 'words'),
  [
    (lambda: compressors.block_float('fp4'), "format='fp4': must be one of mxfp8, mxfp8_e5m2"),
    (lambda: compressors.statistical(1), 'bits=1: must be a whole number from 2 to 8'),
    (lambda: compressors.affine(9), 'bits=9: must be a whole number from 1 to 8'),
  ],
)
def test_bad_arguments_are_named(make, words):
  with pytest.raises(ValueError, match=words):
    make()
