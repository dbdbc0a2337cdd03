"""The tasks that come with decomp, made from `decomp.data` and `decomp.models`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decomp.base import PyTree
from decomp.tasks import data, models
from decomp.tasks.data import batches
from decomp.tasks.functional import functional
from decomp.tasks.supervised import supervised
from decomp.tasks.task import Batch, Task

IMAGE_SETS = ('cifar10', 'mnist', 'fashion_mnist')
"""Image sets that have a name as tasks of their own."""


def digits(model: Any = None) -> Task:
  """The 1,797 handwritten digits of 8 × 8 pixels that come with scikit-learn: no download.

  Args:
    model: a flax linen module; None for `models.mlp(10, hidden=(64,))`.
  """
  return classification(data.digits(), models.mlp(10, hidden=(64,)) if model is None else model)


def images(
  name: str, model: Any = None, augment: bool | None = None, size: int | None = None
) -> Task:
  """Any image set of TensorFlow Datasets that has been prepared.

  Args:
    name: such as 'cifar10', 'mnist' or 'fashion_mnist'.
    model: a flax linen module; None for `models.resnet20()` on CIFAR, else `models.cnn(...)`.
    augment: shifts and mirrors the training images; None for CIFAR only.
    size: height and width to which images are averaged down, such as 16 for CIFAR: a quarter of
      the work. None to leave them as they are.
  """
  dataset = data.tfds_images(name)
  if size is not None:
    dataset = data.shrink(dataset, size)
  cifar = name.startswith('cifar')
  default = models.resnet20 if cifar else models.cnn
  statistics = batches.STATISTICS.get(name) or _statistics(dataset.train['input'])
  return classification(
    dataset,
    default(dataset.num_classes) if model is None else model,
    normalize=lambda x: batches.normalize(x, statistics),
    augment=batches.augment_cifar if (cifar if augment is None else augment) else None,
  )


def text(model: Any = None, length: int = 64) -> Task:
  """The next character of the Python language reference, which comes with Python: no download.

  Args:
    model: a flax linen module from tokens to logits; None for `models.char_transformer(...)`.
    length: characters in an example.
  """
  dataset = data.text(length=length)
  default = models.char_transformer(dataset.num_classes, length=length)
  return classification(dataset, default if model is None else model)


def classification(
  dataset: data.Dataset,
  model: Any,
  normalize: Callable[[jax.Array], jax.Array] = lambda x: x,
  augment: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> Task:
  """Cross-entropy of a model on a dataset.

  Args:
    dataset: with 'input' and 'label'.
    model: a flax module or a pair of functions, as in `from_arrays`.
    normalize: raw inputs -> inputs of the model.
    augment: (key, raw inputs) -> raw inputs, in training only.
  """
  net = functional(model)

  def apply(params: PyTree, state: PyTree, inputs: jax.Array, *rest: Any) -> tuple[PyTree, PyTree]:
    logits, state = net.apply(params, state, inputs, *rest)
    needed = (len(inputs), *dataset.train['label'].shape[1:], dataset.num_classes)
    if logits.shape[:-1] != needed[:-1] or logits.shape[-1] < needed[-1]:
      raise ValueError(
        f'model gives outputs of shape {logits.shape}: {dataset.name} needs {needed}'
      )
    return logits, state

  name, checked = f'{dataset.name}/{net.name}', net._replace(apply=apply)
  return supervised(
    name, checked, dataset.train, dataset.test, normalize=normalize, augment=augment
  )


def logistic_regression(
  num_examples: int = 1000, dimension: int = 20, regularization: float = 1e-2, seed: int = 0
) -> Task:
  """Synthetic logistic regression whose optimum is known: `suboptimality` is f(x) - f*.

  It is evaluated on its training examples, since that is what f is made of.
  """
  problem = data.logistic_regression(num_examples, dimension, regularization, seed)

  def loss(params: PyTree, state: PyTree, batch: Batch, key: jax.Array) -> tuple[jax.Array, PyTree]:
    return problem.loss(params, batch), state

  def predict(params: PyTree, state: PyTree, inputs: jax.Array) -> jax.Array:
    return inputs @ params

  def evaluate(params: PyTree, state: PyTree, batch: Batch) -> dict[str, jax.Array]:
    scores = predict(params, state, batch['input'])
    signs = (2 * batch['label'] - 1).astype(params.dtype)
    losses = jax.nn.softplus(-signs * scores) + 0.5 * regularization * params @ params
    right = ((scores > 0) == (batch['label'] == 1)).astype(jnp.float32)
    return {'loss': losses, 'accuracy': right, 'suboptimality': losses - problem.optimal_value}

  train = problem.dataset.train
  start = (jnp.zeros(dimension, jnp.float32), ())
  name = 'logistic_regression'
  return Task(name, lambda key: start, loss, evaluate, train, train, predict=predict)


def quadratic(
  num_workers: int = 8,
  dimension: int = 20,
  heterogeneity: float = 1.0,
  noise: float = 0.0,
  condition: float = 10.0,
  seed: int = 0,
) -> Task:
  """One quadratic for each worker, with the optimum of their mean known.

  An "example" is the number of a worker, so partition it by label: then worker i draws from f_i.
  """
  problem = data.quadratic(num_workers, dimension, heterogeneity, noise, condition, seed)

  def loss(params: PyTree, state: PyTree, batch: Batch, key: jax.Array) -> tuple[jax.Array, PyTree]:
    values = jax.vmap(problem.loss, in_axes=(None, 0))(params, batch['label'])
    # A linear term whose gradient is the noise of a stochastic gradient.
    scale = noise / dimension**0.5 / len(batch['label']) ** 0.5
    return values.mean() + scale * jax.random.normal(key, params.shape) @ params, state

  def evaluate(params: PyTree, state: PyTree, batch: Batch) -> dict[str, jax.Array]:
    gap = problem.suboptimality(params)
    return {'loss': jnp.broadcast_to(gap, batch['label'].shape)}

  train = {'label': np.arange(num_workers, dtype=np.int32)}
  start = (jnp.zeros(dimension, jnp.float32), ())
  test = {'label': train['label'][:1]}
  return Task('quadratic', lambda key: start, loss, evaluate, train, test)


def _statistics(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
  """Mean and standard deviation of each channel, of pixels in [0, 1]."""
  pixels = images.reshape(-1, images.shape[-1]) / 255
  return tuple(pixels.mean(0).tolist()), tuple((pixels.std(0) + 1e-6).tolist())
