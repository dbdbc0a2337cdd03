r"""Several runs in one table, one picture and one page to look at.

For example, two runs and all runs of a comparison:

  python -m experiments.report runs/digits-d_psgd-ring-8-seed0-1 runs/compare-digits-ring-8-seed0-1

A folder is one of experiments.train or experiments.compare, finished or not, or a checkpoint_dir of
decomp.train. Results go to one folder: plot.png; results.json, the table; and report.html, with
curves over steps, bytes and simulated seconds whose values are shown where one points at them. The
page needs no network.
"""

import html
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from absl import app, flags

import decomp
from decomp import plots
from decomp.training import history as histories
from experiments.common import output, report, settings

flags.declare_key_flag('output')

PAGE = Path(__file__).parent / 'common' / 'page.html'
AXES = {
  'step': 'steps',
  'megabytes': 'MB sent by a worker',
  'simulated_seconds': 'simulated seconds',
}
"""What curves are drawn over, where runs have it."""


class Found(NamedTuple):
  """A run that was found.

  Attributes:
    path: of its rows.
    name: of its algorithm.
    config: its settings.
    history: its rows, and whether it diverged.
  """

  path: Path
  name: str
  config: Mapping[str, Any]
  history: decomp.History


def main(argv: Sequence[str]) -> None:
  """Runs the program."""
  settings.start(argv[:1])
  with settings.mistakes_in_one_line(stopped='stopped'):
    if len(argv) < 2:
      raise ValueError('nothing to report: give folders of runs, such as runs/*')
    found = []
    for folder in argv[1:]:
      with output.written_by('experiments.train or experiments.compare', folder):
        found += read(Path(folder))
    labelled = dict(zip(labels(found), found, strict=True))
    path = output.choose_folder('report')
    shown = {label: run.history for label, run in labelled.items()}
    rows = summaries(labelled)
    output.write_json(path / 'results.json', output.for_json(rows))
    output.save_plot(plots.overview(shown), path / 'plot.png')
    (path / 'report.html').write_text(page(shown, rows))
    report.print_table(rows, f'{len(rows)} runs')
    print(f'page: {path / "report.html"}')


def read(folder: Path) -> list[Found]:
  """The runs in a folder."""
  config_file = folder / 'config.json'
  config = output.read_json(config_file) if config_file.exists() else {}
  if 'grid' in config:
    raise ValueError(f'{folder} is a sweep: its own results.json has all its runs')
  names = config.get('algorithm')
  if isinstance(names, list):
    places = {name: output.metrics_file(folder, name) for name in names}
    found = [
      Found(place, name, config, history(place)) for name, place in places.items() if place.exists()
    ]
  elif (place := folder / 'metrics.jsonl').exists():
    found = [Found(place, config['algorithm'], config, history(place))]
  else:
    run = decomp.load(folder)
    found = [Found(folder, run.config['algorithm'], run.config, run.history)]
  if not any(run.history for run in found):
    raise ValueError(f'{folder} holds no rows yet')
  return [run for run in found if run.history]


def history(file: Path) -> decomp.History:
  """The rows of a file, and whether they end as those of a run that has diverged."""
  rows = output.read_rows(file)
  found = decomp.History(
    {name: math.nan if value is None else value for name, value in row.items()} for row in rows
  )
  if found:
    last = found[-1]
    found.steps_per_second = last['step'] / max(last['seconds'], 1e-9)
    losses = [last[name] for name in ('train_loss', 'test_loss') if name in last]
    limit = histories.limit(found)
    if not all(loss < limit for loss in losses) or math.isnan(last['consensus_distance']):
      found.diverged = f'diverged at step {last["step"]}'
  return found


def labels(found: Sequence[Found]) -> list[str]:
  """Names by the algorithm, and by the settings in which runs of one algorithm differ."""
  told = []
  for run in found:
    alike = [other.config for other in found if other.name == run.name]
    keys = [key for key in settings.settings() if len({repr(c.get(key)) for c in alike}) > 1]
    keys = [key for key in keys if key != 'compressor']  # the algorithm's name has its own
    told.append(', '.join([run.name, *(f'{key} {run.config.get(key)}' for key in keys)]))
  return [
    label if told.count(label) == 1 else f'{label}, {run.path}'
    for label, run in zip(told, found, strict=True)
  ]


def summaries(labelled: Mapping[str, Found]) -> list[dict[str, Any]]:
  """A row for each run, all with the same columns."""
  rows = [
    {'run': label, **report.summary(run.history, run.name)} for label, run in labelled.items()
  ]
  names = dict.fromkeys(name for row in rows for name in row)
  told = [name for name in names if name not in ('algorithm', 'compressor')]  # in the label
  return [{name: row.get(name, '') for name in told} for row in rows]


def page(shown: Mapping[str, decomp.History], rows: Sequence[Mapping[str, Any]]) -> str:
  """The page, complete in itself."""
  columns = {label: columns_of(run) for label, run in shown.items()}
  known = {name for run in columns.values() for name in run}
  data = {
    'axes': {name: words for name, words in AXES.items() if name in known},
    'runs': [{'label': label, 'columns': found} for label, found in columns.items()],
  }
  # Nothing in the text of a script may look like its end.
  text = json.dumps(output.for_json(data, digits=6)).replace('<', '\\u003c')
  count = f'{len(rows)} run{"s" * (len(rows) > 1)}'
  return Template(PAGE.read_text()).substitute(title=count, table=table(rows), data=text)


def columns_of(run: decomp.History) -> dict[str, list[float]]:
  """The metrics of a run, a list for each."""
  names = dict.fromkeys(name for row in run for name in row)
  found = {name: run.column(name).tolist() for name in names}
  return {**found, 'megabytes': [sent / 1e6 for sent in found['bytes_sent']]}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
  """A table in HTML."""
  head = ''.join(f'<th>{html.escape(name)}</th>' for name in rows[0])
  cells = (
    ''.join(f'<td>{html.escape(report.text(name, x))}</td>' for name, x in row.items())
    for row in rows
  )
  body = ''.join(f'<tr>{row}</tr>' for row in cells)
  return f'<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


if __name__ == '__main__':
  app.run(main)
