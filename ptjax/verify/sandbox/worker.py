"""The trainer's side of a sandbox: worker processes, and the job that each of them runs at a time.

A worker is spoken to over one stream socket, one job at a time. What arrives from it is bounded and was written by the
keeper, never by the job; the job's own bytes come through pipes and are only ever counted and kept.
"""

import dataclasses
import json
import os
import selectors
import socket
import struct
import subprocess
import time
import weakref

# argv[0] of a job that is a fork of the warm interpreter.
WARM_PYTHON = 'warm-python'
ZYGOTE = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'zygote.py')
CHUNK = 1 << 16
CHANNEL_BYTES = 1 << 20  # of answers that nobody has received yet; past that the job is over its output limit
START_S = 20.0  # for a worker to get ready
GRACE_S = 10.0  # past a job's wall limit, for its keeper to end it
DRAIN_S = 1.0  # for what a dead job has written to arrive
REPORT_BYTES = 1 << 30


class SandboxError(RuntimeError):
  """The host or the sandbox broke; the program is not to blame and nothing is known about it."""


@dataclasses.dataclass(frozen=True)
class JobResult:
  """How a job ended.

  `verdict` is one of VERDICTS: 'contained' means that it ended by itself, whatever its status. `returncode` is the
  exit status, or minus the signal that killed it. `files` holds the regular files asked for that were there.
  """

  verdict: str
  returncode: int
  stdout: bytes
  stderr: bytes
  files: dict[str, bytes]
  wall_s: float
  cpu_s: float
  peak_memory_bytes: int
  tier: str


class Worker:
  """One zygote process and its control socket."""

  def __init__(self, tier: str, interpreter: str, readable: list):
    self.tier, self.interpreter = tier, interpreter
    self._control, theirs = socket.socketpair()
    self._control.settimeout(START_S)
    config = {'tier': tier, 'control': theirs.fileno(), 'readable': readable}
    with theirs:
      self._process = subprocess.Popen(
          [interpreter, '-I', '-S', ZYGOTE, json.dumps(config)],
          stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
          env={}, cwd='/', start_new_session=True)

  def wait_ready(self):
    """Returns when a keeper waits for a job. Raises SandboxError with the step that failed."""
    while 'ready' not in self.read():
      continue

  def fileno(self) -> int:
    return self._control.fileno()

  def read(self) -> dict:
    """The next message; 'files' comes as name -> content. Raises SandboxError when there is none."""
    try:
      message = json.loads(self._exactly(struct.unpack('>I', self._exactly(4))[0]))
      if 'ended' in message:
        message['ended']['files'] = {name: self._exactly(size) for name, size in message['ended']['files']}
    except OSError as error:
      raise SandboxError(f'sandbox worker, tier {self.tier}: {error}') from error
    if 'failed' in message:
      raise SandboxError(message['failed'])
    return message

  def _exactly(self, size: int) -> bytes:
    if size > REPORT_BYTES:
      raise SandboxError(f'sandbox worker, tier {self.tier}: a report of {size} bytes')
    data = bytearray()
    while len(data) < size:
      part = self._control.recv(min(size - len(data), 1 << 20))
      if not part:
        raise SandboxError(f'sandbox worker, tier {self.tier}: ended with status {self._process.poll()}')
      data += part
    return bytes(data)

  def submit(self, head: dict, body: dict, descriptors: list[int], blobs: list[bytes]):
    """Sends a job: `head` is for the keeper, `body` (command, environment, names of files) and `blobs` for it alone."""
    told = json.dumps(body).encode()
    text = json.dumps(dict(head, body=len(told))).encode()
    try:
      socket.send_fds(self._control, [struct.pack('>I', len(text))], descriptors)
      self._control.sendall(b''.join([text, told, *blobs]))
    except OSError as error:
      raise SandboxError(f'sandbox worker, tier {self.tier}: {error}') from error

  def order(self, letter: bytes):
    """Asks the keeper to end the job: b'o' for too much output, b'k' because nobody wants it any more."""
    try:
      self._control.send(letter)
    except OSError:
      return  # the keeper is gone; the next read says so

  def hang_up(self):
    """Tells the worker to end with all it runs; whoever reads from it gets SandboxError."""
    try:
      self._control.shutdown(socket.SHUT_RDWR)
    except OSError:
      return  # it has ended, or was closed

  def close(self):
    """Ends the worker and all it runs, and waits for that. A Job that still waits for it must hang up instead."""
    self.hang_up()
    self._control.close()
    self.wait()

  def wait(self):
    try:
      self._process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()


# A child that the trainer forks must not hold the ends of a job's pipes, or the job would wait for their end for ever.
_open_jobs: weakref.WeakSet = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [job._let_go() for job in list(_open_jobs)])


class Job:
  """A running job with a two-way byte channel, which the program holds as descriptor 3. For one thread at a time.

  A job that is not finished holds a worker, so use it as a context manager: leaving it kills the job. `send`,
  `receive`, `finish` and `kill` raise SandboxError when the host broke.
  """

  def __init__(self, worker: Worker, head: dict, body: dict, blobs: list[bytes], stdin: bytes, channel: bool, release):
    self._worker, self._limits, self._release = worker, head['limits'], release
    self._stdin, self._output, self._printed = memoryview(stdin), {'stdout': bytearray(), 'stderr': bytearray()}, 0
    self._answers, self._hung_up, self._result = bytearray(), not channel, None
    self._flooded, self._failure, self._given_back = False, None, False
    self._selector = selectors.PollSelector()  # cheap to make, for a handful of ends
    self._channel = None
    try:
      theirs = self._open(channel)
    except OSError as error:
      self._close()
      raise SandboxError(f'no pipes for a job: {error}') from error
    try:
      worker.submit(head, body, [end if isinstance(end, int) else end.fileno() for end in theirs], blobs)
    except SandboxError:
      self._close()
      raise
    finally:
      for end in theirs:
        os.close(end) if isinstance(end, int) else end.close()
    self._deadline = time.monotonic() + self._limits['wall_s'] + GRACE_S
    _open_jobs.add(self)

  def _open(self, channel: bool) -> list:
    """Makes the pipes, watches our ends, and returns the job's ends in the order of its descriptors."""
    their_stdin, our_stdin = os.pipe()
    our_stdout, their_stdout = os.pipe()
    our_stderr, their_stderr = os.pipe()
    for end in (their_stdin, their_stdout, their_stderr):
      os.fchmod(end, 0o666)  # so that /dev/stdout opens for the job's uid
    for end in (our_stdin, our_stdout, our_stderr):
      os.set_blocking(end, False)
    self._selector.register(our_stdin, selectors.EVENT_WRITE, self._feed)
    self._selector.register(our_stdout, selectors.EVENT_READ, lambda end: self._drain(end, 'stdout'))
    self._selector.register(our_stderr, selectors.EVENT_READ, lambda end: self._drain(end, 'stderr'))
    self._selector.register(self._worker, selectors.EVENT_READ, self._report)
    theirs = [their_stdin, their_stdout, their_stderr]
    if channel:
      self._channel, far = socket.socketpair()
      self._channel.setblocking(False)
      self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)  # or an urgent byte could not be read
      self._selector.register(self._channel, selectors.EVENT_READ, self._listen)
      theirs.append(far)
    return theirs

  def __enter__(self):
    return self

  def __exit__(self, *unused):
    if self._failure is None:
      self.kill()

  def send(self, data: bytes) -> None:
    """Writes all of `data` to the job's descriptor 3. Raises BrokenPipeError once the job has closed it or ended."""
    rest = memoryview(data)
    while rest:
      if self._hung_up:
        raise BrokenPipeError('the job has closed its channel')
      try:
        rest = rest[self._channel.send(rest, socket.MSG_NOSIGNAL):]
      except BlockingIOError:
        self._step(0.01)
      except ConnectionResetError as error:
        raise BrokenPipeError('the job has closed its channel') from error

  def receive(self, timeout_s: float) -> bytes:
    """The next bytes the job wrote to descriptor 3; b'' once it has closed it or ended. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not self._answers and not self._hung_up:
      left = deadline - time.monotonic()
      if left <= 0:
        raise TimeoutError(f'no answer from the job in {timeout_s} s')
      self._step(left)
    data = bytes(self._answers)
    self._answers.clear()
    return data

  def finish(self) -> JobResult:
    """Closes the channel's sending side, waits until the job has ended (its limits bound this), and returns how."""
    if not self._hung_up and self._result is None:
      self._channel.shutdown(socket.SHUT_WR)
    while self._result is None:
      self._answers.clear()
      self._step(1.0)
    return self._result

  def kill(self) -> JobResult:
    """Ends the job now and returns how it stood; the verdict is 'contained' unless a limit had ended it before."""
    if self._result is None:
      self.stop()
    return self.finish()

  def stop(self) -> None:
    """Asks for the job's end without waiting for it: the one thing that another thread may do."""
    self._worker.order(b'k')

  def _step(self, timeout_s: float):
    """Moves whatever bytes are ready, for at most `timeout_s`."""
    if self._failure is not None:
      raise self._failure
    if self._result is not None:
      return
    try:
      for key, _ in self._selector.select(timeout_s):
        if self._result is None:  # else the one before was the report, and these are closed
          key.data(key.fileobj)
      if self._result is None and time.monotonic() > self._deadline:
        raise SandboxError(f'sandbox worker, tier {self._worker.tier}: silent {GRACE_S} s past the wall limit')
    except BaseException as error:  # whatever it is, the place must be free again
      self._abandon(error)
      raise

  def _feed(self, end: int):
    try:
      self._stdin = self._stdin[os.write(end, self._stdin[:CHUNK]):] if self._stdin else self._stdin
    except BlockingIOError:
      return
    except BrokenPipeError:
      self._stdin = memoryview(b'')  # the job does not read it
    if not self._stdin:
      self._forget(end)

  def _drain(self, end: int, name: str):
    try:
      data = os.read(end, CHUNK)
    except BlockingIOError:
      return
    if not data:
      self._forget(end)
    room = max(0, int(self._limits['output_bytes']) - self._printed)
    self._output[name] += data[:room]
    self._printed += len(data)
    if len(data) > room:
      self._stop_flood()

  def _listen(self, channel: socket.socket):
    try:
      data = channel.recv(CHUNK)
    except BlockingIOError:
      return
    except ConnectionResetError:
      data = b''  # it ended with questions unread
    self._answers += data
    if not data:
      self._hung_up = True
      self._selector.unregister(channel)
    elif len(self._answers) > CHANNEL_BYTES:
      self._stop_flood()

  def _stop_flood(self):
    if not self._flooded:
      self._flooded = True
      self._worker.order(b'o')

  def _report(self, worker: Worker):
    message = worker.read()
    if 'died' in message:
      raise SandboxError(f'sandbox worker, tier {worker.tier}: its keeper died with status {message["died"]}')
    ended = message['ended']
    self._drain_all()
    if self._flooded:
      ended['verdict'] = 'limit:output'
    output = {name: bytes(data) for name, data in self._output.items()}
    self._result = JobResult(**ended, **output, tier=worker.tier)
    self._give_back(usable=True)

  def _drain_all(self):
    """Reads what is left. Every writer is dead, so each end comes at once, unless the job has sent it elsewhere."""
    self._selector.unregister(self._worker)
    for end in [key.fileobj for key in self._selector.get_map().values() if key.data == self._feed]:
      self._forget(end)
    deadline = time.monotonic() + DRAIN_S
    while self._selector.get_map() and time.monotonic() < deadline:
      for key, _ in self._selector.select(0.1):
        key.data(key.fileobj)

  def _abandon(self, error: BaseException):
    """The worker is of no use any more: its end is the end of the job."""
    self._failure = self._failure or error
    self._give_back(usable=False)

  def _give_back(self, usable: bool):
    if not self._given_back:
      self._given_back = True
      self._close()
      self._release(self._worker, usable)

  def _let_go(self):
    """In a forked child: closes this job's ends. The parent's are not touched, nor what it waits for."""
    self._hung_up = True
    for key in (self._selector.get_map() or {}).values():
      if isinstance(key.fileobj, int):
        os.close(key.fileobj)
    self._selector.close()
    if self._channel is not None:
      self._channel.close()

  def _forget(self, end: int):
    self._selector.unregister(end)
    os.close(end)

  def _close(self):
    self._hung_up = True
    for key in list(self._selector.get_map().values()):
      self._selector.unregister(key.fileobj)
      if isinstance(key.fileobj, int):
        os.close(key.fileobj)
    self._selector.close()
    if self._channel is not None:
      self._channel.close()
