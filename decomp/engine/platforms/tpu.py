"""What XLA's compiler for TPUs wants."""

from decomp.engine.platforms.wants import Wants


def _product(num_workers: int, degree: int) -> bool:
  """A gather of rows is slow, a product with W reads and writes everything once.

  In full precision the matrix unit does it in 6 passes of bfloat16: on a v5e (197 TFLOP/s, 819
  GB/s) arithmetic takes longer than reading and writing from about 160 workers on, in proportion.
  """
  return num_workers < 320 * (degree + 2)


TPU = Wants(
  name='tpu',
  product=_product,
  # Bytes of floats would be an array whose last axis is 4, which is padded to 128 lanes.
  joined=1 << 16,
  stacked=(1 << 16) - 1,
  looped=13,
)
