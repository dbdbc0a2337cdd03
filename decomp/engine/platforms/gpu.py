"""What XLA's compiler for GPUs wants."""

from decomp.engine.platforms.wants import Wants


def _product(num_workers: int, degree: int) -> bool:
  """A product with W is bound by arithmetic from about 50 workers on, in full precision on an A100.

  19.5 TFLOP/s and 1.55 TB/s: max(2, n / 25) passes over everyone's models, where rows gathered for
  `degree` neighbours and the own one, and written, are degree + 2.
  """
  return num_workers < 25 * (degree + 2)


GPU = Wants(
  name='gpu',
  product=_product,
  # Every collective and every copy is a kernel to launch: few of them.
  joined=1 << 20,
  stacked=(1 << 16) - 1,
  looped=13,
)
