"""What XLA's compiler for CPUs wants; its tricks are in `decomp.engine.cpu`."""

from decomp.engine.platforms.wants import Wants


def _product(num_workers: int, degree: int) -> bool:
  """Measured, in passes over everyone's models: a product 4 + n/8, a sum of gathered rows K + 1."""
  return degree + 1 > 4 + num_workers / 8


CPU = Wants(
  name='cpu',
  product=_product,
  # Collectives widen what is narrow (int4 to int8, bfloat16 to float32), but never uint8.
  joined=None,
  # It saves time to compile; of longer ones a copy takes longer than a loop more.
  stacked=1 << 10,
  # XLA uses half of a vector register where it could use 512 bits: random numbers take longer.
  options={'xla_cpu_prefer_vector_width': '512'},
)
