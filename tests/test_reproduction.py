"""The programs and presets that reproduce papers."""

import json
import math

import pytest
from test_experiments import PRESETS, ROOT, Program

from decomp import cost

pytestmark = pytest.mark.usefixtures('as_users_have_it')

DEMO = ROOT / 'experiments' / 'studies' / 'demo' / 'results'
FIGURES = [path for path in PRESETS if path.stem.startswith('figure')]
SMALL = '--task=digits(softmax_regression(10))'


@pytest.mark.parametrize('preset', FIGURES, ids=lambda path: path.stem)
def test_figure(preset, tmp_path, monkeypatch, capsys):
  """Task and algorithms can be built; the short ones are trained on a task that compiles fast."""
  import tensorflow_datasets as tfds

  compare = Program('compare', monkeypatch)
  settings = compare.module.settings
  compare.parse(f'--flagfile={preset}', '--smoke')
  with tfds.testing.mock_data(num_examples=64):
    assert 'cifar10/resnet' in settings.build_setup().task.name
  chosen = compare.module.ALGORITHM.value
  assert [settings.build_algorithm(text, 100).name for text in chosen] == chosen
  if preset.stem.endswith('_short'):
    compare(f'--flagfile={preset}', SMALL, '--smoke', f'--output={tmp_path}')
    assert capsys.readouterr().out.count('train loss') >= len(chosen)


def test_table_of_koloskova(tmp_path, monkeypatch, capsys):
  koloskova = Program('studies.koloskova.__main__', monkeypatch)
  columns = {'qsgd(4)': koloskova.module.COLUMNS['qsgd(4)']}
  monkeypatch.setattr(koloskova.module, 'COLUMNS', columns)
  flags = ['--optimizer=sgd(learning_rate)', '--learning_rates=0.2', '--steps=30']
  koloskova(SMALL, *flags, '--tolerance=0.1', f'--output={tmp_path}')
  printed = capsys.readouterr().out
  found = json.loads((tmp_path / 'results.json').read_text())
  assert found['agreement'] in printed
  assert [cell['theirs'] for cell in found['cells']] == [23.56, None, 91.92]
  # Few elements in a leaf: here DCD works where theirs does not.
  assert not found['cells'][0]['agrees']
  assert '23.56 -> ' in (tmp_path / 'results.md').read_text()
  # All cells are known: none is trained again.
  monkeypatch.setattr(koloskova.module.settings, 'run', lambda *args: [{'test_accuracy': 0.9}])
  monkeypatch.setattr(koloskova.module, '_rank', lambda history: 0.9)
  koloskova(SMALL, *flags, '--tolerance=0.1', f'--output={tmp_path}', '--resume')
  assert json.loads((tmp_path / 'results.json').read_text())['cells'] == found['cells']


@pytest.mark.parametrize(
  ('theirs', 'works', 'agrees'),
  [(92.5, True, True), (92.5, False, False), (59.1, False, True), (math.nan, False, True)],
)
def test_cells_agree_if_both_work_or_neither(theirs, works, agrees, monkeypatch):
  koloskova = Program('studies.koloskova.__main__', monkeypatch)
  koloskova.parse()
  cell = koloskova.module.Cell('dcd_psgd', 'qsgd(8)', theirs, 0.9, 0.9, 0.1, '0.1', works)
  assert cell.agrees is agrees


@pytest.mark.parametrize('name', ['koloskova', 'koloskova_short'])
def test_preset_of_koloskova(name, monkeypatch):
  """All cells can be built."""
  koloskova = Program('studies.koloskova.__main__', monkeypatch)
  module = koloskova.module
  koloskova.parse(f'--flagfile={ROOT}/experiments/flags/{name}.flags')
  assert set(module.CHOCO) == set(module.COLUMNS)
  for compressor, inside in module.CHOCO.items():
    assert module.build(f'choco_sgd({inside})', 100, '0.1').name.startswith('choco_sgd')
    assert module.build(f'dcd_psgd({compressor})', 100, '0.1').name.startswith('dcd_psgd')


def test_networks_of_the_paper(tmp_path, monkeypatch, capsys):
  """What the paper says of figure 3 holds for the demo's runs, where gradients take no time."""
  networks = Program('studies.paper_networks.__main__', monkeypatch)
  networks(f'--runs={DEMO}', '--compute=1us', f'--output={tmp_path}')
  assert 'plot.png' in capsys.readouterr().out
  rows = json.loads((tmp_path / 'results.json').read_text())['seconds of an epoch']
  seconds = {row['algorithm']: row for row in rows}
  full, exact = seconds['allreduce'], seconds['d_psgd']
  coarse = seconds['ecd_psgd(stochastic_quantizer(bits=8))']
  assert exact['1.4 Gbit/s, 20 ms'] < full['1.4 Gbit/s, 20 ms'] / 5
  assert full['5 Mbit/s, 0.13 ms'] < exact['5 Mbit/s, 0.13 ms']
  assert coarse['5 Mbit/s, 0.13 ms'] < full['5 Mbit/s, 0.13 ms'] / 2
  assert coarse['5 Mbit/s, 20 ms'] == min(row['5 Mbit/s, 20 ms'] for row in (full, exact, coarse))
  assert (tmp_path / 'plot.png').stat().st_size > 10_000


def test_measured_steps_are_shown_where_they_belong(monkeypatch):
  module = Program('studies.paper_networks.__main__', monkeypatch).module
  measured = [(cost.lan('100Mbps', '0.1ms'), 1.0), (cost.lan('5Mbps', '20ms'), 2.0)]
  shown = {panel.title[:2]: module.on_panel(panel, measured) for panel in module.PANELS}
  assert shown == {'3a': [(1e8, 1.0)], '3b': [(5e6, 2.0)], '3c': [], '3d': [(0.02, 2.0)]}


def test_measured_messages_must_have_the_size_of_the_task(tmp_path, monkeypatch):
  networks = Program('studies.paper_networks.__main__', monkeypatch)
  measured = f'--measured={ROOT / "experiments/studies/network_bench/results/results.json"}'
  with pytest.raises(SystemExit, match=r'272474 parameters and .* has 4810'):
    networks(f'--runs={DEMO}', measured, f'--output={tmp_path}')
