"""Where results go: one folder for each run."""

import contextlib
import csv
import json
import math
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import decomp
from decomp import theory
from decomp.training import folders, processes
from experiments.common import settings

Writer = Callable[[Mapping[str, Any]], None]


class Folder:
  """A run's folder: config.json, metrics.jsonl, plot.png and checkpoints/."""

  def __init__(self, path: Path):
    self.path = path

  def write_config(self, **more: Any) -> None:
    """Writes down every setting, and what the run was made with."""
    config = {**more, **settings.settings(), 'environment': settings.environment()}
    write_json(self.path / 'config.json', config)

  @contextlib.contextmanager
  def writers(self, **config: Any) -> Iterator[Writer]:
    """Gives a function that writes a row everywhere it is wanted, at once; the first process does.

    The first row opens all files anew. It comes when a run has begun, or has been found to be the
    one to resume, whose old rows come again; until then a folder keeps what it has.
    """
    with contextlib.ExitStack() as stack:
      sinks: list[Writer] = []

      def on_row(row: Mapping[str, Any]) -> None:
        if not processes.is_first():
          return
        with folders.written(self.path):
          if not sinks:
            self.write_config(**config)
            sinks.extend(self._open(stack))
          for sink in sinks:
            sink(row)

      try:
        yield on_row
      finally:
        with folders.written(self.path):
          stack.close()

  def _open(self, stack: contextlib.ExitStack) -> Iterator[Writer]:
    yield _jsonl(stack, self.path / 'metrics.jsonl')
    if settings.CSV.value:
      yield _csv(stack, self.path / 'metrics.csv')
    if settings.TENSORBOARD.value:
      yield _tensorboard(stack, self.path / 'tensorboard')


def say(text: str) -> None:
  """Prints, in the first process."""
  if processes.is_first():
    print(text, flush=True)


def say_verdict(setup: settings.Setup, algorithm: decomp.Algorithm) -> None:
  """Prints what to expect of a run, in the first process: from shapes alone, in about a second."""
  if settings.SMOKE.value or not processes.is_first():
    return
  shapes, _ = jax.eval_shape(setup.task.init, jax.random.key(0))
  found = theory.preflight(algorithm, setup.topology, shapes, steps=setup.steps)
  say(('' if found.is_good else 'warning: ') + found.headline)


def look(
  setup: settings.Setup, chosen: Sequence[decomp.Algorithm], pilot: int | None = None
) -> list[theory.Preflight]:
  """What to expect of algorithms with one optimizer, from a few steps on the task of the flags."""
  params, model_state = jax.jit(setup.task.init)(jax.random.key(settings.SEED.value))
  gradients = theory.task_gradients(setup.task, model_state, setup.shards, setup.batch_size)
  loss = theory.task_loss(setup.task, model_state)
  found: list[theory.Preflight] = []
  for algorithm in chosen:
    problem = found[0].problem if found else None  # the task is the same for all
    arguments = algorithm, setup.topology, params, gradients, problem
    options: Any = {'steps': setup.steps, 'pilot': pilot, 'seed': settings.SEED.value}
    found.append(theory.preflight(*arguments, loss=loss, **options))
  return found


@contextlib.contextmanager
def own_folder(name: str) -> Iterator[Path]:
  """The folder of `choose_folder`, which no other run can use meanwhile."""
  path = choose_folder(name)
  with folders.locked(path):
    yield path


def choose_folder(name: str) -> Path:
  """--output, or the first unused runs/NAME-K; with --resume the newest one that is there.

  Raises:
    ValueError: --output holds a run already and --resume is not given.
  """
  # One chooses for all, before it creates the folder that the others would find in use.
  return Path(processes.first_says(str(_choose_folder(name)) if processes.is_first() else ''))


def _choose_folder(name: str) -> Path:
  if settings.OUTPUT.value:
    path = Path(settings.OUTPUT.value)
    with folders.written(path):
      is_used = (path / 'config.json').exists()
    if is_used and not settings.RESUME.value:
      raise ValueError(
        f'--output={path} holds a run already: add --resume to continue it, or choose another'
      )
    return path
  base = Path('runs') / slug(name)
  number = 1
  while (path := base.with_name(f'{base.name}-{number}')).exists():
    number += 1
  if settings.RESUME.value and number > 1:
    return base.with_name(f'{base.name}-{number - 1}')
  return path


def slug(text: str) -> str:
  """`text` as a file name, of no more characters than file systems take."""
  name = re.sub(r'[^\w.=]+', '-', text).strip('-')
  return name if len(name) < 200 else f'{name[:190]}-{zlib.crc32(text.encode()):08x}'


def for_json(found: Any, digits: int = 17) -> Any:
  """JSON has no NaN: null is what other programs can read. With 17 digits floats are exact."""
  if isinstance(found, Mapping):
    return {k: for_json(v, digits) for k, v in found.items()}
  if isinstance(found, list | tuple):
    return [for_json(v, digits) for v in found]
  if isinstance(found, float):
    return float(f'{found:.{digits}g}') if math.isfinite(found) else None
  return found


def write_json(path: Path, found: Any) -> None:
  """Writes a file, and makes its folder."""
  with folders.written(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + '\n')


def write_rows(path: Path, found: Mapping[str, Any]) -> None:
  """Writes JSON with one line for each entry, and for each row of a table."""
  lines = []
  for name, value in found.items():
    text = json.dumps(value)
    if isinstance(value, list) and isinstance(value[0], dict):
      text = '[\n    ' + ',\n    '.join(map(json.dumps, value)) + '\n  ]'
    lines.append(f'  {json.dumps(name)}: {text}')
  path.write_text('{\n' + ',\n'.join(lines) + '\n}\n')


@contextlib.contextmanager
def written_by(program: str, flag: str) -> Iterator[None]:
  """Says so where a file holds something else than the program writes that a flag asks for."""
  try:
    yield
  except (AttributeError, LookupError, TypeError, json.JSONDecodeError) as error:
    reason = f'{type(error).__name__}: {error}'
    raise ValueError(f'{flag}: holds something else than {program} writes ({reason})') from error


def read_json(path: Path) -> Any:
  """What a file of an earlier run holds."""
  if not path.exists():
    raise FileNotFoundError(f'{path} is missing: is the folder right?')
  return json.loads(path.read_text())


def read_metrics(folder: Path, algorithm: str) -> list[dict[str, Any]]:
  """The rows of one algorithm's run, from a folder of one run or of a comparison."""
  path = metrics_file(folder, algorithm)
  if not path.exists():
    raise FileNotFoundError(f'{path} is missing: {algorithm} has not been run there')
  return read_rows(path)


def metrics_file(folder: Path, algorithm: str) -> Path:
  """Where these rows are, or should be."""
  name = slug(algorithm)
  places = [folder / name / 'metrics.jsonl', folder / f'{name}.jsonl', folder / 'metrics.jsonl']
  return next((path for path in places if path.exists()), places[0])


def read_rows(path: Path) -> list[dict[str, Any]]:
  """The rows of a metrics.jsonl."""
  return [json.loads(line) for line in path.read_text().splitlines()]


def save_shards(setup: settings.Setup, path: Path) -> None:
  """Draws who holds which labels, where examples have one."""
  labels = setup.task.train.get('label')
  if labels is not None and labels.ndim == 1:
    save_plot(setup.shards.plot(labels).figure, path / 'partition.png')


def save_plot(figure: Any, path: Path) -> None:
  """Writes a figure, and frees it."""
  import matplotlib.pyplot as plt

  with folders.written(path):
    figure.savefig(path, dpi=120)
  plt.close(figure)


def _jsonl(stack: contextlib.ExitStack, path: Path) -> Writer:
  file = stack.enter_context(path.open('w'))

  def write(row: Mapping[str, Any]) -> None:
    file.write(json.dumps(for_json(row)) + '\n')
    file.flush()

  return write


def _csv(stack: contextlib.ExitStack, path: Path) -> Writer:
  file = stack.enter_context(path.open('w', newline=''))
  writer: list[csv.DictWriter] = []

  def write(row: Mapping[str, Any]) -> None:
    if not writer:
      # The first row has no training metrics yet, so the columns are those of any later one.
      later = ['train_loss', 'gradient_norm', 'compression_error', 'clipped']
      writer.append(csv.DictWriter(file, list(dict.fromkeys([*row, *later]))))
      writer[0].writeheader()
    writer[0].writerow(row)
    file.flush()

  return write


def _tensorboard(stack: contextlib.ExitStack, path: Path) -> Writer:
  from tensorboardX import SummaryWriter

  shutil.rmtree(path, ignore_errors=True)
  writer = SummaryWriter(str(path))
  stack.callback(writer.close)

  def write(row: Mapping[str, Any]) -> None:
    for name, value in row.items():
      if name != 'step':
        writer.add_scalar(name, value, row['step'])

  return write
