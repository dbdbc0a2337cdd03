r"""Trains with one algorithm in several processes, on one machine or many.

All processes run this program with the same flags; their devices share the workers evenly, and
neighbours on different devices exchange packed bytes over the network. On one machine, four
processes are started and looked after by

  python -m experiments.distributed --local_processes=4 --topology='ring(8)' --steps=500

On several machines, start it once in each, either under SLURM, Open MPI or another cluster that JAX
knows (then no more flags are needed), or by hand:

  python -m experiments.distributed --coordinator=10.0.0.1:1234 --num_processes=2 --process_id=0 ...
  python -m experiments.distributed --coordinator=10.0.0.1:1234 --num_processes=2 --process_id=1 ...

All other flags are those of experiments.train, and so are the results, which the first process
writes. --output must be on a file system that all of them share. Each process loads its own
workers' data only, except with --reshuffle. If a process dies the others stop, and --resume
continues from the last checkpoint, also with another number of processes.
"""

import os
import signal
import socket
import sys
from collections.abc import Sequence

import jax
from absl import app, flags

from experiments import train
from experiments.common import launch, settings

LOCAL_PROCESSES = flags.DEFINE_integer(
  'local_processes', None, 'Start this many processes on this machine.', 1
)
COORDINATOR = flags.DEFINE_string(
  'coordinator', None, 'Address of the first process, host:port; found by itself on a cluster.'
)
NUM_PROCESSES = flags.DEFINE_integer('num_processes', None, 'How many processes there are.', 1)
PROCESS_ID = flags.DEFINE_integer('process_id', None, 'The number of this process, from 0.', 0)
flags.adopt_module_key_flags(train)
flags.adopt_module_key_flags(settings)

LOST_AFTER = 20
"""Seconds without a sign of life after which a process counts as dead."""


def main(argv: Sequence[str]) -> None:
  """Runs the program."""
  if LOCAL_PROCESSES.value and COORDINATOR.value is None:
    sys.exit(launch.supervise(commands(LOCAL_PROCESSES.value)))
  signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in background jobs
  settings.start(argv)
  with settings.mistakes_in_one_line():
    join()
  try:
    train.run()
  except jax.errors.JaxRuntimeError as error:
    reason = str(error).splitlines()[0]
    _end(f'error: lost another process ({reason}); --resume continues from the last checkpoint')
  except SystemExit as error:
    # The usual way out would wait for the other processes.
    _end(error.code)


def commands(count: int) -> list[list[str]]:
  """This very command for each of several processes on this machine."""
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{free.getsockname()[1]}'
  cores = max(1, (os.cpu_count() or 1) // count)
  return [
    [
      *(sys.executable, '-m', 'experiments.distributed', f'--host_devices={cores}', *sys.argv[1:]),
      *(f'--coordinator={address}', f'--num_processes={count}', f'--process_id={number}'),
    ]
    for number in range(count)
  ]


def join() -> None:
  """Meets the other processes."""
  by_hand = {'--num_processes': NUM_PROCESSES.value, '--process_id': PROCESS_ID.value}
  given = [name for name, value in by_hand.items() if value is not None]
  if COORDINATOR.value and len(given) < 2:
    raise ValueError(f'--coordinator={COORDINATOR.value}: needs {" and ".join(by_hand)} too')
  if given and not COORDINATOR.value:
    raise ValueError(f'{given[0]}={by_hand[given[0]]}: needs --coordinator=HOST:PORT too')
  try:
    jax.distributed.initialize(
      COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value, heartbeat_timeout_seconds=LOST_AFTER
    )
  except ValueError as error:
    raise ValueError(
      f'no cluster found ({error}): give --local_processes=N for this machine, or --coordinator'
    ) from error


def _end(code: str | int | None) -> None:
  if isinstance(code, str):
    print(code, file=sys.stderr)
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(1 if isinstance(code, str) else code or 0)


if __name__ == '__main__':
  app.run(main)
