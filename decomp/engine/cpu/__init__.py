"""What only the CPU's compiler needs. Numbers are the same with or without, up to rounding.

`loops` gives loops the shapes that XLA:CPU runs fast, `keys` writes its random generator out, and
`convolution` has a gradient that stays fast inside a loop.
"""

OPTIONS: dict[str, str | bool] = {'xla_cpu_prefer_vector_width': '512'}
"""Compiler options of a training loop. XLA uses half of a vector register where it could use 512
bits: random numbers take longer."""
