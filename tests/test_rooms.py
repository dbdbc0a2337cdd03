"""The house stays one in which a newcomer finds every door: few entries, small files."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHORT = ('d_psgd', 'dcd_psgd', 'ecd_psgd', 'choco_sgd')


def entries(folder):
  return [path.name for path in (ROOT / folder).iterdir() if path.name != '__pycache__']


def lines_of_code(path):
  """Lines that are neither empty nor comments nor docstrings."""
  text = path.read_text()
  prose = {
    line
    for node in ast.walk(ast.parse(text))
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    for line in range(node.lineno, node.end_lineno + 1)
  }
  numbered = enumerate(text.splitlines(), start=1)
  return sum(1 for n, line in numbered if line.split('#')[0].strip() and n not in prose)


@pytest.mark.parametrize(('folder', 'most'), [('decomp', 15), ('experiments', 15)])
def test_few_entries(folder, most):
  assert len(entries(folder)) <= most, entries(folder)


@pytest.mark.parametrize(
  'path', sorted((ROOT / 'decomp' / 'algorithms').glob('*.py')), ids=lambda path: path.stem
)
def test_an_algorithm_is_a_small_file(path):
  assert lines_of_code(path) <= (45 if path.stem in SHORT else 60)


def test_every_study_has_a_page():
  """And results, of a program of its own or of one at the top."""
  for path in (ROOT / 'experiments' / 'studies').iterdir():
    if path.is_dir() and path.name != '__pycache__':
      assert (path / 'README.md').exists(), path
      assert (path / 'results').is_dir(), path
