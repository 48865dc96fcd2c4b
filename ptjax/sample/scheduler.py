"""Who runs next: admission, page grants, preemption and the packing of prompt chunks, all on the host.

A sequence is one sample of one request. What it has drawn lives here, so a sequence can lose its pages at any time and
be computed again (preemption, new weights): only its keys and values are lost, never a token. The oldest sequence is
never the victim, so some sequence always finishes. No array of a model is touched here.
"""

import collections
import dataclasses

import numpy as np

from ptjax.sample.page_pool import PagePool
from ptjax.sample.prefix_cache import PrefixCache


@dataclasses.dataclass(frozen=True)
class Request:
  """A prompt to be completed `samples` times."""

  id: str
  prompt_ids: np.ndarray  # [P] int32
  max_tokens: int  # a completion also ends where the context does
  temperature: float = 1.0  # 0 takes the most likely token
  top_k: int = 0  # 0 keeps all
  top_p: float = 1.0
  min_p: float = 0.0
  seed: int = 0  # with the sample's number and the position, all that a draw depends on
  samples: int = 1
  stop_ids: tuple[int, ...] = ()  # kept in the completion when drawn
  group_id: str = ''

  def __post_init__(self):
    object.__setattr__(self, 'prompt_ids', np.asarray(self.prompt_ids, np.int32))
    rules = (
        (self.prompt_ids.ndim == 1 and len(self.prompt_ids) > 0, 'prompt_ids must be a list of at least one token'),
        (self.max_tokens >= 1, f'max_tokens = {self.max_tokens} must be at least 1'),
        (self.samples >= 1, f'samples = {self.samples} must be at least 1'),
        (np.isfinite(self.temperature) and self.temperature >= 0, f'temperature = {self.temperature} must be >= 0'),
        (self.top_k >= 0, f'top_k = {self.top_k} must be >= 0 (0 keeps all)'),
        (0 < self.top_p <= 1, f'top_p = {self.top_p} must be in (0, 1]'),
        (0 <= self.min_p < 1, f'min_p = {self.min_p} must be in [0, 1)'),
        (0 <= self.seed < 2 ** 64, f'seed = {self.seed} must be in [0, 2**64)'),
    )
    problems = [problem for fine, problem in rules if not fine]
    if problems:
      raise ValueError(f'request {self.id!r}: ' + '; '.join(problems))


@dataclasses.dataclass(frozen=True)
class SamplerLimits:
  """Sizes that fix what is compiled and how much memory is held."""

  slots: int = 32  # sequences decoded at once
  page_size: int = 16  # tokens
  pages: int = 0  # in the pool; 0 is enough for every slot at full context
  max_context: int = 1024  # tokens of prompt and completion
  window: int = 32  # decode steps per device call, at most
  prefill_chunk: int = 128  # prompt tokens per device call, at most
  stop_ids: int = 8  # per request, at most

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value, least = getattr(self, field.name), 0 if field.name == 'pages' else 1
      if not isinstance(value, int) or value < least:
        raise ValueError(f'sampler {field.name} = {value!r} must be a whole number >= {least}')
    if self.pages == 0:
      object.__setattr__(self, 'pages', self.slots * self.pages_per_sequence + 1)
    if self.pages < 2:
      raise ValueError(f'sampler pages = {self.pages}: needs at least 2, one of which is the sink')

  @property
  def pages_per_sequence(self) -> int:
    return -(-self.max_context // self.page_size)

  @property
  def slot_buckets(self) -> tuple[int, ...]:
    """Row counts a window is compiled for: 8, 32, 128, ... and `slots`; few, as each is a compilation."""
    powers = [8 << 2 * n for n in range(self.slots.bit_length()) if 8 << 2 * n < self.slots]
    return (*powers, self.slots)

  @property
  def chunk_buckets(self) -> tuple[int, ...]:
    """Token counts a chunk is compiled for."""
    return tuple(sorted({max(1, self.prefill_chunk // 4), self.prefill_chunk}))

  @property
  def chunk_pages(self) -> int:
    """Earlier pages that the rows of one chunk may look at, all rows together."""
    return min(self.pages, 4 * self.pages_per_sequence)


@dataclasses.dataclass(eq=False)
class Sequence:
  """One sample: its tokens so far and the pages that hold their keys and values."""

  ticket: int
  sample: int
  request: Request
  limit: int  # tokens it may draw
  tokens: np.ndarray  # [P + limit] int32: prompt, then what was drawn
  drawn: int = 0
  logp: list[float] = dataclasses.field(default_factory=list)
  version: list[int] = dataclasses.field(default_factory=list)
  pages: list[int] = dataclasses.field(default_factory=list)
  computed: int = 0  # tokens whose keys and values are in the pages

  @property
  def order(self) -> tuple[int, int]:
    return self.ticket, self.sample

  @property
  def length(self) -> int:
    return len(self.request.prompt_ids) + self.drawn

  @property
  def prefix(self) -> np.ndarray:
    """Tokens to compute before decoding: all but the last, which is the first decode step's input."""
    return self.tokens[:self.length - 1]


@dataclasses.dataclass(frozen=True)
class Piece:
  """Part of a prompt to compute: tokens [start, stop) of a sequence."""

  sequence: Sequence
  start: int
  stop: int


class _Chunk:
  """Pieces collected for one device call, within its tokens and its list of earlier pages."""

  def __init__(self, limits: SamplerLimits):
    self.budget, self._limits = limits.prefill_chunk, limits
    self.pieces: list[Piece] = []
    self.in_work = set()  # cache keys of the first page each piece computes
    self._earlier: set[int] = set()  # pages

  def add(self, sequence: Sequence, key: tuple | None) -> None:
    """Takes as much of the sequence's prefix as fits: perhaps nothing, but something if the chunk is empty."""
    earlier = self._earlier.union(sequence.pages[:-(-sequence.computed // self._limits.page_size)])
    stop = min(len(sequence.prefix), sequence.computed + self.budget)
    if stop == sequence.computed or len(earlier) > self._limits.chunk_pages:
      return
    self.pieces.append(Piece(sequence, sequence.computed, stop))
    self.budget -= stop - sequence.computed
    self._earlier = earlier
    if key is not None:
      self.in_work.add(key)


class Scheduler:
  """The queue, the running sequences and their pages."""

  def __init__(self, limits: SamplerLimits):
    self.limits = limits
    self.pool = PagePool(limits.pages)
    self.cache = PrefixCache(self.pool, limits.page_size)
    self.waiting: collections.deque[Sequence] = collections.deque()
    self.filling: list[Sequence] = []  # admitted, prefix not all computed
    self.running: list[Sequence] = []  # ready to decode
    self.version = -1
    self.counts = collections.Counter()

  @property
  def live(self) -> int:
    return len(self.filling) + len(self.running)

  @property
  def idle(self) -> bool:
    return not (self.waiting or self.live)

  def add(self, sequence: Sequence) -> None:
    """Queues a sequence.

    Raises:
      ValueError: it could not finish even with the whole pool to itself.
    """
    need = self._pages_for(len(sequence.tokens) - 1)
    if need > self.limits.pages - 1:
      raise ValueError(
          f'request {sequence.request.id!r} needs {need} pages of {self.limits.page_size} tokens, the pool has '
          f'{self.limits.pages - 1}; fix: fewer max_tokens, a shorter prompt or more sampler pages')
    self.waiting.append(sequence)

  def next_chunk(self) -> list[Piece]:
    """Pieces of at most prefill_chunk tokens in all, from sequences being filled and then from the queue.

    A sequence whose next page is being computed by another one in this chunk stays in the queue: it will find the page
    in the cache. Sequences that need no computing become running at once.
    """
    chunk = _Chunk(self.limits)
    for sequence in self.filling:
      chunk.add(sequence, self.cache.next_key(self.version, sequence.prefix))
    later = []
    while self.waiting and chunk.budget and self.live < self.limits.slots:
      sequence = self.waiting.popleft()
      key = self.cache.next_key(self.version, sequence.prefix)
      if key in chunk.in_work:
        later.append(sequence)
      elif not self._admit(sequence):
        later.append(sequence)
        break
      elif sequence in self.filling:
        chunk.add(sequence, key)
    self.waiting.extendleft(reversed(later))
    return chunk.pieces

  def _admit(self, sequence: Sequence) -> bool:
    """Gives a queued sequence the pages of its prefix, from the cache where they are known."""
    prefix = sequence.prefix
    pages, cached = self.cache.match(self.version, prefix)
    need = self._pages_for(len(prefix)) - len(pages)
    headroom = sum(self._growth(s) for s in self.running + self.filling)
    if not self._room(need + headroom + self._growth(sequence) if self.live else need):
      for page in pages:
        self.pool.release(page)
      return False
    sequence.pages = pages + self.pool.take(need)
    sequence.computed = cached
    self.counts['tokens_cached'] += cached
    (self.filling if cached < len(prefix) else self.running).append(sequence)
    return True

  def computed(self, pieces: list[Piece]) -> None:
    """The chunk ran: records what is computed, and enters it in the cache."""
    for piece in pieces:
      sequence = piece.sequence
      sequence.computed = piece.stop
      self.counts['tokens_prefilled'] += piece.stop - piece.start
      full = piece.stop == len(sequence.prefix)
      self._enter(sequence, tail=full and sequence.request.samples > 1 and not sequence.drawn)
      if full:
        self.filling.remove(sequence)
        self.running.append(sequence)

  def _enter(self, sequence: Sequence, *, tail: bool = False) -> None:
    held = self._pages_for(sequence.computed)
    self.cache.enter(self.version, sequence.tokens[:sequence.computed], sequence.pages[:held], tail=tail)

  def grant(self, steps: int) -> list[tuple[int, int]]:
    """Gives every running sequence pages of its own for the next `steps` tokens, preempting the youngest if it must.

    Returns:
      (source, target) pages to copy before the window: pages that were shared and are about to be written.
    """
    copies = []
    self.running.sort(key=lambda s: s.order)
    for sequence in list(self.running):
      while sequence in self.running and not self._grow(sequence, steps, copies):
        victims = [s for s in self.running + self.filling if s is not sequence and s.order > sequence.order]
        if victims:
          self.preempt(max(victims, key=lambda s: s.order))
        elif self.live > 1:
          self.preempt(sequence)
        elif len(self.cache):
          self.cache.clear()
        else:
          raise RuntimeError(f'request {sequence.request.id!r} alone does not fit in {self.limits.pages} pages')
    return copies

  def _growth(self, sequence: Sequence) -> int:
    """Pages that the next window may ask for beyond those of the prefix."""
    last = min(sequence.length - 1 + self.limits.window, len(sequence.tokens) - 1)
    held = max(len(sequence.pages), self._pages_for(sequence.length - 1))
    return max(0, self._pages_for(last) - held) + 1

  def _grow(self, sequence: Sequence, steps: int, copies: list) -> bool:
    last = min(sequence.length - 1 + steps, len(sequence.tokens) - 1)  # tokens in pages after the window
    written = (sequence.length - 1) // self.limits.page_size
    shared = written < len(sequence.pages) and self.pool.refs_Z[sequence.pages[written]] > 1
    need = self._pages_for(last) - len(sequence.pages) + bool(shared)
    if need <= 0:
      return True
    if not self._room(need):
      return False
    fresh = self.pool.take(need)
    if shared:
      copies.append((sequence.pages[written], fresh[0]))
      self.pool.release(sequence.pages[written])
      sequence.pages[written] = fresh.pop(0)
    sequence.pages += fresh
    return True

  def _room(self, count: int) -> bool:
    if self.pool.free < count:
      self.counts['evictions'] += self.cache.evict(count - self.pool.free)
    return self.pool.free >= count

  def preempt(self, sequence: Sequence) -> None:
    """Takes the pages of a live sequence and puts it back in the queue, in order of age."""
    self.release(sequence)
    self.counts['preemptions'] += 1
    younger = sum(s.order < sequence.order for s in self.waiting)
    self.waiting.insert(younger, sequence)

  def release(self, sequence: Sequence) -> None:
    """Takes a sequence off the machine; what it computed stays in the cache."""
    self._enter(sequence)
    for page in sequence.pages:
      self.pool.release(page)
    sequence.pages, sequence.computed = [], 0
    for group in (self.filling, self.running):
      if sequence in group:
        group.remove(sequence)

  def new_version(self, version: int) -> None:
    """Weights changed: live sequences keep their tokens and lose their keys and values; the cache forgets all."""
    for sequence in self.running + self.filling:
      self.preempt(sequence)
    self.cache.clear()
    self.version = version

  def _pages_for(self, tokens: int) -> int:
    return -(-tokens // self.limits.page_size)
