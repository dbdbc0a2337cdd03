"""From one worker to all: who runs the code of an algorithm, and how messages travel.

`simulation` lifts an algorithm to all workers, `stacked` on one device or `sharded` over several.
`tree` makes messages of whole models and `wire` makes bytes of messages; `meter` counts them.
`mapping` lifts functions that need no messages, such as gradients. `platforms` says what each
platform's compiler wants, a file each; the tricks for XLA on CPU are in `cpu`.
"""
