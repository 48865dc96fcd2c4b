"""Who runs next: admission, page grants, preemption and the packing of prompt chunks, all on the host.

A sequence is one sample of one request. What it has drawn lives here, so a sequence can lose its pages at any time and
be computed again (preemption, new weights): only its keys and values are lost, never a token. The oldest sequence is
never the victim, so some sequence always finishes. No array of a model is touched here.
"""

import collections
import dataclasses

import numpy as np

from ptjax.sample.bias_table import BiasTable
from ptjax.sample.page_pool import PagePool
from ptjax.sample.prefix_cache import PrefixCache
from ptjax.sample.requests import Request, SamplerLimits
from ptjax.sample.stop_strings import StopStrings

_LOOK_AHEAD = 8  # queued sequences without room that are passed over in one chunk
_OVERTAKES = 64  # times that one sequence is passed over before the queue waits for it


class PromptScores:
  """Log-probs of a prompt's tokens, under temperature 1, shared by the samples of one request."""

  def __init__(self, prompt: int, alternatives: int):
    self.logp_P = np.full(prompt, np.nan, np.float32)  # nothing predicts the first token
    self.top_id_PA = np.zeros((prompt, alternatives), np.int32)
    self.top_logp_PA = np.full((prompt, alternatives), np.nan, np.float32)
    self.known = 0  # tokens whose successor is scored

  def add(self, start: int, logp_T: np.ndarray, top_id_TA: np.ndarray, top_logp_TA: np.ndarray) -> None:
    """Takes what the tokens from `start` on predict of the tokens after them."""
    after = slice(start + 1, start + 1 + len(logp_T))
    self.logp_P[after], self.top_id_PA[after], self.top_logp_PA[after] = logp_T, top_id_TA, top_logp_TA
    self.known = start + len(logp_T)


@dataclasses.dataclass(eq=False)
class Sequence:
  """One sample: its tokens so far and the pages that hold their keys and values."""

  ticket: int
  sample: int
  request: Request
  limit: int  # n, tokens it may draw
  scores: PromptScores | None = None  # when the prompt is to be scored
  stops: StopStrings | None = None
  drawn: int = 0
  reported: int = 0  # drawn tokens that an event has told of
  pages: list[int] = dataclasses.field(default_factory=list)
  computed: int = 0  # tokens whose keys and values are in the pages
  draft_computed: int = 0  # the same of a draft model
  steps: int = 0  # decode steps it took part in
  drafted: int = 0  # tokens guessed for it, and of those
  accepted: int = 0  # drawn
  bias_row: int = 0
  held: bool = False  # in the queue until the engine has drained
  overtaken: int = 0  # by younger ones, while it waited for pages

  def __post_init__(self):
    n, A = self.limit, self.request.top_logp
    self.tokens = np.concatenate([self.request.prompt_ids, np.zeros(n, np.int32)])
    self.behavior_logp, self.model_logp = np.zeros(n, np.float32), np.zeros(n, np.float32)
    self.top_ids, self.top_logp = np.zeros((n, A), np.int32), np.zeros((n, A), np.float32)
    self.version = np.zeros(n, np.int32)

  def restart(self) -> None:
    """Forgets what was drawn."""
    self.drawn = self.reported = self.steps = self.drafted = self.accepted = 0
    if self.stops is not None:
      self.stops = self.stops.again()

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

  @property
  def scored(self) -> np.ndarray:
    """The part of the prefix that need not be computed for its scores."""
    unscored = self.scores is not None and self.scores.known < len(self.request.prompt_ids) - 1
    return self.prefix[:self.scores.known] if unscored else self.prefix

  @property
  def unfilled(self) -> int:
    return self.length - 1 - self.computed


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

  def add(self, sequence: Sequence, key: tuple | None, *, keep: int = 0) -> None:
    """Takes as much of the sequence's prefix as fits with `keep` tokens left over: perhaps nothing."""
    earlier = self._earlier.union(sequence.pages[:-(-sequence.computed // self._limits.page_size)])
    stop = min(len(sequence.prefix), sequence.computed + self.budget - keep)
    if stop <= sequence.computed or len(earlier) > self._limits.chunk_pages:
      return
    self.pieces.append(Piece(sequence, sequence.computed, stop))
    self.budget -= stop - sequence.computed
    self._earlier = earlier
    if key is not None:
      self.in_work.add(key)


class Scheduler:
  """The queue, the running sequences and their pages."""

  def __init__(self, limits: SamplerLimits, shards: int = 1):
    self.limits = limits
    self.pool = PagePool(limits.pages, shards)
    self.cache = PrefixCache(self.pool, limits.page_size)
    self.biases = BiasTable(limits.biases)
    self.waiting: collections.deque[Sequence] = collections.deque()
    self.filling: list[Sequence] = []  # admitted, prefix not all computed
    self.running: list[Sequence] = []  # ready to decode
    self.version = -1
    self.counts = collections.Counter()
    self.peak_pages = 0  # held by live sequences at one time

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
    if need > self.pool.longest:
      raise ValueError(
          f'request {sequence.request.id!r} needs {need} pages of {self.limits.page_size} tokens, the pool has '
          f'{self.pool.longest}; fix: fewer max_tokens, a shorter prompt or more sampler pages')
    self.waiting.append(sequence)

  def next_chunk(self) -> list[Piece]:
    """Pieces of at most prefill_chunk tokens in all, from sequences being filled and then from the queue.

    The oldest sequence being filled gets at least half of the chunk, the others come shortest first, so neither a long
    prompt nor many short ones hold the rest up. A sequence whose next page is being computed by another one in this
    chunk stays in the queue: it will find the page in the cache. Sequences that need no computing become running.
    """
    chunk = _Chunk(self.limits)
    oldest = min(self.filling, key=lambda s: s.order, default=None)
    keep = min(oldest.unfilled, self.limits.prefill_chunk // 2) if oldest else 0
    for sequence in sorted(self.filling, key=lambda s: s.unfilled):
      if sequence is not oldest:
        chunk.add(sequence, self._next_key(sequence), keep=keep)
    self._take_from_queue(chunk, keep)
    if oldest:
      chunk.add(oldest, self._next_key(oldest))
    return chunk.pieces

  def _take_from_queue(self, chunk: _Chunk, keep: int) -> None:
    """Admits what there is room for; those that do not fit are overtaken by few, and only so often."""
    later, passed = [], []
    in_work = {self._next_key(s) for s in self.filling} - {None}
    while self.waiting and chunk.budget > keep and self.live < self.limits.slots and len(passed) < _LOOK_AHEAD:
      sequence = self.waiting.popleft()
      if sequence.held or self._next_key(sequence) in in_work | chunk.in_work or self._scored_by_another(sequence):
        later.append(sequence)
      elif self._admit(sequence):
        for other in passed:
          other.overtaken += 1
        if sequence in self.filling:
          chunk.add(sequence, self._next_key(sequence), keep=keep)
      else:
        later.append(sequence)
        passed.append(sequence)
        if sequence.overtaken >= _OVERTAKES:
          break
    self.waiting.extendleft(reversed(later))

  def _next_key(self, sequence: Sequence) -> tuple | None:
    return self.cache.next_key(self.version, sequence.scored)

  def _scored_by_another(self, sequence: Sequence) -> bool:
    return len(sequence.scored) < len(sequence.prefix) and any(s.ticket == sequence.ticket for s in self.filling)

  def _admit(self, sequence: Sequence) -> bool:
    """Gives a queued sequence a bias row and the pages of its prefix, from the cache where they are known."""
    row = self.biases.take(sequence.request.logit_bias)
    if row is None:
      return False
    prefix = sequence.prefix
    pages, cached = self.cache.match(self.version, sequence.scored)
    need = self._pages_for(len(prefix)) - len(pages)
    headroom = sum(self._growth(s) for s in self.running + self.filling)
    if not self._room(need + headroom + self._growth(sequence) if self.live else need, len(pages)):
      for page in pages:
        self.pool.release(page)
      self.biases.release(row)
      return False
    sequence.pages = pages + self.pool.take(need, len(pages))
    sequence.computed = sequence.draft_computed = cached
    sequence.bias_row = row
    self.counts['tokens_cached'] += cached
    (self.filling if cached < len(prefix) else self.running).append(sequence)
    return True

  def computed(self, pieces: list[Piece]) -> None:
    """The chunk ran: records what is computed, and enters it in the cache."""
    for piece in pieces:
      sequence = piece.sequence
      sequence.computed = sequence.draft_computed = piece.stop
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
    held = set().union(*(s.pages for s in self.running + self.filling))
    self.peak_pages = max(self.peak_pages, len(held))
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
    first = written if shared else len(sequence.pages)  # a shared page is the last one
    if not self._room(need, first):
      return False
    fresh = self.pool.take(need, first)
    if shared:
      copies.append((sequence.pages[written], fresh[0]))
      self.pool.release(sequence.pages.pop())
    sequence.pages += fresh
    return True

  def _room(self, count: int, first: int) -> bool:
    while missing := self.pool.short(count, first):
      evicted = self.cache.evict(missing)
      self.counts['evictions'] += evicted
      if not evicted:
        return False
    return True

  def preempt(self, sequence: Sequence) -> None:
    """Takes the pages of a live sequence and puts it back in the queue."""
    self.counts['preemptions'] += 1
    self._requeue(sequence)

  def _requeue(self, sequence: Sequence) -> None:
    """Back to the queue, in order of age."""
    self.release(sequence)
    younger = sum(s.order < sequence.order for s in self.waiting)
    self.waiting.insert(younger, sequence)

  def release(self, sequence: Sequence) -> None:
    """Takes a sequence off the machine; what it computed stays in the cache."""
    self._enter(sequence)
    for page in sequence.pages:
      self.pool.release(page)
    self.biases.release(sequence.bias_row)
    sequence.pages, sequence.computed, sequence.draft_computed, sequence.bias_row = [], 0, 0, 0
    for group in (self.filling, self.running):
      if sequence in group:
        group.remove(sequence)

  def new_version(self, version: int, *, restart: bool) -> None:
    """Weights changed: the cache forgets all, live sequences lose their keys and values, and with `restart` all that
    have drawn tokens lose those too. A prompt that was scored in part is scored again."""
    for sequence in self.running + self.filling:
      self._requeue(sequence)
    for sequence in self.waiting:
      if restart and sequence.drawn:
        sequence.restart()
      if len(sequence.scored) < len(sequence.prefix):
        sequence.scores.known = 0
    self.cache.clear()
    self.version = version

  def _pages_for(self, tokens: int) -> int:
    return -(-tokens // self.limits.page_size)
