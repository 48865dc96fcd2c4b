"""Work folders on the host's own disk, for tiers that cannot mount a private one: made, counted, and removed.

Runs inside the zygote only (standard library, no import of ptjax). What a job left in its folder is hostile: nothing
here follows a link, recurses, or trusts a name, a depth or a mode.
"""

import fcntl
import os
import stat
from collections.abc import Container

FOLDERS = '/tmp/ptjax-job-'


def make() -> tuple[str, int]:
  """A private folder, and the descriptor whose lock says that its keeper lives."""
  name = os.urandom(8).hex()
  fresh, path = f'/tmp/.ptjax-{name}', f'{FOLDERS}{name}'
  os.mkdir(fresh, 0o700)
  lock = _lock(fresh)
  os.rename(fresh, path)  # only now may a sweep see it
  return path, lock


def _lock(path: str) -> int:
  descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
  fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  return descriptor


def sweep(owners: Container[int]):
  """Removes the folders of keepers that were killed before they could, of those that these users own."""
  for name in os.listdir(os.path.dirname(FOLDERS)):
    path = os.path.join(os.path.dirname(FOLDERS), name)
    if path.startswith(FOLDERS):
      try:
        if os.lstat(path).st_uid not in owners:
          continue
        os.close(_lock(path))
        erase(path)
      except OSError:
        continue  # in use, another user's, or gone


def count_bytes(top: str, most: int) -> float:
  """Bytes on disk below `top`; infinite where that cannot be counted.

  Which is: past `most` files, below a path that is too long, in a folder that the job shut to its owner.
  """
  total, count, todo = 0, 0, [top]
  while todo:
    try:
      with os.scandir(todo.pop()) as entries:
        for entry in entries:
          status = entry.stat(follow_symlinks=False)
          total, count = total + status.st_blocks * 512, count + 1
          if stat.S_ISDIR(status.st_mode):
            todo.append(entry.path)
          if count > most:
            return float('inf')
    except FileNotFoundError:
      continue  # gone since it was listed
    except OSError:
      return float('inf')
  return total


def _open_up(name: str, parent: int | None) -> int:
  """A descriptor of a folder, to which its owner has all rights from then on; through no link, whoever swaps them."""
  found = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
  try:
    os.chmod(f'/proc/self/fd/{found}', 0o700)
    return os.open('.', os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=found)
  finally:
    os.close(found)


def erase(top: str):
  """Removes a hostile tree of any depth: sub-folders are moved up and emptied one by one, through no link."""
  folder = _open_up(top, None)
  moved = 0
  while names := os.listdir(folder):
    for name in names:
      if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=folder)
        continue
      inner = _open_up(name, folder)
      for below in os.listdir(inner):
        if stat.S_ISDIR(os.stat(below, dir_fd=inner, follow_symlinks=False).st_mode):
          os.close(_open_up(below, inner))  # moving a folder takes the right to write into it
        moved += 1
        os.rename(below, f'.erase-{moved}-{os.urandom(4).hex()}', src_dir_fd=inner, dst_dir_fd=folder)
      os.close(inner)
      os.rmdir(name, dir_fd=folder)
  os.close(folder)
  os.rmdir(top)
