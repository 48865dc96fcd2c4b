"""The kernel's isolation features as plain functions, through ctypes: namespaces, mounts, seccomp, Landlock, caps.

Standard library only, and no import of ptjax: the zygote loads this file by its folder. Every call that the kernel
refuses raises OSError with the call's name, so that a probe can say which feature is missing.
"""

import ctypes
import functools
import os
import struct

MACHINE = os.uname().machine
ARCHES = {'x86_64': (0, 0xC000003E), 'aarch64': (1, 0xC00000B7)}  # column in the table below, AUDIT_ARCH value

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE, MNT_DETACH = 16384, 1 << 18, 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4  # of mount_setattr
SIGCHLD = 17

# Calls that no job may make (EPERM): other processes' memory, mounts and namespaces, kernel surface that programs do
# not need, memory that no limit counts (memfd, System V), clocks and modules. name: (x86_64, aarch64), -1 where absent.
DENIED = {
    'ptrace': (101, 117), 'process_vm_readv': (310, 270), 'process_vm_writev': (311, 271), 'kcmp': (312, 272),
    'pidfd_getfd': (438, 438), 'process_madvise': (440, 440), 'process_mrelease': (448, 448),
    'mount': (165, 40), 'umount2': (166, 39), 'pivot_root': (155, 41), 'chroot': (161, 51),
    'open_tree': (428, 428), 'move_mount': (429, 429), 'fsopen': (430, 430), 'fsconfig': (431, 431),
    'fsmount': (432, 432), 'fspick': (433, 433), 'mount_setattr': (442, 442), 'unshare': (272, 97),
    'setns': (308, 268), 'bpf': (321, 280), 'perf_event_open': (298, 241), 'userfaultfd': (323, 282),
    'io_uring_setup': (425, 425), 'io_uring_enter': (426, 426), 'io_uring_register': (427, 427),
    'add_key': (248, 217), 'request_key': (249, 218), 'keyctl': (250, 219), 'memfd_create': (319, 279),
    'memfd_secret': (447, 447), 'shmget': (29, 194), 'shmctl': (31, 195), 'shmat': (30, 196), 'shmdt': (67, 197),
    'semget': (64, 190), 'semctl': (66, 191), 'semop': (65, 193), 'semtimedop': (220, 192), 'msgget': (68, 186),
    'msgctl': (71, 187), 'msgrcv': (70, 188), 'msgsnd': (69, 189), 'mq_open': (240, 180), 'mq_unlink': (241, 181),
    'init_module': (175, 105), 'finit_module': (313, 273), 'delete_module': (176, 106), 'kexec_load': (246, 104),
    'kexec_file_load': (320, 294), 'reboot': (169, 142), 'swapon': (167, 224), 'swapoff': (168, 225),
    'syslog': (103, 116), 'acct': (163, 89), 'quotactl': (179, 60), 'quotactl_fd': (443, 443),
    'settimeofday': (164, 170), 'clock_settime': (227, 112), 'adjtimex': (159, 171), 'clock_adjtime': (305, 266),
    'sethostname': (170, 161), 'setdomainname': (171, 162), 'open_by_handle_at': (304, 265),
    'name_to_handle_at': (303, 264), 'fanotify_init': (300, 262), 'move_pages': (279, 239),
    'migrate_pages': (256, 238), 'vmsplice': (278, 75), 'personality': (135, 92), 'lookup_dcookie': (212, 18),
    'iopl': (172, -1), 'ioperm': (173, -1), 'modify_ldt': (154, -1), 'uselib': (134, -1), 'vhangup': (153, 58),
    'io_setup': (206, 0), 'io_submit': (209, 2), 'ioprio_set': (251, 30),
    # A job's own rule sets would be kernel memory that no limit counts; the jail's are in place by then.
    'landlock_create_ruleset': (444, 444), 'landlock_add_rule': (445, 445), 'landlock_restrict_self': (446, 446),
}
# Where sockets are off, pairs of connected ones stay, for Python's asyncio needs them; but nothing that gives one a
# name or finds another, and no descriptor travels, for what is in flight is counted nowhere.
NETWORK = {
    'bind': (49, 200), 'connect': (42, 203), 'listen': (50, 201), 'accept': (43, 202), 'accept4': (288, 242),
    'sendmsg': (46, 211), 'sendmmsg': (307, 269),
}
# Changes to a file's mode, owner, times and attributes, which Landlock does not rule on: refused where a job has the
# uid of the trainer and could reach its files by path.
METADATA = {
    'chmod': (90, -1), 'fchmod': (91, 52), 'fchmodat': (268, 53), 'fchmodat2': (452, 452), 'chown': (92, -1),
    'fchown': (93, 55), 'lchown': (94, -1), 'fchownat': (260, 54), 'setxattr': (188, 5), 'lsetxattr': (189, 6),
    'fsetxattr': (190, 7), 'removexattr': (197, 14), 'lremovexattr': (198, 15), 'fremovexattr': (199, 16),
    'utime': (132, -1), 'utimes': (235, -1), 'futimesat': (261, -1), 'utimensat': (280, 88),
}
# Calls a process may make upon itself alone: these arguments must all be 0. Else a job could starve its keeper.
SELF_ONLY = {
    'prlimit64': ((302, 261), (0,)), 'sched_setaffinity': ((203, 122), (0,)), 'setpriority': ((141, 140), (0, 1)),
    'sched_setscheduler': ((144, 119), (0,)), 'sched_setparam': ((142, 118), (0,)),
    'sched_setattr': ((314, 274), (0,)),
}
CLONE, CLONE3, SOCKET, IOCTL, PRCTL = (56, 220), (435, 435), (41, 198), (16, 29), (157, 167)
SOCKETPAIR, MMAP = (53, 199), (9, 222)
SHARED_ANONYMOUS = 0x21
FIRST_UNKNOWN = 463  # calls newer than this table look absent
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
SOCK_STREAM, SOCK_RAW, SOCK_PACKET = 1, 3, 10
SET_DUMPABLE = 4
TIOCSTI, TIOCLINUX = 0x5412, 0x541C

# Made once, for ctypes makes a type for each: header and empty sets of capset.
_CAPABILITIES = ctypes.create_string_buffer(struct.pack('Ii', 0x20080522, 0))
_NO_CAPABILITIES = ctypes.create_string_buffer(24)
_libc = ctypes.CDLL(None, use_errno=True)
_held = ctypes.PyDLL(None, use_errno=True)  # keeps the GIL over the call, as a fork must


def _check(result: int, name: str) -> int:
  if result < 0:
    number = ctypes.get_errno()
    raise OSError(number, f'{name}: {os.strerror(number)}')
  return result


def syscall(name: str, number: int, *args) -> int:
  """The kernel's answer to one raw call. Raises OSError, which carries `name`."""
  plain = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
  return _check(_libc.syscall(ctypes.c_long(number), *plain), name)


def write_file(path: str, text: str):
  """One write to a file that is there, as the kernel's own files want it."""
  descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
  try:
    os.write(descriptor, text.encode())
  finally:
    os.close(descriptor)


def prctl(option: int, *args: int) -> int:
  return _check(_libc.prctl(option, *[ctypes.c_ulong(a) for a in (*args, 0, 0, 0, 0)[:4]]), f'prctl {option}')


def set_dumpable(on: bool):
  prctl(4, int(on))


def set_parent_death_signal(number: int):
  prctl(1, number)


def become_subreaper():
  prctl(36, 1)


def unshare(flags: int):
  _check(_libc.unshare(flags), f'unshare {flags:#x}')


def fork_into(flags: int) -> int:
  """os.fork with namespace flags: 0 in the child, its pid in the parent."""
  number = CLONE[ARCHES[MACHINE][0]]
  ctypes.pythonapi.PyOS_BeforeFork()
  pid = _held.syscall(ctypes.c_long(number), ctypes.c_long(flags | SIGCHLD), ctypes.c_long(0), ctypes.c_long(0),
                      ctypes.c_long(0), ctypes.c_long(0))
  number = ctypes.get_errno()
  if pid == 0:
    ctypes.pythonapi.PyOS_AfterFork_Child()
    return 0
  ctypes.pythonapi.PyOS_AfterFork_Parent()
  ctypes.set_errno(number)
  return _check(pid, f'clone {flags:#x}')


def mount(source: str, target: str, kind: str | None, flags: int = 0, data: str | None = None):
  encode = lambda text: None if text is None else os.fsencode(text)
  _check(_libc.mount(encode(source), encode(target), encode(kind), ctypes.c_ulong(flags), encode(data)),
         f'mount {kind or "bind"} on {target}')


def set_mount_attributes(path: str, attributes: int, recursive: bool = True):
  """Adds ATTR_* to a mount and, if recursive, all below it (Linux 5.12)."""
  data = ctypes.create_string_buffer(struct.pack('QQQQ', attributes, 0, 0, 0))
  syscall('mount_setattr', 442, -100, ctypes.c_char_p(os.fsencode(path)), 0x8000 if recursive else 0, data, 32)


def pivot_root(new: str, old: str):
  number = {'x86_64': 155, 'aarch64': 41}[MACHINE]
  syscall('pivot_root', number, ctypes.c_char_p(os.fsencode(new)), ctypes.c_char_p(os.fsencode(old)))


def detach(path: str):
  _check(_libc.umount2(os.fsencode(path), MNT_DETACH), f'umount {path}')


def open_beneath(folder: int, path: str) -> int:
  """A descriptor for reading `path` below `folder`, through no link at all (Linux 5.6)."""
  how = ctypes.create_string_buffer(struct.pack('QQQ', os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, 0, 0x08 | 0x04))
  return syscall('openat2', 437, folder, ctypes.c_char_p(os.fsencode(path)), how, 24)


def bound_capabilities():
  """What this process and its children execute gains no capability; those that they hold stay."""
  for capability in range(64):
    if _libc.prctl(24, ctypes.c_ulong(capability), 0, 0, 0) < 0:
      return  # past the kernel's last one, or no right to: then no_new_privs is what counts


def drop_capabilities():
  """Gives up every capability. The uid must be set before."""
  prctl(47, 4)  # clear the ambient set
  number = {'x86_64': 126, 'aarch64': 91}[MACHINE]
  syscall('capset', number, _CAPABILITIES, _NO_CAPABILITIES)


def seccomp_program(sockets: bool, metadata: bool) -> bytes:
  """The filter's code. sockets: allow four harmless families. metadata: allow chmod and its like."""
  column, arch = ARCHES[MACHINE]
  op = lambda code, yes, no, value: struct.pack('HBBI', code, yes, no, value)
  argument = lambda i: op(0x20, 0, 0, 16 + 8 * i)  # its low half
  equal = lambda value, no: op(0x15, 0, no, value)  # go on if equal, else jump over `no`
  allow, refuse, absent, die = (op(6, 0, 0, v) for v in (0x7FFF0000, 0x50001, 0x50026, 0x80000000))
  stream_or_datagram = [argument(1), op(0x54, 0, 0, 0xF), op(0x15, 2, 0, SOCK_RAW), op(0x15, 1, 0, SOCK_PACKET),
                        allow, refuse]
  route_only = [argument(2), equal(0, 1), allow, refuse]
  families = [argument(0), equal(AF_NETLINK, len(route_only)), *route_only, op(0x15, 3, 0, AF_UNIX),
              op(0x15, 2, 0, AF_INET), op(0x15, 1, 0, AF_INET6), refuse, *stream_or_datagram]
  rules = {
      CLONE3: [absent], CLONE: [argument(0), op(0x45, 0, 1, 0x7E020080), refuse, allow],
      IOCTL: [argument(1), op(0x15, 1, 0, TIOCSTI), equal(TIOCLINUX, 1), refuse, allow],
      PRCTL: [argument(0), equal(SET_DUMPABLE, 3), argument(1), equal(0, 1), refuse, allow],
      # Memory that is shared without a file outlives its mapping in part, so that no count of mappings finds it.
      MMAP: [argument(3), op(0x54, 0, 0, SHARED_ANONYMOUS), equal(SHARED_ANONYMOUS, 1), refuse, allow],
      SOCKET: families if sockets else [refuse],
  }
  if not sockets:
    rules[SOCKETPAIR] = [argument(1), op(0x54, 0, 0, 0xF), equal(SOCK_STREAM, 1), allow, refuse]
  for number, arguments in SELF_ONLY.values():
    checks = [part for i in arguments for part in (argument(i), equal(0, 1), op(0x05, 0, 0, 1), refuse)]
    rules[number] = [*checks, allow]
  for table in (DENIED, {} if sockets else NETWORK, {} if metadata else METADATA):
    rules |= {number: [refuse] for number in table.values()}
  by_number = sorted((number[column], b''.join(body)) for number, body in rules.items() if number[column] >= 0)

  def search(some: list[tuple[int, bytes]]) -> bytes:
    """Finds a call's rule by halves, for the kernel runs this for every call there is when it takes the filter."""
    if len(some) <= 3:
      return b''.join([*(equal(number, len(body) // 8) + body for number, body in some), allow])
    lower, upper = search(some[:len(some) // 2]), search(some[len(some) // 2:])
    return b''.join([op(0x35, 0, 1, some[len(some) // 2][0]), op(0x05, 0, 0, len(lower) // 8), lower, upper])

  start = [op(0x20, 0, 0, 4), op(0x15, 1, 0, arch), die, op(0x20, 0, 0, 0), op(0x35, 0, 1, FIRST_UNKNOWN), absent]
  return b''.join(start) + search(by_number)


@functools.cache
def load_filter(sockets: bool, metadata: bool) -> tuple:
  """The filter as the kernel takes it: (header, program) buffers. See seccomp_program."""
  if MACHINE not in ARCHES:
    raise OSError(38, f'seccomp: no filter table for {MACHINE}, only for {sorted(ARCHES)}')
  program = ctypes.create_string_buffer(seccomp_program(sockets, metadata))
  header = struct.pack('HxxxxxxQ', (len(program) - 1) // 8, ctypes.addressof(program))
  return ctypes.create_string_buffer(header), program


def install_filter(sockets: bool, metadata: bool):
  """Puts the seccomp filter on this process for good, with no_new_privs."""
  header, _ = load_filter(sockets, metadata)
  prctl(38, 1)
  prctl(22, 2, ctypes.addressof(header))


def landlock_abi() -> int:
  """The kernel's Landlock version, 0 where there is none."""
  try:
    return syscall('landlock', 444, 0, 0, 1)
  except OSError:
    return 0


READ_ONLY = 0b1101  # execute, read file, read folder
WRITE_FILE = 0b110 | 1 << 14  # read, write, truncate


def restrict_paths(readable: list[str], files: list[str], writable: list[str]):
  """Landlock: this process may open only what lies below these paths from here on, for good.

  readable: folders and files to read and execute. files: device files to read and write. writable: folders for
  anything. Also scopes signals and abstract sockets, and refuses TCP, where the kernel's version knows them.
  """
  abi = landlock_abi()
  bits = {0: 0, 1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)
  handled = (1 << bits) - 1
  ruleset = _ruleset(handled, abi)
  for paths, rights in ((readable, READ_ONLY), (files, WRITE_FILE), (writable, handled & ~0b100001000000)):
    for path in paths:
      if not os.path.exists(path):
        continue
      descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
      allowed = rights & handled if os.path.isdir(path) else rights & handled & (WRITE_FILE | 1)
      rule = ctypes.create_string_buffer(struct.pack('=Qi', allowed, descriptor))
      syscall('landlock_add_rule', 445, ruleset, 1, rule, 0)
      os.close(descriptor)
  _restrict(ruleset)


def scope_signals():
  """Landlock (version 6): this process and its children can signal only each other."""
  if landlock_abi() < 6:
    raise OSError(38, f'landlock: version {landlock_abi()}, signal scoping needs 6')
  _restrict(_ruleset(0, 6))


def _ruleset(handled: int, abi: int) -> int:
  attributes = struct.pack('QQQ', handled, 3 if handled and abi >= 4 else 0, 3 if abi >= 6 else 0)
  size = 8 if abi < 4 else 16 if abi < 6 else 24
  return syscall('landlock_create_ruleset', 444, ctypes.create_string_buffer(attributes), size, 0)


def _restrict(ruleset: int):
  prctl(38, 1)
  syscall('landlock_restrict_self', 446, ruleset, 0)
  os.close(ruleset)
