"""How it is trained: one run or many at once, over one loop.

`train` is `decomp.train`, `sweep` is `decomp.sweep`. Both make a `program`, the device's
side, of the `steps` of a run, and `loop`, the host's side, drives it: rows, checkpoints, signals.
"""
