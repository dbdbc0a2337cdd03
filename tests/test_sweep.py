"""Sweeps: members are single runs, divergence stays with its member, tables, program and plot."""

import functools
import json
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import equations
from test_experiments import TINY, Program, read_rows

import decomp
from decomp import algorithms, compressors, models, plots, topology
from decomp.tasks.data import partition
from decomp.training import program as compiled
from decomp.training import sweep as sweeping
from decomp.training.history import History
from decomp.training.steps import Sampling, Steps, initial
from decomp.training.train import program_of_one_run

RING = topology.ring(4)


@functools.cache
def logistic():
  return decomp.tasks.logistic_regression(61, 3)


def gossip(learning_rate, momentum=0.9):
  return algorithms.d_psgd(optax.sgd(learning_rate, momentum=momentum))


def choco(learning_rate, consensus_rate):
  return algorithms.choco_sgd(optax.sgd(learning_rate), compressors.top_k(0.2), consensus_rate)


def single(task, make, graph, point, **options):
  numbers = {name: value for name, value in point.items() if name != 'seed'}
  return decomp.train(task, make(**numbers), graph, seed=point['seed'], **options)


def assert_same_history(found, expected):
  """Up to the last bits, which a program for several runs rounds in another order."""
  assert found.diverged == expected.diverged
  assert len(found) == len(expected)
  for row, other in zip(found, expected, strict=True):
    assert list(row) == list(other)
    shared = {name: value for name, value in other.items() if name != 'seconds'}
    ours = {name: row[name] for name in shared}
    assert ours == pytest.approx(shared, rel=1e-4, abs=1e-6, nan_ok=True)
  ends = [(history.state, history.model_state) for history in (found, expected)]
  chex.assert_trees_all_equal_shapes_and_dtypes(*ends)
  chex.assert_trees_all_close(*ends, rtol=1e-4, atol=1e-5)


def test_members_are_single_runs():
  """A start and a division of the data for each seed; the last of three groups is filled up."""
  task = logistic()._replace(init=lambda key: (jax.random.normal(key, (3,)), jnp.zeros(2)))
  rows, options = [], {'steps': 5, 'batch_size': 4, 'eval_every': 3, 'worker_examples': 7}
  grids = {'seeds': (0, 5), 'learning_rate': (0.1, 0.4), 'consensus_rate': (0.1, 0.5)}
  note = lambda *row: rows.append(row)  # noqa: E731
  found = decomp.sweep(task, choco, RING, members_at_once=3, on_row=note, **options, **grids)
  assert found.points == [
    {'learning_rate': lr, 'consensus_rate': cr, 'seed': seed}
    for lr in (0.1, 0.4)
    for cr in (0.1, 0.5)
    for seed in (0, 5)
  ]
  assert len(found.histories) == 8
  for number in (2, 7):
    point, history = found.points[number], found.histories[number]
    assert_same_history(history, single(task, choco, RING, point, **options))
    assert [row for owner, row in rows if owner == point] == history
    assert history.steps_per_second > 0
  ends = [history[-1]['test_loss'] for history in found.histories]
  assert len(set(ends)) == 8


def test_other_graphs_and_shards():
  """A graph that varies in time; shards that depend on the seed, as does the longest one."""
  graph = topology.one_peer_exponential(4)
  shards = functools.partial(partition.dirichlet, logistic().train['label'], 4, 0.5)
  short, long = sorted((1, 2), key=lambda seed: shards(seed=seed).lengths.max())
  assert shards(seed=short).lengths.max() < shards(seed=long).lengths.max()
  options = {'steps': 30, 'batch_size': 4, 'eval_every': 30}
  found = decomp.sweep(
    logistic(), gossip, graph, seeds=(long, short), shards=shards, learning_rate=(0.1,), **options
  )
  options['shards'] = shards(seed=short)
  alone = single(logistic(), gossip, graph, found.points[1], **options)
  assert_same_history(found.histories[1], alone)


def test_divergence_stays_with_its_member():
  """The others have the very same bits as beside a member that is well."""
  options = {'steps': 12, 'batch_size': 4, 'eval_every': 5, 'replacement': True}
  sweep = functools.partial(decomp.sweep, logistic(), gossip, RING, seeds=(0, 1), **options)
  beside, well = (sweep(learning_rate=(0.1, rate, 0.2)) for rate in (1e4, 0.3))
  for number in (0, 1, 4, 5):
    for row, other in zip(beside.histories[number], well.histories[number], strict=True):
      assert {**row, 'seconds': 0} == {**other, 'seconds': 0}
    states = [found.histories[number].state for found in (beside, well)]
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), *states))
  with pytest.warns(RuntimeWarning, match='diverged at step [2-4]:'):
    alone = single(logistic(), gossip, RING, beside.points[3], **options)
  assert_same_history(beside.histories[3], alone)
  assert int(beside.histories[3].state.round) < 5
  assert [row['diverged'] for row in beside.table()] == [0, 2, 0]
  assert beside.best()['learning_rate'] in (0.1, 0.2)


def stop_at(step, count=1):
  """An `on_row` that presses Ctrl-C at the `count`-th row of a step."""
  seen = []

  def on_row(point, row):
    seen.extend([row] if row['step'] == step else [])
    if len(seen) == count and row['step'] == step:
      raise KeyboardInterrupt

  return on_row


@pytest.mark.parametrize(
  ('rates', 'at_once', 'row'),
  [((0.1, 1e4, 0.2), 2, 3), ((1e4, 0.1), 4, 1)],
  ids=['groups', 'beside one that has diverged'],
)
def test_resumed_sweep_is_the_uninterrupted_one(rates, at_once, row, tmp_path, monkeypatch):
  """Bit by bit; a finished group is there at once."""
  options = {'steps': 12, 'batch_size': 4, 'eval_every': 4, 'seeds': (0, 1)}
  sweep = functools.partial(decomp.sweep, logistic(), gossip, RING, **options)
  resume = functools.partial(sweep, checkpoint_dir=tmp_path, resume=True)
  expected_rows, rows = [], []
  expected = sweep(
    members_at_once=at_once, learning_rate=rates, on_row=lambda *row: expected_rows.append(row)
  )
  assert {bool(history.diverged) for history in expected.histories} == {True, False}
  with pytest.raises(KeyboardInterrupt):
    resume(members_at_once=at_once, learning_rate=rates, on_row=stop_at(8, row))
  with pytest.raises(ValueError, match='holds a sweep already: pass resume=True'):
    resume(learning_rate=rates, resume=False)
  found = resume(learning_rate=rates, on_row=lambda *row: rows.append(row))
  same = [[(p, {**row, 'seconds': 0}) for p, row in part] for part in (rows, expected_rows)]
  assert repr(same[0]) == repr(same[1])  # NaN is not equal to itself
  for ours, other in zip(found.histories, expected.histories, strict=True):
    assert ours.diverged == other.diverged
    jax.tree.map(np.testing.assert_array_equal, ours.state, other.state)
  monkeypatch.setattr(compiled.Program, 'compile', None)
  again = resume(learning_rate=rates)
  assert repr(again.histories) == repr(found.histories)
  for other in ({'learning_rate': (*rates[:-1], 0.3)}, {'members_at_once': 1}, {'seeds': (0, 2)}):
    with pytest.raises(ValueError, match='another configuration'):
      resume(**{'learning_rate': rates, **other})


def test_sweep_over_devices():
  """The same members as on one device, each with its workers on two.

  Between devices the states also hold the sums that are carried.
  """
  compressor = compressors.stochastic_quantizer(8)

  def make(learning_rate):
    return algorithms.dcd_psgd(optax.sgd(learning_rate), compressor)

  options = {'steps': 4, 'batch_size': 2, 'eval_every': 2, 'seeds': (0, 1)}
  sweep = functools.partial(
    decomp.sweep, logistic(), make, RING, learning_rate=(0.1, 0.2), **options
  )
  found, expected = sweep(mesh=decomp.worker_mesh(4, jax.devices()[:2])), sweep()
  for ours, other in zip(found.histories, expected.histories, strict=True):
    assert len(jax.tree.leaves(ours.state.workers)[0].sharding.device_set) == 2
    model = ours.state.workers.model
    ours.state = ours.state._replace(
      workers=ours.state.workers._replace(model=decomp.Shared(model.value))
    )
    assert_same_history(ours, other)


def test_a_member_that_diverged_before_comes_back_on_its_devices(tmp_path):
  mesh = decomp.worker_mesh(4, jax.devices()[:2])
  sweep = functools.partial(
    decomp.sweep, logistic(), gossip, RING, batch_size=2, seeds=(0,), learning_rate=(0.1, 1e4)
  )
  sweep(steps=8, mesh=mesh, checkpoint_dir=tmp_path)
  found = sweep(steps=12, mesh=mesh, checkpoint_dir=tmp_path, resume=True, eval_every=None)
  assert [bool(history.diverged) for history in found.histories] == [False, True]
  for history in found.histories:
    assert len(history.params.sharding.device_set) == 2


def test_resume_needs_a_folder():
  with pytest.raises(ValueError, match='resume=True: needs the checkpoint_dir of the run'):
    decomp.sweep(logistic(), gossip, RING, 1, 1, learning_rate=(0.1,), resume=True)


def test_all_members_diverge():
  found = decomp.sweep(
    logistic(), gossip, RING, steps=1000, batch_size=4, seeds=(0,), learning_rate=(1e4, 1e30)
  )
  assert all(history.diverged and history[-1]['step'] < 50 for history in found.histories)
  assert found.best() is None


def traced(task, make, numbers, graph=RING, mapping='vmap'):
  """The loop of two members, and that of one run."""
  shards = partition.iid(task.train['label'], graph.num_workers)
  sim, start = decomp.simulate(make(**numbers), graph), initial(task, 0)
  one = program_of_one_run(task, sim, Sampling(shards, 2), 0, start, mapping, worker_examples=10)

  def steps_of(member):
    sim = decomp.simulate(make(**member.numbers), graph)
    return Steps(task, sim, Sampling(member.shards, 2), member.seed, mapping)

  shards, start = (jax.tree.map(lambda x: np.stack([x, x]), tree) for tree in (shards, start))
  both = {name: jnp.array([value, value]) for name, value in numbers.items()}
  members = compiled.Members(np.arange(2, dtype=np.int32), both, shards)
  many = compiled.Program(steps_of, one.data, members, start)
  return many.trace().jaxpr.jaxpr, one.trace().jaxpr.jaxpr


def test_what_depends_on_the_step_alone_is_decided_once():
  """Conditions are still conditions, which a batched predicate would turn into selections."""

  def loss(params, state, batch, key):
    return params @ params, state

  labels = np.arange(8, dtype=np.int32)
  start = jnp.zeros(2048)  # a message so long that it is computed once
  task = decomp.Task('long', lambda key: (start, ()), loss, loss, *[{'label': labels}] * 2)
  compressor = compressors.stochastic_quantizer(8)
  for graph, make in (
    (topology.one_peer_exponential(4), lambda rate: algorithms.naive(optax.sgd(rate), compressor)),
    (RING, lambda rate: algorithms.dcd_psgd(optax.sgd(rate), compressor)),
  ):
    many, one = traced(task, make, {'rate': 0.1}, graph)
    found = [[e.invars[0].aval.shape for e in equations(j, 'cond')] for j in (many, one)]
    assert found[0] == found[1]
    assert set(found[0]) == {()}
    (loop,) = [e for e in equations(many, 'while') if 'cond_jaxpr' in e.params]
    (going,) = loop.params['cond_jaxpr'].out_avals
    assert going.shape == ()


def test_convolutions_take_turns():
  """Runs side by side would make grouped convolutions of them, which are slow on CPU."""
  images = np.random.default_rng(0).standard_normal((16, 8, 8, 1)).astype(np.float32)
  dataset = decomp.data.Dataset(
    *[{'input': images, 'label': np.arange(16, dtype=np.int32) % 2}] * 2, 'noise', 2
  )
  task = decomp.tasks.classification(dataset, models.cnn(2, channels=(2,)))
  many, one = traced(task, gossip, {'learning_rate': 0.1}, topology.ring(2), 'scan')
  for jaxpr in (many, one):
    found = list(equations(jaxpr, 'conv_general_dilated'))
    assert found
    for equation in found:
      groups = [equation.params[f'{kind}_group_count'] for kind in ('feature', 'batch')]
      assert groups == [1, 1]
  options = {'steps': 2, 'batch_size': 2, 'reshuffle': True}
  found = decomp.sweep(
    task, gossip, topology.ring(2), seeds=(0, 1), learning_rate=(0.1,), **options
  )
  alone = single(task, gossip, topology.ring(2), found.points[1], **options)
  assert_same_history(found.histories[1], alone)


def test_parameters_keep_their_dtype():
  """Numbers are as Python's: they do not turn bfloat16 into float32."""
  task = logistic()
  small = task._replace(
    init=lambda key: (optax.tree.cast(task.init(key)[0], jnp.bfloat16), ()),
    loss=lambda params, *rest: task.loss(optax.tree.cast(params, jnp.float32), *rest),
    evaluate=lambda params, *rest: task.evaluate(optax.tree.cast(params, jnp.float32), *rest),
  )
  found = decomp.sweep(
    small, gossip, RING, 2, 2, seeds=(0,), learning_rate=(0.1, 1), momentum=(0.5, 0.9)
  )
  assert all(
    leaf.dtype == jnp.bfloat16
    for history in found.histories
    for leaf in jax.tree.leaves(history.state.workers)
  )


def test_members_that_fit_the_memory(monkeypatch):
  """If six need twice the memory they may have, three run at once."""
  made = []

  def compile(program, compile=compiled.Program.compile):
    if program.loop is None:
      compile(program)
      made.append((program.size, program.bytes()))

  monkeypatch.setattr(compiled.Program, 'compile', compile)
  monkeypatch.setattr(sweeping.arguments, 'memory_of_a_device', lambda count: made[0][1] * 1.02)
  found = decomp.sweep(logistic(), gossip, RING, 2, 2, seeds=range(6), learning_rate=(0.1,))
  assert [members for members, _ in made] == [6, 3]
  assert made[1][1] < made[0][1]
  assert [history[-1]['step'] for history in found.histories] == [2] * 6


def history(value, diverged=None, metric='test_loss'):
  found = History([{metric: 9.0}, {metric: value}])
  found.diverged = diverged
  return found


def test_table_and_best():
  points = [{'rate': rate, 'seed': seed} for rate in (0.1, 0.2, 0.3) for seed in (0, 1)]
  ends = [history(2.0), history(4.0), history(1.0), history(1.0, 'diverged'), history(math.inf)]
  found = decomp.Sweep(points, [*ends, history(5.0)])
  rows = found.table()
  statistics = {'metric': 'test_loss', 'mean': 3.0, 'std': 1.0, 'seeds': 2, 'diverged': 0}
  assert rows[0] == {'rate': 0.1, **statistics}
  assert [row['diverged'] for row in rows] == [0, 1, 1]
  assert [row['mean'] for row in rows] == [3.0, 1.0, 5.0]
  assert found.best() == rows[0]


def test_the_best_accuracy_is_the_largest():
  ends = [history(value, metric='test_accuracy') for value in (0.2, 0.9, 0.5)]
  found = decomp.Sweep([{'rate': rate, 'seed': 0} for rate in (1, 2, 3)], ends)
  assert found.best()['rate'] == 2


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'learning_rate': ()}, r'learning_rate=\(\): must be a sequence of numbers'),
    ({'learning_rate': ('0.1',)}, 'must be a sequence of numbers'),
    ({'learning_rate': (True,)}, 'must be a sequence of numbers'),
    ({'learning_rate': 0.1}, 'learning_rate=0.1: must be a sequence of numbers'),
    ({'seeds': ()}, r'seeds=\(\): must be a sequence of whole numbers'),
    ({'seeds': (0.5,)}, r'seeds=\(0.5,\): must be a sequence of whole numbers'),
    ({'seeds': (1, 1)}, r'seeds=\(1, 1\): must be different'),
    ({'seed': (5,)}, r'seed=\(5,\): must be given as seeds'),
    ({'members_at_once': 0}, 'members_at_once=0: must be'),
    ({'steps': 0}, 'steps=0: must be'),
  ],
)
def test_bad_arguments(options, message):
  options = {'steps': 1, 'batch_size': 1, 'learning_rate': (0.1,), **options}
  with pytest.raises(ValueError, match=message):
    decomp.sweep(logistic(), gossip, RING, **options)


def test_numbers_out_of_range():
  with pytest.raises(ValueError, match=r'consensus_rate=1.5: must be above 0'):
    decomp.sweep(logistic(), choco, RING, 1, 1, learning_rate=(0.1,), consensus_rate=(0.5, 1.5))


@pytest.mark.parametrize(
  'make',
  [
    lambda number: algorithms.naive(optax.sgd(0.1), compressors.stochastic_quantizer(number)),
    lambda number: algorithms.naive(optax.sgd(0.1), compressors.fixed_grid(8, limit=number)),
  ],
  ids=['bits', 'limit'],
)
def test_what_cannot_be_traced(make):
  with pytest.raises(ValueError, match='takes number only as Python numbers, not as traced'):
    decomp.sweep(logistic(), make, RING, 1, 1, number=(2, 4))


@pytest.fixture
def program(monkeypatch, as_users_have_it):
  return Program('sweep', monkeypatch)


def test_program(program, tmp_path, capsys):
  """Each algorithm has the grids that it mentions; rows are those of experiments.train."""
  args = [*TINY, '--steps=4', '--eval_every=2', '--partition=iid']
  flags = ['--optimizer=sgd(rate, momentum=0.5)', '--seeds=0,7', '--csv', f'--output={tmp_path}']
  flags += ['--algorithm=d_psgd', '--algorithm=choco_sgd(random_k(0.5), consensus)']
  program(*args, *flags, '--grid=rate=0.1,1e30', '--grid=consensus=0.2,0.4')
  printed = capsys.readouterr().out
  assert '[1/2] d_psgd: 4 runs, 2 diverged, step 4 reached' in printed
  assert '[2/2] choco_sgd(random_k(0.5), consensus): 8 runs, 4 diverged' in printed
  assert 'best of d_psgd: rate=0.1, by test suboptimality\n' in printed
  assert re.search(r'd_psgd .*│ 1e\+30 .*│ diverged .*│ 2 of 2 ', printed)
  results = json.loads((tmp_path / 'results.json').read_text(), parse_constant=pytest.fail)
  assert [row.get('consensus') for row in results] == [None, None, 0.2, 0.4, 0.2, 0.4]
  assert [row['best'] for row in results].count(True) == 2
  assert (tmp_path / 'plot.png').read_bytes().startswith(b'\x89PNG')
  config = json.loads((tmp_path / 'config.json').read_text())
  assert (config['grid'], config['seeds']) == (['rate=0.1,1e30', 'consensus=0.2,0.4'], [0, 7])
  rows = read_rows(tmp_path / 'metrics.jsonl')
  own = [row for row in rows if (row['algorithm'], row['rate'], row['seed']) == ('d_psgd', 0.1, 7)]
  assert [row['step'] for row in own] == [0, 2, 4]
  assert len((tmp_path / 'metrics.csv').read_text().splitlines()) == 1 + len(rows)

  train = Program('train', pytest.MonkeyPatch())
  alone = tmp_path / 'alone'
  flags = ['--algorithm=d_psgd', '--optimizer=sgd(0.1, momentum=0.5)', '--seed=7']
  train(*args, *flags, f'--output={alone}')
  for row, other in zip(own, read_rows(alone / 'metrics.jsonl'), strict=True):
    shared = {name: value for name, value in other.items() if name != 'seconds'}
    assert {name: row[name] for name in shared} == pytest.approx(shared, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    (['--grid=rates=0.1'], 'error: --grid=rates=...: neither --optimizer=sgd(0.1) nor an'),
    (['--grid=rate:0.1'], 'error: --grid=rate:0.1: must be like learning_rate=0.05,0.1,0.2'),
    (['--seeds=0,x'], 'error: --seeds=0,x: must be whole numbers, such as 0,1,2'),
    (['--optimizer=sgd(learning_rat)'], 'error: --optimizer=sgd(learning_rat): unknown name'),
    (['--seeds=0,4294967296'], 'error: --seeds=0,4294967296: seed=4294967296: must be a whole'),
    (['--seeds=1,1'], 'error: --seeds=1,1: must be some seeds that differ'),
    (['--grid=rate=0.1', '--grid=rate=0.2'], 'error: --grid=rate=0.2: rate has a grid already'),
    (['--grid=rate=0.1,0.1'], 'error: --grid=rate=0.1,0.1: must be numbers that differ'),
    (['--grid=rate=nan'], 'error: --grid=rate=nan: must be like learning_rate=0.05,0.1,0.2'),
    (['--seed=1'], 'error: --seed is not for a sweep: give --seeds'),
    (['--devices=3'], 'error: --topology=ring(4) has 4 workers, which 3 devices cannot share'),
  ],
)
def test_mistakes(program, tmp_path, args, message):
  output = tmp_path / 'output'
  error = program.error(*TINY, '--optimizer=sgd(0.1)', *args, f'--output={output}')
  assert error.startswith(message)
  assert not output.exists()


@pytest.mark.parametrize('text', ['', '=', 'a', 'a=', '=1', 'a=1,', 'a=x', 'a=inf', 'a b=1', '1=1'])
def test_grids_of_nonsense(program, text):
  with pytest.raises(ValueError, match=r'must be like learning_rate=0\.05,0\.1,0\.2'):
    program.module.read_grids([text])


def cell(x, y, mean, diverged=0, metric='test_loss'):
  more = {'metric': metric, 'mean': mean, 'std': 0.5, 'seeds': 3, 'diverged': diverged}
  return {'rate': x, 'consensus': y, **more}


def test_heat_map():
  """The better of two settings is shown in their cell; one where all diverged is empty."""
  rows = [cell(0.1, 1, 2.0), cell(0.1, 1, 7.0), cell(0.2, 1, 3.0), cell(0.2, 5, math.nan, 3)]
  ax = plots.heat_map(rows, 'rate', 'consensus')
  np.testing.assert_array_equal(ax.images[0].get_array().filled(np.nan), [[2, 3], [np.nan, np.nan]])
  assert [text.get_text() for text in ax.get_xticklabels()] == ['0.1', '0.2']
  assert [text.get_text() for text in ax.get_yticklabels()] == ['1', '5']
  texts = {text.xy: text.get_text() for text in ax.texts}
  assert texts == {(0, 0): '2\n± 0.5', (1, 0): '3\n± 0.5', (1, 1): '3 of 3\ndiverged'}


def test_heat_map_of_one_grid(tmp_path):
  rows = [cell(rate, None, rate / 2, metric='test_accuracy') for rate in (1, 2)]
  ax = plots.heat_map(rows, 'rate')
  np.testing.assert_array_equal(ax.images[0].get_array(), [[0.5, 1.0]])
  assert [text.get_text() for text in ax.texts] == ['50.0\n± 50.0 %', '100.0\n± 50.0 %']
  nothing = plots.heat_map([cell(1, 1, math.nan, 3)], 'rate', 'consensus')
  nothing.figure.savefig(tmp_path / 'plot.png')
