"""The one entry point: flags -> config -> validate -> devices -> one job.

  python -m ptjax.main --config=configs/quickstart.py --workdir=runs/quickstart --config.rl.steps=5
  python -m ptjax.main --job=verify --input=answers.jsonl --output=verdicts.jsonl

jax is imported only by the jobs that need it.
"""

import importlib.util
import logging as std_logging
import os
import pathlib
import sys

from absl import app
from absl import flags
from absl import logging
from ml_collections import config_flags

from ptjax import config as configs

_BASE = pathlib.Path(__file__).resolve().parent.parent / 'configs' / 'base.py'

_CONFIG = config_flags.DEFINE_config_file('config', str(_BASE), 'What to run: a file of configs/.', lock_config=True)
_JOB = flags.DEFINE_string('job', 'pipeline', 'One of the jobs below.')
_WORKDIR = flags.DEFINE_string('workdir', '', 'Where a run lives: checkpoints, manifests, metrics, report.')
_INPUT = flags.DEFINE_string('input', '-', 'JSONL to read; - is standard input.')
_OUTPUT = flags.DEFINE_string('output', '-', 'JSONL (or, for export, the directory) to write; - is standard output.')
_COORDINATOR = flags.DEFINE_string('coordinator', '', "Address host:port of process 0, or 'auto' on a TPU pod.")
_NUM_PROCESSES = flags.DEFINE_integer('num_processes', 0, 'Processes in all, with --coordinator.')
_DEBUG = flags.DEFINE_bool('debug', False, 'Shows the traceback of an error beside its message.')
_PROCESS_ID = flags.DEFINE_integer('process_id', -1, 'This process, from 0, with --coordinator.')

# job -> (module, function, needs jax, needs --workdir); every function takes (config, **options).
JOBS = {
    'pipeline': ('ptjax.jobs', 'pipeline', True, True),
    'sft': ('ptjax.jobs', 'sft', True, True),
    'dpo': ('ptjax.jobs', 'dpo', True, True),
    'rl': ('ptjax.jobs', 'rl', True, True),
    'eval': ('ptjax.jobs', 'evaluate', True, False),
    'generate': ('ptjax.jobs', 'generate', True, False),
    'score': ('ptjax.jobs', 'score', True, False),
    'serve': ('ptjax.jobs', 'serve', True, False),
    'export': ('ptjax.jobs', 'export', True, False),
    'verify': ('ptjax.verify.stream', 'job', False, False),
    'sandbox_check': ('ptjax.verify.sandbox_check', 'job', False, False),
    'bench_verify': ('ptjax.verify.bench_verify', 'job', False, False),
}


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments {argv[1:]}; flags start with --')
  job, workdir = _JOB.value, _WORKDIR.value
  if job not in JOBS:
    raise app.UsageError(f'--job={job} is unknown; known: {", ".join(JOBS)}')
  module, function, needs_jax, needs_workdir = JOBS[job]
  if needs_workdir and not workdir:
    raise app.UsageError(f'--job={job} needs --workdir=DIRECTORY, where its checkpoints and report go')
  if '://' in workdir:
    raise app.UsageError(f'--workdir={workdir}: must be a directory; mount the bucket, and give the mounted directory')
  config, where = _CONFIG.value, config_flags.get_config_filename(flags.FLAGS['config'])
  base = _load_base()
  configs.validate(config, base, where=where)
  if needs_jax:
    from ptjax.runtime import devices  # pylint: disable=g-import-not-at-top
    devices.initialize(coordinator=_COORDINATOR.value, num_processes=_NUM_PROCESSES.value,
                       process_id=_PROCESS_ID.value,
                       cache_dir=os.path.join(os.path.expanduser(config.model.cache_dir), 'compiled'))
  overrides = [f'{name}={value!r}' for name, value in config_flags.get_override_values(flags.FLAGS['config']).items()]
  options = dict(workdir=workdir, input=_INPUT.value, output=_OUTPUT.value, overrides=overrides)
  return getattr(importlib.import_module(module), function)(config, **options)


def _load_base():
  spec = importlib.util.spec_from_file_location('ptjax_base_config', _BASE)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config()


def run():
  """Parses flags and runs the job.

  What a user can mend ends in one message and status 1; its traceback is shown with --debug. A run that a signal
  stopped has saved what it did and ends with status 0.
  """
  logging.set_verbosity(logging.INFO)
  # The checkpoint library logs every file it touches; its warnings are kept.
  logging.get_absl_handler().addFilter(
      lambda record: record.levelno >= std_logging.WARNING or f'{os.sep}orbax{os.sep}' not in record.pathname)
  app.run(_reported)


def _reported(argv):
  try:
    main(argv)
  except (ValueError, RuntimeError, OSError, ArithmeticError) as error:
    logging.error('%s', error, exc_info=_DEBUG.value)
    sys.exit(getattr(error, 'exit_code', 1))


if __name__ == '__main__':
  run()
