"""The README's Python is run as it stands."""

import re
from pathlib import Path

import jax
import pytest

from decomp import algorithms

ROOT = Path(__file__).parent.parent


@pytest.mark.usefixtures('as_users_have_it')
def test_every_snippet_runs(capsys):
  snippets = re.findall(r'```python\n(.*?)```', (ROOT / 'README.md').read_text(), re.DOTALL)
  assert len(snippets) == 7
  names = {}
  for snippet in snippets:
    exec(snippet, names)
  out = capsys.readouterr().out
  assert '2008' not in out  # four bits, not eight
  assert '1008' in out
  assert 'likely' in out
  assert 'from_graph(10 nodes): 10 workers, degree 3' in out
  assert names['sim'].algorithm.name == 'every_other_step'
  assert names['history'][-1]['test_loss'] < names['history'][0]['test_loss']


@pytest.mark.parametrize('name', algorithms.__all__)
def test_every_algorithm_is_in_the_table_of_when_to_use_it(name):
  assert f'\n| `{name}` |' in (ROOT / 'README.md').read_text()


@pytest.mark.parametrize(
  'line',
  re.findall(
    r'^\| `(.*?)` \| (\d+)',
    (ROOT / 'README.md').read_text().partition('## What crosses the wire')[2].partition('\n## ')[0],
    re.MULTILINE,
  ),
)
def test_the_table_of_bytes(line):
  from decomp import compressors, spec, wire

  compressor = spec.build(line[0], compressors)
  x = jax.ShapeDtypeStruct((1000,), 'float32')
  payload = jax.eval_shape(compressor.encode, jax.eval_shape(lambda: jax.random.key(0)), x)
  assert wire.size(payload) == int(line[1])
