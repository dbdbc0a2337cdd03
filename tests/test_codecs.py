"""The study of all codecs."""

import json
from pathlib import Path

import pytest
from test_experiments import Program

from decomp import compressors, spec
from experiments.studies import codecs
from experiments.studies.codecs import __main__ as study

pytestmark = pytest.mark.usefixtures('as_users_have_it')

RESULTS = Path(codecs.__file__).parent / 'results'


def test_every_codec_is_in_the_study():
  """But for those that only wrap another one, and full precision."""
  texts = [text for family in study.FAMILIES.values() for text in family]
  made = [spec.build(text, [compressors], kind='compressor') for text in texts]
  named = {part for codec in made for part in codec.name.replace('(', ' ').split()}
  assert named.issuperset(
    {*compressors.__all__} - {'contractive', 'correlated', 'identity', 'fixed_grid'}
  )


def test_program(monkeypatch, tmp_path):
  program = Program('studies.codecs.__main__', monkeypatch)
  program('--smoke', f'--output={tmp_path}')
  rows = json.loads((tmp_path / 'results.json').read_text())['rows']
  assert [row['codec'] for row in rows] == study.FAMILIES['stochastic_quantizer']
  assert (tmp_path / 'plot.png').stat().st_size > 10_000


def test_the_page_shows_the_results():
  rows = json.loads((RESULTS / 'results.json').read_text())['rows']
  assert [row['codec'] for row in rows] == [t for f in study.FAMILIES.values() for t in f]
  table = (RESULTS / 'table.md').read_text()
  assert table in (RESULTS.parent / 'README.md').read_text()
  for row in rows:
    assert f'| {row["codec"]} | ' in table
    assert f' | {row["Gaussian"]["bits"]:.3g} | ' in table
