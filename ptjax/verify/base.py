"""The table of verifiers, and a pool that verifies many answers at once.

A verifier finds whether a completion does its task; it never says what a model should be paid for it. What breaks in
a verifier or its host becomes a verdict of status `error`, which is neither a 0 nor trained on. Only failures of the
host are tried again: a second try at judging an answer would let chance decide.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import hashlib
import importlib.metadata
import pathlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from absl import logging

from ptjax import types
from ptjax.verify import code
from ptjax.verify import languages
from ptjax.verify import math
from ptjax.verify import procedural
from ptjax.verify import sandbox
from ptjax.verify import worker

_HOST_FAILURES = (sandbox.SandboxError, worker.Died)
_ATTEMPTS = 3
_RECENT = 200  # verdicts of a domain, of which too many may not be errors
_LEAST_ERRORS = 5  # below that, chance


class TooManyErrors(RuntimeError):
  """Verifiers or their host break too often to go on: what is learned from the rest could be biased."""


class Verifier(Protocol):
  """Judges one completion of one task. A sandboxed one takes the sandbox as a third argument."""

  def __call__(self, task: types.Task, text: str) -> types.Verdict:
    ...


@dataclasses.dataclass(frozen=True)
class Row:
  """A verifier with what its version depends on: files of this package and installed packages."""

  verify: Callable[..., types.Verdict]
  check: Callable[[types.Task], None]  # raises ValueError, naming the field, where a task does not suit the verifier
  files: tuple[str, ...]
  packages: tuple[str, ...] = ()
  sandboxed: bool = False


VERIFIERS = {
    'exact': Row(procedural.verify_exact, procedural.check_exact, ('procedural.py', 'answers.py')),
    'math': Row(math.verify, math.check, ('math.py', 'math_policy.py', 'answers.py', 'worker.py'),
                ('math-verify', 'latex2sympy2_extended', 'sympy')),
    'code': Row(code.verify, code.check,
                ('code.py', 'code_blocks.py', 'code_server.py', 'code_tests.py', 'languages.py', 'plain_values.py',
                 'answers.py'), ('pytest',), sandboxed=True),
    'procedural': Row(procedural.verify, procedural.check,
                      ('procedural.py', 'puzzles.py', 'answers.py', 'worker.py'), ('reasoning-gym',)),
}


def lookup(name: str) -> Row:
  """The row of a verifier. Raises ValueError, listing the known ones, for an unknown name."""
  if name not in VERIFIERS:
    raise ValueError(f'unknown verifier {name!r}; known are {sorted(VERIFIERS)}')
  return VERIFIERS[name]


def check(task: types.Task) -> None:
  """Raises ValueError, naming the field, unless the task's verifier can judge it."""
  lookup(task.verifier).check(task)


@functools.lru_cache
def version(name: str) -> str:
  """16 hex digits over a verifier's source and the versions of the packages it leans on."""
  row = lookup(name)
  digest = hashlib.sha256(name.encode())
  for file in row.files:
    digest.update((pathlib.Path(__file__).parent / file).read_bytes())
  for package in row.packages:
    digest.update(f'{package}=={importlib.metadata.version(package)}'.encode())
  return digest.hexdigest()[:16]


class VerifierPool:
  """Verifies (task, completion) pairs concurrently. Use as a context manager, or call `close`.

  Args:
    min_isolation: the weakest sandbox tier to run code in; see sandbox.Sandbox.
    workers: jobs in flight at most. 0: as many as sandbox.Sandbox has by itself.
    box: a sandbox to use and leave open. None: one is made when the first code task comes.
    max_error_frac: the largest share of a domain's latest verdicts that may be errors before `run` gives up.
  """

  def __init__(self, *, min_isolation: str = 'uid', workers: int = 0, box: sandbox.Sandbox | None = None,
               max_error_frac: float = 1.0):
    self._max_error_frac = max_error_frac
    self._errors = collections.defaultdict(lambda: collections.deque(maxlen=_RECENT))  # domain -> of each: why, or ''
    self._workers = workers
    self._min_isolation = min_isolation
    self._box = box
    self._owns_box = box is None
    self._lock = threading.Lock()
    # Program tests hold a place while they start their second job, so there are two threads for each.
    threads = 2 * (workers or sandbox.default_workers())
    self._threads = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix='verify')

  def run(self, tasks: Sequence[types.Task], texts: Sequence[str]) -> list[types.Verdict]:
    """The verdicts in order. Blocks until all are in.

    Raises:
      ValueError: tasks and texts differ in number, or a task names no known verifier.
      sandbox.SandboxUnavailable: code would have to run in less isolation than asked for.
      TooManyErrors: more of a domain's latest verdicts are errors than max_error_frac allows.
    """
    if len(tasks) != len(texts):
      raise ValueError(f'{len(tasks)} tasks and {len(texts)} texts: they must pair up')
    for task in tasks:
      lookup(task.verifier)
    verdicts = list(self._threads.map(self.verify, tasks, texts))
    self._watch(tasks, verdicts)
    return verdicts

  def _watch(self, tasks: Sequence[types.Task], verdicts: Sequence[types.Verdict]):
    for task, verdict in zip(tasks, verdicts):
      why = verdict.evidence.get('error', 'no reason given') if verdict.status == 'error' else ''
      self._errors[task.domain].append(why)
    for domain, latest in self._errors.items():
      errors = [error for error in latest if error]
      if len(errors) >= _LEAST_ERRORS and len(errors) > self._max_error_frac * len(latest):
        raise TooManyErrors(f'domain {domain!r}: {len(errors)} of the latest {len(latest)} answers got no verdict, for '
                            f'the verifier or its host broke: {errors[-1]}; mend that, or allow more with '
                            '--config.verify.max_error_frac')

  def verify(self, task: types.Task, text: str) -> types.Verdict:
    """One verdict; see `run`."""
    row = lookup(task.verifier)
    rest = (self._sandbox(),) if row.sandboxed else ()
    for attempt in range(_ATTEMPTS):
      try:
        verdict = row.verify(task, text, *rest)
        break
      except _HOST_FAILURES as e:
        verdict = _error(task, e)
        if attempt + 1 < _ATTEMPTS:
          time.sleep(0.1 * 2**attempt * (1 + random.random()))
      except Exception as e:  # pylint: disable=broad-except
        verdict = _error(task, e)
        break
    return dataclasses.replace(verdict, verifier_version=version(task.verifier))

  def close(self):
    """Ends the threads and the sandbox, if the pool made it."""
    self._threads.shutdown(cancel_futures=True)
    with self._lock:
      if self._owns_box and self._box is not None:
        self._box.close()
        self._box = None

  def __enter__(self):
    return self

  def __exit__(self, *exc):
    self.close()

  def _sandbox(self) -> sandbox.Sandbox:
    with self._lock:
      if self._box is None:
        self._box = sandbox.Sandbox(min_isolation=self._min_isolation, workers=self._workers or None,
                                    readable=languages.readable())
      return self._box


def _error(task: types.Task, error: Exception) -> types.Verdict:
  logging.log_every_n_seconds(logging.WARNING, 'verifier %s broke on task %s: %s: %s', 10, task.verifier, task.id,
                              type(error).__name__, error)
  return types.Verdict('error', 0.0, {'error': f'{type(error).__name__}: {error}'[:1000]})
