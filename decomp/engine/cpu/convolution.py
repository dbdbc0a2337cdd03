"""A 2-D convolution whose gradient stays fast inside loops on CPU.

Inside a loop body (``lax.scan``, ``lax.map``) XLA:CPU runs the two convolutions of the usual
gradient in layouts that its fast kernels do not take, many times slower than outside the loop.
:func:`conv` has a hand-written gradient whose convolutions are all NHWC/HWIO, like the forward
one, so that workers can be scanned one after another at full speed. On other platforms it is
XLA's own gradient, which moves less memory there.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from decomp.engine.cpu.loops import once

Pair = tuple[int, int]
Padding = str | Sequence[Pair]

LAYOUT = lax.ConvDimensionNumbers((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))
"""NHWC inputs and outputs, HWIO kernels: the one layout that XLA:CPU runs fast inside a loop. All
convolutions of `conv` have it, and in XLA's own gradient only the forward one."""


def conv(x: jax.Array, kernel: jax.Array, strides: Pair, padding: Padding) -> jax.Array:
  r"""2-D convolution with a gradient in canonical form.

  With stride s, low padding p and cotangent g, the value and its two gradients are

  .. math::
    y_{nio} &= \sum_{ac} x_{n,\, si + a - p,\, c}\, k_{aco} \\
    dx_{njc} &= \sum_{ao} g_{n,\, (j + p - a)/s,\, o}\, k_{aco} \\
    dk_{aco} &= \sum_{ni} x_{n,\, si + a - p,\, c}\, g_{nio}

  (one spatial axis shown; a, i and j are positions). So dx is a convolution of g, dilated by s,
  with the kernel flipped and its channels swapped; dk is a convolution of x, with batch and
  channels swapped, with g, dilated by s, as the kernel. Reverse mode only.

  Args:
    x: Inputs [batch, height, width, in].
    kernel: Weights [height, width, in, out].
    strides: Step between outputs along height and width.
    padding: 'SAME', 'VALID', or ((low, high), (low, high)) for height and width.

  Returns:
    Outputs [batch, height, width, out].

  Example:
    >>> import jax.numpy as jnp
    >>> conv(jnp.ones((1, 4, 4, 1)), jnp.ones((3, 3, 1, 1)), (1, 1), 'VALID')[0, :, :, 0]
    Array([[9., 9.],
           [9., 9.]], dtype=float32)
  """
  if isinstance(padding, str):
    padding = lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], strides, padding)
  return _conv(x, kernel, tuple(strides), tuple((low, high) for low, high in padding))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _conv(x: jax.Array, kernel: jax.Array, strides: Pair, padding: tuple[Pair, ...]) -> jax.Array:
  return _convolve(x, kernel, padding, strides)


def _forward(x, kernel, strides, padding):
  return _conv(x, kernel, strides, padding), (x, kernel)


def _backward(strides, padding, residuals, g):
  def usual(x, kernel, g):
    return jax.vjp(lambda x, kernel: _convolve(x, kernel, padding, strides), x, kernel)[1](g)

  canonical = partial(_canonical, strides, padding)
  return lax.platform_dependent(*residuals, g, cpu=canonical, default=usual)


def _canonical(strides, padding, x, kernel, g):
  dilated = [(size - 1) * stride + 1 for size, stride in zip(g.shape[1:3], strides, strict=True)]
  flipped = jnp.flip(kernel, (0, 1)).swapaxes(2, 3)
  low = [size - 1 - p for size, (p, _) in zip(kernel.shape[:2], padding, strict=True)]
  pads = _pads_to(x.shape[1:3], dilated, kernel.shape[:2], low)
  input_gradient = _convolve(g, flipped, pads, lhs_dilation=strides)
  # In two steps: images are powers of two apart in memory, and a loop that reads one number of each
  # in turn finds them all in the same few lines of the cache.
  swapped = once(lambda x: x.transpose(1, 2, 0, 3), x).transpose(3, 0, 1, 2)
  pads = _pads_to(kernel.shape[:2], x.shape[1:3], dilated, [p for p, _ in padding])
  gradient = _convolve(swapped, g.transpose(1, 2, 0, 3), pads, rhs_dilation=strides)
  return input_gradient, gradient.transpose(1, 2, 0, 3)


_conv.defvjp(_forward, _backward)


def _convolve(x, kernel, padding, strides=(1, 1), **dilations):
  return lax.conv_general_dilated(
    x, kernel, strides, padding, dimension_numbers=LAYOUT, **dilations
  )


def _pads_to(out_sizes, in_sizes, kernel_sizes, low):
  """Pads that start at `low` and give outputs of `out_sizes`; negative ones cut."""
  sizes = zip(out_sizes, in_sizes, kernel_sizes, low, strict=True)
  return tuple((p, out + k - 1 - size - p) for out, size, k, p in sizes)
