r"""Says what a run would need on a TPU or GPU, without having one.

For example:

  python -m experiments.compile --target='tpu v5e:2x4' --task=digits --topology='ring(8)' \
    --algorithm='dcd_psgd(stochastic_quantizer(4))' --algorithm='choco_sgd(top_k(0.01))'

Compiles the whole training step (gradients, exchange, optimizer) and the metrics of a row for that
machine with its own compiler, and prints for each device: whether it fits into the memory, and what
takes it; what a step sends, and whether the compiled program sends exactly that; the memory it
reads and writes; kernels; how long a step takes at least. allreduce stands beside for comparison.
Targets: 'tpu v5e:2x4' (or v4, v5p, v6e; up to v5e:16x16), 'gpu a100 x8', 'cpu x8'; --devices takes
fewer of them, and --devices=1 simulates all workers on one. The compilers are the extras tpu and
gpu of this package. Results go to one folder: compile.json, which experiments.plan
--compiled=FILE takes the seconds of a step from.

`overlapped` is how many of the messages have other kernels between their start and their end in the
compiled schedule. `traffic` and `kernels` count every loop once, as the compilers do. `at least` is
the larger of traffic / memory bandwidth and operations / peak rate (float32 in full precision), by
the maker's figures; without what is sent. `estimate` is the compiler's own, where it gives one.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax
from absl import app, flags

from decomp import cost
from decomp.training import ahead
from experiments.common import output, report, settings

TARGET = flags.DEFINE_string('target', 'tpu v5e:2x4', 'The machine to compile for.')
ALGORITHM = flags.DEFINE_multi_string(
  'algorithm', ['d_psgd', 'dcd_psgd', 'ecd_psgd', 'choco_sgd'], settings.ALGORITHM_HELP
)
flags.adopt_module_key_flags(settings)


def main(argv: Sequence[str]) -> None:
  """Runs the program."""
  settings.start(argv)
  jax.config.update('jax_platforms', 'cpu')  # the machine at hand only compiles
  with settings.mistakes_in_one_line(stopped='stopped'):
    count = settings.DEVICES.value
    flags.FLAGS['devices'].value = None  # they are the target's, not this machine's
    if cpus := re.fullmatch(r'cpu x(\d+)', TARGET.value):
      settings.make_devices(min(max(1, int(cpus[1])), settings.MOST_DEVICES))
    machine = cost.machine(TARGET.value)
    if count and count > len(machine.devices):
      raise ValueError(f'--devices={count}: {machine.name} has {len(machine.devices)}')
    machine = machine._replace(devices=machine.devices[:count])
    setup = settings.build_setup(here=False)
    texts = dict.fromkeys(['allreduce', *ALGORITHM.value])
    chosen = [settings.build_algorithm(text, setup.steps) for text in texts]
    path = output.choose_folder('compile')
    found = {}
    for algorithm in chosen:
      print(f'compiling {algorithm.name} ...', flush=True)
      found[algorithm.name] = ahead.compile_for(
        machine,
        setup.task,
        algorithm,
        setup.topology,
        setup.shards,
        setup.batch_size,
        settings.WORKER_EXAMPLES.value,
        settings.MAPPING.value,
      )
  first = next(iter(found.values()))
  devices = setup.topology.num_workers // first.workers
  title = (
    f'{setup.task.name} on {setup.topology.name} for {machine.name}, workers on each of {devices} '
    f'devices: {first.workers}; all numbers are of one device'
  )
  rows = [_row(name, one, first, machine) for name, one in found.items()]
  report.print_table(rows, title)
  for name, one in found.items():
    print(f'{name}: {_memory(one, machine)}')
  facts = {
    'target': machine.name,
    'devices': devices,
    'task': setup.task.name,
    'topology': setup.topology.name,
    'batch_size': setup.batch_size,
    'algorithms': {name: _facts(one, machine) for name, one in found.items()},
    'environment': settings.environment(),
  }
  output.write_json(path / 'compile.json', facts)
  print(f'results: {path / "compile.json"}')


def _row(name: str, one: ahead.Ahead, first: ahead.Ahead, machine: cost.Machine) -> dict[str, Any]:
  step = one.step
  sent = 'nothing' if one.exact is None else f'{one.bytes:,} bytes in {one.messages}'
  if one.exact is not None:
    sent += ', exactly' if one.exact else ', but the program differs'
  busy = sum(many > 0 for many in step.meanwhile)
  times = 'unknown'
  if step.traffic and first.step.traffic:
    times = f'{step.traffic / first.step.traffic:.2f}'
  least = machine.at_least(step.traffic, step.flops)
  return {
    'algorithm': name,
    'memory MB': _needed(one) / 1e6,
    'a step exchanges': sent,
    'overlapped': f'{busy} of {len(step.meanwhile)}' if step.meanwhile else 'none',
    'traffic MB': 'unknown' if step.traffic is None else step.traffic / 1e6,
    'x allreduce': times,
    'kernels': float(step.kernels),
    'at least ms': 'unknown' if least is None else 1e3 * least,
    'estimate ms': 'none' if step.seconds is None else 1e3 * step.seconds,
    'compiled in s': one.seconds,
  }


def _needed(one: ahead.Ahead) -> int:
  return max(one.step.memory, one.evaluation.memory)


def _memory(one: ahead.Ahead, machine: cost.Machine) -> str:
  """Whether it fits, and what takes the memory."""
  parts = [f'{name} {size / 1e6:,.2f}' for name, size in one.parts.items() if size]
  parts.append(f'temporary {max(one.step.temporary, one.evaluation.temporary) / 1e6:,.2f}')
  needed = f'{_needed(one) / 1e6:,.1f} MB ({", ".join(parts)})'
  if machine.kind is None:
    return f'needs {needed}'
  if _needed(one) > machine.kind.memory:
    return f'does NOT fit into {machine.kind.memory / 1e9:g} GB: needs {needed}'
  return f'fits into {machine.kind.memory / 1e9:g} GB: needs {needed}'


def _facts(one: ahead.Ahead, machine: cost.Machine) -> dict[str, Any]:
  facts = {**one._asdict(), 'step': one.step._asdict(), 'evaluation': one.evaluation._asdict()}
  facts['at least'] = machine.at_least(one.step.traffic, one.step.flops)
  facts['memory'] = _needed(one)
  return facts


if __name__ == '__main__':
  app.run(main)
