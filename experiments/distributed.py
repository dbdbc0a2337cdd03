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
writes. --output must be on a file system that all of them share, which is checked at the start.
Each process loads its own workers' data only, except with --reshuffle. If a process dies the others
stop, and --resume continues from the last checkpoint, also with another number of processes: last
bits then differ from those of a run that was not stopped, because sums over neighbours are added in
another order, and after a stochastic rounding that such a bit decides models differ by its noise.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence

import jax
from absl import app, flags

from experiments import train
from experiments.common import launch, settings

LOCAL_PROCESSES = flags.DEFINE_integer(
  'local_processes', None, 'Start this many processes on this machine.', 1, 256
)
COORDINATOR = flags.DEFINE_string(
  'coordinator', None, 'Address of the first process, host:port; found by itself on a cluster.'
)
NUM_PROCESSES = flags.DEFINE_integer('num_processes', None, 'How many processes there are.', 1)
LAUNCHED = flags.DEFINE_boolean(
  'launched', False, 'Set by --local_processes: end when standard input closes.'
)
PROCESS_ID = flags.DEFINE_integer('process_id', None, 'The number of this process, from 0.', 0)
flags.adopt_module_key_flags(train)
flags.adopt_module_key_flags(settings)

LOST_AFTER = 20
"""Seconds without a sign of life after which a process counts as dead."""

MEET_WITHIN = 300
"""Seconds that processes wait for each other at the start."""


def main(argv: Sequence[str]) -> None:
  """Runs the program."""
  if LOCAL_PROCESSES.value and COORDINATOR.value is None:
    sys.exit(launch.supervise(commands(LOCAL_PROCESSES.value)))
  signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in background jobs
  if LAUNCHED.value:
    launch.end_with_launcher()
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
      '--launched',
    ]
    for number in range(count)
  ]


def join() -> None:
  """Meets the other processes."""
  text, count, number = COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value
  by_hand = {'--num_processes': count, '--process_id': number}
  given = [name for name, value in by_hand.items() if value is not None]
  if text and len(given) < 2:
    raise ValueError(f'--coordinator={text}: needs {" and ".join(by_hand)} too')
  if given and not text:
    raise ValueError(f'{given[0]}={by_hand[given[0]]}: needs --coordinator=HOST:PORT too')
  bind = None
  if text and count is not None and number is not None:
    bind = check_coordinator(text, count, number)
  try:
    jax.distributed.initialize(
      text,
      count,
      number,
      initialization_timeout=MEET_WITHIN,
      coordinator_bind_address=bind,
      heartbeat_timeout_seconds=LOST_AFTER,
    )
  except ValueError as error:
    raise ValueError(
      f'no cluster found ({error}): give --local_processes=N for this machine, or --coordinator'
    ) from error


def check_coordinator(text: str, count: int, number: int) -> str | None:
  """Whether the first process can listen at --coordinator, and another one reach it there.

  JAX would end the process without a word that explains it.

  Args:
    text: the value of --coordinator.
    count: of the processes.
    number: of this process.

  Returns:
    The address to listen at; None for all of this machine's.
  """
  if number >= count:
    raise ValueError(f'--process_id={number}: must be below --num_processes={count}')
  host, _, digits = text.rpartition(':')
  host, port = host.strip('[]'), int(digits) if digits.isdecimal() and len(digits) < 6 else 0
  if not host or not 1 <= port <= 65535:
    raise ValueError(f'--coordinator={text}: must be like 10.0.0.1:1234')
  local = host in ('localhost', '::1') or host.startswith('127.')
  try:
    if number > 0:
      _wait_for(host, port)
    else:
      kind = socket.AF_INET6 if ':' in host else socket.AF_INET
      with socket.socket(kind) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the coordinator does
        trial.bind((host if local else '', port))
  except OSError as error:
    what = 'nobody answers there' if number > 0 else 'process 0 cannot listen there'
    raise ValueError(f'--coordinator={text}: {what} ({error.strerror or error})') from error
  return text if local else None


def _wait_for(host: str, port: int) -> None:
  """Waits until somebody listens."""
  deadline = time.monotonic() + MEET_WITHIN
  while True:
    try:
      socket.create_connection((host, port), timeout=10).close()
      return
    except socket.gaierror:
      raise
    except OSError:
      if time.monotonic() > deadline:
        raise
      time.sleep(0.2)


def _end(code: str | int | None) -> None:
  if isinstance(code, str):
    print(code, file=sys.stderr)
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(1 if isinstance(code, str) else code or 0)


if __name__ == '__main__':
  app.run(main)
