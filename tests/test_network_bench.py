"""The benchmark on namespaces: its tables and plot, and, where permitted, the network itself."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_experiments import Program

from experiments.studies.network_bench import shaped_network

needs_namespaces = pytest.mark.skipif(
  bool(shaped_network.problem()), reason=f'no shaped network here: {shaped_network.problem()}'
)
FOUR_BITS = 'dcd_psgd(stochastic_quantizer(4))'


@pytest.fixture
def bench(monkeypatch):
  return Program('studies.network_bench.__main__', monkeypatch)


def row(algorithm, bandwidth, latency, seconds, sent=110.0):
  link = {'bandwidth': bandwidth, 'latency': latency, 'round_trip_ms': 2 * latency}
  found = {'seconds': seconds, 'bytes_sent': sent, 'bytes_per_step': 100}
  return {'algorithm': algorithm, **link, **found}


GRID = [
  row(name, bandwidth, latency, scale * (8 / bandwidth + latency / 1e3), sent=105.0 + latency)
  for latency in (0.1, 5, 20)
  for bandwidth in (1000, 20, 5)
  for name, scale in (('d_psgd', 1), (FOUR_BITS, 1 / 8))
]


def test_tables(bench):
  bench.parse()
  times = bench.module.time_table(GRID)
  assert len(times) == 9
  assert times[1] == {
    'Mbit/s': 20,
    'ms': 0.1,
    'round trip': 0.2,
    'd_psgd': pytest.approx(400.1),
    FOUR_BITS: pytest.approx(400.1 / 8),
  }
  assert bench.module.byte_table(GRID) == [
    {'algorithm': name, 'bytes_per_step': 100.0, 'on the interface': 110.0}
    for name in ('d_psgd', FOUR_BITS)
  ]


def test_plot_has_the_panels_of_the_papers_figure(bench):
  axes = bench.module.draw(GRID).axes
  titles = ['latency 0.1 ms', 'latency 20 ms', 'bandwidth 1000 Mbit/s', 'bandwidth 5 Mbit/s']
  assert [ax.get_title() for ax in axes] == titles
  line = axes[3].lines[0]
  assert list(line.get_xdata()) == [0.1, 5, 20]
  assert list(line.get_ydata()) == pytest.approx([1600.1, 1605, 1620])


def test_plot_of_a_single_link(bench):
  assert len(bench.module.draw(GRID[:2]).axes) == 2


def test_measure_takes_the_median_of_the_slowest_and_the_bytes_of_the_repeats_alone(bench):
  bench.parse('--seconds=1', '--repeats=3')
  asked = []
  counter = [0, 0]

  def run(text, steps, repeats):
    asked.append((steps, repeats))
    for worker in range(2):
      counter[worker] += 10 * (worker + 1) * steps * repeats
    pace = {1: 0.5, 2: 0.1, 10: 0.2}[steps]
    return [
      {'seconds': [pace * steps * scale * k for k in (1, 3, 2)][:repeats], 'bytes': 14}
      for scale in (1, 0.5)
    ]

  found = bench.module.measure('d_psgd', run, lambda: list(counter))
  assert asked == [(1, 1), (2, 1), (10, 3)]
  assert found['seconds'] == pytest.approx(0.4)
  assert (found['bytes_sent'], found['bytes_per_step'], found['steps']) == (15, 14, 10)


@pytest.mark.parametrize(
  ('flag', 'words'),
  [
    ('--bandwidths=fast', '--bandwidths=fast: give positive numbers'),
    ('--latencies=1,-2', '--latencies=1,-2: give positive numbers'),
    ('--algorithm=d_pgsd', "unknown algorithm 'd_pgsd'; did you mean 'd_psgd'?"),
    ('--algorithm=dcd_psgd', 'compressor'),
  ],
)
def test_mistakes_in_flags(bench, flag, words):
  assert words in bench.error(flag)


def test_says_why_there_is_no_network_and_ends_well(bench, monkeypatch, tmp_path, capsys):
  monkeypatch.setattr(bench.module.shaped_network.os, 'geteuid', lambda: 1000)
  bench(f'--output={tmp_path / "results"}')
  assert 'nothing measured: network namespaces need root' in capsys.readouterr().out
  assert not list(tmp_path.iterdir())


def test_names_the_programs_to_install(monkeypatch):
  monkeypatch.setattr(shaped_network.shutil, 'which', lambda name: None if name == 'tc' else name)
  assert shaped_network.problem() == 'tc not found: install iproute2 and util-linux'


def test_frames_go_to_the_worker_in_their_address_or_to_all_others():
  taps = [11, 12, 13]
  frame = bytes(10) + bytes.fromhex('020000000002') + b'rest'
  assert shaped_network._receivers(frame, taps, 11) == [13]
  everyone = bytes(10) + b'\xff' * 6 + b'rest'
  assert shaped_network._receivers(everyone, taps, 12) == [11, 13]


SEND = """
import socket, sys, time
here, there, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
server = socket.create_server((here, 7000))
print('listening', flush=True)
sys.stdin.readline()
client = socket.create_connection((there, 7000))
start = time.perf_counter()
client.sendall(bytes(size))
client.shutdown(socket.SHUT_WR)
source = server.accept()[0]
got = 0
while chunk := source.recv(1 << 20):
  got += len(chunk)
print(got, time.perf_counter() - start, socket.gethostname(), flush=True)
sys.stdin.read()
"""


@needs_namespaces
def test_links_are_as_slow_as_asked():
  """Nothing can be faster than the link; how much slower it is depends on the machine."""
  size = 200_000
  with shaped_network.ShapedNetwork(2) as network:
    network.shape(bandwidth=5, latency=10)
    assert network.round_trip() > 20
    before = network.bytes_sent()
    pair = []
    try:
      for worker in range(2):
        addresses = network.address(worker), network.address(1 - worker)
        command = [sys.executable, '-c', SEND, *addresses, str(size)]
        pair.append(network.start(worker, command))
      for process in pair:
        assert process.stdout.readline() == 'listening\n'
      for process in pair:
        print('go', file=process.stdin, flush=True)
      for worker, process in enumerate(pair):
        got, seconds, name = process.stdout.readline().split()
        assert int(got) == size
        assert float(seconds) > 0.95 * 8 * size / 5e6
        assert name == network.address(worker)
    finally:
      shaped_network.end(pair)
    for sent in (b - a for a, b in zip(before, network.bytes_sent(), strict=True)):
      assert size < sent < on_the_wire(size)


def on_the_wire(payload, messages=1):
  """The most bytes an interface should send for a payload, when it receives as much.

  For every segment of 1448 bytes the headers of Ethernet, IP and TCP (66 bytes), and as much again
  to acknowledge one that arrives; for every message 500 bytes to agree on it; and 5 %.
  """
  return 1.05 * payload + 2 * 66 * (payload / 1448 + 1) + 500 * messages


@needs_namespaces
def test_interfaces_send_the_bytes_that_the_simulation_reports(tmp_path):
  """Also with delayed links; and the account is checked against a formula for one vector."""
  size = 100_000
  flags = ['--workers=3', f'--size={size}', '--bandwidths=1000', '--latencies=0.1,1']
  flags += ['--seconds=0.1', '--repeats=1', '--algorithm=d_psgd', f'--algorithm={FOUR_BITS}']
  program = start_program(tmp_path, *flags)
  try:
    printed, _ = program.communicate(timeout=300)
  finally:
    program.kill()
  assert program.returncode == 0, printed
  rows = json.loads((tmp_path / 'out' / 'results.json').read_text())
  assert [(r['algorithm'], r['latency']) for r in rows] == [
    (name, latency) for latency in (0.1, 1) for name in ('d_psgd', FOUR_BITS)
  ]
  for found in rows:
    reported = 2 * (size // 2 + 4) if found['algorithm'] == FOUR_BITS else 2 * 4 * size
    assert found['bytes_per_step'] == reported
    assert reported < found['bytes_sent'] < on_the_wire(reported, messages=2)
    assert found['seconds'] > 0
    assert found['round_trip_ms'] > (2 if found['latency'] == 1 else 0)
  # Codes of a byte each, not to speak of float32, would not pass for 4 bits.
  assert on_the_wire(2 * (size // 2 + 4), messages=2) < 2 * size
  assert 'ms per step, 3 workers on a ring' in printed
  config = json.loads((tmp_path / 'out' / 'config.json').read_text())
  assert config['latency method'] in printed
  assert (tmp_path / 'out' / 'plot.png').read_bytes().startswith(b'\x89PNG')


def start_program(path, *arguments):
  """The benchmark in a process whose descendants can be told by their environment."""
  command = [sys.executable, '-m', 'experiments.studies.network_bench', f'--output={path / "out"}']
  return subprocess.Popen(
    [*command, *arguments],
    env={**os.environ, 'DECOMP_TEST': str(path)},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def descendants(path):
  """The processes, of whatever parent now, with the environment of `start_program(path)`."""
  mark = f'DECOMP_TEST={path}'.encode()
  found = []
  for process in Path('/proc').glob('[0-9]*'):
    try:
      if mark in (process / 'environ').read_bytes().split(b'\0'):
        found.append((process / 'cmdline').read_text().replace('\0', ' '))
    except OSError:  # it has just ended
      continue
  return found


@needs_namespaces
@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_it_is_stopped(tmp_path, number):
  """Namespaces without names end with their last process."""
  program = start_program(tmp_path, '--workers=2', '--size=1000')
  try:
    for line in program.stdout:
      if line.startswith('latency by'):
        break
    assert len(descendants(tmp_path)) >= 1 + 3 + 2  # itself, the namespaces, the workers
    program.send_signal(number)
    printed, _ = program.communicate(timeout=60)
  finally:
    program.kill()
  if number == signal.SIGINT:
    assert program.returncode == 1
    assert 'stopped' in printed
    assert 'Traceback' not in printed
  until = time.monotonic() + 20
  while descendants(tmp_path) and time.monotonic() < until:
    time.sleep(0.1)
  assert descendants(tmp_path) == []
