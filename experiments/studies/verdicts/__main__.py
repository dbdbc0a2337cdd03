r"""Checks the verdicts of decomp.theory against what happens, on 278 runs to the end.

  python -m experiments.studies.verdicts --output=runs/verdicts
  python -m experiments.studies.verdicts --only=made

Each cell is an algorithm with a compressor, a topology, a division of the data and an optimizer
(cells.py). Its verdict is asked for, and it is run to the end; labs.py says when a run counts as
converged, stalled or diverged. 'converges' and 'likely' agree with converged, 'will stall' with
stalled and diverged, 'will diverge' with diverged; 'at risk' and 'unknown' promise nothing and are
counted apart. Where a verdict on choco_sgd recommends a consensus rate, that rate is judged and run
as well. Prints a table of each group of cells, and writes its rows to GROUP.json.

What happens does not depend on the rules, and is kept in outcomes.json of the output folder: a
second call of the program with the same --output only asks for verdicts.
"""

import collections
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from absl import app, flags

from decomp.theory import Preflight, Verdict
from experiments.common import output, report, settings
from experiments.studies.verdicts import cells, labs

GROUPS = ('by_hand', 'made', 'held_out', 'too_fast')
ONLY = flags.DEFINE_multi_enum('only', GROUPS, GROUPS, 'Groups of cells; all by default.')
OUTCOMES_ONLY = flags.DEFINE_bool('outcomes_only', False, 'Run the cells, and judge and show none.')
flags.declare_key_flag('output')
flags.declare_key_flag('seed')

AGREES = {
  'converges': ('converged',),
  'likely': ('converged',),
  'will stall': ('stalled', 'diverged'),
  'will diverge': ('diverged',),
}
"""What must happen for a verdict to be right; the others promise nothing."""
OUTCOMES = ('converged', 'stalled', 'diverged')


class Result(NamedTuple):
  """A cell's verdict, and what happened: f at the end, and that of the reference."""

  group: str
  cell: cells.Cell
  verdict: Verdict
  reason: str
  outcome: str
  end: float
  reference: float
  advised: bool = False

  @property
  def agrees(self) -> bool | None:
    """Whether what happened is what was said; None if nothing was."""
    return self.outcome in AGREES[self.verdict] if self.verdict in AGREES else None

  def row(self) -> dict[str, Any]:
    """The result as one flat row."""
    fields = self._asdict()
    return {'group': fields.pop('group'), **fields.pop('cell')._asdict(), **fields}


def grid(groups: Sequence[str]) -> list[tuple[str, cells.Cell]]:
  """The cells of some groups, with their group; those of one lab follow each other."""
  made, held_out = cells.at_random()
  found = {'by_hand': cells.by_hand(), 'made': made, 'held_out': held_out}
  if 'too_fast' in groups:  # whose rates take a while to be found
    found['too_fast'] = cells.too_fast()
  chosen = [(group, cell) for group in groups for cell in found[group]]
  return sorted(chosen, key=lambda pair: (pair[1].data, pair[1].topology, pair[1].optimizer))


class Outcomes:
  """What happened in the cells that have been run, kept in a file."""

  def __init__(self, path: Path, seed: int):
    self._path, self._seed = path, seed
    self._known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

  def of(self, cell: cells.Cell) -> tuple[str, float, float]:
    """Runs the cell, if need be."""
    name = f'{cell}, seed {self._seed}'
    if name not in self._known:
      found = labs.lab(cell).run(cell.algorithm, self._seed)
      self._known[name] = output.for_json(list(found), digits=6)
      output.write_json(self._path, self._known)
    outcome, *numbers = self._known[name]
    end, reference = (math.nan if number is None else number for number in numbers)
    return outcome, end, reference


def check(chosen: Sequence[tuple[str, cells.Cell]], outcomes: Outcomes) -> Iterator[Result]:
  """Verdict and outcome of each cell, and of what the verdict recommends."""
  for group, cell in chosen:
    said = labs.lab(cell).judge(cell.algorithm)
    yield Result(group, cell, said.verdict, said.reason, *outcomes.of(cell))
    advised = advice(cell, said)
    if advised is not None:
      said = labs.lab(advised).judge(advised.algorithm)
      yield Result(group, advised, said.verdict, said.reason, *outcomes.of(advised), advised=True)


def advice(cell: cells.Cell, said: Preflight) -> cells.Cell | None:
  """The cell with the consensus rate that its verdict recommends, if it recommends one."""
  found = re.search(r'consensus_rate=([0-9.e-]+)', said.advice)
  if not found:
    return None
  changed = re.sub(r'consensus_rate=[0-9.]+', found[0], cell.algorithm)
  return cell._replace(algorithm=changed)


def confusion(results: Sequence[Result]) -> list[dict[str, Any]]:
  """How often each outcome followed each verdict."""
  counts = collections.Counter((r.verdict, r.outcome) for r in results)
  return [
    {'verdict': verdict} | {o: float(counts[verdict, o]) for o in OUTCOMES}
    for verdict in get_args(Verdict)
  ]


def agreement(results: Sequence[Result]) -> str:
  """In how many of the cells that are not left open the verdict was right."""
  judged = [r.agrees for r in results if r.agrees is not None]
  return (
    f'{sum(judged)} of {len(judged)} verdicts agree; {len(results) - len(judged)} are left open'
  )


def main(argv: Sequence[str]) -> None:
  """Runs the program."""
  settings.start(argv)
  path = Path(settings.OUTPUT.value or 'runs/verdicts')
  path.mkdir(parents=True, exist_ok=True)
  outcomes = Outcomes(path / 'outcomes.json', settings.SEED.value)
  chosen = grid(ONLY.value)
  if OUTCOMES_ONLY.value:
    for number, (_, cell) in enumerate(chosen, start=1):
      outcomes.of(cell)
      print(f'[{number}/{len(chosen)}] {cell}', flush=True)
    return
  results = []
  for number, result in enumerate(check(chosen, outcomes), start=1):
    results.append(result)
    mark = {True: 'agrees', False: 'DISAGREES', None: '-'}[result.agrees]
    line = f'{result.cell}: {result.verdict}, {result.outcome} ({result.end:.3g})'
    print(f'[{number}, {len(chosen)} and advice] {line}: {mark}', flush=True)
  for group in ONLY.value:
    found = {}
    for advised in (False, True):
      part = [r for r in results if r.group == group and r.advised == advised]
      if part:
        title = f'{group}, as recommended' if advised else group
        found[title] = agreement(part)
        report.print_table(confusion(part), f'{title}: {agreement(part)}')
    rows = [r.row() | {'agrees': str(r.agrees)} for r in results if r.group == group]
    facts = {'seed': settings.SEED.value, 'agreement': found, 'cells': rows}
    output.write_json(path / f'{group}.json', output.for_json(facts))


if __name__ == '__main__':
  app.run(main)
