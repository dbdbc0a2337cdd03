"""Flags that the programs share, and the objects they stand for.

Things to choose are written as calls: --compressor='stochastic_quantizer(bits=4)'. Names are looked
up, never evaluated.
"""

import contextlib
import functools
import os
import platform
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import flags, logging
from jax.sharding import Mesh

import decomp
from decomp import algorithms, compressors, cost, models, schedules, spec, tasks, topology
from decomp.tasks.data import Partition, partition
from decomp.training import signals

IMAGE_SETS = ('cifar10', 'mnist', 'fashion_mnist')

TASK = flags.DEFINE_string(
  'task',
  'digits',
  f'What to train: one of {", ".join(tasks.__all__)}; or {", ".join(IMAGE_SETS)}, which '
  'experiments.prepare_data downloads. Another model goes inside, such as '
  f'"digits(mlp(10, hidden=(32,)))" or "cifar10(resnet8(10))": one of {", ".join(models.__all__)}.',
)
TOPOLOGY = flags.DEFINE_string(
  'topology',
  'ring(8)',
  f'Who talks to whom, such as "torus(4, 4)": one of {", ".join(topology.__all__)}.',
)
COMPRESSOR = flags.DEFINE_string(
  'compressor',
  'stochastic_quantizer(bits=8)',
  f'What algorithms that compress use, such as "top_k(0.01)": one of '
  f'{", ".join(compressors.__all__)}.',
)
OPTIMIZER = flags.DEFINE_string(
  'optimizer',
  'sgd(0.1)',
  'Each worker\'s optimizer with its learning rate or schedule, from optax: "sgd(0.1, '
  'momentum=0.9)", "adam(1e-3)", "chain(add_decayed_weights(1e-4), sgd(warmup_step_decay(0.1)))".',
)
ALGORITHM_HELP = (
  f'One of {", ".join(algorithms.__all__)}; "choco_sgd(top_k(0.1))" has a compressor of its own'
)
CONSENSUS_RATE = flags.DEFINE_float(
  'consensus_rate', 0.2, 'For choco_sgd: the step size towards the neighbours.', 0.0, 1.0
)


class _InsteadOf(flags.Flag):
  """A flag that unsets another one: of the two the last one given holds, also after a preset."""

  def __init__(self, name: str, other: str, parser: flags.ArgumentParser, help_string: str):
    super().__init__(parser, flags.ArgumentSerializer(), name, None, help_string)
    self._other = other

  def parse(self, argument: Any) -> None:
    super().parse(argument)
    flags.FLAGS[self._other].value = None


STEPS = flags.DEFINE_flag(
  _InsteadOf('steps', 'epochs', flags.IntegerParser(1), 'Steps of each worker, by default 1000.')
)
EPOCHS = flags.DEFINE_flag(
  _InsteadOf(
    'epochs', 'steps', flags.FloatParser(0.0), 'Passes through the data, instead of --steps.'
  )
)
BATCH_SIZE = flags.DEFINE_integer('batch_size', 16, 'Examples per worker and step.', 1)
SEED = flags.DEFINE_integer('seed', 0, 'Seed of everything random.', 0)
PARTITION = flags.DEFINE_string(
  'partition',
  'iid',
  'Who has which examples: iid (at random), by_label (sorted, the hardest case), or '
  '"dirichlet(0.1)" (in between; shards are alike if it is large).',
)
RESHUFFLE = flags.DEFINE_boolean(
  'reshuffle', False, 'Deal the data anew to all workers every epoch.'
)
REPLACEMENT = flags.DEFINE_boolean(
  'replacement', False, 'Draw each example independently, as theory has it.'
)
EVAL_EVERY = flags.DEFINE_integer(
  'eval_every', None, 'Steps between two rows of metrics; by default 20 rows in all.', 1
)
WORKER_EXAMPLES = flags.DEFINE_integer(
  'worker_examples', 2000, 'Test examples that single workers are evaluated on, at most.', 1
)
MAPPING = flags.DEFINE_enum(
  'mapping',
  'auto',
  ['auto', 'vmap', 'scan', 'devices'],
  'How the gradients of all workers are computed on this machine; the numbers are the same up to '
  'rounding. auto takes the fastest.',
)
NETWORK = flags.DEFINE_string(
  'network',
  None,
  'Adds simulated_seconds to the metrics, as on this network: \'lan("100Mbps", "5ms")\'.',
)
OUTPUT = flags.DEFINE_string(
  'output', None, 'Folder of the results; by default a new one under runs/.'
)
RESUME = flags.DEFINE_boolean(
  'resume', False, 'Continue the run in --output, by default the newest of its name under runs/.'
)
CHECKPOINT_SECONDS = flags.DEFINE_float(
  'checkpoint_seconds', 30.0, 'Seconds between two checkpoints.', lower_bound=0.0
)
TENSORBOARD = flags.DEFINE_boolean(
  'tensorboard', False, 'Also write event files for TensorBoard, under tensorboard/.'
)
CSV = flags.DEFINE_boolean('csv', False, 'Also write metrics.csv.')
SMOKE = flags.DEFINE_boolean('smoke', False, 'Three small steps, to see whether it runs.')
HOST_DEVICES = flags.DEFINE_integer(
  'host_devices',
  None,
  'CPU devices to make, by default as many as --devices, or one for each core; convolutions are '
  'split over them.',
  1,
)
DEVICES = flags.DEFINE_integer(
  'devices',
  None,
  'Split the workers over this many devices, which then exchange packed bytes; by default all '
  'workers are simulated on one.',
  1,
)


class Setup(NamedTuple):
  """The objects that all runs of a program share."""

  task: decomp.Task
  topology: decomp.Topology
  shards: Partition
  steps: int
  batch_size: int
  eval_every: int | None
  mesh: Mesh | None


def start(argv: Sequence[str]) -> None:
  """What every program does first: makes CPU devices before JAX starts, and keeps JAX quiet."""
  if len(argv) > 1:
    sys.exit(f'error: unexpected argument {argv[1]!r}: every setting is a --flag=value')
  # What was imported meanwhile may now clean up: see `experiments`.
  signal.signal(signal.SIGINT, signal.default_int_handler)
  logging.set_verbosity(logging.WARNING)
  make_devices(HOST_DEVICES.value or DEVICES.value or os.cpu_count() or 1)


def make_devices(count: int) -> None:
  """Makes so many CPU devices."""
  jax.config.update('jax_num_cpu_devices', count)


@contextlib.contextmanager
def mistakes_in_one_line(
  stopped: str = 'stopped; the same command with --resume continues from here',
) -> Iterator[None]:
  """Ends the program with one sentence where the user can do something about it.

  Args:
    stopped: what to say after Ctrl-C, or another signal that ends programs.
  """
  try:
    with signals.caught(signals.interrupt):
      yield
  except (ValueError, OSError) as error:
    sys.exit(f'error: {error}')
  except KeyboardInterrupt as error:
    text = f'\n{stopped}'
    with contextlib.suppress(OSError):  # the terminal may be what has gone
      print(text, file=sys.stderr)
    end = SystemExit(text)
    end.code = 128 + signals.number_of(error)
    raise end from None


def build_setup() -> Setup:
  """Everything but the algorithm, from the flags."""
  graph = spec.build(TOPOLOGY.value, topology, kind='topology')
  task = build_task()
  shards = build_shards(task, graph, SEED.value)
  steps, mesh = STEPS.value or 1000, build_mesh(graph)
  if EPOCHS.value is not None:
    steps = max(1, round(EPOCHS.value * float(shards.lengths.mean()) / BATCH_SIZE.value))
  setup = Setup(task, graph, shards, steps, BATCH_SIZE.value, EVAL_EVERY.value, mesh)
  if not SMOKE.value:
    return setup
  few = {name: values[:20] for name, values in task.test.items()}
  return setup._replace(
    task=task._replace(test=few),
    steps=min(3, steps),
    batch_size=min(4, BATCH_SIZE.value),
    eval_every=1,
  )


def build_shards(task: decomp.Task, graph: decomp.Topology, seed: int) -> Partition:
  """The division of the data that --partition and a seed make."""
  return spec.build(
    PARTITION.value,
    {name: getattr(partition, name) for name in ('iid', 'by_label', 'dirichlet')},
    kind='partition',
    labels=task.train['label'],
    num_workers=graph.num_workers,
    seed=seed,
  )


def build_mesh(graph: decomp.Topology) -> Mesh | None:
  """The devices of --devices, or all devices of several processes."""
  if DEVICES.value is None and jax.process_count() == 1:
    return None
  devices = jax.devices()
  count = DEVICES.value or len(devices)
  if count > len(devices):
    raise ValueError(
      f'--devices={count}: there are {len(devices)}; on CPU --host_devices={count} makes them'
    )
  if graph.num_workers % count:
    raise ValueError(
      f'--topology={TOPOLOGY.value} has {graph.num_workers} workers, which {count} devices cannot '
      'share evenly'
    )
  return decomp.worker_mesh(graph.num_workers, devices[:count])


def build_task() -> decomp.Task:
  """The task of --task."""
  sets = {name: functools.partial(tasks.images, name) for name in IMAGE_SETS}
  named = {name: getattr(tasks, name) for name in tasks.__all__}
  return spec.build(TASK.value, [{**named, **sets}, models], kind='task')


def build_algorithm(
  text: str, steps: int, values: Mapping[str, Callable[[], Any]] | None = None
) -> decomp.Algorithm:
  """An algorithm with the flags' optimizer, and their compressor where `text` names none.

  Args:
    text: the spec.
    steps: the length of the run, for schedules.
    values: what names of one's own stand for, in all specs.
  """
  values = values or {}
  decay = functools.partial(schedules.warmup_step_decay, steps=steps)
  optimizer = spec.build(
    OPTIMIZER.value, [{**spec.optimizers(), 'warmup_step_decay': decay}, values], kind='optimizer'
  )
  return spec.build(
    text,
    [spec.algorithms(optimizer), compressors, values],
    kind='algorithm',
    compressor=spec.build(COMPRESSOR.value, [compressors, values], kind='compressor'),
    consensus_rate=CONSENSUS_RATE.value,
  )


def run(setup: Setup, algorithm: decomp.Algorithm, folder: Any) -> decomp.History:
  """One training run with the flags' settings, its results in `folder`."""
  network = spec.build(NETWORK.value, {'lan': cost.lan}, kind='network') if NETWORK.value else None
  with folder.writers(algorithm=algorithm.name) as on_row, warnings.catch_warnings():
    # The programs tell it themselves, in one line.
    warnings.filterwarnings('ignore', '.* diverged at step', RuntimeWarning)
    return decomp.train(
      setup.task,
      algorithm,
      setup.topology,
      setup.steps,
      setup.batch_size,
      SEED.value,
      shards=setup.shards,
      reshuffle=RESHUFFLE.value,
      replacement=REPLACEMENT.value,
      eval_every=setup.eval_every,
      worker_examples=WORKER_EXAMPLES.value,
      mapping=MAPPING.value,
      mesh=setup.mesh,
      network=network,
      checkpoint_dir=str(folder.path / 'checkpoints'),
      checkpoint_seconds=CHECKPOINT_SECONDS.value,
      resume=RESUME.value,
      config=shared_by_resumed(setup),
      on_row=on_row,
    )


def shared_by_resumed(setup: Setup) -> dict[str, Any]:
  """The settings that a run must share with the one it continues.

  A longer run may continue a shorter one, unless the learning rate depends on the length.
  """
  shared = {k: v for k, v in settings().items() if k not in ('steps', 'epochs', 'eval_every')}
  if 'warmup_step_decay' in OPTIMIZER.value:
    shared['steps of the schedule'] = setup.steps
  return shared


def settings() -> dict[str, Any]:
  """Every flag that decides what a run computes."""
  ours = [TASK, TOPOLOGY, COMPRESSOR, OPTIMIZER, CONSENSUS_RATE, STEPS, EPOCHS, BATCH_SIZE, SEED]
  ours += [PARTITION, RESHUFFLE, REPLACEMENT, EVAL_EVERY, WORKER_EXAMPLES, MAPPING, NETWORK, SMOKE]
  return {holder.name: holder.value for holder in ours}


def environment() -> dict[str, str]:
  """What else a reader of the results should know."""
  return {
    'decomp': decomp.__version__,
    'jax': jax.__version__,
    'python': platform.python_version(),
    'machine': f'{processor()}, {os.cpu_count()} cores',
    'devices': f'{jax.device_count()} x {jax.devices()[0].device_kind}',
  }


def processor() -> str:
  """The name of this machine's processor, or of its kind where the system does not tell."""
  try:
    facts = Path('/proc/cpuinfo').read_text()
  except OSError:
    facts = ''
  found = re.search(r'^model name\s*: (.*)$', facts, re.MULTILINE)
  return found[1] if found else platform.machine()
