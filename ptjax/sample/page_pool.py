"""Which pages of the key/value pool are in use, by how many holders: the host's truth, the device knows nothing of it.

A page is held by sequences and by the prefix cache; it returns to the free list when the last holder lets go. Page 0 is
never handed out: masked rows of a device program write there. When the pool lies in several shards, as it does over a
mesh's `context` axis, page j of a sequence comes from shard j mod n, so each shard holds its share of every sequence.
Any count that would go wrong is a RuntimeError.
"""

import numpy as np

SINK = 0  # the page that absorbs writes of masked rows


class PagePool:
  """Free lists and reference counts of `pages` pages, of which page 0 is the sink, in `shards` equal runs of pages."""

  def __init__(self, pages: int, shards: int = 1):
    self.pages, self.shards = pages, shards
    self.refs_Z = np.zeros(pages, np.int32)
    self.refs_Z[SINK] = 1
    size = pages // shards
    self._free = [[p for p in range((s + 1) * size - 1, s * size - 1, -1) if p != SINK] for s in range(shards)]

  @property
  def free(self) -> int:
    return sum(map(len, self._free))

  @property
  def longest(self) -> int:
    """Pages that one sequence could have if nothing else held any."""
    return self.pages - self.shards

  def short(self, count: int, first: int = 0) -> int:
    """How many pages are missing for pages first, first + 1, ... of a sequence, `count` in all."""
    wanted = [len(range((s - first) % self.shards, count, self.shards)) for s in range(self.shards)]
    return sum(max(0, n - len(free)) for n, free in zip(wanted, self._free))

  def take(self, count: int, first: int = 0) -> list[int]:
    """Pages first, first + 1, ... of a sequence: `count` free ones, now held once each.

    Raises:
      RuntimeError: fewer are free; callers make room first.
    """
    if missing := self.short(count, first):
      raise RuntimeError(f'{count} pages wanted, {self.free} of {self.pages} are free and {missing} are missing')
    taken = [self._free[(first + j) % self.shards].pop() for j in range(count)]
    self.refs_Z[taken] += 1
    return taken

  def hold(self, page: int) -> None:
    """One more holder of a page in use."""
    if self.refs_Z[page] < 1:
      raise RuntimeError(f'page {page} is free: it cannot be shared')
    self.refs_Z[page] += 1

  def release(self, page: int) -> None:
    """One holder less; the last one frees the page."""
    if page == SINK or self.refs_Z[page] < 1:
      raise RuntimeError(f'page {page} is released more often than it was held')
    self.refs_Z[page] -= 1
    if self.refs_Z[page] == 0:
      self._free[page * self.shards // self.pages].append(page)
