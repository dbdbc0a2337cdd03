"""What is expected, before any run: α² of codecs, what graphs bear, and how fast workers agree.

Derived here. The limit 1/K is the library's, `decomp.theory.rules.common.noise_gain`.
"""

import math
from collections.abc import Callable, Iterator

import networkx as nx
import numpy as np

import decomp
from decomp import spec, topology
from decomp.compressors.eden import lloyd_max
from decomp.theory.rules.common import noise_gain
from experiments.studies.disagreement.theory import largest, rounding_noise
from experiments.studies.one_bit.kept import Kept, Row

BITS = (1, 2, 3, 4)
BITS_OF = {'full': 32, **{f'{bits}': bits for bits in BITS}}
LEAF = 4096
"""Elements of the Gaussian leaf for which grids of the largest element are judged."""
GRAPHS = (
  *(f'ring({n})' for n in (4, 8, 16, 32, 64)),
  *(f'path({n})' for n in (8, 64)),
  *(f'torus({side}, {side})' for side in (4, 8)),
  *(f'{name}({n})' for name in ('star', 'hypercube', 'exponential', 'complete') for n in (8, 64)),
  'erdos_renyi(16, p=0.3)',
  'erdos_renyi(64, p=0.1)',
  *(f'bipartite({n})' for n in (8, 32, 128)),
  *(f'lazy_ring(16, {own})' for own in (0.01, 0.05, 0.1, 0.15, 0.2, 0.5)),
)


def graph_of(text: str) -> decomp.Topology:
  """One of the library's, a `lazy_ring` or a `bipartite`.

  >>> graph_of('bipartite(8)').degree
  4
  """
  named: dict[str, Callable[..., decomp.Topology]] = {
    name: getattr(topology, name) for name in topology.__all__
  }
  return spec.build(text, {**named, 'lazy_ring': lazy_ring, 'bipartite': bipartite}, kind='graph')


def lazy_ring(n: int, own: float) -> decomp.Topology:
  """A ring whose workers give themselves the weight `own`, and half of the rest to each neighbour.

  >>> lazy_ring(4, 0.5).matrix[0].tolist()
  [0.5, 0.25, 0.0, 0.25]
  """
  eye = np.eye(n)
  shifts = np.roll(eye, 1, axis=0) + np.roll(eye, -1, axis=0)
  return topology.from_matrix(own * eye + (1 - own) / 2 * shifts)


def bipartite(n: int) -> decomp.Topology:
  """Two halves, everyone linked with the whole other half: the worst Metropolis weights known here.

  1/K = 1 / ((m - 1)/(m + 2) + 1/2) for halves of m, which falls to 2/3.
  """
  return topology.from_graph(nx.complete_bipartite_graph(n // 2, n // 2))


def eden_alpha2(bits: int) -> float:
  """D / (1 - D) with D the least squared error of 2**bits points for a normal number.

  >>> [round(eden_alpha2(bits), 4) for bits in BITS]
  [0.5708, 0.1331, 0.0358, 0.0096]
  """
  error = lloyd_max(bits)[2]
  return error / (1 - error)


def sampled_alpha2(fraction: float, alpha2: float) -> float:
  """α² of a codec of the elements that unbiased `random_k` keeps: (1 + α²)/fraction - 1.

  Of independent unbiased codes one after the other, 1 + α² multiply.

  >>> round(sampled_alpha2(0.5, eden_alpha2(1)), 3)
  2.142
  """
  return (1 + alpha2) / fraction - 1


def least_fraction(limit: float, alpha2: float) -> float:
  """The fraction of elements at which `sampled_alpha2` meets a limit; above it DCD converges.

  Above 1 where the codec itself is beyond the limit.

  >>> round(least_fraction(1.366, eden_alpha2(1)), 3)
  0.664
  """
  return (1 + alpha2) / (1 + limit)


def curved_gain(graph: decomp.Topology, rates: np.ndarray) -> float:
  """K where a gradient step takes its part: the mean of (1 - λ + γh)/(1 + λ - γh) over λ and γh.

  For symmetric W with alike workers, quadratics with curvatures h, and codecs that spread their
  noise evenly over all elements, as a rotation does. Larger steps lower the limit 1/K.

  >>> round(1 / curved_gain(topology.ring(8), np.zeros(1)), 3)
  1.366
  >>> round(1 / curved_gain(topology.ring(8), np.full(1, 0.1)), 3)
  1.078
  """
  factors = np.linalg.eigvalsh(graph.matrix)[:, None] - rates
  return float(((1 - factors) / (1 + factors)).mean())


def largest_gain(graph: decomp.Topology) -> float:
  """A bound of K that shows what it hangs on, for symmetric W: no worker's A_ij add up to more.

    K <= max_i [(I - W)(I + W)⁻¹]_ii <= (1 - λ_n)/(1 + λ_n)

  So **α² (1 - λ_n) < 1 + λ_n suffices on every graph**: λ_n > -0.273 for one bit, and with
  (W + I)/2 in place of W every α² below 1.

  >>> round(1 / noise_gain(topology.star(8)), 3), round(1 / largest_gain(topology.star(8)), 3)
  (1.302, 1.143)
  """
  eye = np.eye(graph.num_workers)
  return float(np.diag((eye - graph.matrix) @ np.linalg.inv(eye + graph.matrix)).max())


def regular_gain(degree: int) -> float:
  """A bound of K on every regular graph with Metropolis weights: 2k/(k + 3), k the degree.

  W = (I + A)/(k + 1). Seen from any worker, that is weighted by the squares of its elements of the
  eigenvectors, the eigenvalues μ of A have mean 0 and mean square k. Of all weights on [-k, k] with
  these two, 1/(k + 1) at -k and the rest at 1 give 2/(1 + λ) = 2(k + 1)/(k + 2 + μ) the largest
  mean, since a parabola that meets that function at -k and touches it at 1 is nowhere below it.
  With `largest_gain`: **every regular graph of degree 21 or less bears one bit**.

  >>> max(k for k in range(2, 100) if eden_alpha2(1) * regular_gain(k) < 1)
  21
  """
  return 2 * degree / (degree + 3)


def grid_alpha2(bits: int) -> float:
  """α² of `stochastic_quantizer(bits)` on a Gaussian leaf, from the expected largest element."""
  scale = largest(LEAF)
  return scale**2 - 1 if bits == 1 else float(rounding_noise(scale / (2 ** (bits - 1) - 1)))


def ring_limit(own: float) -> float:
  """1/K of an endless ring with this own weight: √w / (1 - √w).

  The eigenvalues are w + (1-w) cos θ, and 1 + K is the mean of 2/(1 + λ), which is 1/√w. With
  D = α²/(1 + α²) the condition α²K < 1 reads **w > D²**.

  >>> round(ring_limit(1 / 3), 3), round(noise_gain(lazy_ring(64, 1 / 3)) ** -1, 3)
  (1.366, 1.366)
  """
  return math.sqrt(own) / (1 - math.sqrt(own))


def moments(graph: decomp.Topology, alpha2: float) -> Iterator[float]:
  """By which factor E|x - x̄|² changes in each round of DCD without gradients, from unlike starts.

  With S = E (x - x̄)(x - x̄)ᵀ over workers, summed over elements, and z = (W - I)x,

    S' = W S Wᵀ + α² diag E|z_i|²,   without its mean part.

  Exact for every W with W1 = Wᵀ1 = 1, if the codec is unbiased, draws independently for each
  worker, and has |C(z) - z|² = α²|z|² whatever z is.
  """
  n, w = graph.num_workers, graph.matrix
  away = np.eye(n) - 1 / n
  second = away / np.trace(away)
  while True:
    difference = (w - np.eye(n)) @ second
    noise = alpha2 * np.diag(difference @ (w - np.eye(n)).T)
    second = away @ (w @ second @ w.T + np.diag(noise)) @ away
    factor = float(np.trace(second))
    second = second / factor
    yield factor


def rate(graph: decomp.Topology, alpha2: float, rounds: int = 3000) -> float:
  """The factor of E|x - x̄|² in a round, in the long run; ρ² without compression.

  >>> round(rate(topology.ring(8), 0.0), 4), round(rate(topology.ring(8), eden_alpha2(1)), 4)
  (0.6476, 0.6624)
  """
  if not alpha2:
    return graph.rho**2
  factors = moments(graph, alpha2)
  before, factor = 0.0, next(factors)
  for _ in range(rounds):
    before, factor = factor, next(factors)
    if abs(factor - before) < 1e-10:
      break
  return factor


def bits_for_agreement(factor: float, bits: float) -> float:
  """Bits per element that a worker sends to a neighbour until E|x - x̄|² is a thousandth.

  >>> round(bits_for_agreement(0.1, bits=2), 3)
  6.0
  """
  return bits * math.log(1000) / -math.log(factor) if 0 < factor < 1 else math.inf


def predict(kept: Kept, smoke: bool) -> None:
  """What each graph bears."""
  for name in GRAPHS[:2] if smoke else GRAPHS:
    row = kept.of(name, lambda name=name: bears(graph_of(name)))  # type: ignore[misc]
    fewest = f'eden({row["eden bits"]}), stochastic_quantizer({row["grid bits"]})'
    print(f'theory {name}: 1/K = {row["limit"]:.4g}, {fewest}', flush=True)


def bears(graph: decomp.Topology) -> Row:
  """The limit 1/K of a graph, and the least that is below it."""
  limit = 1 / noise_gain(graph)
  eden = [bits for bits in BITS if eden_alpha2(bits) < limit]
  grid = [bits for bits in range(1, 9) if grid_alpha2(bits) < limit]
  rates = {'full': rate(graph, 0.0), **{f'{b}': rate(graph, eden_alpha2(b)) for b in BITS}}
  return {
    'limit': limit,
    'sufficient': ((1 - graph.rho) / (2 * graph.mu)) ** 2,
    'eden bits': min(eden, default=None),
    'grid bits': min(grid, default=None),
    'fractions': {f'{bits}': least_fraction(limit, eden_alpha2(bits)) for bits in BITS},
    'rates': rates,
    'bits for agreement': {name: bits_for_agreement(rates[name], BITS_OF[name]) for name in rates},
  }
