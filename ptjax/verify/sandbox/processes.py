"""What /proc says of a job's processes: which there are, and what they use. They may end, or lie, at any moment.

Runs inside the zygote only (standard library, no import of ptjax). Raises FileNotFoundError or ProcessLookupError for
a process that has ended since it was listed; nothing a process calls itself is taken for text or for a number.
"""

import os
import stat


def below(root: int) -> list[int]:
  """All descendants of a process."""
  found, todo = [], [root]
  while todo:
    children = _children(todo.pop())
    found += children
    todo += children
  return found


def _children(pid: int) -> list[int]:
  found = []
  try:
    for thread in os.listdir(f'/proc/{pid}/task'):
      with open(f'/proc/{pid}/task/{thread}/children') as file:
        found += [int(word) for word in file.read().split()]
  except (FileNotFoundError, ProcessLookupError):
    return found  # ended since it was listed
  return found


def count_threads(uid: int) -> int:
  """Threads that this user runs on the host, which the kernel counts against a job's own limit."""
  count = 0
  for name in os.listdir('/proc'):
    try:
      if name.isdigit() and os.stat(f'/proc/{name}').st_uid == uid:
        count += len(os.listdir(f'/proc/{name}/task'))
    except OSError:
      continue  # ended since it was listed
  return count


def read_status(pid: int) -> dict[str, int]:
  """Threads, and the memory fields in kB."""
  with open(f'/proc/{pid}/status', errors='replace') as file:
    pairs = (line.split(':', 1) for line in file)
    return {name: int(text.split()[0]) for name, text in pairs if name == 'Threads' or name.startswith(('Rss', 'VmS'))}


def read_ticks(pid: int) -> tuple[int, int]:
  """CPU time of a process, and of its children that it has waited for."""
  with open(f'/proc/{pid}/stat', 'rb') as file:
    times = [int(word) for word in file.read().rpartition(b')')[2].split()[11:15]]
  return times[0] + times[1], times[2] + times[3]


def inspect(pids: list[int], device: int | None) -> tuple[int, int, list[int]]:
  """What the cheap numbers miss: (kB of memory, bytes in unlinked files, processes that hide).

  A page that processes share counts once. Anonymous shared memory counts as mapped, for touched pages can be dropped
  from a process and stay allocated. Unlinked files that are still open are counted on `device` only. A process that
  is just ending cannot be looked at either, so hiding for long is what tells.
  """
  own_kb = shared_kb = 0
  mapped_kb, unlinked, hidden = {}, {}, []
  for pid in pids:
    try:
      own, shared = _proportional_kb(pid)
      own_kb, shared_kb = own_kb + own, shared_kb + shared
      mapped_kb |= {inode: max(size, mapped_kb.get(inode, 0)) for inode, size in _zero_maps(pid).items()}
      if device is not None:
        unlinked |= _unlinked_files(pid, device)
    except (FileNotFoundError, ProcessLookupError):
      continue
    except PermissionError:
      if not _is_dead(pid):
        hidden.append(pid)
  return own_kb + max(shared_kb, sum(mapped_kb.values())), sum(unlinked.values()), hidden


def _is_dead(pid: int) -> bool:
  """Whether it has ended and only waits to be waited for."""
  try:
    with open(f'/proc/{pid}/stat', 'rb') as file:
      return file.read().rpartition(b')')[2].split()[0] in (b'Z', b'X')
  except (FileNotFoundError, ProcessLookupError):
    return True


def _proportional_kb(pid: int) -> tuple[int, int]:
  """Private and shared memory, each page divided by how many processes have it."""
  with open(f'/proc/{pid}/smaps_rollup', 'rb') as file:
    sizes = {words[0]: int(words[1]) for words in map(bytes.split, file) if words[-1] == b'kB'}
  return sizes[b'Pss_Anon:'] + sizes[b'SwapPss:'], sizes[b'Pss_Shmem:']


def _zero_maps(pid: int) -> dict[bytes, int]:
  sizes = {}
  with open(f'/proc/{pid}/maps', 'rb') as file:
    for line in file:
      if line.rstrip().endswith(b'/dev/zero (deleted)'):
        area, _, _, _, inode = line.split()[:5]
        first, last = (int(edge, 16) for edge in area.split(b'-'))
        sizes[inode] = sizes.get(inode, 0) + (last - first >> 10)
  return sizes


def _unlinked_files(pid: int, device: int) -> dict[int, int]:
  sizes = {}
  for name in os.listdir(f'/proc/{pid}/fd'):
    status = os.stat(f'/proc/{pid}/fd/{name}')
    if status.st_nlink == 0 and status.st_dev == device and stat.S_ISREG(status.st_mode):
      sizes[status.st_ino] = status.st_blocks * 512
  return sizes
