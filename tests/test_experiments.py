"""The programs: what they write and print, mistakes in one line, every preset for a step."""

import csv
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from absl import flags

pytestmark = pytest.mark.usefixtures('as_users_have_it')

ROOT = Path(__file__).parents[1]
PRESETS = sorted((ROOT / 'experiments' / 'flags').glob('*.flags'))
TINY = ['--task=logistic_regression(64, 3)', '--topology=ring(4)', '--batch_size=2']


class Program:
  """A program of `experiments` in this process, as if started anew: two of them share flags."""

  def __init__(self, name, monkeypatch):
    self._forget()
    self.module = importlib.import_module(f'experiments.{name}')
    # The tests have made their devices.
    monkeypatch.setattr(self.module.settings, 'make_devices', lambda count: None)

  def __call__(self, *args):
    """Runs it; a message with which it stops is raised as SystemExit."""
    self.module.main(self.parse(*args))

  def error(self, *args):
    """The message with which it stops, one line; with a message the exit code is 1."""
    with pytest.raises(SystemExit) as caught:
      self(*args)
    message = caught.value.code
    assert isinstance(message, str)
    assert '\n' not in message
    return message

  def parse(self, *args):
    for name in self.flags():
      flags.FLAGS[name].unparse()
    return flags.FLAGS(['program', *args])

  @classmethod
  def _forget(cls):
    for name in cls.flags():
      delattr(flags.FLAGS, name)
    for module in [name for name in sys.modules if name.partition('.')[0] == 'experiments']:
      del sys.modules[module]

  @staticmethod
  def flags():
    modules = flags.FLAGS.flags_by_module_dict()
    return [flag.name for m, found in modules.items() if 'experiments' in m for flag in found]


@pytest.fixture
def train(monkeypatch):
  return Program('train', monkeypatch)


@pytest.fixture
def compare(monkeypatch):
  return Program('compare', monkeypatch)


def read_rows(path):
  return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def interrupted(*_):
  raise KeyboardInterrupt


def test_train_writes_everything_and_resumes(train, tmp_path, capsys):
  args = [*TINY, '--algorithm=d_psgd', '--eval_every=2', f'--output={tmp_path}']
  train(*args, '--steps=4', '--csv', '--tensorboard')
  printed = capsys.readouterr().out
  assert 'd_psgd on ring(4)' in printed
  for column in ('test suboptimality', 'consensus distance', 'MB per worker', 'steps/s', 'step 4'):
    assert column in printed
  config = json.loads((tmp_path / 'config.json').read_text())
  assert (config['algorithm'], config['steps'], config['seed']) == ('d_psgd', 4, 0)
  assert config['environment']['jax'] == jax.__version__
  assert (tmp_path / 'plot.png').read_bytes().startswith(b'\x89PNG')
  rows = read_rows(tmp_path / 'metrics.jsonl')
  assert [row['step'] for row in rows] == [0, 2, 4]
  with (tmp_path / 'metrics.csv').open() as file:
    table = list(csv.DictReader(file))
  assert [float(row['test_loss']) for row in table] == [row['test_loss'] for row in rows]
  assert set(table[0]) == set(rows[-1])
  assert len(list((tmp_path / 'tensorboard').iterdir())) == 1

  before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
  error = train.error(*args, '--steps=4')
  assert error.endswith('add --resume to continue it, or choose another')
  with pytest.raises(SystemExit, match=r'optimizer: .* there, "adam.*" here'):
    train(*args, '--steps=4', '--resume', '--optimizer=adam(0.1)')
  assert before == {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}

  train(*args, '--steps=6', '--resume', '--tensorboard')
  resumed = read_rows(tmp_path / 'metrics.jsonl')
  assert resumed[:3] == rows
  assert [row['step'] for row in resumed] == [0, 2, 4, 6]
  assert len(list((tmp_path / 'tensorboard').iterdir())) == 1


def test_schedules_know_the_length_of_the_run(train, tmp_path):
  """So a run with one cannot be made longer."""
  optimizer = '--optimizer=sgd(warmup_step_decay(0.1))'
  args = [*TINY, '--algorithm=allreduce', optimizer, '--eval_every=1', f'--output={tmp_path}']
  train(*args, '--steps=2')
  with pytest.raises(SystemExit, match='steps of the schedule: 2 there, 4 here'):
    train(*args, '--steps=4', '--resume')


def test_train_reports_divergence(train, tmp_path):
  args = [*TINY, '--algorithm=d_psgd', '--optimizer=sgd(1e38)', f'--output={tmp_path}']
  assert train.error(*args).startswith('error: d_psgd on ring(4) diverged at step ')
  assert read_rows(tmp_path / 'metrics.jsonl')[-1]['train_loss'] is None
  assert (tmp_path / 'plot.png').exists()


def test_train_uses_a_new_folder_by_itself(train, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  chosen = []
  monkeypatch.setattr(
    train.module.settings, 'run', lambda setup, algorithm, folder: chosen.append(folder.path)
  )
  for extra, existing in ([], None), ([], 1), (['--resume'], 2):
    if existing:
      name = f'logistic_regression-dcd_psgd-stochastic_quantizer-bits=8-ring-4-seed0-{existing}'
      (tmp_path / 'runs' / name).mkdir(parents=True)
    with pytest.raises(TypeError):  # there is no history to report
      train(*TINY, *extra)
  assert [path.name[-1] for path in chosen] == ['1', '2', '2']


def test_ctrl_c_says_how_to_continue(train, monkeypatch, tmp_path):
  monkeypatch.setattr(train.module.settings, 'run', interrupted)
  with pytest.raises(SystemExit, match='--resume continues'):
    train(*TINY, f'--output={tmp_path}')


def test_other_processes_compute_no_verdict(train, monkeypatch):
  module = train.module
  train.parse(*TINY)
  setup = module.settings.build_setup()
  algorithm = module.settings.build_algorithm('dcd_psgd', setup.steps)
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  monkeypatch.setattr(module.output.theory, 'preflight', lambda *_, **__: pytest.fail('asked'))
  module.output.say_verdict(setup, algorithm)


RESUMABLE = r'; the same command with --resume continues from here'


@pytest.mark.parametrize(
  ('name', 'more'), [('plan', ''), ('preflight', ''), ('sweep', RESUMABLE), ('train', RESUMABLE)]
)
def test_ctrl_c_says_whether_it_can_be_continued(name, more, monkeypatch):
  program = Program(name, monkeypatch)
  monkeypatch.setattr(program.module.settings, 'build_setup', interrupted)
  with pytest.raises(SystemExit, match=f'^\nstopped{more}$'):
    program(*TINY, '--algorithm=d_psgd=10')


def test_compare(compare, tmp_path, capsys):
  """With an algorithm that takes the flags' compressor and one with its own."""
  own = 'choco_sgd(random_k(0.5), consensus_rate=0.3)'
  args = [*TINY, '--smoke', f'--output={tmp_path}', '--algorithm=naive', f'--algorithm={own}']
  compare(*args, '--compressor=sign_norm')
  printed = capsys.readouterr().out
  assert re.search(r'\[1/2\] naive\(sign_norm\(?\)?\): train loss', printed)
  results = json.loads((tmp_path / 'results.json').read_text())
  assert [row['algorithm'] for row in results] == ['naive', 'choco_sgd']
  assert 'consensus_rate=0.3' in results[1]['compressor']
  assert (tmp_path / 'plot.png').exists()
  assert (tmp_path / 'partition.png').exists()
  assert (tmp_path / 'config.json').exists()
  folders = sorted(path for path in tmp_path.iterdir() if path.is_dir())
  assert [folder.name.split('-')[0] for folder in folders] == ['choco_sgd', 'naive']
  for folder in folders:
    assert [row['step'] for row in read_rows(folder / 'metrics.jsonl')] == [0, 1, 2, 3]
    assert {'config.json', 'checkpoints'} < {path.name for path in folder.iterdir()}
  # All are finished: nothing is trained again, and the names in the table can be given as flags.
  compare(*args[:-2], '--resume', '--compressor=sign_norm', '--algorithm=naive(sign_norm())')
  assert 'naive' in capsys.readouterr().out


def test_compare_goes_on_when_one_diverges(compare, tmp_path, capsys):
  args = ['--algorithm=allreduce', '--algorithm=d_psgd', '--optimizer=sgd(1e38)']
  compare(*TINY, *args, f'--output={tmp_path}')
  printed = capsys.readouterr().out
  assert '[1/2] allreduce on ring(4) diverged at step' in printed
  assert '[2/2] d_psgd on ring(4) diverged at step' in printed
  assert len(read_rows(tmp_path / 'allreduce' / 'metrics.jsonl')) == 2
  results = json.loads((tmp_path / 'results.json').read_text(), parse_constant=pytest.fail)
  assert [row['train loss'] for row in results] == [None, None]


def test_compare_takes_each_algorithm_once(compare, tmp_path):
  error = compare.error(*TINY, '--algorithm=d_psgd', '--algorithm=d_psgd', f'--output={tmp_path}')
  assert error == 'error: --algorithm=d_psgd is given more than once'


@pytest.mark.parametrize(
  ('flag', 'kind', 'meant'),
  [
    ('--algorithm=dcd_pgsd', 'algorithm', 'dcd_psgd'),
    ('--algorithm=dcd', 'algorithm', 'dcd_psgd'),
    ('--compressor=topk(0.1)', 'compressor', 'top_k'),
    ('--topology=rings(8)', 'topology', 'ring'),
    ('--optimizer=sdg(0.1)', 'optimizer', 'sgd'),
    ('--task=logistic_regresion', 'task', 'logistic_regression'),
    ('--partition=by_labels', 'partition', 'by_label'),
  ],
)
def test_typos(train, tmp_path, flag, kind, meant):
  output = tmp_path / 'output'
  error, wrong = train.error(*TINY, flag, f'--output={output}'), re.split(r'[=(]', flag)[1]
  assert error.startswith(f'error: {flag}: unknown {kind} {wrong!r}; did you mean {meant!r}?')
  assert not output.exists()


def test_network(train, tmp_path):
  train(*TINY, '--smoke', '--network=lan(bandwidth="1Mbps", latency="5ms")', f'--output={tmp_path}')
  assert all(
    row['simulated_seconds'] > row['step'] * 5e-3
    for row in read_rows(tmp_path / 'metrics.jsonl')[1:]
  )
  error = train.error(*TINY, '--smoke', '--network=lan("1Mbit")', f'--output={tmp_path / "2"}')
  assert error.startswith(
    """error: --network=lan("1Mbit"): bandwidth='1Mbit': must be a number and one of"""
  )


def test_devices(train, tmp_path):
  """The same rows from workers on one device, and on four that exchange packed bytes."""
  rows = {}
  for flag in ('--nocsv', '--devices=4'):
    train(*TINY, '--algorithm=dcd_psgd', '--steps=6', flag, f'--output={tmp_path / flag}')
    rows[flag] = read_rows(tmp_path / flag / 'metrics.jsonl')
  for one, other in zip(*rows.values(), strict=True):
    del one['seconds'], other['seconds']
    # An 8-bit message: a rounding that flips on the last bit moves a parameter by a quantum.
    assert other == pytest.approx(one, rel=0.05, abs=2e-3)


def test_devices_that_do_not_fit(train):
  error = train.error(*TINY, '--devices=3')
  assert error.endswith('has 4 workers, which 3 devices cannot share evenly')
  error = train.error(*TINY, '--devices=100')
  assert '--devices=100: there are 8; on CPU --host_devices=100 makes them' in error


def test_the_last_one_of_steps_and_epochs_holds(train):
  for args, steps in (
    (['--epochs=2'], 16),
    (['--epochs=2', '--steps=5'], 5),
    (['--steps=5', '--epochs=0.5'], 4),
    ([], 1000),
  ):
    train.parse(*TINY, *args)
    assert train.module.settings.build_setup().steps == steps


def test_stray_argument(train):
  assert train.error('digits').startswith("error: unexpected argument 'digits'")


def start(program, *args, **environment):
  """A program in a process of its own, as a user starts it."""
  return subprocess.run(
    [sys.executable, '-m', f'experiments.{program}', *args],
    cwd=ROOT,
    env={**os.environ, **environment},
    capture_output=True,
    text=True,
    timeout=300,
  )


@pytest.mark.parametrize('program', ['train', 'compare', 'sweep'])
def test_help(program):
  done = start(program, '--help')
  first = {
    'train': 'Trains with one algorithm.',
    'compare': 'Compares algorithms on the same task',
    'sweep': 'Trains with every combination of seeds and numbers',
  }
  assert done.stdout.startswith(first[program])
  for flag in ('algorithm', 'compressor', 'topology', 'optimizer', 'task', 'partition', 'steps'):
    assert f'  --{flag}: ' in done.stdout
  for flag in ('resume', 'smoke', 'tensorboard', 'csv', 'reshuffle'):
    assert f'  --[no]{flag}: ' in done.stdout
  for name in ('ecd_psgd', 'stochastic_quantizer', 'torus', 'cifar10', 'resnet20'):
    assert name in done.stdout


def test_unknown_flag():
  done = start('train', '--algoritm=d_psgd')
  assert done.returncode != 0
  assert "Unknown command line flag 'algoritm'. Did you mean: algorithm ?" in done.stderr
  assert 'Traceback' not in done.stderr


def test_a_process_of_its_own(tmp_path):
  """Quiet on stderr off a terminal, one device for each core, and exit code 0."""
  done = start('train', *TINY, '--algorithm=allreduce', '--smoke', f'--output={tmp_path}')
  assert done.stderr == ''
  assert done.returncode == 0
  config = json.loads((tmp_path / 'config.json').read_text())
  assert config['environment']['devices'].startswith(f'{os.cpu_count()} x ')


def test_missing_data(tmp_path):
  done = start('train', '--task=cifar10', TFDS_DATA_DIR=str(tmp_path))
  assert done.returncode == 1
  assert done.stderr.startswith('error: cifar10 is not prepared')
  assert 'python -m experiments.prepare_data --dataset=cifar10' in done.stderr
  assert 'Traceback' not in done.stderr


def test_benchmark(monkeypatch, tmp_path, capsys):
  benchmark = Program('benchmark.__main__', monkeypatch)
  benchmark('--only=memory', '--smoke', f'--output={tmp_path}')
  assert 'dcd_psgd, model copies per worker' in capsys.readouterr().out
  rows = json.loads((tmp_path / 'results.json').read_text())
  # Parameters are carried, and gradients are made.
  assert 2 <= next(row['value'] for row in rows if 'dcd_psgd' in row['what']) <= 8
  goals = {'<= 1.05': False, '>= 0.6': True, '': None}
  assert {goal: benchmark.module.Row('group', 'what', 1.1, goal).met for goal in goals} == goals


# Those of papers are in test_reproduction: to compile all of them would take minutes.
OTHERS = [path for path in PRESETS if not re.match('figure|koloskova', path.stem)]


@pytest.mark.parametrize('preset', OTHERS, ids=lambda path: path.stem)
def test_preset(preset, tmp_path, monkeypatch, capsys):
  """Every algorithm of it is trained for three small steps."""
  import tensorflow_datasets as tfds

  command = re.search(
    r'^#.*python -m experiments\.(train|compare|sweep) (.*)$', preset.read_text(), re.M
  )
  assert command[2] == f'--flagfile=experiments/flags/{preset.name}'
  program = Program(command[1], monkeypatch)
  with tfds.testing.mock_data(num_examples=64):
    program(f'--flagfile={preset}', '--smoke', f'--output={tmp_path}')
  chosen = program.module.ALGORITHM.value
  count = 1 if isinstance(chosen, str) else len(chosen)
  assert len(re.findall(r' step [1-3] ', capsys.readouterr().out)) == count
