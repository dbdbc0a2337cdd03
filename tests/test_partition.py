"""Every example belongs to exactly one worker, and the shards look as they should."""

import numpy as np
import pytest

from decomp.tasks.data import partition

LABELS = np.random.default_rng(0).integers(0, 10, 1003).astype(np.int32)

PARTITIONS = {
  'iid': lambda n: partition.iid(LABELS, n, seed=1),
  'by_label': lambda n: partition.by_label(LABELS, n),
  'dirichlet': lambda n: partition.dirichlet(LABELS, n, alpha=0.3, seed=1),
}


@pytest.mark.parametrize('num_workers', [1, 2, 7, 16])
@pytest.mark.parametrize('name', PARTITIONS)
def test_every_example_has_exactly_one_owner(name, num_workers):
  found = PARTITIONS[name](num_workers)
  shards = [found.shard(worker) for worker in range(num_workers)]
  assert found.indices.shape == (num_workers, found.lengths.max())
  assert found.indices.dtype == found.lengths.dtype == np.int32
  assert found.lengths.min() >= 1
  np.testing.assert_array_equal(np.sort(np.concatenate(shards)), np.arange(len(LABELS)))
  padding = np.arange(found.lengths.max())[None] >= found.lengths[:, None]
  np.testing.assert_array_equal(found.indices == -1, padding)


@pytest.mark.parametrize('name', PARTITIONS)
def test_histogram_counts_every_label(name):
  histogram = PARTITIONS[name](5).histogram(LABELS)
  assert histogram.shape == (5, 10)
  np.testing.assert_array_equal(histogram.sum(axis=0), np.bincount(LABELS))
  np.testing.assert_array_equal(histogram.sum(axis=1), PARTITIONS[name](5).lengths)


@pytest.mark.parametrize('name', ['iid', 'by_label'])
def test_sizes_differ_by_at_most_one(name):
  assert np.ptp(PARTITIONS[name](16).lengths) == 1


def test_iid_shards_have_the_labels_of_the_whole():
  labels = np.repeat(np.arange(10), 1000)
  histogram = partition.iid(labels, 4, seed=0).histogram(labels)
  deviation = (histogram - 250) / np.sqrt(1000 * 0.25 * 0.75)
  assert np.abs(deviation).max() < 4.5
  assert (deviation**2).mean() > 0.3  # not a stratified split either


def test_by_label_shards_are_contiguous_in_label():
  found = partition.by_label(LABELS, 8)
  owned = [LABELS[found.shard(worker)] for worker in range(8)]
  assert np.all(np.diff(np.concatenate(owned)) >= 0)
  assert max(len(np.unique(labels)) for labels in owned) <= 3


def test_dirichlet_shares_have_the_right_spread():
  """The share of a worker in a class has mean 1/n and variance (n-1) / (n² (n alpha + 1))."""
  n, alpha = 5, 0.5
  labels = np.repeat(np.arange(1000), 100)
  shares = partition.dirichlet(labels, n, alpha).histogram(labels) / 100
  variance = (n - 1) / (n**2 * (n * alpha + 1))
  z = (shares.mean(axis=1) - 1 / n) / np.sqrt(variance / 1000)
  assert np.abs(z).max() < 4.5
  np.testing.assert_allclose(shares.var(), variance, rtol=0.1)


def test_seeds_matter_and_repeat():
  for draw in (partition.iid, lambda *a, seed: partition.dirichlet(*a, alpha=1.0, seed=seed)):
    first, again, other = (draw(LABELS, 4, seed=seed).indices for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
  ('draw', 'message'),
  [
    (lambda: partition.iid(LABELS, 0), 'num_workers=0'),
    (lambda: partition.by_label(LABELS[:3], 4), 'num_workers=4: must be from 1 to 3'),
    (lambda: partition.dirichlet(LABELS, 4, alpha=0.0), r'alpha=0\.0'),
    (lambda: partition.dirichlet(LABELS, 4, alpha=float('nan')), 'alpha=nan'),
    (lambda: partition.dirichlet(LABELS, 100, alpha=1e-3), 'num_workers=100 smaller'),
    (lambda: partition.by_label(LABELS[:, None], 4), r'shape \(1003, 1\)'),
    (lambda: partition.by_label(LABELS / 2, 4), 'float64'),
  ],
)
def test_errors_name_the_argument(draw, message):
  with pytest.raises(ValueError, match=message):
    draw()


@pytest.mark.parametrize('classes', [10, 30])
def test_plot_draws_a_bar_per_worker_and_label(classes):
  labels = np.arange(600) % classes
  found = partition.dirichlet(labels, 3, alpha=1.0)
  ax = found.plot(labels)
  widths = np.array([bar.get_width() for bar in ax.patches]).reshape(classes, 3)
  np.testing.assert_array_equal(widths.T, found.histogram(labels))
  assert found.plot(labels, ax=ax) is ax
