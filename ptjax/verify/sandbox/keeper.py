"""Keeps jobs, one at a time: starts each shut in, watches its limits, kills all of it, and reports how it ended.

Runs inside the zygote only (standard library, no import of ptjax), in the jobs' own namespaces but out of their reach.
Refuses to report before every process of the job is dead and its files are gone. A job is a fork of this process, so
nothing that a job was given or has made ever enters this process's memory: commands and files go from the trainer to
the fork, and what is collected goes from the file to the trainer.
"""

import _sitebuiltins
import atexit
import builtins
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
import types

import jail as jails
import linux
import processes

POLL_S = 0.02  # between two looks at memory, cpu time and disk; bounds how far past a limit a job can get
SLOW_LOOKS = 5  # every so many looks the costly ones: files, shared memory
LONGEST_END = 20  # costly looks that a process may take to end
TICKS_PER_S = os.sysconf('SC_CLK_TCK')
WARM_PYTHON = 'warm-python'
PATH = '/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin'
REASONS = {b'o': 'output', b'k': ''}  # what the trainer may ask to end a job for
TELL = 200  # the descriptor on which a job's process says why it could not be shut in
MOST_COLLECTED = 1 << 30  # bytes of files to return
MOST_JOBS = 500  # of one keeper
AFRESH, HUNG_UP = 0, 4  # why a keeper ends: another is to follow, or the trainer is gone


def send_message(control: socket.socket, message: dict):
  text = json.dumps(message).encode()
  control.sendall(struct.pack('>I', len(text)) + text)


def receive_exactly(control: socket.socket, size: int) -> bytes:
  parts = bytearray()
  while len(parts) < size:
    part = control.recv(min(size - len(parts), 1 << 20))
    if not part:
      raise EOFError('the trainer is gone')
    parts += part
  return bytes(parts)


def receive_head(control: socket.socket) -> tuple[dict, list[int]]:
  """The next job's limits, names to collect and size of its body, and its open descriptors.

  Raises EOFError when there will be none.
  """
  first = b'k'
  while first in REASONS:  # an order that came when its job had ended by itself
    first, descriptors, _, _ = socket.recv_fds(control, 1, 4)
  if not first:
    raise EOFError('the trainer is gone')
  size = struct.unpack('>I', first + receive_exactly(control, 3))[0]
  return json.loads(receive_exactly(control, size)), descriptors


def serve(control: socket.socket, jail) -> int:
  """Jobs one after another. Returns AFRESH when the last one is a reason to begin with nothing, or HUNG_UP."""
  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)  # process 1 is deaf to what it does not handle
  jail.isolate()
  try:
    for _ in range(MOST_JOBS):
      if not serve_one(control, jail):
        break
    return AFRESH
  except (EOFError, BrokenPipeError, ConnectionResetError):
    return HUNG_UP  # nobody is left to report to


def serve_one(control: socket.socket, jail) -> bool:
  """One job from its wait to its report; whether it ended in a way after which this process may serve another."""
  jail.prepare()
  try:
    send_message(control, {'ready': True})
    head, descriptors = receive_head(control)
    jail.begin(head['limits'])
    ended = Watch(control, jail, head, descriptors).run()
    most = min(int(head['limits']['disk_mb'] * 2**20), MOST_COLLECTED)
    found = open_files(jail.folder, head['collect'], most)
  finally:
    jail.kill_all()
    jails.reap_all()
    jail.clean()
  send_message(control, {'ended': dict(ended, files=[[name, size] for name, _, size in found])})
  for _, descriptor, size in found:
    send_file(control, descriptor, size)
  return ended['verdict'] == 'contained' and not head['collect'] and jail.is_as_new()


def open_files(folder: int, names: list[str], most: int) -> list[tuple[str, int, int]]:
  """(name, descriptor, size) of those that are regular files, reached through no link, up to `most` bytes in all."""
  found = []
  for name in names:
    try:
      descriptor = linux.open_beneath(folder, name)
    except OSError:
      continue  # not there, or a link
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_size <= most:
      most -= status.st_size
      found.append((name, descriptor, status.st_size))
    else:
      os.close(descriptor)
  return found


def send_file(control: socket.socket, descriptor: int, size: int):
  sent = 0
  while sent < size:
    part = os.sendfile(control.fileno(), descriptor, sent, size - sent)
    if not part:
      raise OSError('a collected file became shorter when nothing of its job was left')
    sent += part
  os.close(descriptor)


class Watch:
  """The job while it runs."""

  def __init__(self, control: socket.socket, jail, head: dict, descriptors: list[int]):
    self.control, self.jail, self.head, self.descriptors = control, jail, head, descriptors
    self.limits = head['limits']
    self.cpu_s = self.peak_bytes = 0.0
    self._earlier_s = waited_s()
    self.status = None
    self._looks, self._own_ticks, self._hidden = 0, {}, {}

  def run(self) -> dict:
    """Starts the job, waits for its end or the first limit, kills all of it, and says how it was."""
    self.main = self._start()
    started = time.monotonic()
    reason = self._wait(started + self.limits['wall_s'])
    wall_s = time.monotonic() - started
    self.jail.kill_all()
    self._reap(0)
    self.cpu_s = max(self.cpu_s, waited_s() - self._earlier_s)
    ended_itself = self.status is not None and not reason
    code = os.waitstatus_to_exitcode(self.status) if ended_itself else -signal.SIGKILL
    if reason is None and code in (-signal.SIGKILL, -signal.SIGXCPU) and self.cpu_s >= self.limits['cpu_s']:
      reason = 'cpu'
    return {'verdict': f'limit:{reason}' if reason else 'contained', 'returncode': code, 'wall_s': wall_s,
            'cpu_s': self.cpu_s, 'peak_memory_bytes': int(self.peak_bytes)}

  def _start(self) -> int:
    """The pid of the job's first process. Raises RuntimeError when it could not be shut in."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
      try:
        os.dup2(tell, TELL, inheritable=False)
        become_job(self.control, self.jail, self.head, self.descriptors)
      except BaseException as error:  # this process must never return into the keeper's code
        os.write(TELL, f'{type(error).__name__}: {error}'.encode()[:4000])
      finally:
        os._exit(126)
    os.close(tell)
    for descriptor in self.descriptors:
      os.close(descriptor)
    failure = os.read(told, 4096)
    os.close(told)
    if failure:
      raise RuntimeError(f'could not shut the job in: {failure.decode(errors="replace")}')
    return pid

  def _wait(self, deadline: float) -> str | None:
    """None when the first process ended by itself, else the limit that was reached ('' when told to stop)."""
    main = os.pidfd_open(self.main)
    try:
      return self._wait_for(main, deadline)
    finally:
      os.close(main)

  def _wait_for(self, main: int, deadline: float) -> str | None:
    poll = select.poll()
    poll.register(main, select.POLLIN)
    poll.register(self.control, select.POLLIN)
    while True:
      left = deadline - time.monotonic()
      if left <= 0:
        return 'time'
      ready = {descriptor for descriptor, _ in poll.poll(max(1, min(left, POLL_S) * 1000))}
      if self.control.fileno() in ready:
        order = self.control.recv(1)
        if not order:
          raise EOFError('the trainer is gone')
        return REASONS[order]
      self._reap(os.WNOHANG)
      if self.status is not None or main in ready:
        return None
      reason = self._over_limit()
      if reason:
        return reason

  def _reap(self, flags: int):
    try:
      while True:
        pid, status, used = os.wait4(-1, flags)
        if pid == 0:
          return
        self.peak_bytes = max(self.peak_bytes, used.ru_maxrss * 1024)
        if pid == self.main:
          self.status = status
    except ChildProcessError:
      return

  def _over_limit(self) -> str | None:
    """The limit that the job is over, of those that no kernel counts for all of its processes together."""
    self._looks += 1
    threads = ticks = disk = 0
    resident_kb, pids = {}, self.jail.processes()
    for pid in pids:
      try:
        (own_threads, resident_kb[pid]), (own, waited) = processes.read_status(pid), processes.read_ticks(pid)
      except (FileNotFoundError, ProcessLookupError):
        continue
      threads += own_threads
      ticks += own + waited
      self._own_ticks[pid] = own
    memory_kb, most_kb = sum(resident_kb.values()), self.limits['memory_mb'] * 1024
    if memory_kb > most_kb or self._looks % SLOW_LOOKS == 0:
      try:
        found = self.jail.inspect(pids)
      except BlockingIOError:  # the host has no process left for a look at the job: it may have them all
        return 'pids'
      if found is None or self._hides(found[2]):
        return 'memory'
      memory_kb = found[0] + sum(resident_kb.get(pid, 0) for pid in found[2])
      disk = self.jail.disk_bytes(self.limits) + found[1]
    self.peak_bytes = max(self.peak_bytes, memory_kb * 1024)
    self._count_cpu(ticks)
    over = {'memory': memory_kb > most_kb, 'cpu': self.cpu_s > self.limits['cpu_s'],
            'pids': threads > self.limits['pids'], 'disk': disk > self.limits['disk_mb'] * 2**20}
    return next((name for name, is_over in over.items() if is_over), None)

  def _hides(self, hidden: list[int]) -> bool:
    """Whether a process has refused to be looked at for longer than one takes to end."""
    self._hidden = {pid: self._hidden.get(pid, 0) + 1 for pid in hidden}
    return max(self._hidden.values(), default=0) > LONGEST_END

  def _count_cpu(self, live_ticks: int):
    """CPU time both ways: with children that were waited for, and with those that were seen and that nobody did."""
    seen_s = sum(self._own_ticks.values()) / TICKS_PER_S
    self.cpu_s = max(self.cpu_s, seen_s, live_ticks / TICKS_PER_S + waited_s() - self._earlier_s)


def waited_s() -> float:
  """CPU time of all children that this process has waited for."""
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  return used.ru_utime + used.ru_stime


def receive_body(control: socket.socket, jail, size: int) -> dict:
  """The job's command and environment; its files go to its folder."""
  body = json.loads(receive_exactly(control, size))
  owner = jail.owner()
  for name, left in body['files']:
    path = jail.work
    for part in os.path.dirname(name).split('/'):
      path = os.path.join(path, part)
      if not os.path.isdir(path):
        os.mkdir(path)
        if owner is not None:
          os.chown(path, owner, owner)
    with open(os.path.join(jail.work, name), 'wb', buffering=0) as file:
      while left:
        left -= file.write(receive_exactly(control, min(left, 1 << 16)))
      os.fchmod(file.fileno(), 0o755)
      if owner is not None:
        os.fchown(file.fileno(), owner, owner)
  return body


def become_job(control: socket.socket, jail, head: dict, descriptors: list[int]):
  """Turns this fresh process into the job. Returns only by an exception, and only before the job's code has run."""
  body = receive_body(control, jail, head['body'])
  os.setsid()
  # Duplicates first, out of the way of the targets.
  copies = [os.dup2(descriptor, TELL + 1 + i, inheritable=False) for i, descriptor in enumerate(descriptors)]
  for target, descriptor in enumerate(copies):
    os.dup2(descriptor, target)
  os.closerange(len(copies), TELL)
  os.closerange(TELL + 1, 1 << 12)  # the worker's own are all below
  os.chdir(jail.work)
  linux.set_dumpable(True)  # not the keeper's secret any more: the job may read its own /proc/self
  raise_oom_score()
  environment = {'PATH': PATH, 'HOME': jail.home, 'TMPDIR': jail.temporary, 'LANG': 'C.UTF-8', **body['env']}
  jail.confine(head['limits'])
  linux.set_dumpable(True)  # a change of uid clears it
  argv = body['argv']
  if argv[0] == WARM_PYTHON:
    os.environ.update(environment)  # over nothing: the worker has none
    os.close(TELL)
    run_warm(argv[1:])
  for number in (signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(number, signal.SIG_DFL)  # which this interpreter ignores
  try:
    os.execvpe(argv[0], argv, environment)
  except OSError as error:
    os.write(2, f'cannot execute {argv[0]!r}: {error.strerror}\n'.encode())
    os._exit(127)


def raise_oom_score():
  """Makes the job the kernel's first choice when the whole host is out of memory."""
  try:
    linux.write_file('/proc/self/oom_score_adj', '1000')
  except OSError:
    return  # a host that shows no such file: the keeper's own limit is what counts


def run_warm(arguments: list[str]):
  """Runs a program as this process's `__main__`, the way `python -I -S` does, and exits with its status."""
  signal.signal(signal.SIGINT, signal.default_int_handler)
  for name in ('folders', 'jail', 'keeper', 'linux', 'processes'):
    sys.modules.pop(name, None)
  for name in ('exit', 'quit'):  # which a plain program expects, and only `site` would bring
    setattr(builtins, name, _sitebuiltins.Quitter(name, 'Ctrl-D'))
  main = types.ModuleType('__main__')
  main.__builtins__ = builtins
  sys.modules['__main__'] = main
  status = 0
  try:
    if arguments[:1] == ['-c']:
      sys.argv, name, source = ['-c', *arguments[2:]], '<string>', arguments[1]
    else:
      sys.argv, name = arguments, arguments[0]
      main.__file__ = name
      with open(name, 'rb') as file:
        source = file.read()
    exec(compile(source, name, 'exec'), main.__dict__)
  except SystemExit as error:
    status = error.code
  except BaseException as error:
    below = error.__traceback__.tb_next  # without this function's own frame
    sys.excepthook(type(error), error.with_traceback(below), below)
    status = 1
  finish_warm(status)


def finish_warm(status):
  """What the interpreter does at its end, then the end."""
  if status is not None and not isinstance(status, int):
    print(status, file=sys.stderr)
    status = 1
  if 'threading' in sys.modules:  # not warm: what it does at every fork costs more than its import where it is needed
    sys.modules['threading']._shutdown()
  atexit._run_exitfuncs()
  for stream in (sys.stdout, sys.stderr):
    try:
      stream.flush()
    except (OSError, ValueError):
      status = status or 120  # closed by the program or by its reader
  os._exit((status or 0) & 0xFF)
