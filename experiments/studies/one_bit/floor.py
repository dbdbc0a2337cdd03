"""What few bits cost where the noise of gradients decides: the error at the end, over D-PSGD's."""

import functools

import numpy as np

from decomp.theory.rules.common import noise_gain
from experiments.studies.disagreement.theory import dcd_ratio
from experiments.studies.one_bit import gossip
from experiments.studies.one_bit.kept import Kept, Row
from experiments.studies.one_bit.theory import curved_gain, eden_alpha2, graph_of
from experiments.studies.verdicts import labs
from experiments.studies.verdicts.cells import QUADRATIC, Cell

CODECS = [*(f'eden({bits})' for bits in (1, 2, 4)), gossip.GRIDS[1]]
CURVATURES = 0.1 * np.geomspace(0.1, 1, 128)
"""γh of the quadratics."""
GRAPHS = ('ring(8)', 'torus(4, 4)')
SEEDS = (0, 1, 2)


def measure(kept: Kept, smoke: bool) -> None:
  """Every codec on the quadratics of the study verdicts: noisy gradients, a known optimum."""
  for graph in GRAPHS[:1] if smoke else GRAPHS:
    for codec in CODECS[:1] if smoke else CODECS:
      row = kept.of(
        f'{graph}, {codec}', functools.partial(_ratio, graph, codec, SEEDS[: 1 if smoke else 3])
      )
      print(f'floor {graph}, {codec}: measured {row["measured"]:.3g}', flush=True)


def expected(graph_text: str, codec: str) -> list[float]:
  """What D-PSGD's error is multiplied by: for small steps, and with the curvature of these."""
  graph, alpha2 = graph_of(graph_text), np.array(eden_alpha2(int(codec.removeprefix('eden(')[0])))
  return [float(dcd_ratio(alpha2, k)) for k in (noise_gain(graph), curved_gain(graph, CURVATURES))]


def _ratio(graph: str, codec: str, seeds: tuple[int, ...]) -> Row:
  """f(x̄) - f* over that of `d_psgd`, the means over seeds."""
  lab = labs.lab(Cell('', graph, QUADRATIC, 'sgd(0.1)'))
  ends = np.array([lab.run(f'dcd_psgd({codec})', seed)[1:] for seed in seeds])
  own, reference = ends.mean(0)
  return {
    'measured': float(own / reference),
    'seeds': (ends[:, 0] / ends[:, 1]).tolist(),
  }
