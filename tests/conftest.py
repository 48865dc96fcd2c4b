"""Session flags of every test: 8 CPU devices, f32 matmuls at full precision, rank promotion refused, programs cached.

Set through the environment, before anything imports jax, so that child processes of a test run under the same flags.
Nothing here imports jax: tests of parts that never start it stay free of it.
"""

import os
import pathlib
import shutil
import tempfile

from absl import flags

ROOT = pathlib.Path(__file__).resolve().parent.parent

os.environ.update(
    JAX_PLATFORMS='cpu',
    JAX_NUM_CPU_DEVICES='8',
    JAX_DEFAULT_MATMUL_PRECISION='highest',
    JAX_NUMPY_RANK_PROMOTION='raise',
    JAX_COMPILATION_CACHE_DIR=str(ROOT / '.jax_cache'),
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0',
    JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES='-1',
    # Eight devices share two cores or fewer: a collective may wait long for the last of them without being stuck.
    XLA_FLAGS='--xla_cpu_collective_call_terminate_timeout_seconds=600',
    TEST_TMPDIR=tempfile.mkdtemp(prefix='ptjax_test_'),  # where absltest's create_tempdir works
)


def pytest_configure() -> None:
  flags.FLAGS.mark_as_parsed()  # absltest reads its flags, and pytest never parses them


def pytest_unconfigure() -> None:
  shutil.rmtree(os.environ['TEST_TMPDIR'], ignore_errors=True)
