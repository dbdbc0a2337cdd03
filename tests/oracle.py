"""The algorithms as in their papers: float64 NumPy, every worker with explicit replicas of others.

`compress(i, t, z)` is worker i's C(z) in step t (counted from 0): the very message the workers of
the simulation send. `update(g)` is the optimizer's step.
"""

import numpy as np


def neighbours(W, i):
  return [j for j in range(len(W)) if W[i, j] != 0]


def allreduce(W, x, grads, compress, update):
  for g in grads:
    x = x + update(g.mean(0))
  return x


def compressed_allreduce(W, x, grads, compress, update):
  for t, g in enumerate(grads):
    x = x + update(np.mean([compress(i, t, g[i]) for i in range(len(W))], 0))
  return x


def d_psgd(W, x, grads, compress, update):
  for g in grads:
    x = W @ x + update(g)
  return x


def naive(W, x, grads, compress, update):
  for t, g in enumerate(grads):
    sent = np.stack([compress(i, t, x[i]) for i in range(len(W))])
    x = W @ sent + update(g)
  return x


def dcd_psgd(W, x, grads, compress, update):
  n = len(W)
  x = x.copy()
  replica = {(i, j): x[j].copy() for i in range(n) for j in neighbours(W, i)}
  for t, g in enumerate(grads):
    messages = []
    for i in range(n):
      half = sum(W[i, j] * replica[i, j] for j in neighbours(W, i)) + update(g[i])
      messages.append(compress(i, t, half - x[i]))
    for i in range(n):
      x[i] += messages[i]
      for j in neighbours(W, i):
        replica[i, j] += messages[j]
  for (_, j), copy in replica.items():  # the paper's invariant: every holder has the owner's model
    np.testing.assert_array_equal(copy, x[j])
  return x


def ecd_psgd(W, x, grads, compress, update):
  n = len(W)
  estimate = {(i, j): x[j].copy() for i in range(n) for j in neighbours(W, i)}
  for t, g in enumerate(grads, start=1):
    new, messages = np.zeros_like(x), []
    for i in range(n):
      new[i] = sum(W[i, j] * estimate[i, j] for j in neighbours(W, i)) + update(g[i])
      messages.append(compress(i, t - 1, (1 - 0.5 * t) * x[i] + 0.5 * t * new[i]))
    for i, j in estimate:
      estimate[i, j] = (1 - 2 / t) * estimate[i, j] + 2 / t * messages[j]
    x = new
  return x


def choco_sgd(W, x, grads, compress, update, rate=0.5):
  n = len(W)
  estimate = {(i, j): np.zeros_like(x[j]) for i in range(n) for j in [*neighbours(W, i), i]}
  for t, g in enumerate(grads):
    half = x + update(g)
    messages = [compress(i, t, half[i] - estimate[i, i]) for i in range(n)]
    for i, j in estimate:
      estimate[i, j] = estimate[i, j] + messages[j]
    x = np.stack(
      [
        half[i] + rate * sum(W[i, j] * (estimate[i, j] - estimate[i, i]) for j in neighbours(W, i))
        for i in range(n)
      ]
    )
  return x
