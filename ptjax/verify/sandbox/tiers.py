"""Finds what isolation this host really grants, by rehearsing whole jobs in it, and says what each tier leaves open.

A bare `unshare` can succeed and the mount after it fail, so nothing is believed but a job that ran, tried to break out,
was stopped on time, and left nothing behind. Refuses to rank a tier that failed any part of that.
"""

import os
import secrets
import socket
import stat
import sys
import tempfile

from ptjax.verify.sandbox import worker as workers

# Strongest first, with what each one does not stop.
TIERS = {
    'userns': 'kernel bugs reachable through the calls left; cache and timing channels; kernel memory behind sockets '
              'and pipes is not counted, nor is CPU time of children that nobody waits for and that end between two '
              'looks (20 ms)',
    'root': 'as userns; the keeper beside the job holds real root, so a kernel bug costs more',
    'uid': 'as userns; names, sizes and process lists of the host can be seen; disk is counted every 100 ms, so a job '
           'can run past it for that long',
    'landlock': 'as uid; jobs share the uid of the trainer, so a hole in Landlock opens all of its files',
    'none': 'anything: the job can read, write, connect and signal whatever this user can',
}
FIXES = {
    'userns': 'allow user namespaces: sysctl -w kernel.unprivileged_userns_clone=1 user.max_user_namespaces=10000 '
              'kernel.apparmor_restrict_unprivileged_userns=0; in docker run with --security-opt seccomp=unconfined '
              '--security-opt apparmor=unconfined --security-opt systempaths=unconfined',
    'root': 'run as root with CAP_SYS_ADMIN (docker: --cap-add SYS_ADMIN and the security-opts of userns)',
    'uid': 'run as root on a kernel with Landlock (5.13, boot with lsm=landlock,...) and install /usr/bin/python3',
    'landlock': "run as an ordinary user on a kernel with Landlock version 6 (6.12), min_isolation='landlock'",
    'none': "run untrusted code unprotected: min_isolation='none' and the environment variable "
            'PTJAX_UNSAFE_SANDBOX=1, both',
}
SYSTEM_PYTHON = '/usr/bin/python3'
REHEARSAL_LIMITS = {'wall_s': 10.0, 'cpu_s': 10.0, 'memory_mb': 256, 'pids': 16, 'output_bytes': 65536, 'disk_mb': 8}

# What a rehearsed job tries. It prints a line for each thing that worked and should not have.
ATTEMPTS = '''
import ctypes, os, socket, sys
secret, port, outside = sys.argv[1], int(sys.argv[2]), sys.argv[3]
def attempt(name, action):
  try:
    action()
    print("BREACH", name)
  except (OSError, ValueError):
    pass
def connect():
  socket.create_connection(("127.0.0.1", port), 1)
def unshare():
  if ctypes.CDLL(None, use_errno=True).unshare(0x10000000):
    raise OSError("refused")
attempt("read a file of the host", lambda: open(secret).read())
attempt("write beside a file of the host", lambda: open(outside, "w"))
attempt("connect to a port of the host", connect)
attempt("make a user namespace", unshare)
attempt("become root", lambda: os.setuid(0))
open("out.txt", "w").write("written")
if os.fork() == 0:
  os.setsid()
  os.execv("/bin/sleep", [secret, "30"])
print("DONE", os.getuid(), sys.stdin.read())
'''


def interpreter_of(tier: str) -> tuple[str, list]:
  """The Python that runs a tier's workers, and the (path, real path) folders that jobs read beside the system's own.

  Where nothing can be bound into the job's view (uid, landlock) the job's uid must be able to reach the interpreter
  on the host, so one below a private home gives way to the system's.
  """
  prefixes = [(path, os.path.realpath(path)) for path in dict.fromkeys((sys.prefix, sys.base_prefix))]
  if tier == 'uid' and not all(_reachable(real) for _, real in prefixes):
    if not os.path.exists(SYSTEM_PYTHON):
      raise workers.SandboxError(f'{sys.base_prefix} is below a private folder and there is no {SYSTEM_PYTHON}')
    return SYSTEM_PYTHON, []
  return sys.executable, prefixes


def _reachable(path: str) -> bool:
  while path != '/':
    if not os.stat(path).st_mode & stat.S_IXOTH:
      return False
    path = os.path.dirname(path)
  return True


def launch(tier: str, readable: tuple[str, ...]) -> workers.Worker:
  """A worker that is ready for its first job. Raises SandboxError with the step that failed."""
  interpreter, paths = interpreter_of(tier)
  worker = workers.Worker(tier, interpreter, [*paths, *((path, os.path.realpath(path)) for path in readable)])
  try:
    worker.wait_ready()
  except workers.SandboxError:
    worker.close()
    raise
  return worker


def rehearse(tier: str) -> None:
  """Runs hostile and honest jobs in a tier. Raises SandboxError naming the first thing that was not as promised."""
  worker = launch(tier, ())
  try:
    with tempfile.TemporaryDirectory(prefix='ptjax-rehearsal-') as folder, socket.socket() as listener:
      os.chmod(folder, 0o777)
      secret, mark = os.path.join(folder, secrets.token_hex(8)), secrets.token_hex(8)
      with open(secret, 'w') as file:
        file.write(mark)
      listener.bind(('127.0.0.1', 0))
      listener.listen()
      arguments = [secret, str(listener.getsockname()[1]), os.path.join(folder, 'outside')]
      result = _run(worker, [worker.interpreter, '-I', '-S', '-c', ATTEMPTS, *arguments], mark.encode())
      _judge(tier, result, mark)
      _expect_dead(secret)
    worker.wait_ready()
    stuck = _run(worker, [workers.WARM_PYTHON, '-c', 'import time; time.sleep(30)'], b'', wall_s=0.2)
    if stuck.verdict != 'limit:time':
      raise workers.SandboxError(f'a job that sleeps past its limit ended as {stuck.verdict}')
  finally:
    worker.close()


def _run(worker: workers.Worker, argv: list[str], stdin: bytes, **limits) -> workers.JobResult:
  head = {'limits': {**REHEARSAL_LIMITS, **limits}, 'collect': ['out.txt']}
  body = {'argv': argv, 'files': [], 'env': {}}
  return workers.Job(worker, head, body, [], stdin, channel=False, release=lambda *unused: None).finish()


def _judge(tier: str, result: workers.JobResult, mark: str):
  lines = result.stdout.decode(errors='replace').splitlines()
  breaches = [line for line in lines if line.startswith('BREACH')]
  if breaches and tier != 'none':
    raise workers.SandboxError(f'a job could {", ".join(line[7:] for line in breaches)}')
  done = [line.split() for line in lines if line.startswith('DONE')]
  if not done or done[0][2:] != [mark] or result.files != {'out.txt': b'written'}:
    raise workers.SandboxError(f'a plain job went wrong: {result}')


def _expect_dead(name: str):
  """No process may carry `name`, which only the rehearsed job's daemon was given."""
  for pid in os.listdir('/proc'):
    try:
      with open(f'/proc/{pid}/cmdline', 'rb') as file:
        words = file.read().split(b'\0')
    except OSError:
      continue  # not a process, or ended since it was listed
    if words[0] == name.encode():
      raise workers.SandboxError(f'a daemon outlived its job as process {pid}')
