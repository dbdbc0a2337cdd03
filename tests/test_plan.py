"""The planner as a program: from runs, from step counts, beside measurements; and mistakes."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from test_experiments import Program, read_rows

from decomp import cost, topology

pytestmark = pytest.mark.usefixtures('as_users_have_it')

DEMO = Path(__file__).parents[1] / 'experiments' / 'studies' / 'demo' / 'results'
FOUR_BITS = 'dcd_psgd(stochastic_quantizer(bits=4))'
FOUR_BITS_FILE = 'dcd_psgd-stochastic_quantizer-bits=4'
TINY = ['--task=logistic_regression(64, 3)', '--topology=ring(4)', '--compute=1ms']


@pytest.fixture
def plan(monkeypatch):
  """The program, with codecs that take no time: what they take here is no matter of these tests."""
  program = Program('plan', monkeypatch)
  monkeypatch.setattr(cost, 'measure_codec', lambda algorithm, graph, params: 0.0)
  return program


def copy_demo(path, **changed):
  """The demo's runs of three algorithms in folders as experiments.compare makes them."""
  config = json.loads((DEMO / 'config.json').read_text())
  config |= {'algorithm': ['allreduce', 'd_psgd', FOUR_BITS], **changed}
  path.mkdir()
  (path / 'config.json').write_text(json.dumps(config))
  for name in ('allreduce', 'd_psgd', FOUR_BITS_FILE):
    (path / name).mkdir()
    shutil.copy(DEMO / f'{name}.jsonl', path / name / 'metrics.jsonl')


def test_runs_give_a_table_a_sentence_and_a_map(plan, tmp_path, capsys):
  """On the committed demo: the steps are its own, and naive compression does not count."""
  point = ['--bandwidth=100Mbps', '--latency=5ms', '--compute=2ms', f'--output={tmp_path}']
  plan(f'--runs={DEMO}', '--target=test_accuracy>=0.95', *point)
  printed = ' '.join(capsys.readouterr().out.split())
  found = json.loads((tmp_path / 'plan.json').read_text())
  assert 'naive(stochastic_quantizer(bits=4)) in' in printed
  assert 'test_accuracy>=0.95 is not reached' in printed
  assert found['answer'] in printed
  assert found['answer'].endswith('faster than allreduce at 100 Mbps, 5 ms')
  assert re.search(r': [0-9.]+x \([0-9.]+ to [0-9.]+\) faster', found['answer'])
  winner = found['answer'].partition(': ')[0]
  assert f'preflight: {found["preflight"]}' in printed
  assert found['preflight'].startswith(f'{winner} on ring(8): ')
  rows = {row['algorithm']: row for row in found['table']}
  assert len(rows) == 5
  for name, file in (('allreduce', 'allreduce'), (FOUR_BITS, FOUR_BITS_FILE)):
    metrics = read_rows(DEMO / f'{file}.jsonl')
    below = max(row['step'] for row in metrics if row['test_accuracy'] < 0.95)
    assert below < rows[name]['steps'] <= below + 50
    assert rows[name]['±'] == 50
    # What the run itself has counted.
    bits = 8 * metrics[-1]['bytes_sent'] / metrics[-1]['step']
    messages = 14 if name == 'allreduce' else 1
    network = messages * 5e-3 + bits / 100e6
    assert rows[name]['network (ms)'] == pytest.approx(1e3 * network, rel=1e-3)
    seconds = rows[name]['steps'] * (2e-3 + network)
    assert rows[name]['time to target (s)'] == pytest.approx(seconds, rel=1e-3)
  assert np.shape(found['winner']) == (121, 121)
  assert (tmp_path / 'winners.png').read_bytes().startswith(b'\x89PNG')


def test_folders_of_a_comparison_and_of_a_single_run(plan, tmp_path):
  copy_demo(tmp_path / 'compared')
  plan(f'--runs={tmp_path / "compared"}', '--compute=1ms', f'--output={tmp_path / "a"}')
  found = json.loads((tmp_path / 'a' / 'plan.json').read_text())
  assert found['algorithms'] == ['allreduce', 'd_psgd', FOUR_BITS]

  single = tmp_path / 'other'
  copy_demo(single, algorithm='d_psgd')
  shutil.move(single / 'd_psgd' / 'metrics.jsonl', single / 'metrics.jsonl')
  args = [f'--runs={tmp_path / "compared"}', f'--runs={single}', '--compute=1ms']
  plan(*args, f'--output={tmp_path / "b"}')
  found = json.loads((tmp_path / 'b' / 'plan.json').read_text())
  assert found['algorithms'] == ['allreduce', 'd_psgd', FOUR_BITS]


def test_steps_may_be_given(plan, tmp_path, capsys):
  args = [*TINY, '--algorithm=allreduce=900', f'--algorithm={FOUR_BITS}=1000']
  plan(*args, '--latency=10ms', f'--output={tmp_path}')
  # 900 (1 + 6 · 10) ms against 1000 (1 + 10) ms, with a few bytes at 1 Gbps.
  assert f'{FOUR_BITS}: 4.99x faster than allreduce at 1 Gbps, 10 ms' in capsys.readouterr().out
  plan(*args, '--latency=10ms', '--straggling=48', f'--output={tmp_path}')
  # Waiting 1 + 48 H_4 = 101 ms for the slowest of four: 900 · 161 against 1000 · 111.
  assert f'{FOUR_BITS}: 1.31x faster' in capsys.readouterr().out


def test_all_reduce_may_win(plan, tmp_path, capsys):
  args = [*TINY, '--algorithm=allreduce=100', '--algorithm=d_psgd=300', '--latency=1us']
  plan(*args, f'--output={tmp_path}')
  assert 'allreduce: 2.99x faster than d_psgd' in capsys.readouterr().out
  (_, gossip) = json.loads((tmp_path / 'plan.json').read_text())['table']
  assert gossip['faster'] == 'nowhere'


def test_the_network_may_be_described(plan, tmp_path):
  args = [*TINY, '--algorithm=allreduce=100', '--algorithm=d_psgd=100', '--latency=10ms']
  doubling = '--links=lan(allreduce="recursive_doubling")'
  plan(*args, doubling, '--bandwidth=1Gbps', f'--output={tmp_path}')
  centralised, _ = json.loads((tmp_path / 'plan.json').read_text())['table']
  assert centralised['network (ms)'] == pytest.approx(20, rel=1e-3)


def test_a_codec_that_costs_too_much_loses(plan, tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(
    cost, 'measure_codec', lambda algorithm, graph, params: 0.1 * ('dcd' in algorithm.name)
  )
  args = [*TINY, '--algorithm=d_psgd=100', f'--algorithm={FOUR_BITS}=100']
  plan(*args, f'--output={tmp_path}')
  # 1 + 0.1 ms against 1 + 0.1 + 100 ms.
  assert f'd_psgd: 91.9x faster than {FOUR_BITS}' in capsys.readouterr().out


@pytest.mark.parametrize('efficiency', [1.0, 0.6])
def test_predictions_stand_beside_measurements(plan, tmp_path, capsys, efficiency):
  """Measurements that the model has made itself: no error, or one that the fit takes away."""
  graph, names = topology.ring(4), ['d_psgd', FOUR_BITS]
  plan.parse()
  rows = []
  for name in names:
    algorithm = plan.module.settings.build_algorithm(name, 1)
    work = cost.workload(algorithm, graph, np.zeros(10_000, np.float32), compute=0, codec=0)
    for bandwidth in (5, 20, 100):
      links = cost.lan(bandwidth * 1e6, 1e-3, efficiency=efficiency, window=1e5)
      point = {'bandwidth': bandwidth, 'latency': 1.0, 'round_trip_ms': 2.0}
      seconds = float(cost.step_seconds(work, links))
      rows.append({'algorithm': name, **point, 'seconds': seconds})
  config = {'workers': 4, 'size': 10_000, 'algorithm': names}
  (tmp_path / 'config.json').write_text(json.dumps(config))
  path = tmp_path / 'results.json'
  path.write_text(json.dumps(rows))
  plan(f'--measured={path}')
  printed = capsys.readouterr().out
  # Two messages of 4 bytes or half a byte for each number, and a scale.
  wire = np.array([[8 * 2 * size / (mbps * 1e6) for mbps in (5, 20, 100)] for size in (4e4, 5004)])
  error = 100 * np.median(1 - (1e-3 + wire) / (1e-3 + wire / efficiency))
  assert f'median error {error:.0f} %; 0 % if fitted to the other algorithms' in printed
  # No message was ever held up by the window, so that it is not known to be finite.
  assert f'lan(efficiency={efficiency:.2g}, window=1e+09)' in printed

  path.write_text(json.dumps(rows[:3]))
  assert 'must have rows of two algorithms at least' in plan.error(f'--measured={path}')


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    ([], 'nothing to plan: give --runs=FOLDER, or --algorithm=NAME=STEPS'),
    (['--runs=nowhere'], 'nowhere/config.json is missing'),
    (['--measured=nowhere.json'], 'nowhere.json is missing'),
    ([f'--runs={DEMO}', '--target=accuracy'], "target='accuracy': must be a column"),
    ([f'--runs={DEMO}', '--target=loss<=1'], "no column 'loss' to reach; there are: step, epoch"),
    ([f'--runs={DEMO}', '--target=test_accuracy>=0.999'], 'test_accuracy>=0.999 is not reached'),
    ([*TINY, '--algorithm=d_psgd'], "must end in its number of steps, such as 'd_psgd=1000'"),
    ([*TINY, '--algorithm=d_psgd=0'], '--algorithm=d_psgd=0: must end in its number of steps'),
    ([*TINY, '--algorithm=dpsgd=10'], "unknown algorithm 'dpsgd'; did you mean 'd_psgd'?"),
    (['--bandwidth=fast'], "bandwidth='fast': must be a number and one of the units"),
    (['--bandwidth=0Mbps'], 'bandwidth=0.0: must be above 0'),
    (['--latency=5'], "latency='5': must be a number and one of the units s, ms, us, ns"),
    (['--links=wan'], "unknown links 'wan'"),
    ([*TINY[:2], '--algorithm=d_psgd=1', '--compute=quick'], "compute='quick': must be a number"),
  ],
)
def test_mistakes_are_told_in_one_line(plan, tmp_path, args, message):
  assert message in plan.error(*args, f'--output={tmp_path}')
  assert not list(tmp_path.iterdir())


def test_runs_that_have_not_begun(plan, tmp_path):
  copy_demo(tmp_path / 'runs', algorithm=['d_psgd'])
  metrics = tmp_path / 'runs' / 'd_psgd' / 'metrics.jsonl'
  metrics.write_text('')
  assert 'the metrics are empty' in plan.error(f'--runs={tmp_path / "runs"}')
  metrics.unlink()
  assert 'd_psgd has not been run there' in plan.error(f'--runs={tmp_path / "runs"}')


def test_seconds_of_another_machine(plan, tmp_path):
  """All-reduce's step is the gradient; what an algorithm takes beyond it is its codec."""
  facts = {'allreduce': {'at least': 2e-3}, FOUR_BITS: {'at least': 5e-3}}
  path = tmp_path / 'compile.json'
  path.write_text(json.dumps({'algorithms': facts}))
  own = [argument for argument in TINY if '--compute' not in argument]
  chosen = ['--algorithm=allreduce=10', f'--algorithm={FOUR_BITS}=10']
  plan(*own, *chosen, f'--compiled={path}', f'--output={tmp_path}')
  first, second = json.loads((tmp_path / 'plan.json').read_text())['table']
  assert (first['compute (ms)'], first['message and update (ms)']) == (2, 0)
  assert (second['compute (ms)'], second['message and update (ms)']) == (2, pytest.approx(3))
  message = plan.error(*own, '--algorithm=d_psgd=10', f'--compiled={path}')
  assert 'knows no seconds of d_psgd' in message


def test_files_that_something_else_has_written(plan, tmp_path):
  config, rows = tmp_path / 'config.json', tmp_path / 'rows.json'
  config.write_text('{"task": "digits"}')
  rows.write_text('[3]')
  assert 'else than experiments.train or experiments.comp' in plan.error(f'--runs={tmp_path}')
  assert 'else than experiments.studies.network_bench' in plan.error(f'--measured={rows}')
  compiled = plan.error(*TINY, '--algorithm=d_psgd=10', f'--compiled={rows}')
  assert 'holds something else than experiments.compile writes (TypeError' in compiled
