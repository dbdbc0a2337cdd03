"""Reports on several runs: which runs are found, what they are called, and a page that works."""

import html
import json
import re
import shutil
import subprocess

import optax
import pytest
from test_experiments import Program
from test_plan import DEMO, copy_demo

import decomp

pytestmark = pytest.mark.usefixtures('as_users_have_it')

BROWSER = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'chrome'))), None)


@pytest.fixture
def report(monkeypatch):
  program = Program('report', monkeypatch)

  def run(*args):
    program.module.main(program.parse(*map(str, args)))

  run.error = lambda *args: program.error(*map(str, args))
  return run


def write_run(path, losses, algorithm='d_psgd', seed=0, **more):
  """The folder of a run as experiments.train makes it."""
  path.mkdir(parents=True)
  config = {'algorithm': algorithm, 'seed': seed, 'compressor': 'identity', 'topology': 'ring(8)'}
  (path / 'config.json').write_text(json.dumps(config))
  rows = [
    {
      'step': 10 * k,
      'epoch': k,
      'test_loss': loss,
      'consensus_distance': 0.1,
      'bytes_sent': 1000 * k,
    }
    | {'seconds': 0.5 * k, **({'train_loss': loss} if k else {}), **more}
    for k, loss in enumerate(losses)
  ]
  (path / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return path


def data_of(page):
  """What the page's program reads."""
  (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
  return json.loads(text, parse_constant=pytest.fail)


def names_in(path):
  return [row['run'] for row in json.loads((path / 'results.json').read_text())]


def test_a_comparison(report, tmp_path, capsys):
  report(DEMO, f'--output={tmp_path}')
  printed = capsys.readouterr().out
  assert f'page: {tmp_path}/report.html' in printed
  rows = json.loads((tmp_path / 'results.json').read_text())
  assert [row['run'] for row in rows] == json.loads((DEMO / 'config.json').read_text())['algorithm']
  page = (tmp_path / 'report.html').read_text()
  data = data_of(page)
  assert list(data['axes']) == ['step', 'megabytes']
  lines = (DEMO / 'allreduce.jsonl').read_text().splitlines()
  found = data['runs'][0]['columns']
  assert found['train_loss'][0] is None
  for name in ('step', 'train_loss', 'test_accuracy'):
    expected = [json.loads(line)[name] for line in lines[1:]]
    assert found[name][1:] == pytest.approx(expected, rel=1e-5)
  assert found['megabytes'][-1] == pytest.approx(json.loads(lines[-1])['bytes_sent'] / 1e6)
  assert (tmp_path / 'plot.png').read_bytes().startswith(b'\x89PNG')


def test_the_page_is_complete_in_itself(report, tmp_path):
  """Whatever runs are called."""
  name = '</script><script>alert(1)</script>&'
  run = write_run(tmp_path / 'run', [1.0, 0.5], algorithm=name, simulated_seconds=2.0)
  report(run, f'--output={tmp_path / "out"}')
  page = (tmp_path / 'out' / 'report.html').read_text()
  assert (page.count('<script'), page.count('</script>')) == (2, 2)
  assert html.escape(name) in page
  assert data_of(page)['runs'][0]['label'] == name
  assert list(data_of(page)['axes']) == ['step', 'megabytes', 'simulated_seconds']
  assert re.findall(r'\w+://[^\'"]+', page) == ['http://www.w3.org/2000/svg']  # a name, not a place
  assert not re.search(r'\b(src|href)=|@import', page)


def test_runs_are_called_by_what_tells_them_apart(report, tmp_path):
  runs = [
    write_run(tmp_path / 'a', [1.0, 0.5]),
    write_run(tmp_path / 'b', [1.0, 0.4], seed=1),
    write_run(tmp_path / 'c', [1.0, 0.3], seed=1),
    write_run(tmp_path / 'd', [1.0, 0.2], algorithm='allreduce', test_accuracy=0.5),
  ]
  report(*runs, f'--output={tmp_path / "out"}')
  assert names_in(tmp_path / 'out') == [
    'd_psgd, seed 0',
    f'd_psgd, seed 1, {tmp_path}/b/metrics.jsonl',
    f'd_psgd, seed 1, {tmp_path}/c/metrics.jsonl',
    'allreduce',
  ]
  rows = json.loads((tmp_path / 'out' / 'results.json').read_text())
  assert len({tuple(row) for row in rows}) == 1  # all have the same columns
  assert (rows[0]['test accuracy'], rows[3]['test accuracy']) == ('', 0.5)


@pytest.mark.parametrize('last', [None, 1e5])
def test_runs_that_diverged_or_have_just_begun(last, report, tmp_path):
  runs = write_run(tmp_path / 'a', [1.0, 2.0, last]), write_run(tmp_path / 'b', [1.0], 'allreduce')
  report(*runs, f'--output={tmp_path / "out"}')
  ends = [row['end'] for row in json.loads((tmp_path / 'out' / 'results.json').read_text())]
  assert ends == ['diverged at step 20', 'step 0']


def test_checkpoints_of_a_run_in_python(report, tmp_path):
  task = decomp.tasks.logistic_regression(32, 3)
  ring, algorithm = decomp.topology.ring(2), decomp.algorithms.d_psgd(optax.sgd(0.1))
  decomp.train(task, algorithm, ring, steps=2, batch_size=2, checkpoint_dir=str(tmp_path / 'run'))
  report(tmp_path / 'run', f'--output={tmp_path / "out"}')
  assert names_in(tmp_path / 'out') == ['d_psgd']
  (run,) = data_of((tmp_path / 'out' / 'report.html').read_text())['runs']
  assert run['columns']['step'] == [0, 1, 2]


def test_mistakes(report, tmp_path):
  assert report.error() == 'error: nothing to report: give folders of runs, such as runs/*'
  assert 'is no folder: must be' in report.error(tmp_path / 'nothing')
  write_run(tmp_path / 'empty', [])
  assert 'holds no rows yet' in report.error(tmp_path / 'empty')
  (tmp_path / 'empty' / 'config.json').write_text('{"grid": ["a=1"]}')
  assert 'is a sweep: its own results.json' in report.error(tmp_path / 'empty')
  (tmp_path / 'empty' / 'config.json').write_text('{')
  assert 'holds something else than experiments.train or' in report.error(tmp_path / 'empty')
  write_run(tmp_path / 'broken', [1.0])
  (tmp_path / 'broken' / 'metrics.jsonl').write_text('{"step": 0}\n')
  assert 'holds something else than experiments.train or' in report.error(tmp_path / 'broken')


WHAT_PEOPLE_DO = """
<script>
{
  const told = {};
  const lines = () => document.querySelectorAll('polyline').length;
  told.lines = lines();
  const chart = document.querySelector('#charts svg'), box = chart.getBoundingClientRect();
  const place = {clientX: box.right - 15, clientY: box.top + 50};
  chart.dispatchEvent(new PointerEvent('pointermove', place));
  told.values = document.getElementById('values').innerText;
  const heights = () => document.querySelector('polyline').getAttribute('points');
  const before = heights();
  document.getElementById('logy').click();
  told.isMoved = heights() !== before;
  document.querySelector('#legend button').click();
  told.linesLeft = lines();
  told.isTooWide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
  const metric = document.getElementById('metric');
  metric.value = 'test_accuracy';
  metric.dispatchEvent(new Event('change'));
  const all = document.querySelectorAll('polyline');
  const places = [...all].flatMap(line => line.getAttribute('points').split(/[ ,]/).map(Number));
  told.isInside = Math.min(...places) >= 0 && Math.max(...places) <= box.width;
  const result = document.createElement('output');
  result.textContent = JSON.stringify(told);
  document.body.append(result);
}
</script>
"""


@pytest.mark.skipif(BROWSER is None, reason='there is no chromium to show the page in')
def test_the_page_in_a_browser(report, tmp_path):
  """At the width of a phone: values at the pointer, the switch of scales, runs left out."""
  copy_demo(tmp_path / 'runs')
  report(tmp_path / 'runs', f'--output={tmp_path / "out"}')
  page = tmp_path / 'out' / 'report.html'
  page.write_text(page.read_text().replace('</html>', WHAT_PEOPLE_DO + '</html>'))
  command = [BROWSER, '--headless', '--no-sandbox', '--disable-gpu', '--window-size=390,800']
  command += [f'--user-data-dir={tmp_path / "profile"}', '--dump-dom', page.as_uri()]
  shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
  told = json.loads(html.unescape(re.search('<output>(.*?)</output>', shown)[1]))
  assert (told['lines'], told['linesLeft']) == (6, 4)
  last = json.loads((DEMO / 'allreduce.jsonl').read_text().splitlines()[-1])
  assert told['values'].split('\n')[0] == f'steps {last["step"]}'
  assert f'allreduce: {last["train_loss"]:.4g}' in told['values']
  assert told['isMoved']
  assert told['isInside']
  assert not told['isTooWide']
