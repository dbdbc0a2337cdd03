"""Every flag with every kind of nonsense: one sentence that names it, and soon."""

import inspect
import time

import hypothesis
import jax
import numpy as np
import pytest
from absl import flags
from hypothesis import strategies as st
from test_experiments import TINY, Program

import decomp
from decomp import compressors, cost, models, spec, tasks, topology
from decomp.tasks.data import partition
from decomp.training import arguments

pytestmark = [
  pytest.mark.usefixtures('as_users_have_it'),
  pytest.mark.filterwarnings('ignore:.* which is biased'),
]

LITERALS = """
  None True 0 -1 1 2 7 1000000000 99999999999999999999 0.5 -0.5 1e999 -1e999 1e300 1e-300 1j
  'x' '' b'x' [] [1,2] (1,2) {} {1:2} {'a':1} {1} [[1,2],[3]] [None] ['a'] [1e999] ... top_k(0.1)
  ring(4) sgd(0.1) mlp(10) chain() lan
""".split()  # noqa: SIM905
NUMBERS = """
  -1 0 1 1.5 nan inf -inf 1e300 1e-300 99999999999999999999 2147483648 4294967296
""".split()  # noqa: SIM905
TEXTS = [*NUMBERS, '', 'x', 'None', '[1]', 'a b', '(', '\0', 'ring(8)', '3', "'ring'"]

REQUIRED = {
  'num_workers': '4',
  'p': '0.9',
  'matrix': '[[0.5,0.5],[0.5,0.5]]',
  'bits': '4',
  'fraction': '0.1',
  'compressor': 'stochastic_quantizer(4)',
  'consensus_rate': '0.2',
  'num_classes': '10',
  'depth': '8',
  'vocabulary': '96',
  'learning_rate': '0.1',
  'alpha': '1.0',
  'boundaries_and_scales': '{1: 0.5}',
}
"""What other parameters are given while one is tried; 1 where nothing is said."""


def module(found):
  return {name: getattr(found, name) for name in found.__all__}


OPTIMIZERS = spec.optimizers()
SCHEDULES = {k: v for k, v in OPTIMIZERS.items() if 'schedule' in k or k == 'exponential_decay'}
FAMILIES = {
  'topology': [('{}', module(topology))],
  # Without what reads files, or is slow to trace.
  'task': [
    ('{}', {k: v for k, v in module(tasks).items() if k not in ('images', 'text')}),
    ('digits({})', {k: models.__dict__[k] for k in ('mlp', 'softmax_regression', 'cnn')}),
  ],
  'compressor': [('{}', module(compressors))],
  'algorithm': [('{}', spec.algorithms(OPTIMIZERS['sgd'](0.1)))],
  'optimizer': [('{}', OPTIMIZERS), ('sgd({})', SCHEDULES)],
  'network': [('{}', {'lan': cost.lan})],
  'partition': [('{}', {name: getattr(partition, name) for name in ('iid', 'by_label')})],
}
"""For the flags that take calls: what may be called, and where the call goes."""

PLAIN = """
  steps epochs batch_size seed eval_every worker_examples consensus_rate mapping checkpoint_seconds
  devices host_devices validation patience
""".split()  # noqa: SIM905


@st.composite
def calls(draw, families):
  """A call of something known, with a literal for one of its parameters."""
  place, known = draw(st.sampled_from(families))
  name = draw(st.sampled_from(sorted(known)))
  parameters = inspect.signature(known[name]).parameters
  kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
  named = {key: one for key, one in parameters.items() if one.kind not in kinds}
  required = [key for key, one in named.items() if one.default is one.empty]
  chosen = draw(st.sampled_from([*named, None]))
  literal = draw(st.sampled_from(LITERALS))
  if chosen is None:
    return place.format(f'{name}({literal})')
  given = {**{key: REQUIRED.get(key, '1') for key in required}, chosen: literal}
  return place.format(f'{name}({", ".join(f"{key}={text}" for key, text in given.items())})')


@pytest.fixture(scope='module')
def train():
  with pytest.MonkeyPatch.context() as patch:
    yield Program('train', patch)


def answer(train, *given):
  """The sentence with which a program stops, or None if it would train."""
  try:
    # What comes last holds, so that a flag may be given twice.
    train.parse(*TINY, *given)
    settings = train.module.settings
    with settings.mistakes_in_one_line():
      setup = settings.build_setup()
      algorithm = settings.build_algorithm(train.module.ALGORITHM.value, setup.steps)
      sim = decomp.simulate(algorithm, setup.topology, setup.mesh)
      sim.bytes_per_step(jax.eval_shape(setup.task.init, jax.random.key(0))[0])
      if network := settings.build_network():
        arguments.wire_seconds(setup.task, sim, network)
  except flags.Error as error:
    return str(error)
  except SystemExit as error:
    return error.code
  return None


def check(train, flag, text):
  began = time.process_time()
  sentence = answer(train, f'--{flag}={text}')
  assert time.process_time() - began < 10, 'too long'
  if sentence is not None:
    named = (f'--{flag}', 'topology=', 'paths has')
    assert any(name in sentence for name in named), sentence
    assert '\n' not in sentence, sentence
    assert len(sentence) < 1000, sentence


@pytest.mark.parametrize('flag', FAMILIES)
def test_calls_are_made_or_answered(train, flag):
  @hypothesis.settings(max_examples=60, derandomize=True, deadline=None, database=None)
  @hypothesis.given(calls(FAMILIES[flag]) | st.sampled_from(TEXTS))
  def run(text):
    check(train, flag, text)

  run()


def test_plain_flags_are_taken_or_answered(train):
  for flag in PLAIN:
    for text in TEXTS:
      check(train, flag, text)


def test_every_flag_is_here(train):
  """Except those that name files, switch something, or start processes."""
  others = {'output', 'resume', 'reshuffle', 'replacement', 'csv', 'tensorboard', 'smoke'}
  assert set(train.flags()) == {*FAMILIES, *PLAIN, *others}


@pytest.mark.parametrize(
  ('given', 'words'),
  [
    ("--optimizer=sgd('0.1')", "sgd: learning_rate='0.1' must be a number or a schedule"),
    ('--optimizer=sgd(None)', 'sgd: learning_rate=None must be a number or a schedule'),
    ('--optimizer=sgd(1j)', 'sgd: learning_rate=1j must be a number or a schedule'),
    ('--optimizer=sgd(-0.1)', 'its first step goes up the gradient or is not finite'),
    ('--optimizer=sgd(1e999)', 'sgd: learning_rate=inf must be finite'),
    ('--optimizer=sgd(0.1, momentum=1.5)', 'sgd: momentum=1.5 must be from 0 to below 1'),
    ('--optimizer=chain()', 'chain cannot use its arguments (ValueError: not enough values'),
    ('--optimizer=clip(1.0)', 'its first step goes up the gradient'),
    ('--optimizer=constant_schedule(0.1)', 'is no optimizer'),
    ("--task=digits(model='x')", "model='x': must be a flax linen module"),
    ('--task=digits(model=0)', 'model=0: must be a flax linen module'),
    ('--task=text(model=1j)', 'model=1j: must be a flax linen module'),
    ('--task=digits(mlp(0))', 'num_classes=0: must be a whole number from 1 to'),
    ('--task=digits(mlp(5))', 'digits needs (2, 10)'),
    ('--task=digits(mlp(10, hidden=(1000000000,)))', 'hidden[0]=1000000000: must be a whole'),
    ('--task=digits(mlp(10, hidden=(1000000, 1000000)))', 'of 4 workers take 32,'),
    ('--task=digits(char_transformer(96))', 'its model does not suit its data'),
    ('--task=digits(resnet(6000002, 10))', 'depth=6000002 is not 6 m + 2'),
    ('--task=logistic_regression(1000000000)', 'num_examples=1000000000: must be a whole'),
    ('--task=quadratic(dimension=1000000)', 'dimension=1000000: must be a whole number'),
    ('--compressor=contractive(4)', 'contractive: compressor=4 must be a Compressor'),
    ('--network=lan(bandwidth=[1, 2])', 'must have one bandwidth and one latency'),
    ('--network=lan(paths=3)', 'paths=3: must be a matrix of bandwidths'),
    ('--network=lan(paths=[[1, 2], [3]])', 'paths=[[1, 2], [3]]: must be a matrix'),
    ('--topology=from_matrix({})', 'matrix={}: must be n rows of n numbers'),
    ('--topology=ring(20000)', 'num_workers=20000: must be a whole number from 1 to 4096'),
    ('--topology=torus(1000, 1000)', 'columns=1000: must be a whole number from 1 to 4'),
    ('--topology=erdos_renyi(300, 0.001)', 'gave no connected graph'),
    ('--topology=ring(65)', 'has 65 workers, and logistic_regression has examples for 64'),
    ('--partition=dirichlet', "missing a required argument: 'alpha'; its signature is dirichlet("),
    ("--partition=dirichlet('a')", "alpha='a' must be a number"),
    ('--steps=99999999999999999999', '99999999999999999999'),
    ('--epochs=inf', 'inf'),
    ('--epochs=nan', 'must be a number'),
    ('--epochs=1e9', 'would be 8,000,000,000 steps'),
    ('--epochs=0', '0'),
    ('--seed=4294967296', '4294967296'),
    ('--checkpoint_seconds=nan', 'must be a number'),
    ('--devices=100000', '100000'),
    ('--batch_size=17', 'must be at most 16, which the worker with the most has'),
  ],
)
def test_what_would_be_right(train, given, words):
  began = time.process_time()
  found = answer(train, given)
  assert time.process_time() - began < 10
  assert found is not None
  assert given.partition('=')[0] in found
  assert words in found


def test_a_folder_that_cannot_be_made(train, tmp_path):
  (tmp_path / 'file').touch()
  output = tmp_path / 'file' / 'folder'
  error = train.error(*TINY, '--algorithm=d_psgd', '--smoke', f'--output={output}')
  assert f'cannot write {output} (Not a directory): choose a folder that can be' in error


def test_an_error_inside_is_one_sentence_with_its_cause():
  def broken(size):
    return [][size]

  with pytest.raises(
    ValueError, match=r'^broken cannot use its arguments \(IndexError: .*see brok'
  ) as e:
    spec.build('broken(3)', {'broken': broken})
  assert isinstance(e.value.__cause__, IndexError)


def test_a_partition_is_chosen_by_its_text(train):
  """On the command line and in Python."""
  labels = decomp.data.digits().train['label']
  expected = partition.dirichlet(labels, 4, 0.1, seed=3)
  train.parse(*TINY, '--task=digits', '--partition=dirichlet(0.1)', '--seed=3')
  shards = train.module.settings.build_setup().shards
  np.testing.assert_array_equal(shards.indices, expected.indices)
  task, ring = decomp.tasks.digits(), topology.ring(4)
  np.testing.assert_array_equal(
    arguments.divide('dirichlet(0.1)', task, ring, 3).indices, expected.indices
  )


def test_large_graphs_have_their_spectrum_soon():
  """λ = 1/3 + 2/3 cos(2π/n) is the second largest of a ring."""
  began = time.process_time()
  ring, star = topology.ring(1438), topology.star(600)
  assert ring.rho == pytest.approx((1 + 2 * np.cos(2 * np.pi / 1438)) / 3, abs=1e-12)
  assert ring.mu == pytest.approx(4 / 3, abs=1e-9)
  assert star.spectral_gap == pytest.approx(1 / 600, abs=1e-12)
  assert time.process_time() - began < 10
