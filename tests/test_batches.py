"""Batches: exact epochs, statistics of the shuffle, long runs, augmentation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decomp.tasks.data import batches
from decomp.tasks.data.partition import Partition, iid

KEY = jax.random.key(0)
UNEVEN = Partition(  # shards of 5, 1 and 3 examples
  np.array([[8, 0, 3, 5, 1], [7, -1, -1, -1, -1], [2, 6, 4, -1, -1]], np.int32),
  np.array([5, 1, 3], np.int32),
)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _permutations(key, num_epochs, size):
  """The whole permutation of each epoch: [num_epochs, size]."""
  epochs = jax.lax.broadcasted_iota(jnp.uint32, (num_epochs, size), 0)
  positions = jax.lax.broadcasted_iota(jnp.uint32, (num_epochs, size), 1)
  return batches.permute(key, epochs, positions, size)


def _stream(partition, batch_size, steps, **options):
  """What every worker draws, one batch after the other: [workers, steps * batch_size]."""
  draw = functools.partial(batches.sample, batch_size=batch_size, **options)
  by_worker = jax.vmap(draw, in_axes=(None, None, 0, None))
  by_step = jax.jit(jax.vmap(by_worker, in_axes=(None, 0, None, None)))
  drawn = by_step(KEY, jnp.arange(steps), jnp.arange(len(partition.lengths)), partition)
  assert drawn.dtype == jnp.int32
  return np.asarray(drawn).swapaxes(0, 1).reshape(len(partition.lengths), -1)


@pytest.mark.parametrize('size', [1, 2, 3, 7, 64, 1000, 6251])
def test_permute_is_a_bijection(size):
  found = np.sort(_permutations(KEY, 3, size), axis=1)
  np.testing.assert_array_equal(found, np.tile(np.arange(size), (3, 1)))


def test_permute_handles_the_largest_size():
  size = 2**31 - 1
  positions = jnp.arange(size - 1000, size, dtype=jnp.uint32)
  found = np.asarray(batches.permute(KEY, jnp.zeros_like(positions), positions, size))
  assert len(np.unique(found)) == 1000
  assert found.min() >= 0
  assert abs(found.mean() / size - 0.5) < 4.5 / np.sqrt(12 * 1000)


def _z_of_chi_square(counts):
  """Standardised chi-square of a table in which all cells are equally likely."""
  expected = counts.mean()
  chi_square = ((counts - expected) ** 2 / expected).sum()
  return (chi_square - counts.size) / np.sqrt(2 * counts.size)


@pytest.mark.parametrize('size', [6, 16, 37])
def test_every_value_is_equally_likely_at_every_position(size):
  found = np.asarray(_permutations(KEY, 20_000, size))
  counts = np.zeros((size, size))
  np.add.at(counts, (np.broadcast_to(np.arange(size), found.shape), found), 1)
  assert abs(_z_of_chi_square(counts)) < 4.5


def test_all_permutations_of_four_are_equally_likely():
  found = np.asarray(_permutations(KEY, 24_000, 4))
  _, counts = np.unique(found @ 4 ** np.arange(4), return_counts=True)
  assert counts.size == 24
  assert abs(_z_of_chi_square(counts)) < 4.5


def _correlation_z(a, b):
  """Correlation of two arrays in units of its standard deviation under independence."""
  return np.corrcoef(a.ravel(), b.ravel())[0, 1] * np.sqrt(a.size)


def test_neighbouring_positions_and_epochs_are_independent():
  size = 1000
  found = np.asarray(_permutations(KEY, 200, size))
  assert abs(_correlation_z(found[:, 1:], found[:, :-1])) < 4.5
  assert abs(_correlation_z(found[1:], found[:-1])) < 4.5
  # Without enough rounds the difference of two neighbours survives far too often.
  differences = np.bincount(((found[:, 1:] - found[:, :-1]) % size).ravel(), minlength=size)[1:]
  assert abs(_z_of_chi_square(differences)) < 4.5
  # Two independent permutations agree in one place on average.
  agreements = (found[1:] == found[:-1]).sum(axis=1)
  assert abs(agreements.mean() - 1) < 4.5 / np.sqrt(len(agreements))


def test_workers_are_independent():
  partition = Partition(np.tile(np.arange(1000, dtype=np.int32), (200, 1)), np.full(200, 1000))
  found = _stream(partition, batch_size=1000, steps=1)
  np.testing.assert_array_equal(np.sort(found, axis=1), np.tile(np.arange(1000), (200, 1)))
  assert abs(_correlation_z(found[1:], found[:-1])) < 4.5
  agreements = (found[1:] == found[:-1]).sum(axis=1)
  assert abs(agreements.mean() - 1) < 4.5 / np.sqrt(len(agreements))


@pytest.mark.parametrize('batch_size', [1, 2, 7])  # 7 spans several epochs of a small shard
def test_each_worker_passes_through_its_shard_exactly(batch_size):
  drawn = _stream(UNEVEN, batch_size, steps=60)
  for worker, row in enumerate(drawn):
    shard = np.sort(UNEVEN.shard(worker))
    epochs = row[: len(row) // len(shard) * len(shard)].reshape(-1, len(shard))
    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(shard, (len(epochs), 1)))
    assert len(shard) == 1 or len(np.unique(epochs, axis=0)) > 1


@pytest.mark.parametrize('partition', [UNEVEN, iid(np.zeros(50), 4)], ids=['uneven', 'iid'])
def test_reshuffle_deals_out_all_examples_every_epoch(partition):
  total = partition.lengths.sum()
  drawn = _stream(partition, batch_size=2, steps=100, reshuffle=True)
  for epoch in range(5):
    slices = [
      row[epoch * length : (epoch + 1) * length]
      for row, length in zip(drawn, partition.lengths, strict=True)
    ]
    np.testing.assert_array_equal(np.sort(np.concatenate(slices)), np.arange(total))
  assert len(np.unique(drawn[0])) > partition.lengths[0]  # it left its own shard


def test_replacement_draws_uniformly_from_the_shard():
  drawn = _stream(UNEVEN, batch_size=100, steps=300, replacement=True)
  for worker, row in enumerate(drawn):
    values, counts = np.unique(row, return_counts=True)
    np.testing.assert_array_equal(values, np.sort(UNEVEN.shard(worker)))
    assert abs(_z_of_chi_square(counts)) < 4.5
  repeats = (drawn[0, 1:] == drawn[0, :-1]).mean()
  assert abs(repeats - 0.2) < 4.5 * np.sqrt(0.2 * 0.8 / drawn.shape[1])


@pytest.mark.parametrize('step', [0, 1, 12_345, 2**24 + 1, 2**31 - 1])
def test_place_agrees_with_exact_arithmetic(step):
  for batch_size, length in [(1, 1), (32, 7), (128, 50_000), (1000, 1_300_000)]:
    epoch, position = batches._place(jnp.int32(step), batch_size, jnp.int32(length))
    exact = step * batch_size + np.arange(batch_size, dtype=object)
    np.testing.assert_array_equal(np.asarray(position), exact % length)
    np.testing.assert_array_equal(np.asarray(epoch), exact // length % 2**32)


def test_sample_is_a_function_of_key_step_and_worker():
  draw = jax.jit(batches.sample, static_argnums=4)
  partition = iid(np.zeros(1000), 2)
  first = draw(KEY, 5, 0, partition, 100)
  np.testing.assert_array_equal(first, draw(KEY, 5, 0, partition, 100))
  np.testing.assert_array_equal(first, batches.sample(KEY, 5, 0, partition, 100))
  for other in [(jax.random.key(1), 5, 0), (KEY, 6, 0), (KEY, 5, 1)]:
    assert not np.array_equal(first, draw(*other, partition, 100))


def test_sample_refuses_what_it_cannot_do():
  with pytest.raises(ValueError, match='replacement=True'):
    batches.sample(KEY, 0, 0, UNEVEN, 2, reshuffle=True, replacement=True)
  for batch_size in (0, 2**30):
    with pytest.raises(ValueError, match=f'batch_size={batch_size}: must be from 1 to'):
      batches.sample(KEY, 0, 0, UNEVEN, batch_size)


@pytest.mark.parametrize(('dtype', 'height'), [(np.uint8, 32), (np.float32, 32), (np.uint8, 16)])
def test_augment_shows_every_crop_and_mirror_and_nothing_else(dtype, height):
  image = np.random.default_rng(0).integers(1, 255, (height, 6, 3)).astype(dtype)
  copies = np.tile(image, (8000, 1, 1, 1))
  found = np.asarray(jax.jit(batches.augment_cifar)(KEY, copies))
  assert found.dtype == dtype
  most, shifts = height // 8, range(height // 4 + 1)
  padded = np.pad(image, ((most, most), (most, most), (0, 0)))
  crops = [padded[i : i + height, j : j + 6] for i in shifts for j in shifts]
  expected = {view.tobytes(): k for k, view in enumerate(crops + [c[:, ::-1] for c in crops])}
  counts = np.bincount([expected[view.tobytes()] for view in found], minlength=len(expected))
  assert abs(_z_of_chi_square(counts)) < 4.5


def test_normalize_standardises():
  images = np.random.default_rng(0).integers(0, 256, (50, 4, 4, 3)).astype(np.uint8)
  scaled = images.astype(np.float32) / 255
  statistics = tuple(f(scaled, axis=(0, 1, 2)) for f in (np.mean, np.std))
  for version in (images, scaled, jnp.asarray(images)):
    found = batches.normalize(version, statistics)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found.mean((0, 1, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(found.std((0, 1, 2)), 1, rtol=1e-5)
  mean, std = batches.STATISTICS['cifar10']
  np.testing.assert_allclose(
    batches.normalize(images, 'cifar10'), (scaled - mean) / std, rtol=1e-4, atol=1e-5
  )
  with pytest.raises(ValueError, match="statistics='cifar11'"):
    batches.normalize(images, 'cifar11')
