"""A tree of computed pages: which tokens, after which earlier pages, under which policy version, lie in which page.

Every request looks its prompt up here, so a system prompt shared by many prompts, the R samples of one prompt and the
earlier turns of an episode are one mechanism. Entries of another policy version can't be matched: the version is the
root of the key. A page may be entered before it is full (the tail of a prompt with several samples); it is matched only
by a sequence whose remaining prompt is exactly those tokens, and the sequence copies it before it writes.
The cache holds each of its pages once and gives up the least recently used leaves that nobody else holds.
"""

import collections
import dataclasses

import numpy as np

from ptjax.sample.page_pool import PagePool

Key = tuple  # (parent's key id or ('version', n), bytes of the page's tokens)


@dataclasses.dataclass
class _Node:
  page: int
  id: int
  parent: Key | None  # key of the parent's node; None at the root
  children: int = 0


class PrefixCache:
  """Lookup, entry and eviction over the pages of one PagePool."""

  def __init__(self, pool: PagePool, page_size: int):
    self._pool = pool
    self._page_size = page_size
    self._nodes: collections.OrderedDict[Key, _Node] = collections.OrderedDict()  # oldest use first
    self._next_id = 0

  def __len__(self) -> int:
    return len(self._nodes)

  @property
  def pages(self) -> list[int]:
    """The pages it holds, one hold each."""
    return [node.page for node in self._nodes.values()]

  def _path(self, version: int, tokens: np.ndarray) -> list[Key]:
    """Keys of the longest entered prefix of `tokens`, root first."""
    keys, above = [], ('version', version)
    for start in range(0, len(tokens), self._page_size):
      key = (above, tokens[start:start + self._page_size].tobytes())
      if key not in self._nodes:
        break
      keys.append(key)
      above = self._nodes[key].id
    return keys

  def match(self, version: int, tokens: np.ndarray) -> tuple[list[int], int]:
    """Pages that already hold a prefix of `tokens` (int32), each now held for the caller, and its length in tokens."""
    keys = self._path(version, tokens)
    for key in reversed(keys):  # leaves first, so that a parent is never older than its child
      self._nodes.move_to_end(key)
    pages = [self._nodes[key].page for key in keys]
    for page in pages:
      self._pool.hold(page)
    return pages, min(len(pages) * self._page_size, len(tokens))

  def next_key(self, version: int, tokens: np.ndarray) -> Key | None:
    """Names the first page of `tokens` that is not entered: two sequences with equal keys would compute it twice."""
    keys = self._path(version, tokens)
    start = len(keys) * self._page_size
    if start >= len(tokens):
      return None
    above = self._nodes[keys[-1]].id if keys else ('version', version)
    return above, tokens[start:start + self._page_size].tobytes()

  def enter(self, version: int, tokens: np.ndarray, pages: list[int], *, tail: bool = False) -> None:
    """Records that `pages` hold `tokens`; the last page only if it is full or `tail` is set. Known pages stay."""
    above, parent = ('version', version), None
    for index, page in enumerate(pages):
      piece = tokens[index * self._page_size:(index + 1) * self._page_size]
      if not len(piece) or (len(piece) < self._page_size and not tail):
        break
      key = (above, piece.tobytes())
      if key not in self._nodes:
        self._pool.hold(page)
        self._nodes[key] = _Node(page=page, id=self._next_id, parent=parent)
        self._next_id += 1
        if parent is not None:
          self._nodes[parent].children += 1
      above, parent = self._nodes[key].id, key

  def evict(self, count: int) -> int:
    """Frees up to `count` pages, least recently used leaves first; returns how many."""
    chosen, gone = [], collections.Counter()  # parent's key -> children chosen
    progress = True
    while len(chosen) < count and progress:
      progress, known = False, set(chosen)
      for key, node in self._nodes.items():
        if len(chosen) == count:
          break
        if key not in known and node.children == gone[key] and self._pool.refs_Z[node.page] == 1:
          chosen.append(key)
          gone[node.parent] += 1
          progress = True
    for key in chosen:  # a child before its parent
      self._drop(key)
    return len(chosen)

  def _drop(self, key: Key) -> None:
    node = self._nodes.pop(key)
    if node.parent is not None:
      self._nodes[node.parent].children -= 1
    self._pool.release(node.page)

  def clear(self) -> None:
    """Forgets everything; pages that sequences hold stay theirs."""
    for node in self._nodes.values():
      self._pool.release(node.page)
    self._nodes.clear()
