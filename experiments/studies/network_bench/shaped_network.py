"""A small network of Linux namespaces whose links have a chosen bandwidth and latency.

Each worker has a network namespace (its own interface, address and TCP stack) and a UTS namespace
(its own host name, which is its address, because gloo tells others the address of the host name).
TCP is Reno, a worker queues little of a message at a time, and nothing is lost.
Cables lead to a switch in a further namespace:

    worker: eth0 ── tbf ──▶ [delay] ──▶ switch: port ── tbf ──▶ eth0 of another worker

`tbf` limits the bandwidth of every cable in both directions. The delay is `netem` on the port where
the kernel has it. Elsewhere frames go through a TAP device to a process that holds them for that
long; latencies below `LEAST_DELAY` are then left to the kernel's own path.

A namespace lives as long as a process in it, and all of these processes end when the pipe from this
one closes. So nothing is left behind, whatever this process dies of.
"""

import collections
import contextlib
import fcntl
import os
import select
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

LEAST_DELAY = 0.5
"""In ms: a shorter delay is within what the way through a process takes by itself."""

_TUN = '/dev/net/tun'
_QUEUE = 8_000_000  # bytes a link may hold back: more than all messages of a step, so none is lost
_THIS_PROGRAM = [sys.executable, '-m', 'experiments.studies.network_bench.shaped_network']
_TRIAL = """
ip link add port0 type veth peer name eth0
ip link add switch type bridge
tc qdisc add dev eth0 root tbf rate 10mbit burst 4000 limit 100000
"""
_VNET_HEADER = 10  # bytes that a TAP device puts before a frame


class ShapedNetwork:
  """Namespaces joined by a switch; a context manager.

  Args:
    num_workers: n.
  """

  def __init__(self, num_workers: int):
    self.num_workers = num_workers

  def __enter__(self) -> Self:
    with contextlib.ExitStack() as stack:
      self._switch = self._namespace(stack)
      self._workers = [self._namespace(stack) for _ in range(self.num_workers)]
      self._lay_cables()
      self._netem = _has_netem(self._switch)
      self._delay_line = None
      if not self._netem and os.path.exists(_TUN):
        self._delay_line = self._add_delay_line(stack)
      self._processes = stack.pop_all()
    return self

  def __exit__(self, *_: Any) -> None:
    self._processes.close()

  @property
  def latency_method(self) -> str:
    """What delays packets, in words."""
    if self._netem:
      return 'netem'
    if self._delay_line:
      return f'a userspace delay on TAP devices from {LEAST_DELAY} ms on'
    return f'nothing: this kernel has neither netem nor {_TUN}'

  def address(self, worker: int) -> str:
    """The IP address of a worker, which is also its host name."""
    return f'10.77.{worker // 250}.{worker % 250 + 1}'

  def shape(self, bandwidth: float, latency: float) -> None:
    """Gives every link a bandwidth (in each direction) and every path a one-way latency.

    Args:
      bandwidth: in Mbit/s.
      latency: in ms.
    """
    # A bucket of 1 ms of traffic: a smaller one keeps fast links below their rate, and a larger one
    # lets whole messages through at once.
    burst = max(4_000, round(bandwidth * 1e6 / 8 / 1000))
    tbf = f'root handle 1: tbf rate {bandwidth * 1e6:.0f}bit burst {burst} limit {_QUEUE}'
    for pid in self._workers:
      _batch(pid, 'tc', [f'qdisc replace dev eth0 {tbf}'])
      # A whole message in the link's queue would hold up acknowledgements and the few bytes with
      # which workers agree to exchange: on slow links up to twice the time. So TCP queues little,
      # and in packets that the bucket takes; connections learn of it with a new route.
      _configure(pid, 'net/ipv4/tcp_limit_output_bytes', str(max(16_384, 2 * burst)))
      _batch(pid, 'ip', [f'link set eth0 gso_max_size {min(burst, 65_536)}', 'route flush cache'])
    _batch(self._switch, 'tc', [f'qdisc replace dev {p} {tbf}' for p in self._names('port')])
    if self._netem:
      netem = f'parent 1:1 handle 10: netem delay {latency}ms limit 100000'
      _batch(self._switch, 'tc', [f'qdisc replace dev {p} {netem}' for p in self._names('port')])
    else:
      self._reroute(latency)

  def round_trip(self) -> float:
    """Milliseconds from worker 0 to worker 1 and back, the median of a few."""
    command = [*_inside(self._workers[0]), *_THIS_PROGRAM, 'round_trip', self.address(1)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

  def bytes_sent(self) -> list[int]:
    """What each worker's interface has sent so far, headers included."""
    return [_transmitted(Path(f'/proc/{pid}/net/dev').read_text()) for pid in self._workers]

  def start(self, worker: int, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Starts a process in a worker's namespaces, in its own session, with pipes to it."""
    return _start([*_inside(self._workers[worker]), *command], **options)

  def _names(self, kind: str) -> list[str]:
    return [f'{kind}{worker}' for worker in range(self.num_workers)]

  def _namespace(self, stack: contextlib.ExitStack) -> int:
    """Makes a namespace; returns the id of the process that keeps it."""
    process = _start(['unshare', '--net', '--uts', 'sh', '-c', 'echo made; exec cat'])
    stack.callback(end, [process])
    _await_line(process)
    return process.pid

  def _lay_cables(self) -> None:
    lines = ['link add switch type bridge', 'link set switch up']
    for port, pid in zip(self._names('port'), self._workers, strict=True):
      lines += [f'link add {port} type veth peer name eth0 netns {pid}']
      lines += [f'link set {port} master switch up']
    _batch(self._switch, 'ip', lines)
    for worker, pid in enumerate(self._workers):
      lines = [
        'link set lo up',
        f'link set eth0 address 02:00:00:00:{worker // 256:02x}:{worker % 256:02x}',
        'link set eth0 addrgenmode none',  # no IPv6: nothing but the workers' own messages is sent
        f'address add {self.address(worker)}/16 dev eth0',
        'link set eth0 up',
      ]
      _batch(pid, 'ip', lines)
      _configure(pid, 'kernel/hostname', self.address(worker))
      # Every kernel allows it in a namespace. BBR, the default of some, measures a link's rate over
      # time, and would go on at the old pace for seconds after the link has changed.
      _configure(pid, 'net/ipv4/tcp_congestion_control', 'reno')

  def _add_delay_line(self, stack: contextlib.ExitStack) -> subprocess.Popen[str]:
    command = [*_inside(self._switch), *_THIS_PROGRAM, 'delay_line', str(self.num_workers)]
    process = _start(command)
    stack.callback(end, [process])
    _await_line(process)
    lines = []
    for tap, cable in zip(self._names('tap'), self._names('cable'), strict=True):
      lines += [f'link add {cable} type bridge', f'link set {cable} up']
      lines += [f'link set {tap} txqueuelen 10000 master {cable} up']
    _batch(self._switch, 'ip', lines)
    return process

  def _reroute(self, latency: float) -> None:
    """Connects each port to its TAP device, or straight to the switch."""
    direct = latency < LEAST_DELAY
    if not direct:
      if self._delay_line is None:
        raise RuntimeError(
          f'a latency of {latency} ms cannot be had without netem and {_TUN}: ask for less than '
          f'{LEAST_DELAY}'
        )
      print(latency, file=self._delay_line.stdin, flush=True)
      _await_line(self._delay_line)
    bridges = ['switch'] * self.num_workers if direct else self._names('cable')
    pairs = zip(self._names('port'), bridges, strict=True)
    _batch(self._switch, 'ip', [f'link set {port} master {bridge}' for port, bridge in pairs])


def problem() -> str:
  """Why this machine cannot have such a network, in a sentence; empty if it can."""
  if sys.platform != 'linux':
    return f'network namespaces need Linux, and this is {sys.platform}'
  missing = [name for name in ('ip', 'tc', 'unshare', 'nsenter') if not shutil.which(name)]
  if missing:
    return f'{", ".join(missing)} not found: install iproute2 and util-linux'
  if os.geteuid():
    return 'network namespaces need root: run it with sudo'
  try:
    _run(['unshare', '--net', '--uts', 'sh', '-ec', _TRIAL])
  except RuntimeError as error:
    return f'network namespaces, veth, bridge or tbf are not permitted here ({error})'
  return ''


def end(processes: Iterable[subprocess.Popen[str]], grace: float = 2.0) -> None:
  """Closes the pipes to processes, and kills those that have not ended a moment later."""
  processes = list(processes)
  for process in processes:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
      process.stdin.close()
  until = time.monotonic() + grace
  for process in processes:
    with contextlib.suppress(subprocess.TimeoutExpired):
      process.wait(max(0.0, until - time.monotonic()))
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def _inside(pid: int) -> list[str]:
  """What precedes a command that is to run in the namespaces of a process."""
  return ['nsenter', f'--target={pid}', '--net', '--uts', '--']


def _start(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
  pipe = subprocess.PIPE
  # In a session of its own it does not get the Ctrl-C that is meant for this process.
  return subprocess.Popen(
    command, stdin=pipe, stdout=pipe, text=True, start_new_session=True, **options
  )


def _await_line(process: subprocess.Popen[str]) -> None:
  assert process.stdout is not None
  if not process.stdout.readline():
    raise RuntimeError(f'{process.args!r} ended before it was ready')


def _run(command: Sequence[str], text: str = '') -> None:
  done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
  if done.returncode:
    raise RuntimeError(' '.join(done.stderr.split()) or f'{command[-1]} failed')


def _batch(pid: int, program: str, lines: Sequence[str]) -> None:
  """Many commands of `ip` or `tc` in a namespace at once."""
  _run([*_inside(pid), program, '-batch', '-'], '\n'.join(lines) + '\n')


def _configure(pid: int, setting: str, value: str) -> None:
  _run([*_inside(pid), 'sh', '-c', f'echo {value} > /proc/sys/{setting}'])


def _has_netem(pid: int) -> bool:
  try:
    _batch(pid, 'tc', ['qdisc add dev lo root netem delay 1ms', 'qdisc del dev lo root'])
  except RuntimeError:
    return False
  return True


def _transmitted(table: str) -> int:
  """The bytes sent by eth0, from the text of /proc/net/dev."""
  line = next(line for line in table.splitlines() if line.strip().startswith('eth0:'))
  return int(line.split(':')[1].split()[8])


def _round_trip(address: str) -> float:
  """The median time, in ms, of a TCP connection's refusal: a packet there and a packet back."""
  times = []
  for _ in range(7):
    with socket.socket() as client:
      start = time.perf_counter()
      client.connect_ex((address, 9))
      times.append(1e3 * (time.perf_counter() - start))
  return statistics.median(times)


def _open_tap(name: str) -> int:
  """A TAP device that takes and gives packets larger than a frame, as TCP makes them."""
  tap = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
  set_interface, set_offload = 0x400454CA, 0x400454D0  # TUNSETIFF, TUNSETOFFLOAD
  tap_mode = 0x0002 | 0x1000 | 0x4000  # IFF_TAP | IFF_NO_PI | IFF_VNET_HDR
  fcntl.ioctl(tap, set_interface, struct.pack('16sH22x', name.encode(), tap_mode))
  fcntl.ioctl(tap, set_offload, 0x01 | 0x02)  # TUN_F_CSUM | TUN_F_TSO4
  return tap


def _receivers(packet: bytes, taps: Sequence[int], sender: int) -> list[int]:
  """Where a frame goes: to the worker whose number is in its address, or to all others."""
  destination = packet[_VNET_HEADER : _VNET_HEADER + 6]
  if destination[0] & 1:  # multicast or broadcast
    return [tap for tap in taps if tap != sender]
  return [taps[int.from_bytes(destination[4:])]]


def _delay_line(num_workers: int) -> None:
  """A switch that holds each frame for as many ms as its last line of input says; ends with it."""
  os.nice(-10)  # a delay is to be kept also while the workers compute
  taps = [_open_tap(f'tap{worker}') for worker in range(num_workers)]
  print('ready', flush=True)
  delay = 0.0
  waiting: collections.deque[tuple[float, bytes, list[int]]] = collections.deque()
  while True:
    timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
    readable = select.select([0, *taps], [], [], timeout)[0]
    if 0 in readable:
      line = sys.stdin.readline()
      if not line:
        return
      delay = float(line) / 1e3
      print('set', flush=True)
    due = time.monotonic() + delay
    for tap in set(readable) - {0}:
      with contextlib.suppress(BlockingIOError):
        for _ in range(64):  # many at once, as long as there are some
          packet = os.read(tap, 1 << 17)
          waiting.append((due, packet, _receivers(packet, taps, tap)))
    now = time.monotonic()
    while waiting and waiting[0][0] <= now:
      _, packet, receivers = waiting.popleft()
      for tap in receivers:
        # A device that is not in use yet takes nothing: the frame is lost, as on a cut cable.
        with contextlib.suppress(OSError):
          os.write(tap, packet)


if __name__ == '__main__':
  if sys.argv[1] == 'delay_line':
    _delay_line(int(sys.argv[2]))
  else:
    print(_round_trip(sys.argv[2]))
