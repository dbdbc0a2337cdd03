r"""How fast decomp is, in ratios: each number against a reference measured in the same run.

  python -m experiments.benchmark
  python -m experiments.benchmark --only=exchange --only=small

Every row times two or more programs in turns, divides the times of each turn and takes the median,
so that it means the same on a machine that is slow or busy. `goal` is what the row should be at
most (or at least); a row that misses it is marked, and the program goes on. Results go to a folder:
results.json and the table.
"""

import functools
import importlib.util
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

import decomp
from decomp import algorithms, compressors, tasks, topology
from decomp.engine.cpu.loops import once
from experiments.benchmark.programs import Training, by_hand, loop, mlp_task, quantized, resnet_task
from experiments.benchmark.torch_loop import torch_loop
from experiments.common import output, report, settings

GROUPS = ('resnet', 'exchange', 'codecs', 'mlp', 'workers', 'small', 'memory', 'sweep', 'start')
ONLY = flags.DEFINE_multi_enum('only', None, GROUPS, 'Which rows to measure; by default all.')
REPEATS = flags.DEFINE_integer('repeats', 7, 'Turns of each program; the median counts.', 1, 1000)
flags.adopt_module_key_flags(settings)


class Row(NamedTuple):
  """One result.

  Attributes:
    what: was compared with what.
    value: the ratio, or seconds or a number where `unit` says so.
    goal: '<= 1.05', '>= 0.6', or '' if there is none.
    unit: of `value`; '' for a ratio.
  """

  group: str
  what: str
  value: float
  goal: str = ''
  unit: str = ''

  @property
  def met(self) -> bool | None:
    """Whether the goal is reached; None without one."""
    if not self.goal:
      return None
    relation, number = self.goal.split()
    return self.value <= float(number) if relation == '<=' else self.value >= float(number)


def main(argv: Sequence[str]) -> None:
  """Runs the program."""
  settings.start(argv)
  with settings.mistakes_in_one_line('stopped'):
    path = output.choose_folder('benchmark')
    rows = []
    for row in measure(ONLY.value or GROUPS):
      rows.append(row)
      mark = {True: 'met', False: 'MISSED', None: ''}[row.met]
      print(f'{row.group:9} {row.what}: {row.value:.3g}{row.unit} {row.goal} {mark}', flush=True)
      output.Folder(path).write_config()
      output.write_json(path / 'results.json', [{**r._asdict(), 'met': r.met} for r in rows])
  marks = {True: 'met', False: 'missed', None: ''}
  shown = [
    {'what': r.what, 'measured': f'{r.value:.3g}{r.unit}', 'goal': r.goal, '': marks[r.met]}
    for r in rows
  ]
  facts = settings.environment()
  report.print_table(shown, f'{facts["machine"]}, jax {facts["jax"]}')
  print(path / 'results.json')


def measure(groups: Sequence[str]) -> Iterator[Row]:
  """The rows of some groups, as they are found."""
  for function in (resnet, exchange, codecs, mlp, workers, small, memory, sweep, start):
    if function.__name__ in groups:
      yield from function()


class Times(dict[str, np.ndarray]):
  """The seconds of each program in every turn."""

  def ratio(self, one: str, other: str) -> float:
    """The median over turns of one program's time over the other's in the same turn."""
    return float(np.median(self[one] / self[other]))

  def median(self, name: str) -> float:
    """The seconds of one program."""
    return float(np.median(self[name]))


def in_turns(programs: dict[str, Callable[[], Any]], more: int = 1) -> Times:
  """Times of programs that take `more` times --repeats turns, after a first call of each."""
  for program in programs.values():
    jax.block_until_ready(program())
  times: dict[str, list[float]] = {name: [] for name in programs}
  for _ in range(1 if settings.SMOKE.value else more * REPEATS.value):
    for name, program in programs.items():
      began = time.perf_counter()
      jax.block_until_ready(program())
      times[name].append(time.perf_counter() - began)
  return Times({name: np.array(seconds) for name, seconds in times.items()})


def resnet() -> Iterator[Row]:
  """ResNet-20, 8 workers, batches of 16."""
  training = Training(resnet_task(8), 8, 16, quantized())
  steps = 1 if settings.SMOKE.value else 4
  programs = {
    'step': training.steps(steps),
    'gradients': training.gradients(steps),
    'plain': training.plain(steps),
  }
  if importlib.util.find_spec('torch'):
    programs['torch'] = torch_loop(8, 16, steps)
  found = in_turns(programs, 2)  # turns differ by 10 %, which is more than a step adds
  what = 'ResNet-20, n = 8, b = 16: '
  yield Row('resnet', what + 'step / gradients', found.ratio('step', 'gradients'), '<= 1.05')
  yield Row('resnet', what + 'gradients / one plain', found.ratio('gradients', 'plain'), '<= 0.6')
  if 'torch' in found:
    ratio = found.ratio('gradients', 'torch')
    yield Row('resnet', what + 'gradients / PyTorch loop', ratio, '<= 1.0')
  rate = steps * 8 * 16 / found.median('step')
  yield Row('resnet', what + 'samples per second', rate, unit='/s')
  yield Row('resnet', what + 'compile', training.compile_seconds, unit=' s')


def exchange() -> Iterator[Row]:
  """Quantize, mix on a ring and update, in multiples of a copy of the same array in a loop."""
  for n, size in ((8, 1_000_000), (64, 1_000_000 if not settings.SMOKE.value else 1000)):
    zeros = jnp.zeros((n, size))
    programs = {'copy': loop(lambda _, x: x * 1.0001, zeros, 10)}
    compiling = {}
    for name, options in (
      ('PRNG', {'bits': 8}),
      ('hash', {'bits': 8, 'dither': 'hash'}),
      ('4 bits', {'bits': 4}),
    ):
      sim = decomp.simulate(quantized(**options), topology.ring(n))
      state = sim.init(zeros[0])
      began = time.perf_counter()
      programs[name] = loop(functools.partial(_exchange, sim), state, 10)
      compiling[name] = time.perf_counter() - began
    found = in_turns(programs)
    what = f'exchange, n = {n}, d = 1 M: '
    for name, goal in (('PRNG', '<= 12'), ('hash', '<= 8')):
      yield Row('exchange', f'{what}8 bits, {name} / copy', found.ratio(name, 'copy'), goal)
    yield Row('exchange', f'{what}4 bits / 8 bits', found.ratio('4 bits', 'PRNG'), '<= 1.3')
    yield Row('exchange', f'{what}compile 8 bits, PRNG', compiling['PRNG'], unit=' s')


def _exchange(sim: decomp.Simulation, _: jax.Array, state: decomp.State) -> decomp.State:
  # Without diagnostics, like seven of eight steps of training.
  return sim.step(jax.random.key(0), state.params - 1, state, observed=False)[0]


def codecs() -> Iterator[Row]:
  """Encoding and decoding messages as they travel, in multiples of `stochastic_quantizer(4)`."""
  n, size = 8, 1000 if settings.SMOKE.value else 250_000
  start = jax.random.normal(jax.random.key(0), (n, size))
  chosen = [compressors.stochastic_quantizer(4), *(compressors.eden(bits) for bits in range(1, 5))]

  def there_and_back(compressor: decomp.Compressor) -> Callable[[], Any]:
    def one(key: jax.Array, x: jax.Array) -> jax.Array:
      return 0.999 * x + 0.001 * compressor.decode(once(compressor.encode, key, x), x)

    def everyone(turn: jax.Array, x: jax.Array) -> jax.Array:
      return jax.vmap(one)(jax.random.split(jax.random.key(turn), n), x)

    return loop(everyone, start, 10)

  found = in_turns({compressor.name: there_and_back(compressor) for compressor in chosen})
  first, *others = found
  for name in others:
    yield Row('codecs', f'encode and decode, {name} / {first}', found.ratio(name, first), '<= 4')


def mlp() -> Iterator[Row]:
  """An MLP with 64 workers, batches of 16."""
  task = mlp_task(64)
  steps = 1 if settings.SMOKE.value else 24
  runs = {name: Training(task, 64, 16, quantized(name=name)) for name in ('dcd_psgd', 'ecd_psgd')}
  programs = {name: training.steps(steps) for name, training in runs.items()}
  programs['gradients'] = runs['dcd_psgd'].gradients(steps)
  programs['uncompressed'] = runs['dcd_psgd'].uncompressed(steps)
  found = in_turns(programs)
  for name, goal in (('dcd_psgd', '<= 1.6'), ('ecd_psgd', '<= 1.8')):
    ratio = found.ratio(name, 'gradients')
    yield Row('mlp', f'MLP 784-256-10, n = 64: {name} step / gradients', ratio, goal)
  what = 'MLP, n = 64: dcd_psgd step / DCD by hand, uncompressed'
  yield Row('mlp', what, found.ratio('dcd_psgd', 'uncompressed'))
  for name, training in runs.items():
    yield Row('mlp', f'MLP, n = 64: compile {name}', training.compile_seconds, unit=' s')


def workers() -> Iterator[Row]:
  """What a worker costs when there are many."""
  for what, make, few, many in (
    ('MLP', mlp_task, 512, 16),
    ('logistic regression', lambda n: tasks.logistic_regression(32 * n, 123), 4000, 200),
  ):
    runs = {n: Training(make(n), n, 16, quantized()) for n in (8, 256)}
    found = in_turns({'few': runs[8].steps(few), 'many': runs[256].steps(many)})
    ratio = found.ratio('many', 'few') * (few * 8) / (many * 256)
    yield Row('workers', f'{what}: cost per worker, n = 256 / n = 8', ratio, '<= 1.3')
    for n, training in runs.items():
      yield Row('workers', f'{what}, n = {n}: compile', training.compile_seconds, unit=' s')
  # What is left of the growth when nothing but memory is at work: 8 models fit into caches.
  size = 784 * 256 + 256 * 10 + 266
  copies = {n: loop(lambda _, x: x * 1.0001, jnp.zeros((n, size)), 512 // n) for n in (8, 256)}
  found = in_turns({str(n): program for n, program in copies.items()})
  yield Row('workers', 'MLP: a copy per worker, n = 256 / n = 8', found.ratio('256', '8'))
  training = Training(tasks.logistic_regression(32 * 1024, 123), 1024, 16, quantized())
  seconds = in_turns({'step': training.steps(100)}).median('step')
  yield Row('workers', 'logistic regression, n = 1024', 100 / seconds, unit=' steps/s')


def small() -> Iterator[Row]:
  """Small problems through `decomp.train`, with a row of metrics every 1,000 steps."""
  for n, batch_size in ((8, 1), (64, 8)):
    steps = 1000 if settings.SMOKE.value else 10_000
    task = tasks.logistic_regression(64 * n, 123)
    rates, hand = [], []
    for _ in range(1 if settings.SMOKE.value else 3):
      history = decomp.train(
        task, quantized(), topology.ring(n), steps, batch_size, eval_every=1000, progress=False
      )
      rates.append(history.steps_per_second)
      hand.append(steps / in_turns({'by hand': by_hand(n, batch_size, steps)}).median('by hand'))
    what = f'logistic regression, n = {n}, d = 123, b = {batch_size}: '
    ratio = float(np.median(rates) / np.median(hand))
    yield Row('small', what + 'train / a loop by hand', ratio, '>= 0.6')
    yield Row('small', what + 'train', float(np.median(rates)), unit=' steps/s')


def memory() -> Iterator[Row]:
  """Bytes of the compiled step, in copies of the model for each worker."""
  n = 16
  for name in ('d_psgd', 'dcd_psgd', 'ecd_psgd', 'choco_sgd'):
    options = {'consensus_rate': 0.2} if name == 'choco_sgd' else {}
    parts = [] if name == 'd_psgd' else [compressors.stochastic_quantizer(8)]
    algorithm = getattr(algorithms, name)(optax.sgd(0.1), *parts, **options)
    training = Training(mlp_task(n), n, 16, algorithm)
    used = training.program.loop.memory_analysis()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(training.begin[0]))
    inside = used.temp_size_in_bytes + used.alias_size_in_bytes
    yield Row('memory', f'MLP, n = {n}: {name}, model copies per worker', inside / size / n)


def sweep() -> Iterator[Row]:
  """32 settings of a small problem in one program, against one run after another."""
  rates, seeds = np.geomspace(0.01, 0.1, 8).tolist(), range(4)
  task, ring = tasks.logistic_regression(64 * 8, 123), topology.ring(8)
  options: dict[str, Any] = {'steps': 1000, 'batch_size': 8, 'eval_every': 500, 'progress': False}
  if settings.SMOKE.value:
    rates, seeds, options['steps'] = rates[:2], range(1), 10

  def make(learning_rate: Any) -> decomp.Algorithm:
    return algorithms.dcd_psgd(optax.sgd(learning_rate), compressors.stochastic_quantizer(8))

  def at_once() -> list[decomp.History]:
    return decomp.sweep(task, make, ring, seeds=seeds, learning_rate=rates, **options).histories

  def in_turn() -> list[decomp.History]:
    each = itertools.product(rates, seeds)
    return [decomp.train(task, make(rate), ring, seed=seed, **options) for rate, seed in each]

  whole, stepping = {}, {}
  for name, program in {'at once': at_once, 'in turn': in_turn}.items():
    began = time.perf_counter()
    histories = program()
    whole[name] = time.perf_counter() - began
    stepping[name] = sum(history[-1]['seconds'] for history in histories)
  what = f'logistic regression, n = 8, d = 123, {options["steps"]} steps, {len(histories)} runs: '
  ratio = whole['at once'] / whole['in turn']
  yield Row('sweep', what + 'sweep / train, compilation included', ratio, '<= 0.25')
  ratio = stepping['at once'] / stepping['in turn']
  yield Row('sweep', what + 'sweep / train, steps alone', ratio)
  yield Row('sweep', what + 'sweep', whole['at once'], unit=' s')


def start() -> Iterator[Row]:
  """How long it takes until something happens."""
  root = Path(__file__).parents[2]

  def run(*arguments: str) -> Callable[[], Any]:
    command = [sys.executable, *arguments]
    return lambda: subprocess.run(command, cwd=root, capture_output=True, check=True)

  found = in_turns(
    {'decomp': run('-c', 'import decomp'), 'train': run('-m', 'experiments.train', '--help')}
  )
  yield Row('start', 'import decomp', found.median('decomp'), '<= 1.5', ' s')
  yield Row('start', 'experiments.train --help', found.median('train'), unit=' s')


if __name__ == '__main__':
  app.run(main)
