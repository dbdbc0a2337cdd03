"""experiments.compile and the machines it compiles for, here on CPUs; see also test_compilers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_experiments import Program

from decomp import cost
from decomp.cost import compiled

pytestmark = pytest.mark.usefixtures('as_users_have_it')


@pytest.mark.parametrize(
  ('name', 'words'),
  [
    ('a computer', "target='a computer': must be like 'tpu v5e:2x4'"),
    ('tpu v9:2x4', 'v9 is unknown; known are v4, v5e'),
    ('gpu b200 x8', 'b200 is unknown; known are a100'),
    ('cpu x99', 'there are 8 CPU devices'),
  ],
)
def test_machines_that_are_not_known(name, words):
  with pytest.raises(ValueError, match=words):
    cost.machine(name)


def test_a_compiler_that_is_not_installed(monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  monkeypatch.setattr('sys.prefix', 'nowhere')
  monkeypatch.delenv('TPU_LIBRARY_PATH', raising=False)
  with pytest.raises(ValueError, match=r"pip install 'decomp\[tpu\]' .* Linux on x86-64 only"):
    cost.machine('tpu v5e:2x4')


def test_the_least_seconds_are_the_slower_of_memory_and_arithmetic():
  kind = cost.machines.Kind(memory=1.0, bandwidth=10.0, flops=100.0)
  machine = cost.Machine('mine', [], kind)
  assert machine.at_least(traffic=20.0, flops=100.0) == 2.0
  assert machine.at_least(traffic=20.0, flops=500.0) == 5.0
  assert machine.at_least(traffic=None, flops=1.0) is None
  assert machine._replace(kind=None).at_least(1.0, 1.0) is None


def test_what_a_program_sends_is_read_from_it():
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ('worker',))
  spec = jax.sharding.PartitionSpec('worker')

  def step(x):
    moved = jax.lax.ppermute(x, 'worker', [(i, (i + 1) % 4) for i in range(4)])
    return moved + jax.lax.psum(x, 'worker')

  lifted = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec))
  found = compiled.read(lifted.lower(jnp.zeros(400)).compile())
  assert found.sends == {'collective-permute': [400], 'all-reduce': [400]}
  assert found.arguments == 400
  assert found.memory >= 800


def test_compile_says_what_a_run_needs(monkeypatch, tmp_path, capsys):
  program = Program('compile', monkeypatch)
  program(
    '--target=cpu x8', '--algorithm=dcd_psgd', f'--output={tmp_path}', '--topology=ring(8)',
    '--task=logistic_regression(64, 30)', '--batch_size=2', '--worker_examples=8',
  )  # fmt: skip
  facts = json.loads((tmp_path / 'compile.json').read_text())
  assert facts['target'] == 'cpu x8'
  first, found = facts['algorithms'].values()
  assert found['bytes'] == 2 * (30 + 4)
  assert found['messages'] == 2
  assert found['exact'] is first['exact'] is True
  assert found['parts']['parameters'] == 4 * 30
  assert found['parts']['replicas'] == 6 * 30  # what compensates, with half of the bits
  printed = ' '.join(capsys.readouterr().out.split())
  assert '68 bytes in 2, exactly' in printed
  assert 'needs' in printed


def test_compile_says_what_is_wrong(monkeypatch):
  program = Program('compile', monkeypatch)
  for target in ('mars', 'cpu x0', 'cpu xq', 'cpu x99999', 'gpu a100 x0', 'tpu v5e:9999x9999'):
    assert f"target='{target}': must be like" in program.error(f'--target={target}')
  assert '--devices=9: cpu x8 has 8' in program.error('--target=cpu x8', '--devices=9')
