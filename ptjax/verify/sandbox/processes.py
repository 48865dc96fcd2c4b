"""What /proc says of a job's processes: which there are, and what they use. They may end, or lie, at any moment.

Runs inside the zygote only (standard library, no import of ptjax). Raises FileNotFoundError or ProcessLookupError for
a process that has ended since it was listed; nothing a process calls itself is taken for text or for a number.
"""

import os
import stat

MOST_MAPS_BYTES = 8 << 20  # of /proc/PID/maps of all processes of a job: about 100 000 mappings
_OWN = (b'RssAnon', b'RssShmem', b'VmSwap', b'VmPTE')


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


def read_status(pid: int) -> tuple[int, int]:
  """Threads, and kB of memory that is the process's own: its pages, what it swapped out, its page tables."""
  fields = _status(pid)
  return fields[b'Threads'], sum(fields.get(name, 0) for name in _OWN)  # a dead process has no memory


def _status(pid: int) -> dict[bytes, int]:
  with open(f'/proc/{pid}/status', 'rb') as file:
    lines = file.read().split(b'\n')[1:]  # the first is a name of the process's own choice
  pairs = (line.split(b':', 1) for line in lines if b':' in line)
  return {name: int(text.split()[0]) for name, text in pairs if name in (b'Threads', *_OWN)}


def read_ticks(pid: int) -> tuple[int, int]:
  """CPU time of a process, and of its children that it has waited for."""
  with open(f'/proc/{pid}/stat', 'rb') as file:
    times = [int(word) for word in file.read().rpartition(b')')[2].split()[11:15]]
  return times[0] + times[1], times[2] + times[3]


def inspect(pids: list[int], device: int | None) -> tuple[int, float, list[int]] | None:
  """What the cheap numbers miss: (kB of memory, bytes in unlinked files, processes that hide).

  A page that processes share counts once. Unlinked files that are still open or mapped are counted on `device` only.
  A process that is just ending cannot be looked at either, so hiding for long is what tells. None when the processes
  have so many mappings that to look at them would take longer than a look may.
  """
  total_kb = unlinked_bytes = 0
  left, unlinked, hidden = MOST_MAPS_BYTES, {}, []
  for pid in pids:
    try:
      maps = _maps(pid, left + 1)
      left -= len(maps)
      if left < 0:
        return None
      total_kb += _proportional_kb(pid) + _status(pid).get(b'VmPTE', 0)
      if device is not None:
        open_files = _unlinked_files(pid, device)
        unlinked |= open_files
        if _mapped_deleted(maps, device) - open_files.keys():
          unlinked_bytes = float('inf')  # mapped, but open nowhere: its size cannot be known
    except (FileNotFoundError, ProcessLookupError):
      continue
    except PermissionError:
      if not _is_dead(pid):
        hidden.append(pid)
  return total_kb, unlinked_bytes + sum(unlinked.values()), hidden


def _is_dead(pid: int) -> bool:
  """Whether it has ended and only waits to be waited for."""
  try:
    with open(f'/proc/{pid}/stat', 'rb') as file:
      return file.read().rpartition(b')')[2].split()[0] in (b'Z', b'X')
  except (FileNotFoundError, ProcessLookupError):
    return True


def _maps(pid: int, most: int) -> bytes:
  parts = []
  with open(f'/proc/{pid}/maps', 'rb', buffering=0) as file:
    while most > 0 and (part := file.read(1 << 16)):
      parts.append(part)
      most -= len(part)
  return b''.join(parts)


def _proportional_kb(pid: int) -> int:
  """Memory with each page divided by how many processes have it."""
  with open(f'/proc/{pid}/smaps_rollup', 'rb') as file:
    sizes = {words[0]: int(words[1]) for words in map(bytes.split, file) if words[-1] == b'kB'}
  return sizes[b'Pss_Anon:'] + sizes[b'SwapPss:'] + sizes[b'Pss_Shmem:']


def _mapped_deleted(maps: bytes, device: int) -> set[int]:
  wanted = b'%02x:%02x' % (os.major(device), os.minor(device))
  rows = [line.split(None, 5) for line in maps.split(b'\n') if line.endswith(b' (deleted)')]
  return {int(row[4]) for row in rows if row[3] == wanted}


def _unlinked_files(pid: int, device: int) -> dict[int, int]:
  """Inode -> bytes on disk. Each thread may have descriptors of its own."""
  sizes = {}
  for thread in os.listdir(f'/proc/{pid}/task'):
    for name in os.listdir(f'/proc/{pid}/task/{thread}/fd'):
      status = os.stat(f'/proc/{pid}/task/{thread}/fd/{name}')
      if status.st_nlink == 0 and status.st_dev == device and stat.S_ISREG(status.st_mode):
        sizes[status.st_ino] = status.st_blocks * 512
  return sizes
