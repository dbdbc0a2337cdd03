"""What only the CPU's compiler needs, all in one place.

`loops` gives loops the shapes that XLA:CPU runs fast, `keys` writes its random generator out (which
random numbers there are is decided there, so that they are the same everywhere), and `convolution`
has a gradient that stays fast inside a loop. Values are the same with or without, up to rounding.
"""
