r"""Says what to expect of a run, before it is started.

For example:

  python -m experiments.preflight --task=digits --topology='ring(8)' --steps=1000 \
    --algorithm='dcd_psgd(stochastic_quantizer(4))' --algorithm='dcd_psgd(random_k(0.1))' \
    --algorithm='ecd_psgd(stochastic_quantizer(4))'

Takes a few steps of each algorithm on the task and measures what compression does to the messages,
and the smoothness and noise of the task. A verdict is an expectation, not a permission: it warns
and never refuses. The step sizes are those of the paper's corollaries, safe rather than fast.
experiments.studies.verdicts checks verdicts against what happens.
"""

from collections.abc import Sequence

from absl import app, flags

from decomp import theory
from experiments.common import output, report, settings

ALGORITHM = flags.DEFINE_multi_string(
  'algorithm', ['d_psgd', 'naive', 'dcd_psgd', 'ecd_psgd', 'choco_sgd'], settings.ALGORITHM_HELP
)
flags.adopt_module_key_flags(settings)


def main(argv: Sequence[str]) -> None:
  """Runs the program."""
  settings.start(argv)
  with settings.mistakes_in_one_line(stopped='stopped'):
    setup = settings.build_setup()
    chosen = [settings.build_algorithm(text, setup.steps) for text in ALGORITHM.value]
    found = output.look(setup, chosen)
  title = f'{setup.task.name} on {setup.topology}, {setup.steps} steps'
  report.print_table([_row(one) for one in found], title)
  for one in found:
    print(f'\n{one}')


def _row(found: theory.Preflight) -> dict[str, str]:
  alpha2 = found.numbers.get('measured alpha²', 0.0)
  ratio = found.numbers.get('noise ratio')
  return {
    'algorithm': found.algorithm,
    'verdict': found.verdict,
    'alpha²': f'{alpha2:.3g}',
    'noise / gradient noise': '' if ratio is None else f'{ratio:.2g}',
    'what to change': found.advice,
  }


if __name__ == '__main__':
  app.run(main)
