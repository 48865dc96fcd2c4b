"""Which pages of the key/value pool are in use, by how many holders: the host's truth, the device knows nothing of it.

A page is held by sequences and by the prefix cache; it returns to the free list when the last holder lets go. Page 0 is
never handed out: masked rows of a device program write there. Any count that would go wrong is a RuntimeError.
"""

import numpy as np

SINK = 0  # the page that absorbs writes of masked rows


class PagePool:
  """Free list and reference counts of `pages` pages, of which page 0 is the sink."""

  def __init__(self, pages: int):
    self.pages = pages
    self.refs_Z = np.zeros(pages, np.int32)
    self.refs_Z[SINK] = 1
    self._free = list(range(pages - 1, SINK, -1))

  @property
  def free(self) -> int:
    return len(self._free)

  def take(self, count: int) -> list[int]:
    """`count` free pages, now held once each.

    Raises:
      RuntimeError: fewer are free; callers make room first.
    """
    if count > len(self._free):
      raise RuntimeError(f'{count} pages wanted, {len(self._free)} of {self.pages} are free')
    taken = [self._free.pop() for _ in range(count)]
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
      self._free.append(page)
