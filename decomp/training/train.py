"""`decomp.train`: one run."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import Mesh

from decomp import cost
from decomp.base import Algorithm, PyTree
from decomp.engine.simulation import Simulation, simulate
from decomp.tasks import Task
from decomp.tasks.data.partition import Partition
from decomp.tasks.records import Records
from decomp.topology import Topology
from decomp.training import arguments, streaming
from decomp.training.history import History, Row
from decomp.training.loop import Checkpoints, Loop, Run
from decomp.training.program import Program, place
from decomp.training.progress import Progress
from decomp.training.steps import Sampling, Steps, choose_mapping, initial
from decomp.training.streaming import StreamedProgram, StreamedSteps, Windows


def train(
  task: Task,
  algorithm: Algorithm,
  topology: Topology,
  steps: int,
  batch_size: int,
  seed: int = 0,
  *,
  shards: Partition | str = 'iid',
  reshuffle: bool = False,
  replacement: bool = False,
  eval_every: int | None = None,
  patience: int | None = None,
  worker_examples: int = 2000,
  mapping: str = 'auto',
  mesh: Mesh | None = None,
  window: int | None = None,
  network: cost.Links | None = None,
  checkpoint_dir: str | None = None,
  checkpoint_seconds: float = 30.0,
  resume: bool = False,
  config: Mapping[str, Any] | None = None,
  on_row: Callable[[Row], None] | None = None,
  progress: bool | None = None,
) -> History:
  """Trains with one algorithm on one topology.

  A run whose loss is no longer finite, or 1000 times what it was, ends at that very step with a
  warning, and one whose models are not finite at the next row; `history.diverged` then says where
  and what to try. A run that ends early because it no longer gets better says so in
  `history.stopped`.

  Args:
    task: what to train.
    algorithm: with its optimizer inside.
    topology: its number of workers divides the data.
    steps: the length of the run.
    batch_size: examples per worker and step.
    seed: of everything random.
    shards: who has which examples: 'iid', 'by_label' (sorted, the hardest case), a text such as
      'dirichlet(0.1)' in between, or a `Partition`.
    reshuffle: whether the data are dealt anew to all workers every epoch.
    replacement: whether each example is drawn independently, as theory has it.
    eval_every: steps between two rows of metrics; None for 20 rows in all.
    patience: ends the run when so many rows in turn had no better validation_loss than one before;
      None for never. The task needs a validation set, see `tasks.hold_out`.
    worker_examples: single workers are evaluated on this many test examples at most; the mean
      model on all of them.
    mapping: how the gradients of all workers are computed: 'vmap', 'scan', 'devices', or 'auto'
      for the fastest on this platform; see `decomp.mapping`.
    mesh: spreads workers over devices that exchange packed bytes, see `decomp.simulate`; None
      simulates the exchange.
    window: keeps the training examples where they are, on the host or in files, and gives the
      devices the batches of so many steps at a time, read while the steps before run; they hold two
      such windows. The numbers are the same. None for 32 with `tasks.Records`, else for all
      examples on the devices.
    network: such as `decomp.cost.lan('100Mbps', '5ms')`: rows then have simulated_seconds, what
      the run would have taken there.
    checkpoint_dir: where to keep checkpoints; None for none.
    checkpoint_seconds: a checkpoint is written when the last one is this old, on Ctrl-C, SIGTERM
      and SIGHUP, and at the end.
    resume: whether to continue from the newest checkpoint in `checkpoint_dir`, if there is one.
    config: more facts of the run, which the run that resumes it must share; the optimizer is one
      that the algorithm does not tell.
    on_row: called with every row, also with those of a checkpoint.
    progress: whether to show a progress bar; None for when a terminal is attached.

  Returns:
    A `History`: rows for step 0, for every `eval_every` steps, and for the last one, which takes in
    up to a tenth of `eval_every` steps that are left over.

  >>> import optax, decomp
  >>> task = decomp.tasks.logistic_regression(num_examples=64, dimension=3)
  >>> algorithm = decomp.algorithms.d_psgd(optax.sgd(0.5))
  >>> history = train(task, algorithm, decomp.topology.ring(4), steps=40, batch_size=4)
  >>> history[-1]['step'], bool(history[-1]['test_suboptimality'] < 0.1)
  (40, True)
  """
  counts = {'eval_every': eval_every, 'worker_examples': worker_examples, 'window': window}
  counts |= {'steps': steps, 'batch_size': batch_size}
  arguments.check(task, checkpoint_dir, resume, [seed], checkpoint_seconds, patience, **counts)
  rows_every, ignore = arguments.interval(eval_every, steps)
  sim = simulate(algorithm, topology, mesh)
  shards = arguments.divide(shards, task, topology, seed)
  sampling = Sampling(shards, batch_size, reshuffle, replacement)
  facts = {
    **arguments.facts(task, topology, sampling, rows_every, worker_examples, patience),
    'algorithm': algorithm.name,
    'seed': seed,
    **(config or {}),
  }
  begin = initial(task, seed)
  program = program_of_one_run(
    task, sim, sampling, seed, begin, mapping, worker_examples, window, steps
  )
  wire_seconds = None if network is None else arguments.wire_seconds(task, sim, network)
  rows = on_row or (lambda row: None)
  run = Run(sim, sampling, sim.bytes_per_step(begin[0]), rows, wire_seconds, patience)
  ignore = (*ignore, 'patience')  # a run that was stopped may go on with more
  checkpoints = Checkpoints(checkpoint_dir, checkpoint_seconds, resume, facts, ignore)
  with Progress(progress, algorithm.name, steps) as bar:
    (history,) = Loop(program, None, [run], checkpoints, bar).train(begin, steps, rows_every)
  if history.diverged:
    warnings.warn(history.diverged, RuntimeWarning, stacklevel=2)
  return history


def program_of_one_run(
  task: Task,
  sim: Simulation,
  sampling: Sampling,
  seed: int,
  begin: PyTree,
  mapping: str,
  worker_examples: int,
  window: int | None = None,
  until: int = arguments.MOST_STEPS,
) -> Program:
  """The program of one run of up to `until` steps: see `train`."""
  n = sim.topology.num_workers
  how, mesh = choose_mapping(task, begin, n, sampling.batch_size, mapping, sim.mesh)
  if window or isinstance(task.train, Records):
    run = task, sim, sampling, seed, how, mesh
    size = min(window or streaming.LENGTH, until)
    windows = Windows(task.train, Steps(*run), n, size, until, mesh)
    streamed = StreamedSteps(windows.size, *run, own_examples=True)
    tests = place(task._replace(train={}), worker_examples, mesh)
    data = tests._replace(train=windows.shapes)
    watch = sim.mesh is None
    return StreamedProgram(windows, lambda _: streamed, data, None, begin, mesh, watch=watch)
  # A worker that is dealt other examples every epoch needs access to all of them.
  own = sim.mesh is not None and not sampling.reshuffle
  steps = Steps(task, sim, sampling, seed, how, mesh, own_examples=own)
  data = place(task, worker_examples, mesh, sampling.shards if own else None)
  return Program(lambda _: steps, data, None, begin, mesh, watch=sim.mesh is None)
