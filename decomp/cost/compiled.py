"""What a compiled program says of itself: memory, traffic, kernels, and what it sends."""

import collections
import math
import re
from typing import Any, NamedTuple

import jax

_ITEM = {
  **dict.fromkeys(('pred', 's8', 'u8'), 1),
  **dict.fromkeys(('s16', 'u16', 'f16', 'bf16'), 2),
  **dict.fromkeys(('s32', 'u32', 'f32'), 4),
  **dict.fromkeys(('s64', 'u64', 'f64'), 8),
}
_ARRAY = re.compile(rf'\b({"|".join(_ITEM)})\[([\d,]*)\]')
_INSTRUCTION = re.compile(
  r'^\s*(?:ROOT )?(%?[\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((%?[\w.\-]*)', re.MULTILINE
)
"""Its name, the shape of what it gives, its kind, and what it is given first."""
_SENDS = ('collective-permute', 'all-reduce', 'all-gather', 'all-to-all', 'reduce-scatter')
_FREE = ('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'while', 'conditional')
"""Instructions that launch nothing; the ends of asynchronous ones, `-done`, do not either."""


class Compiled(NamedTuple):
  """A program as a compiler has made it, for one device of all that run it.

  Attributes:
    arguments: bytes of memory: what it is given.
    outputs: what it gives back in memory of its own; donated arguments are written over.
    temporary: what it needs in between.
    traffic: bytes of memory that it reads and writes, by the compiler's own analysis, each loop
      counted once; None where there is no analysis.
    flops: floating point operations, likewise.
    seconds: the compiler's estimate; None where it gives none.
    kernels: launches of what gives arrays: fusions, copies, ...; loops counted once.
    operations: how often each is launched.
    sends: the bytes that each exchange with other devices gives, by its kind.
    meanwhile: how many kernels run between the start and the end of each exchange that has both,
      in the order of the schedule.
  """

  arguments: int
  outputs: int
  temporary: int
  traffic: float | None
  flops: float | None
  seconds: float | None
  kernels: int
  operations: dict[str, int]
  sends: dict[str, list[int]]
  meanwhile: list[int]

  @property
  def memory(self) -> int:
    """Bytes of memory in all."""
    return self.arguments + self.outputs + self.temporary


def read(compiled: Any) -> Compiled:
  """Reads a `jax.stages.Compiled`.

  >>> program = jax.jit(lambda x: x + 1).lower(jax.numpy.zeros(1000)).compile()
  >>> read(program).arguments, read(program).sends
  (4000, {})
  """
  text, memory = compiled.as_text(), compiled.memory_analysis()
  try:
    costs = compiled.cost_analysis() or {}
  except jax.errors.JaxRuntimeError:  # there is none for this platform
    costs = {}
  seconds = costs.get('optimal_seconds', 0)  # less by 1 for every call of unknown cost
  launched = _INSTRUCTION.findall(_launched(text))
  # Single numbers are computed on the side.
  kinds = (kind for _, shape, kind, _ in launched if re.search(r'\[\d', shape))
  operations = collections.Counter(kinds)
  sends: dict[str, list[int]] = {}
  for _, shape, kind, _ in _INSTRUCTION.findall(text):
    name = kind.removesuffix('-start')
    if name in _SENDS:
      arrays = _ARRAY.findall(shape)
      if kind.endswith('-start'):  # what is sent, what is received, and single numbers
        arrays = [array for array in arrays if array[1]]
        arrays = arrays[len(arrays) // 2 :]
      sends.setdefault(name, []).append(sum(_bytes(*array) for array in arrays))
  return Compiled(
    memory.argument_size_in_bytes,
    memory.output_size_in_bytes - memory.alias_size_in_bytes,
    memory.temp_size_in_bytes,
    costs.get('bytes accessed'),
    costs.get('flops'),
    seconds if seconds > 0 else None,
    sum(many for kind, many in operations.items() if _launches(kind)),
    dict(operations),
    sends,
    _meanwhile(launched),
  )


def _meanwhile(launched: list[tuple[str, ...]]) -> list[int]:
  """`Compiled.meanwhile`, from instructions in the order in which they run."""
  found, running, kernels = [], dict[str, int](), 0
  for name, shape, kind, operand in launched:
    exchange, _, phase = kind.rpartition('-')
    if exchange in _SENDS and phase == 'start':
      running[name] = kernels
    elif exchange in _SENDS and phase == 'done' and operand in running:
      found.append(kernels - running.pop(operand))
    elif phase != 'start' and _launches(kind) and re.search(r'\[\d', shape):
      kernels += 1
  return found


def _launches(kind: str) -> bool:
  return kind not in _FREE and not kind.endswith('-done')


def _launched(text: str) -> str:
  """The text without the bodies of fusions, whose instructions are no launches of their own."""
  fused = set(re.findall(r'(?:calls|to_apply)=%?([\w.\-]+)', text))
  kept = []
  for block in re.split(r'\n(?=\S[^\n]*\{\n)', text):
    name = re.match(r'(?:ENTRY )?%?([\w.\-]+)', block)
    if name and name[1] not in fused:
      kept.append(block)
  return '\n'.join(kept)


def _bytes(kind: str, shape: str) -> int:
  return _ITEM[kind] * math.prod(int(length) for length in shape.split(',') if length)
