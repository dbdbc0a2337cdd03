"""Learning-rate schedules that decentralised training papers use."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

__all__ = ['warmup_step_decay']


def warmup_step_decay(
  peak: float,
  steps: int,
  warmup: float = 5 / 300,
  decay_at: Sequence[float] = (0.5, 0.75),
  factor: float = 0.1,
  start: float | None = None,
) -> optax.Schedule:
  """A linear warm-up, then the peak, multiplied by `factor` at given parts of the run.

  The defaults are the usual ones for ResNets on CIFAR-10 with many workers: 5 of 300 epochs of
  warm-up, a tenth at 150 and at 225.

  Args:
    peak: the learning rate after the warm-up.
    steps: the length of the run.
    warmup: the part of the run that the warm-up takes.
    decay_at: the parts of the run after which the rate falls.
    factor: by what it is then multiplied.
    start: the rate at step 0; None for a tenth of the peak.

  >>> schedule = warmup_step_decay(1.0, steps=100, warmup=0.1)
  >>> [round(float(schedule(step)), 4) for step in (0, 5, 10, 49, 50, 75)]
  [0.1, 0.55, 1.0, 1.0, 0.1, 0.01]
  """
  first = peak / 10 if start is None else start
  boundaries = [part * steps for part in decay_at]

  def schedule(count: jax.typing.ArrayLike) -> jax.Array:
    step = jnp.asarray(count).astype(jnp.float32)
    rise = jnp.minimum(1.0, step / max(1.0, warmup * steps))
    falls = sum(((step >= at).astype(jnp.float32) for at in boundaries), jnp.float32(0))
    return (first + (peak - first) * rise) * factor**falls

  return schedule
