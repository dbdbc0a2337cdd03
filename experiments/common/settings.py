"""Flags that the programs share, and the objects they stand for.

Things to choose are written as calls: --compressor='stochastic_quantizer(bits=4)'. Names are looked
up, never evaluated.
"""

import contextlib
import functools
import math
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
from decomp import algorithms, checks, compressors, cost, models, schedules, spec, tasks, topology
from decomp.tasks.data import Partition
from decomp.training import arguments, signals

MOST_DEVICES = 1024
"""A CPU makes so many in 0.3 s, and the workers of a run are hardly ever more."""

TASK = flags.DEFINE_string(
  'task',
  'digits',
  f'What to train: one of {", ".join(tasks.__all__)}; or {", ".join(tasks.IMAGE_SETS)}, which '
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


class Number(flags.FloatParser):
  """A float in a range; "nan" is none."""

  def convert(self, argument: Any) -> float:
    """The value of a flag's text."""
    found = super().convert(argument)
    if math.isnan(found):
      raise ValueError('must be a number')
    return found


def define_number(
  name: str, default: float, words: str, least: float = 0.0, most: float = math.inf
) -> flags.FlagHolder[float]:
  """A flag with a number in a range."""
  return flags.DEFINE(Number(least, most), name, default, words)


CONSENSUS_RATE = define_number(
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
  _InsteadOf(
    'steps',
    'epochs',
    flags.IntegerParser(1, arguments.MOST_STEPS),
    'Steps of each worker, by default 1000.',
  )
)
EPOCHS = flags.DEFINE_flag(
  _InsteadOf('epochs', 'steps', Number(1e-6, 1e9), 'Passes through the data, instead of --steps.')
)
BATCH_SIZE = flags.DEFINE_integer('batch_size', 16, 'Examples per worker and step.', 1, 2**20)
SEED = flags.DEFINE_integer('seed', 0, 'Seed of everything random.', 0, checks.MOST_SEED)
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
VALIDATION = define_number(
  'validation',
  0.0,
  'Part of the training examples, such as 0.1, that is held out to stop by, and to choose the best '
  'of a sweep by.',
  0.0,
  1.0,
)
PATIENCE = flags.DEFINE_integer(
  'patience',
  None,
  'Ends a run when so many rows of metrics in turn had no better validation_loss than one before; '
  'needs --validation.',
  1,
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
CHECKPOINT_SECONDS = define_number('checkpoint_seconds', 30.0, 'Seconds between two checkpoints.')
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
  MOST_DEVICES,
)
DEVICES = flags.DEFINE_integer(
  'devices',
  None,
  'Split the workers over this many devices, which then exchange packed bytes; by default all '
  'workers are simulated on one.',
  1,
  MOST_DEVICES,
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
  except OSError as error:
    named = error.strerror is not None and error.filename is not None
    sys.exit(f'error: {error.filename}: {error.strerror}' if named else f'error: {error}')
  except ValueError as error:
    sys.exit(f'error: {error}')
  except MemoryError as error:
    sys.exit(f'error: too little memory ({str(error) or "none is left"})')
  except KeyboardInterrupt as error:
    text = f'\n{stopped}'
    with contextlib.suppress(OSError):  # the terminal may be what has gone
      print(text, file=sys.stderr)
    end = SystemExit(text)
    end.code = 128 + signals.number_of(error)
    raise end from None


def build(flag: str, text: str, namespace: Any, **extra: Any) -> Any:
  """The object that the text of a flag stands for; see `spec.build`."""
  with naming(flag, text):
    return spec.build(text, namespace, kind=flag, **extra)


@contextlib.contextmanager
def naming(flag: str, text: Any) -> Iterator[None]:
  """Puts the flag and its text in front of what is wrong with it."""
  try:
    yield
  except ValueError as error:
    raise ValueError(f'--{flag}={text}: {error}') from error


def build_setup(here: bool = True) -> Setup:
  """Everything but the algorithm, from the flags.

  Args:
    here: whether this machine is to train, whose memory must then hold the models.
  """
  graph = build('topology', TOPOLOGY.value, topology)
  task = build_task()
  examples = len(next(iter(task.train.values())))
  if graph.num_workers > examples:
    raise ValueError(
      f'--topology={TOPOLOGY.value}: has {graph.num_workers} workers, and {task.name} has examples '
      f'for {examples}'
    )
  shards, mesh = build_shards(task, graph, SEED.value), build_mesh(graph)
  with naming('task', TASK.value):
    check_model(task, graph.num_workers if here else 0)
  if SMOKE.value:
    task = task._replace(test=_few(task.test), validation=task.validation and _few(task.validation))
    steps, size = min(3, run_length(shards)), min(4, BATCH_SIZE.value)
    return Setup(task, graph, shards, steps, size, 1, mesh)
  if 'input' in task.train:  # else an example is no more than the number of a worker
    check_batch_size(shards)
  steps = run_length(shards)
  return Setup(task, graph, shards, steps, BATCH_SIZE.value, EVAL_EVERY.value, mesh)


def _few(examples: Mapping[str, Any]) -> dict[str, Any]:
  return {name: values[:20] for name, values in examples.items()}


def run_length(shards: Partition) -> int:
  """The steps of --steps or --epochs."""
  if EPOCHS.value is None:
    return STEPS.value or 1000
  steps = max(1, round(EPOCHS.value * float(shards.lengths.mean()) / BATCH_SIZE.value))
  if steps > arguments.MOST_STEPS:
    raise ValueError(
      f'--epochs={EPOCHS.value:g}: would be {steps:,} steps, and {arguments.MOST_STEPS:,} is the '
      'most there can be'
    )
  return steps


def check_batch_size(shards: Partition) -> None:
  """Whether a batch can be drawn without the same example twice."""
  most = int(shards.lengths.sum() if REPLACEMENT.value else shards.lengths.max())
  if BATCH_SIZE.value > most:
    whose = 'all workers have together' if REPLACEMENT.value else 'the worker with the most has'
    raise ValueError(f'--batch_size={BATCH_SIZE.value}: must be at most {most}, which {whose}')


def check_model(task: decomp.Task, num_workers: int) -> None:
  """Whether the model suits the data, and the memory holds one for each worker."""
  key = jax.random.key(0)
  batch = {name: jax.ShapeDtypeStruct((2, *x.shape[1:]), x.dtype) for name, x in task.train.items()}
  try:
    params, state = jax.eval_shape(task.init, key)
    jax.eval_shape(task.loss, params, state, batch, key)
  except Exception as error:
    reason = f'{type(error).__name__}: {error}'.splitlines()[0]
    raise ValueError(f'its model does not suit its data ({reason})') from error
  # A model and its gradient for each of the workers that this process has.
  size = 2 * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
  needed, there = size * num_workers / jax.process_count(), arguments.memory_of_a_device(1)
  if needed > there * (DEVICES.value or 1 if jax.devices()[0].platform != 'cpu' else 1):
    raise ValueError(
      f'models and gradients of {num_workers} workers take {needed / 1e9:,.0f} GB, and there are '
      f'{there / 1e9:,.0f} GB: choose a smaller model, or fewer workers'
    )


def build_shards(task: decomp.Task, graph: decomp.Topology, seed: int) -> Partition:
  """The division of the data that --partition and a seed make."""
  with naming('partition', PARTITION.value):
    return arguments.deal(PARTITION.value, task, graph.num_workers, seed)


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
  """The task of --task, with the validation set of --validation."""
  task = build('task', TASK.value, [tasks.named(), models])
  if not VALIDATION.value:
    if PATIENCE.value is not None:
      raise ValueError(f'--patience={PATIENCE.value}: needs --validation, such as --validation=0.1')
    return task
  with naming('validation', VALIDATION.value):
    return tasks.hold_out(task, VALIDATION.value)


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
  known = [{**spec.optimizers(), 'warmup_step_decay': decay}, values]
  optimizer = build('optimizer', OPTIMIZER.value, known)
  with naming('optimizer', OPTIMIZER.value):
    spec.check_optimizer(optimizer)
  return build(
    'algorithm',
    text,
    [spec.algorithms(optimizer), compressors, values],
    compressor=build('compressor', COMPRESSOR.value, [compressors, values]),
    consensus_rate=CONSENSUS_RATE.value,
  )


def build_network() -> cost.Links | None:
  """The network of --network, if there is one."""
  if NETWORK.value is None:
    return None
  network = build('network', NETWORK.value, {'lan': cost.lan})
  with naming('network', NETWORK.value):
    arguments.check_network(network)
  return network


def run(setup: Setup, algorithm: decomp.Algorithm, folder: Any) -> decomp.History:
  """One training run with the flags' settings, its results in `folder`."""
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
      patience=PATIENCE.value,
      worker_examples=WORKER_EXAMPLES.value,
      mapping=MAPPING.value,
      mesh=setup.mesh,
      network=build_network(),
      checkpoint_dir=str(folder.path / 'checkpoints'),
      checkpoint_seconds=CHECKPOINT_SECONDS.value,
      resume=RESUME.value,
      config=shared_by_resumed(setup),
      on_row=on_row,
    )


def shared_by_resumed(setup: Setup) -> dict[str, Any]:
  """The settings that a run must share with the one it continues.

  A longer run may continue a shorter one, unless the learning rate depends on the length, and one
  with more patience one that was stopped. The validation set is compared by its examples.
  """
  free = 'steps', 'epochs', 'eval_every', 'patience', 'validation'
  shared = {k: v for k, v in settings().items() if k not in free}
  if 'warmup_step_decay' in OPTIMIZER.value:
    shared['steps of the schedule'] = setup.steps
  return shared


def settings() -> dict[str, Any]:
  """Every flag that decides what a run computes."""
  ours = [TASK, TOPOLOGY, COMPRESSOR, OPTIMIZER, CONSENSUS_RATE, STEPS, EPOCHS, BATCH_SIZE, SEED]
  ours += [PARTITION, RESHUFFLE, REPLACEMENT, EVAL_EVERY, WORKER_EXAMPLES, MAPPING, NETWORK, SMOKE]
  ours += [VALIDATION, PATIENCE]
  return {holder.name: holder.value for holder in ours}


def environment() -> dict[str, Any]:
  """What else a reader of the results should know."""
  return {
    'decomp': decomp.__version__,
    'jax': jax.__version__,
    'python': platform.python_version(),
    'machine': f'{processor()}, {os.cpu_count()} cores',
    'devices': f'{jax.device_count()} x {jax.devices()[0].device_kind}',
    'processes': jax.process_count(),
  }


def processor() -> str:
  """The name of this machine's processor, or of its kind where the system does not tell."""
  try:
    facts = Path('/proc/cpuinfo').read_text()
  except OSError:
    facts = ''
  found = re.search(r'^model name\s*: (.*)$', facts, re.MULTILINE)
  return found[1] if found else platform.machine()
