"""Child processes that do checking which may hang, crash or eat memory, and that can be killed.

Symbolic comparison of hostile input cannot be bounded from inside Python. Each worker is one child with limits set by
the kernel: a CPU timer per request that kills it outright, and an address-space limit. It isolates nothing else, so
model-written code never runs here: that is the sandbox's work.
"""

import importlib
import json
import pathlib
import queue
import resource
import selectors
import signal
import subprocess
import sys
import time

_MAX_REPLY_BYTES = 1 << 20
_MEMORY_BYTES = 4 << 30
_START = ('import sys; sys.path[:0] = sys.argv[2:]; from ptjax.verify import worker; '
          'worker.serve(sys.argv[1])')


class Died(RuntimeError):
  """A worker ended, or could not start, for no fault of the request that is known."""


class Killed(Exception):
  """The request outran its limit and its worker was killed."""


class WorkerPool:
  """A few lazily started children that all answer with one module's `respond(request) -> reply`.

  Calls may come from many threads; each holds one child while it waits.
  """

  def __init__(self, module: str, size: int = 2):
    self._module = module
    self._idle = queue.LifoQueue()
    for _ in range(size):
      self._idle.put(None)

  def call(self, request: dict, *, cpu_s: float, wall_s: float) -> dict:
    """The module's reply to a JSON-able request.

    Raises:
      Killed: the request took more CPU or wall time than allowed.
      Died: the child ended for another reason.
      RuntimeError: the module raised.
    """
    child = self._idle.get()
    try:
      if child is None or child.poll() is not None:
        child = self._start()
      reply = _exchange(child, dict(request, cpu_s=cpu_s), wall_s)
    except BaseException:
      _kill(child)
      child = None
      raise
    finally:
      self._idle.put(child)
    if 'raised' in reply:
      raise RuntimeError(f'{self._module} raised {reply["raised"]}')
    return reply

  def close(self):
    for _ in range(self._idle.qsize()):
      _kill(self._idle.get())
      self._idle.put(None)

  def _start(self) -> subprocess.Popen:
    root = str(pathlib.Path(__file__).parents[2])
    child = subprocess.Popen(
        [sys.executable, '-c', _START, self._module, root], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, env={'PATH': '/usr/bin:/bin', 'PYTHONHASHSEED': '0', 'LC_ALL': 'C.UTF-8'})
    if _read_line(child, 60.0) != b'ready\n':
      _kill(child)
      raise Died(f'the worker for {self._module} did not start')
    return child


def serve(module: str):
  """The child's loop: one JSON request per line in, one JSON reply per line out, until stdin ends."""
  resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  respond = importlib.import_module(module).respond
  out = sys.stdout.buffer
  sys.stdout = sys.stderr
  out.write(b'ready\n')
  out.flush()
  for line in sys.stdin.buffer:
    request = json.loads(line)
    # The timer's default action ends the process even inside C code.
    signal.setitimer(signal.ITIMER_PROF, request.pop('cpu_s'))
    try:
      reply = respond(request)
    except Exception as e:  # pylint: disable=broad-except
      reply = {'raised': f'{type(e).__name__}: {e}'[:500]}
    signal.setitimer(signal.ITIMER_PROF, 0)
    out.write(json.dumps(reply).encode() + b'\n')
    out.flush()


def _exchange(child: subprocess.Popen, request: dict, wall_s: float) -> dict:
  try:
    child.stdin.write(json.dumps(request).encode() + b'\n')
    child.stdin.flush()
  except BrokenPipeError as e:
    raise Died('a verifier worker ended before its request') from e
  line = _read_line(child, wall_s)
  if line.endswith(b'\n'):
    return json.loads(line)
  if child.poll() is None and not line:
    raise Killed(f'no reply within {wall_s} s')
  status = child.wait(5.0)
  if status == -signal.SIGPROF:
    raise Killed('CPU time limit')
  raise Died(f'a verifier worker ended with status {status}')


def _read_line(child: subprocess.Popen, wall_s: float) -> bytes:
  """One line; shorter than a line when the child ended or the time did."""
  deadline = time.monotonic() + wall_s
  line = b''
  with selectors.DefaultSelector() as selector:
    selector.register(child.stdout, selectors.EVENT_READ)
    while not line.endswith(b'\n') and len(line) < _MAX_REPLY_BYTES:
      left = deadline - time.monotonic()
      if left <= 0 or not selector.select(left):
        break
      # Replies come one per request, so a read never takes part of the next one.
      chunk = child.stdout.read1(65536)
      if not chunk:
        child.wait(5.0)
        break
      line += chunk
  return line


def _kill(child: subprocess.Popen | None):
  if child is not None:
    child.kill()
    child.wait()
    child.stdin.close()
    child.stdout.close()
