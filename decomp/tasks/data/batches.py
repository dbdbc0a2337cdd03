"""Batches drawn inside jit as a pure function of (key, step, worker), and augmentation.

Nothing is remembered between steps, so a run resumes from its step number alone.
"""

import jax
import jax.numpy as jnp
import numpy as np

from decomp.engine.cpu import keys
from decomp.tasks.data.partition import Partition

_ROUNDS = 24

# Mean and standard deviation of each channel over the training images, in units of [0, 1].
STATISTICS = {
  'cifar10': ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
  'cifar100': ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
  'fashion_mnist': ((0.2860,), (0.3530,)),
  'mnist': ((0.1307,), (0.3081,)),
}


def sample(
  key: jax.Array,
  step: jax.Array,
  worker: jax.Array,
  partition: Partition,
  batch_size: int,
  *,
  reshuffle: bool = False,
  replacement: bool = False,
) -> jax.Array:
  """Draws the examples of one worker's batch; jit it, and vmap it over `worker`.

  A worker passes through its own shard in a new random order every epoch; a batch that meets
  the end of an epoch continues with the next one. Shards of different length are passed
  through exactly, each at its own pace.

  Args:
    key: The same at every step and for every worker.
    step: int32, from 0.
    worker: int32, this worker's number.
    partition: The shards of all workers.
    batch_size: Number of examples.
    reshuffle: Every epoch permutes the data of ALL workers, and the worker takes its slice of
      that order instead of its own shard; the shards then only set the slices' lengths.
    replacement: Each example is drawn uniformly from the shard, independently of all others.

  Returns:
    int32 [batch_size], positions in the dataset.

  Example:
    >>> shards = Partition(np.array([[0, 1], [2, 3]], np.int32), np.array([2, 2], np.int32))
    >>> sorted(sample(jax.random.key(0), 7, 1, shards, batch_size=2).tolist())
    [2, 3]
  """
  if reshuffle and replacement:
    raise ValueError('reshuffle=True, replacement=True: at most one of them may be True')
  limit = (2**32 - 1) // partition.indices.shape[1]  # so that _place stays within 32 bits
  if not 1 <= batch_size <= limit:
    raise ValueError(f'batch_size={batch_size}: must be from 1 to {limit}')
  indices, lengths = jnp.asarray(partition.indices), jnp.asarray(partition.lengths)
  if replacement:
    worker_key = keys.fold_in(keys.fold_in(key, worker), step)
    return indices[worker, jax.random.randint(worker_key, (batch_size,), 0, lengths[worker])]
  epoch, position = _place(step, batch_size, lengths[worker])
  if reshuffle:
    start = jnp.where(jnp.arange(len(lengths)) < worker, lengths, 0).sum().astype(jnp.uint32)
    return permute(key, epoch, start + position, lengths.sum())
  local = permute(keys.fold_in(key, worker), epoch, position, lengths[worker])
  return indices[worker, local]


def permute(key: jax.Array, epoch: jax.Array, position: jax.Array, size: jax.Array) -> jax.Array:
  """Evaluates a random permutation of [0, size) at some positions only, without a sort.

  The swap-or-not shuffle: in each round x has the partner `K - x mod size`, and a hash of the
  larger of the two decides whether they change places. Every round is a bijection for any
  size, so their composition is; after 24 rounds every value is equally likely at a position, up
  to 2**-24.

  Args:
    key: Decides the permutations.
    epoch: uint32, any shape: which permutation.
    position: uint32, the shape of epoch, below size.
    size: int32 scalar, number of permuted values.

  Returns:
    int32, the shape of position: the values at these positions.

  References:
    Hoang, Morris, Rogaway, "An enciphering scheme based on a card shuffle", CRYPTO 2012,
    https://arxiv.org/abs/1208.1176
  """
  size = jnp.asarray(size).astype(jnp.uint32)
  words = jax.random.bits(key, (_ROUNDS, 2, *[1] * position.ndim), jnp.uint32)
  # The epoch enters by a hash, not by fold_in: one batch may meet many epochs, and a threefry
  # key for every element of it would cost more than the shuffle.
  mixed = keys.murmur(keys.murmur(epoch)[None, None] ^ words)

  def swap_or_not(x: jax.Array, word: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
    shift, salt = word
    partner = jnp.where(x <= shift, shift - x, shift + (size - x))
    swap = keys.murmur(jnp.maximum(x, partner) ^ salt) & 1
    return jnp.where(swap == 1, partner, x), None

  # A few rounds at a time: one alone is too little work for a loop's step, and XLA fails to compile
  # all of them for some shapes.
  value, _ = jax.lax.scan(swap_or_not, position, (mixed[:, 0] % size, mixed[:, 1]), unroll=6)
  return value.astype(jnp.int32)


def augment_cifar(key: jax.Array, images: jax.Array) -> jax.Array:
  """Shifts images by up to an eighth of their size (CIFAR: 4 pixels) and mirrors half of them.

  Args:
    key: Decides shifts and mirrors.
    images: [batch, h, w, c] of any type; zeros come in from outside.

  Returns:
    Images of the same shape and type.
  """
  shift_key, flip_key = jax.random.split(key)
  most = images.shape[1] // 8
  shifts = jax.random.randint(shift_key, (len(images), 2), 0, 2 * most + 1)
  flip = jax.random.bernoulli(flip_key, shape=(len(images), 1, 1, 1))
  padded = jnp.pad(images, ((0, 0), (most, most), (most, most), (0, 0)))

  def crop(image: jax.Array, shift: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice(image, (shift[0], shift[1], 0), images.shape[1:])

  cropped = jax.vmap(crop)(padded, shifts)
  return jnp.where(flip, cropped[:, :, ::-1], cropped)


def normalize(
  images: jax.Array, statistics: str | tuple[tuple[float, ...], tuple[float, ...]]
) -> jax.Array:
  """Standardises images channel by channel.

  Args:
    images: [..., c], uint8 from 0 to 255, or floats in [0, 1].
    statistics: A name in `STATISTICS`, or (mean, standard deviation) with a number per channel.

  Returns:
    float32, the shape of images.

  Example:
    >>> normalize(np.full((1, 1), 255, np.uint8), ((0.5,), (0.25,)))
    Array([[2.]], dtype=float32)
  """
  if isinstance(statistics, str):
    if statistics not in STATISTICS:
      raise ValueError(f'statistics={statistics!r}: must be one of {", ".join(STATISTICS)}')
    statistics = STATISTICS[statistics]
  mean, std = (np.asarray(values, np.float32) for values in statistics)
  images = jnp.asarray(images)
  unit = 255 if jnp.issubdtype(images.dtype, jnp.integer) else 1
  scale, offset = 1 / (unit * std), mean / std
  shape = (1,) * (images.ndim - 1) + mean.shape
  return images.astype(jnp.float32) * scale.reshape(shape) - offset.reshape(shape)


def _place(step: jax.Array, batch_size: int, length: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the epoch and the place in it of each element of batch number `step`.

  This is divmod(step * batch_size + arange(batch_size), length), but the product would leave
  32 bits in a long run. `step % length` instead of `step` keeps it small.
  """
  length = length.astype(jnp.uint32)
  passes, rest = jnp.divmod(jnp.asarray(step).astype(jnp.uint32), length)
  position = rest * batch_size + jnp.arange(batch_size, dtype=jnp.uint32)
  return passes * batch_size + position // length, position % length
