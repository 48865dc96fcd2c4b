"""Runs programs that nobody trusts, on this host, under limits, and says how each one ended.

A `Sandbox` is a pool of warm workers. A worker is an interpreter that was exec'ed afresh (never forked from the
trainer), is single-threaded, and runs one job at a time inside the strongest isolation this host grants; `tiers`
finds it by rehearsing whole jobs. Everything a job started is dead, and its files are gone, when `run` returns.

What this package refuses to do: import jax; hand a job an environment variable, descriptor or file that was not
named; fall back to a weaker tier on its own; call a broken host the program's failure (that is `SandboxError`).
"""

import asyncio
import collections
import concurrent.futures
import dataclasses
import os
import posixpath
import threading
from collections.abc import Mapping, Sequence

from absl import logging

from ptjax.verify.sandbox import tiers
from ptjax.verify.sandbox.worker import WARM_PYTHON, Job, JobResult, SandboxError

__all__ = ('Job', 'JobResult', 'Limits', 'Sandbox', 'SandboxError', 'SandboxUnavailable', 'VERDICTS', 'WARM_PYTHON')

VERDICTS = ('contained', 'limit:time', 'limit:cpu', 'limit:memory', 'limit:output', 'limit:disk', 'limit:pids')
UNSAFE_SWITCH = 'PTJAX_UNSAFE_SANDBOX'  # must be 1 for tier none, beside min_isolation='none'
BLOCK = 4096  # a file of one byte takes this much disk

_rehearsed: dict[str, str] = {}  # tier -> '' or what its rehearsal in this process failed at
_rehearsing = threading.Lock()


class SandboxUnavailable(RuntimeError):
  """No tier at or above `min_isolation` works here. The message names each failed probe and its fix."""


# Above these a limit means nothing, or does not fit what the kernel takes.
_MOST = {'wall_s': 1e6, 'cpu_s': 1e6, 'memory_mb': 1 << 20, 'pids': 1 << 20, 'output_bytes': 1 << 30,
         'disk_mb': 1 << 20}


@dataclasses.dataclass(frozen=True)
class Limits:
  """What one job may use, counted over all of its processes together."""

  wall_s: float = 10.0  # from the job's start, not from its wait for a worker
  cpu_s: float = 10.0
  memory_mb: int = 512
  pids: int = 64  # processes and threads
  output_bytes: int = 1 << 20  # stdout and stderr together
  disk_mb: int = 64  # all it writes: work folder, /tmp, /dev/shm, home

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float('inf'):
        raise ValueError(f'sandbox limit {field.name} = {value!r} must be a number > 0')
      if value > _MOST[field.name]:
        raise ValueError(f'sandbox limit {field.name} is {value!r:.20}; at most {_MOST[field.name]:.3g} can be kept')
      if field.type is int and value != int(value):
        raise ValueError(f'sandbox limit {field.name} = {value!r} must be a whole number')
      object.__setattr__(self, field.name, field.type(value))  # 16.0 is 16


def default_workers() -> int:
  """One more than the cores this process may use: while one job ends another can start."""
  return len(os.sched_getaffinity(0)) + 1


def survey() -> dict[str, str]:
  """Each isolating tier's name -> '' where its rehearsal on this host holds, else the step that failed."""
  return {tier: _rehearsal(tier) for tier in tiers.TIERS if tier != 'none'}


def _rehearsal(tier: str) -> str:
  with _rehearsing:
    if tier not in _rehearsed:
      try:
        tiers.rehearse(tier)
        _rehearsed[tier] = ''
      except SandboxError as error:
        _rehearsed[tier] = str(error)
    return _rehearsed[tier]


def _choose(tier: str, min_isolation: str) -> str:
  """The strongest tier that holds, of those allowed. Raises SandboxUnavailable."""
  names = list(tiers.TIERS)
  allowed = names[:names.index(min_isolation) + 1]
  failures = []
  for name in allowed if tier == 'auto' else [tier]:
    if name not in allowed:
      failure = f'weaker than min_isolation = {min_isolation!r}'
    elif name == 'none' and (min_isolation != 'none' or os.environ.get(UNSAFE_SWITCH) != '1'):
      failure = 'not asked for'
    else:
      failure = _rehearsal(name)
    if not failure:
      if failures:
        logging.warning('sandbox: tier %s is the strongest that holds here\n%s', name, '\n'.join(failures))
      return name
    failures.append(f'  {name}: {failure}\n      fix: {tiers.FIXES[name]}')
  raise SandboxUnavailable(f'no sandbox: tier = {tier!r}, min_isolation = {min_isolation!r}\n' + '\n'.join(failures))


class _Places:
  """A semaphore that is fair: whoever has waited longest comes first."""

  def __init__(self, count: int):
    self._free, self._waiting, self._lock = count, collections.deque(), threading.Lock()

  def acquire(self):
    with self._lock:
      if self._free:
        self._free -= 1
        return
      turn = threading.Event()
      self._waiting.append(turn)
    try:
      turn.wait()
    except BaseException:  # such as Ctrl-C: whoever is next must not wait for this one
      with self._lock:
        waited = turn in self._waiting
        if waited:
          self._waiting.remove(turn)
      if not waited:
        self.release()
      raise

  def release(self):
    with self._lock:
      if self._waiting:
        self._waiting.popleft().set()
      else:
        self._free += 1


class Sandbox:
  """A pool of isolated workers; safe to call from many threads. Use as a context manager, or call `close`.

  Args:
    tier: 'auto' takes the strongest that works; or one of tiers.TIERS by name.
    min_isolation: the weakest tier to accept. None: 'uid' for tier='auto', else the named tier.
    workers: jobs in flight at most; further calls wait. None: default_workers().
    readable: more folders of the host that jobs may read, such as a compiler's.
  Raises:
    SandboxUnavailable: nothing at or above min_isolation works here; names each failed probe and the fix.
  """

  def __init__(self, tier: str = 'auto', min_isolation: str | None = None, workers: int | None = None,
               readable: Sequence[str] = ()):
    if min_isolation is None:
      min_isolation = 'uid' if tier in ('auto', 'none') else tier
    for value, known in ((tier, ('auto', *tiers.TIERS)), (min_isolation, tuple(tiers.TIERS))):
      if value not in known:
        raise ValueError(f'sandbox tier {value!r} is not one of {known}')
    self.tier = _choose(tier, min_isolation)
    if self.tier == 'none':
      logging.warning('SANDBOX TIER none: jobs run UNPROTECTED and can do whatever this user can')
    self.interpreter = tiers.interpreter_of(self.tier)[0]  # the Python that jobs can surely execute
    self._readable = tuple(readable)
    workers = workers or default_workers()
    self._places = _Places(workers)
    self._threads = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix='sandbox')  # of run_async
    self._lock = threading.Lock()
    self._idle: collections.deque = collections.deque()  # the one that has had most time to get ready comes first
    self._busy: set = set()
    self._closed = False

  def __enter__(self):
    return self

  def __exit__(self, *unused):
    self.close()

  def run(self, argv: Sequence[str], files: Mapping[str, bytes | str] | None = None, limits: Limits = Limits(),
          stdin: bytes = b'', env: Mapping[str, str] | None = None, collect: Sequence[str] = ()) -> JobResult:
    """Runs one program to its end and returns its JobResult. Blocks while the pool is full.

    Args:
      argv: the program, a path or a name on the job's PATH, or WARM_PYTHON: then the rest is a script and its
        arguments, or '-c' and code, for a fork of a warm `python -I -S` that starts in milliseconds.
      files: relative path -> content, put in the job's working folder, which is its current one; all executable.
      env: added to a minimal environment; nothing is inherited.
      collect: relative paths of regular files to return in `files`.
    Raises:
      ValueError: a malformed argument. SandboxError: the host broke.
    """
    with self._start(argv, files, limits, stdin, env, collect) as job:
      return job.finish()

  async def run_async(self, *args, **kwargs) -> JobResult:
    """`run` without blocking the event loop; a call that is cancelled kills its job."""
    cancelled, started = threading.Event(), []

    def work():
      with self._start(*args, **kwargs) as job:
        started.append(job)
        return job.kill() if cancelled.is_set() else job.finish()

    try:
      return await asyncio.get_running_loop().run_in_executor(self._threads, work)
    except asyncio.CancelledError:
      cancelled.set()
      for job in started:
        job.stop()
      raise

  def start(self, argv: Sequence[str], files: Mapping[str, bytes | str] | None = None, limits: Limits = Limits(),
            stdin: bytes = b'', env: Mapping[str, str] | None = None, collect: Sequence[str] = (),
            beside: Job | None = None) -> Job:
    """Starts one program with a channel on its descriptor 3 and returns the running Job; arguments as for `run`.

    A pool of n workers runs n jobs; a caller that needs two jobs at once names the first as `beside` for the second,
    which then starts without waiting for a place (two callers that each wait for a second place would never end).
    """
    return self._start(argv, files, limits, stdin, env, collect, channel=True, beside=beside)

  def close(self) -> None:
    """Kills what runs and frees everything. Calls in flight raise SandboxError."""
    with self._lock:
      self._closed = True
      idle, busy, self._idle, self._busy = self._idle, self._busy, collections.deque(), set()
    for worker in busy:
      worker.hang_up()  # its Job closes it
    for worker in idle:
      worker.close()
    for worker in busy:
      worker.wait()
    self._threads.shutdown(wait=False, cancel_futures=True)

  def _start(self, argv, files=None, limits=Limits(), stdin=b'', env=None, collect=(), channel=False,
             beside: Job | None = None) -> Job:
    job = (*_request(argv, files or {}, limits, env or {}, collect), stdin, channel)
    counted = beside is None
    if counted:
      self._places.acquire()
    try:
      return self._start_in(job, counted)
    except BaseException:
      if counted:
        self._places.release()
      raise

  def _start_in(self, job: tuple, counted: bool) -> Job:
    """Starts the job in an idle worker, or in a new one where there is none or where it broke while idle."""
    def release(worker, usable: bool):
      self._put_back(worker, usable)
      if counted:
        self._places.release()

    worker = self._take_idle()
    if worker is not None:
      try:
        worker.wait_ready()
        return Job(worker, *job, release)
      except SandboxError as error:
        logging.warning('sandbox worker replaced: %s', error)
        self._put_back(worker, usable=False)
      except BaseException:
        self._put_back(worker, usable=False)
        raise
    worker = tiers.launch(self.tier, self._readable)
    with self._lock:
      closed = self._closed
      self._busy.add(worker)
    try:
      if closed:
        raise SandboxError('this sandbox is closed')
      return Job(worker, *job, release)
    except BaseException:
      self._put_back(worker, usable=False)
      raise

  def _take_idle(self):
    with self._lock:
      if self._closed:
        raise SandboxError('this sandbox is closed')
      worker = self._idle.popleft() if self._idle else None
      if worker is not None:
        self._busy.add(worker)
      return worker

  def _put_back(self, worker, usable: bool):
    with self._lock:
      self._busy.discard(worker)
      keep = usable and not self._closed
      if keep:
        self._idle.append(worker)
    if not keep:
      worker.close()


def _request(argv, files, limits: Limits, env, collect) -> tuple[dict, dict, list[bytes]]:
  """The job as Worker.submit takes it. Raises ValueError."""
  if isinstance(argv, str) or not argv or not all(isinstance(a, str) and '\0' not in a for a in argv) or not argv[0]:
    raise ValueError(f'sandbox argv = {argv!r} must be a non-empty list of strings that names a program first')
  if argv[0] == WARM_PYTHON and len(argv) < (3 if argv[1:2] == ['-c'] else 2):
    raise ValueError(f"sandbox argv = {argv!r}: {WARM_PYTHON} needs a script, or '-c' and code")
  check_paths(files, collect)
  for name, value in env.items():
    if not name or '=' in name or '\0' in name + value:
      raise ValueError(f'sandbox env {name!r} = {value!r} is not a valid variable')
  for text in (*argv, *env, *env.values()):
    os.fsencode(text)  # raises UnicodeEncodeError, a ValueError, for what no program could be given
  blobs = [content.encode() if isinstance(content, str) else bytes(content) for content in files.values()]
  size = sum(len(blob) + 2 * BLOCK for blob in blobs) + sum(BLOCK * path.count('/') for path in files)
  if size > limits.disk_mb * 2**20:
    raise ValueError(f'sandbox files of {size} bytes do not fit into disk_mb = {limits.disk_mb}')
  head = {'limits': dataclasses.asdict(limits), 'collect': list(collect)}
  body = {'argv': list(argv), 'files': [[path, len(blob)] for path, blob in zip(files, blobs)], 'env': dict(env)}
  return head, body, blobs


def check_paths(files: Mapping[str, bytes | str], collect: Sequence[str] = ()) -> None:
  """Raises ValueError for a path that a job cannot have as a file of its working folder."""
  for path in (*files, *collect):
    parts = path.split('/')
    if path != posixpath.normpath(path) or parts[0] in ('', '.', '..') or '\0' in path or len(path) > 1000:
      raise ValueError(f'sandbox file {path!r} must be a plain relative path')
    if any(len(os.fsencode(part)) > 255 for part in parts) or any(parent in files for parent in _parents(path)):
      raise ValueError(f'sandbox file {path!r} has a part that is too long, or another file above it')


def _parents(path: str) -> list[str]:
  parts = path.split('/')
  return ['/'.join(parts[:i]) for i in range(1, len(parts))]
