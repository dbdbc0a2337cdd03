"""Every test runs with 8 host devices, strict dtypes and no silent broadcasting of ranks."""

import os
import sys

os.environ.setdefault('MPLBACKEND', 'Agg')

# Compiling is most of the suite's time, and these programs run for milliseconds.
os.environ['XLA_FLAGS'] = '--xla_backend_optimization_level=0 ' + os.environ.get('XLA_FLAGS', '')

import jax
import pytest

jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')


@pytest.fixture(autouse=True)
def _close_figures():
  yield
  if 'matplotlib.pyplot' in sys.modules:
    sys.modules['matplotlib.pyplot'].close('all')


@pytest.fixture
def as_users_have_it():
  """JAX's own promotion of dtypes and ranks, for the programs."""
  with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
    yield
