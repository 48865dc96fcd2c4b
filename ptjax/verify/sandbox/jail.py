"""One class per kind of isolation: how a worker enters it, how each job is shut in, and how all of a job is killed.

Runs inside the zygote only (standard library, no import of ptjax). A jail's life: `enter` once per worker; then `fork`
keepers, each of which calls `isolate` once and per job `prepare`, `begin`, in the job's own process `confine`, and at
the end `kill_all` and `clean`.
Refuses to go on with less than its tier promises: every step that the kernel denies raises OSError.
"""

import errno
import fcntl
import json
import os
import pwd
import resource
import signal
import socket
import struct
import time

import folders
import linux
import processes

FIRST_UID, SPARE_UIDS = 62000, 900  # uids that no account has, one per worker
JOB_UID = 1000  # what a job in a user namespace sees
SYSTEM = ('/usr', '/bin', '/sbin', '/lib', '/lib32', '/lib64', '/libx32', '/etc/alternatives')
ETC_COPIES = ('ld.so.cache', 'ld.so.conf', 'localtime', 'mime.types', 'os-release')
TEMPORARY = {'/tmp': 'box/tmp', '/var/tmp': '../box/tmp', '/dev/shm': '../box/shm'}
DEVICES = ('null', 'full', 'random', 'urandom')  # no `zero`: mapped, it is shared memory that no look finds
ACCOUNTS = 'root:x:0:0::/root:/bin/sh\njob:x:{0}:{0}::/box/home:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n'
INODES_PER_MB = 256  # a job's files are counted as well as its bytes
INODES_AT_LEAST = 4096
HELPER_S = 2.0  # for a helper of tier uid to look at the job; then that look is left out


def inode_limit(disk_mb: float) -> int:
  return int(max(INODES_AT_LEAST, disk_mb * INODES_PER_MB))


def claim_uid() -> tuple[int, socket.socket]:
  """A uid that no account and no other worker on this host has, held for as long as the socket is open."""
  taken = {entry.pw_uid for entry in pwd.getpwall()}
  for uid in range(FIRST_UID, FIRST_UID + SPARE_UIDS):
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
      if uid not in taken:
        lock.bind(f'\0ptjax-sandbox-uid-{uid}')
        return uid, lock
    except OSError as error:
      if error.errno != errno.EADDRINUSE:
        raise
    lock.close()
  raise OSError(errno.EBUSY, f'spare uid: all of {FIRST_UID}..{FIRST_UID + SPARE_UIDS - 1} are taken')


def become(uid: int):
  """Gives up root for good."""
  os.setgroups([])
  os.setresgid(uid, uid, uid)
  os.setresuid(uid, uid, uid)


def reap_all():
  """Waits for every child, adopted ones included."""
  while True:
    try:
      os.waitpid(-1, 0)
    except ChildProcessError:
      return


def set_limits(limits: dict, processes: int | None):
  """The kernel's own per-process limits, a backstop behind the keeper's per-job ones."""
  # A core limit of 0 does not keep the kernel from piping a core to a program of the host; 1 does.
  cpu, disk = int(limits['cpu_s']) + 2, int(limits['disk_mb'] * 2**20)
  # Runtimes reserve far more addresses than they touch, so this only bounds how far a burst can go.
  space = int(limits['memory_mb'] * 4 + 2048) << 20
  for kind, value in ((resource.RLIMIT_CPU, cpu), (resource.RLIMIT_AS, space), (resource.RLIMIT_FSIZE, disk),
                      (resource.RLIMIT_CORE, 1), (resource.RLIMIT_NOFILE, 256), (resource.RLIMIT_MEMLOCK, 65536),
                      (resource.RLIMIT_NPROC, processes)):
    if value is not None:
      hard = resource.getrlimit(kind)[1]
      value = value if hard == resource.RLIM_INFINITY else min(value, hard)
      resource.setrlimit(kind, (value, value))


class Namespaced:
  """Tiers `userns` and `root`: a private system in which the job's processes are all there are.

  The worker is process 1 of its own pid, mount, network, ipc, uts and cgroup namespaces over a minimal read-only
  root. Each keeper is process 1 of further pid and mount (and user) namespaces, so its end is the end of its job.
  Namespaces may outlive a job, and no job meets another in them: they run one at a time, all of a job's processes are
  killed at one stroke from process 1, the one file system that it could write to is mounted for it alone, and where it
  used the network the next job gets new ones.
  """

  work, home, temporary = '/box/work', '/box/home', '/tmp'

  def __init__(self, tier: str, readable: list):
    self.tier, self.readable = tier, readable
    self.uid, self.gid = os.geteuid(), os.getegid()
    self._below_temporary = []  # (where it is kept, where a job is to see it)

  def enter(self):
    root = os.geteuid() == 0
    if root:
      self.uid, self._lock = claim_uid()
    elif self.tier == 'root':
      raise OSError(errno.EPERM, 'tier root: not the root user')
    flags = linux.NEWNS | linux.NEWPID | linux.NEWCGROUP
    linux.unshare(flags if root else flags | linux.NEWUSER)
    if not root:
      self._map_user(self.uid)
    worker = os.fork()
    if worker:
      self._outlive(worker)
    linux.set_parent_death_signal(signal.SIGKILL)
    self._build_root()
    if root and self.tier == 'userns':
      become(self.uid)
      linux.set_dumpable(True)  # cleared by the change of uid; a keeper needs it to write its uid map
      linux.set_parent_death_signal(signal.SIGKILL)  # cleared as well

  def _outlive(self, worker: int):
    """The outer half waits, so that whoever watches it sees the worker's end. Never returns."""
    os.closerange(0, 256)
    _, status = os.waitpid(worker, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)

  def _map_user(self, inside: int):
    for name, text in (('setgroups', 'deny'), ('uid_map', f'{inside} {self.uid} 1'),
                       ('gid_map', f'{inside} {self.gid} 1')):
      linux.write_file(f'/proc/self/{name}', text)

  def _build_root(self):
    linux.mount('none', '/', None, linux.MS_REC | linux.MS_PRIVATE)
    linux.mount('tmpfs', '/tmp', 'tmpfs', linux.MS_NOSUID, 'mode=0755,size=32m')
    os.chdir('/tmp')
    os.mkdir('.host')
    linux.pivot_root('.', '.host')
    os.chdir('/')
    os.umask(0o022)
    for path in ('/box', '/dev', '/etc', '/proc', '/run', '/shared', '/var'):
      os.makedirs(path, exist_ok=True)
    for path, target in TEMPORARY.items():
      os.symlink(target, path)
    for path in SYSTEM:
      _share('/.host', path)
    for path, real in self.readable:
      if _is_temporary(real):
        self._below_temporary.append((_keep('/.host', real), real))
      else:
        _share('/.host', real)
      if path != real and not _is_temporary(path) and not os.path.lexists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(real, path)
    self._fill_etc()
    for name in DEVICES:
      open(f'/dev/{name}', 'w').close()
      linux.mount(f'/.host/dev/{name}', f'/dev/{name}', None, linux.MS_BIND)
    for name, target in (('fd', ''), ('stdin', '/0'), ('stdout', '/1'), ('stderr', '/2')):
      os.symlink(f'/proc/self/fd{target}', f'/dev/{name}')
    linux.mount('proc', '/proc', 'proc', linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    linux.detach('/.host')
    os.rmdir('/.host')
    linux.set_mount_attributes('/', linux.ATTR_RDONLY | linux.ATTR_NOSUID, recursive=False)

  def _fill_etc(self):
    seen = JOB_UID if self.tier == 'userns' else self.uid
    texts = {'passwd': ACCOUNTS.format(seen), 'group': f'root:x:0:\njob:x:{seen}:\n', 'hosts': '127.0.0.1 localhost\n',
             'nsswitch.conf': 'passwd: files\ngroup: files\nhosts: files\n'}
    for name in ETC_COPIES:
      if os.path.isfile(f'/.host/etc/{name}'):
        with open(f'/.host/etc/{name}', 'rb') as source, open(f'/etc/{name}', 'wb') as copy:
          copy.write(source.read(1 << 20))
    for name, text in texts.items():
      with open(f'/etc/{name}', 'w') as file:
        file.write(text)

  def fork(self) -> int:
    self.gid = os.getegid()
    flags = linux.NEWPID | linux.NEWNS | linux.NEWNET | linux.NEWIPC | linux.NEWUTS
    return linux.fork_into(flags | linux.NEWUSER if self.tier == 'userns' else flags)

  def isolate(self):
    if self.tier == 'userns':
      self._map_user(JOB_UID)
    linux.set_dumpable(False)  # the job cannot open this process's memory, descriptors or environment
    linux.bound_capabilities()
    socket.sethostname('sandbox')
    _raise_loopback()
    linux.mount('proc', '/proc', 'proc', linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)

  def prepare(self):
    linux.mount('box', '/box', 'tmpfs', linux.MS_NOSUID | linux.MS_NODEV, 'mode=0755')
    for name, mode in (('work', 0o755), ('home', 0o755), ('tmp', 0o777), ('shm', 0o777)):
      os.mkdir(f'/box/{name}')
      os.chmod(f'/box/{name}', mode)
      if self.tier == 'root':
        os.chown(f'/box/{name}', self.uid, self.uid)
    for kept, path in self._below_temporary:
      os.makedirs(path)
      linux.mount(kept, path, None, linux.MS_BIND | linux.MS_REC)
    self.folder = os.open(self.work, os.O_RDONLY | os.O_DIRECTORY)  # whatever the job calls it later

  def begin(self, limits: dict):
    size = f'size={int(limits["disk_mb"] * 2**20)},nr_inodes={inode_limit(limits["disk_mb"])}'
    linux.mount('box', '/box', 'tmpfs', linux.MS_REMOUNT | linux.MS_NOSUID | linux.MS_NODEV, size)

  def owner(self) -> int | None:
    return self.uid if self.tier == 'root' else None

  def confine(self, limits: dict):
    set_limits(limits, limits['pids'] + (self.tier == 'userns'))  # there the keeper counts as one
    if self.tier == 'root':
      become(self.uid)
    linux.drop_capabilities()
    linux.install_filter(sockets=True, metadata=True)

  def processes(self) -> list[int]:
    return [int(name) for name in os.listdir('/proc') if name.isdigit() and name != '1']

  def disk_bytes(self, limits: dict) -> float:
    return 0.0  # the tmpfs holds its own size

  def inspect(self, pids: list[int]) -> tuple | None:
    return processes.inspect(pids, None)

  def kill_all(self):
    try:
      os.kill(-1, signal.SIGKILL)  # from process 1: everything in the namespace but itself
    except ProcessLookupError:
      return

  def kill_orphans(self):
    """What is left when a keeper died: nothing, for process 1 takes its namespace along."""

  def clean(self):
    os.close(self.folder)
    linux.detach('/box')

  def is_as_new(self) -> bool:
    """Whether no packet has passed, for counters and connections that end would be seen by the next job."""
    devices = os.open('/proc/self/net/dev', os.O_RDONLY | os.O_CLOEXEC)
    rows = dict(line.split(b':') for line in os.read(devices, 1 << 16).splitlines() if b':' in line)
    os.close(devices)
    return set(rows) == {b'    lo'} and not any(map(int, rows[b'    lo'].split()))


class Landlocked:
  """Tiers `uid` and `landlock`, where the host grants no namespace: the host's files, behind Landlock and seccomp.

  `uid`: root; jobs run as a spare uid with no sockets at all, and are killed by uid. `landlock`: an ordinary user;
  jobs keep its uid, and signal scoping keeps them from everything else of that user.
  """

  def __init__(self, tier: str, readable: list):
    self.tier, self.readable = tier, [real for _, real in readable]
    self.work = self.home = self.temporary = None

  def enter(self):
    linux.become_subreaper()
    if linux.landlock_abi() < (1 if self.tier == 'uid' else 6):
      raise OSError(errno.ENOSYS, f'landlock: version {linux.landlock_abi()} is too old for tier {self.tier}')
    if (self.tier == 'uid') != (os.geteuid() == 0):
      raise OSError(errno.EPERM, f'tier {self.tier}: this process has uid {os.geteuid()}')
    folders.sweep((os.geteuid(), *range(FIRST_UID, FIRST_UID + SPARE_UIDS)))
    if self.tier == 'uid':
      self.uid, self._lock = claim_uid()
      # What a worker that had this uid and was killed with its keeper may have left.
      os.waitpid(self._fork_as_job(lambda: os.kill(-1, signal.SIGKILL)), 0)

  def fork(self) -> int:
    return os.fork()

  def isolate(self):
    linux.become_subreaper()
    linux.set_dumpable(False)
    linux.bound_capabilities()
    if self.tier == 'landlock':
      linux.scope_signals()

  def prepare(self):
    self.work, self.folder = folders.make()
    self.home = self.temporary = self.work
    if self.tier == 'uid':
      os.chown(self.work, self.uid, self.uid)

  def begin(self, limits: dict):
    self._device = os.stat(self.work).st_dev

  def owner(self) -> int | None:
    return self.uid if self.tier == 'uid' else None

  def confine(self, limits: dict):
    extra = 0 if self.tier == 'uid' else processes.count_threads(os.getuid())
    set_limits(limits, limits['pids'] + extra)
    if self.tier == 'uid':
      become(self.uid)
    linux.restrict_paths([*SYSTEM, *self.readable, *(f'/etc/{name}' for name in ETC_COPIES), '/etc/passwd'],
                         [f'/dev/{name}' for name in DEVICES], [self.work])
    linux.drop_capabilities()
    linux.install_filter(sockets=False, metadata=self.tier == 'uid')

  def processes(self) -> list[int]:
    return processes.below(os.getpid())

  def disk_bytes(self, limits: dict) -> float:
    return folders.count_bytes(self.work, inode_limit(limits['disk_mb']))

  def inspect(self, pids: list[int]) -> tuple | None:
    """As processes.inspect; asked as the job's uid in tier uid, for the rights of a default container are too few.

    None also when the job stopped or killed whoever asked.
    """
    if self.tier != 'uid':
      return processes.inspect(pids, self._device)
    answer, tell = os.pipe()
    helper = self._fork_as_job(lambda: os.write(tell, json.dumps(processes.inspect(pids, self._device)).encode()))
    os.close(tell)
    stopped = _await_helper(helper, HELPER_S)
    os.kill(helper, signal.SIGKILL)
    os.waitpid(helper, 0)
    with open(answer, 'rb') as pipe:
      text = pipe.read()
    if text:
      return json.loads(text)
    return None if stopped else (0, 0, pids)

  def _kill_all_of_uid(self):
    try:
      _await_helper(self._fork_as_job(lambda: os.kill(-1, signal.SIGKILL)), 0.1)
    except BlockingIOError:
      return  # no process left on the host for this: those killed one by one make room

  def _fork_as_job(self, action) -> int:
    """The pid of a child that does one thing as the job's uid. The job can stop or kill it."""
    helper = os.fork()
    if not helper:
      try:
        become(self.uid)
        action()
      finally:
        os._exit(0)
    return helper

  def kill_all(self):
    if self.tier == 'uid':
      # As root, which the job cannot hinder; and at one stroke, which its forks cannot outrun.
      kill_tree(self.processes, self._kill_all_of_uid)
      return
    try:
      os.kill(-1, signal.SIGKILL)  # reaches only this keeper's Landlock domain, which `prepare` has entered
    except (ProcessLookupError, PermissionError):
      return

  def kill_orphans(self):
    """In the worker, when a keeper died: its job's processes are this process's children now."""
    kill_tree(self.processes)

  def clean(self):
    folders.erase(self.work)
    os.close(self.folder)

  def is_as_new(self) -> bool:
    return True


class Bare(Landlocked):
  """Tier `none`: limits and a kill of all descendants, and no isolation whatever."""

  def enter(self):
    linux.become_subreaper()
    folders.sweep((os.geteuid(),))

  def isolate(self):
    linux.become_subreaper()

  def prepare(self):
    self.work, self.folder = folders.make()
    self.home = self.temporary = self.work

  def owner(self) -> None:
    return None

  def confine(self, limits: dict):
    set_limits(limits, None)
    linux.prctl(38, 1)  # no_new_privs

  def kill_all(self):
    kill_tree(self.processes)


JAILS = {'userns': Namespaced, 'root': Namespaced, 'uid': Landlocked, 'landlock': Landlocked, 'none': Bare}


def kill_tree(list_processes, sweep=None):
  """Kills what is listed, and calls `sweep`, until this process (a subreaper) has no child left to wait for."""
  while True:
    for pid in list_processes():
      try:
        os.kill(pid, signal.SIGKILL)
      except ProcessLookupError:
        continue
    try:
      while os.waitpid(-1, os.WNOHANG)[0]:
        continue
    except ChildProcessError:
      return
    if sweep is not None:
      sweep()
    time.sleep(0.001)


def _await_helper(helper: int, timeout_s: float) -> bool:
  """Waits for a child to end, without reaping it. True when the job has stopped or killed it instead."""
  deadline = time.monotonic() + timeout_s
  while time.monotonic() < deadline:
    ended = os.waitid(os.P_PID, helper, os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    if ended is not None:
      return ended.si_code != os.CLD_EXITED
    time.sleep(0.001)
  return False


def _share(host: str, path: str):
  """Binds one of the host's folders at the same path, read-only; links are copied as links."""
  source = host + path
  if os.path.islink(source):
    if not os.path.lexists(path):
      os.symlink(os.readlink(source), path)
  elif os.path.isdir(source) and not os.path.isdir(path):
    os.makedirs(path)
    _bind_read_only(source, path)


def _is_temporary(path: str) -> bool:
  return path.startswith(tuple(f'{folder}/' for folder in TEMPORARY))


def _keep(host: str, path: str) -> str:
  """Binds one of the host's folders read-only below /shared, from where it can be bound again."""
  kept = f'/shared/{len(os.listdir("/shared"))}'
  os.mkdir(kept)
  _bind_read_only(host + path, kept)
  return kept


def _bind_read_only(source: str, target: str):
  linux.mount(source, target, None, linux.MS_BIND | linux.MS_REC)
  linux.set_mount_attributes(target, linux.ATTR_RDONLY | linux.ATTR_NOSUID | linux.ATTR_NODEV)


def _raise_loopback():
  """Gives the network namespace its 127.0.0.1."""
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack('16sH14x', b'lo', 0x41))  # SIOCSIFFLAGS, up and running
