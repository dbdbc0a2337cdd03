"""Every notebook runs from the first cell to the last, and is committed with its outputs."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / 'notebooks').glob('*.ipynb'))

each_notebook = pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)


def read(path):
  notebook = nbformat.read(path, as_version=4)
  return notebook, [cell for cell in notebook.cells if cell.cell_type == 'code']


def complaints(cells):
  """Errors, and whatever went to stderr: warnings above all."""
  outputs = [output for cell in cells for output in cell.outputs]
  return [o for o in outputs if o.output_type == 'error' or o.get('name') == 'stderr']


def test_there_are_seven():
  assert [path.name[:2] for path in NOTEBOOKS] == [f'{number:02}' for number in range(1, 8)]


@each_notebook
def test_it_runs(path, tmp_path, monkeypatch):
  monkeypatch.setenv('DECOMP_NOTEBOOK_STEPS', '20')
  monkeypatch.setenv('PYTHONPATH', str(ROOT))
  monkeypatch.delenv('MPLBACKEND', raising=False)  # so that pictures are really drawn
  notebook, cells = read(path)
  place = {'metadata': {'path': str(tmp_path)}}
  NotebookClient(notebook, timeout=300, kernel_name='python3', resources=place).execute()
  assert complaints(cells) == []
  assert list(tmp_path.iterdir()) == []


@each_notebook
def test_its_outputs_are_kept(path):
  notebook, cells = read(path)
  assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
  assert complaints(cells) == []
  outputs = [output for cell in cells for output in cell.outputs]
  assert any('image/png' in output.get('data', {}) for output in outputs)
  assert not re.search(r'/(home|root|tmp|work|Users)/', str(outputs))
  assert path.stat().st_size < 400_000
  assert set(notebook.metadata) == {'kernelspec', 'language_info'}


@each_notebook
def test_it_is_easy_to_read(path):
  notebook, cells = read(path)
  for cell in cells:
    lines = [line for line in cell.source.splitlines() if line.strip()]
    assert len(lines) <= 15, cell.source
    assert 'from decomp.' not in cell.source, 'the public names are those of decomp itself'
  last = notebook.cells[-1]
  assert last.cell_type == 'markdown'
  assert '## What to take away' in last.source
