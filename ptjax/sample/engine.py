"""The sampler: requests in, rollouts out, over a paged key/value pool with shared prefixes.

The host decides between device calls (scheduler), the device runs many tokens per call (runner, decode). Tokens depend
on a request's seed, sample and prompt and on the weights, never on the slot, the pages, the order of arrival, the
window or the neighbours. The engine has no tokenizer: token ids in, token ids out, `Rollout.text` is the caller's; only
stop strings need a function that turns ids into text. One thread owns an engine.
"""

from collections.abc import Callable
import dataclasses
import time
from typing import NamedTuple

from absl import logging
from flax import nnx
from jax.sharding import Mesh
import numpy as np

from ptjax import types
from ptjax.models.families import ModelConfig
from ptjax.sample.requests import Request, SamplerLimits
from ptjax.sample.runner import Runner
from ptjax.sample.scheduler import Piece, PromptScores, Scheduler, Sequence
from ptjax.sample.stop_strings import DecodeText, StopStrings

IN_FLIGHT = ('continue', 'restart', 'finish')  # what new weights mean for sequences that have begun

OnFinish = Callable[[types.Rollout], None]


class Event(NamedTuple):
  """What one step did for one sample: n more drawn tokens, from the `start`-th on, and the rollout if it ended.

  A sample that was restarted under new weights begins again at 0.
  """

  ticket: int
  sample: int
  start: int
  token_ids: np.ndarray  # [n] int32
  behavior_logp: np.ndarray  # [n]
  model_logp: np.ndarray  # [n]
  top_ids: np.ndarray  # [n, top_logp of the request]
  top_logp: np.ndarray
  rollout: types.Rollout | None


class Engine:
  """A paged sampler for one model shape.

  Args:
    model_config: the shape.
    limits: sizes that fix memory and what is compiled.
    mesh: what weights and pages are laid over, kv heads by `tensor` (copied where those are fewer) and pages by
      `context`; None keeps everything on the first device.
    decode_text: text of token ids without special tokens; only requests with stop strings need it.
    draft_config: shape of a smaller model with the same vocabulary that guesses `draft_tokens` tokens ahead; None looks
      guesses up in the sequence itself. With it, sampled tokens keep their law but depend on where steps begin.
  """

  def __init__(self, model_config: ModelConfig, limits: SamplerLimits, *, mesh: Mesh | None = None,
               decode_text: DecodeText | None = None, draft_config: ModelConfig | None = None):
    if limits.max_context > model_config.max_position:
      raise ValueError(f'sampler max_context = {limits.max_context} exceeds the model\'s max_position = '
                       f'{model_config.max_position}')
    if draft_config is not None:
      _check_draft(model_config, draft_config, limits)
    shards = mesh.shape['context'] if mesh else 1
    limits = dataclasses.replace(limits, pages=-(-limits.pages // shards) * shards)
    self.config, self.limits = model_config, limits
    self._decode_text = decode_text
    self._runner = Runner(model_config, limits, mesh, draft_config)
    self._has_draft = draft_config is not None
    self._scheduler = Scheduler(limits, shards)
    self._drafting = _Drafting(limits.draft_tokens)
    self._latest = np.zeros(0, np.int32)  # tokens of the sample that ended last
    self._shift: dict[str, float] = {}  # of log-probs, by weights stored in few bits
    self._paused = False
    self._tickets = 0
    self._events: list[Event] = []

  # Weights

  def load_params(self, state: nnx.State, version: int, *, in_flight: str = 'continue') -> None:
    """Samples from these weights from now on; nothing recompiles and `state` may be donated or changed afterwards.

    All cached prefixes are dropped. Sequences that have begun
      'continue': keep their tokens (with their versions and log-probs) and go on under the new weights;
      'restart': lose their tokens and begin again under the new weights;
      'finish': are sampled to their end under the old weights, before this returns; the next step reports them.

    Args:
      state: a Transformer's parameters with stacked layers and no adapters beside them.
      version: policy version, recorded with every token.

    Raises:
      ValueError: a path, shape or dtype differs from the model's, the version is negative, or `in_flight` is unknown.
    """
    if version < 0:
      raise ValueError(f'version = {version} must be >= 0')
    if in_flight not in IN_FLIGHT:
      raise ValueError(f'in_flight = {in_flight!r} is not one of {IN_FLIGHT}')
    if in_flight == 'finish' and self._runner.ready:
      self._events = self.drain()
    self._runner.load(state)
    if self.limits.weight_dtype:
      self._measure_shift(state)
    self._scheduler.new_version(version, restart=in_flight == 'restart')

  def _measure_shift(self, state: nnx.State) -> None:
    """What the stored weights do to the latest rollout's log-probs, or at first to those of random tokens."""
    tokens = self._latest
    if len(tokens) < 2:
      tokens = np.random.default_rng(0).integers(0, self.config.vocab_size, max(2, self.limits.prefill_chunk))
    shift = np.abs(self._runner.logp_shift(state, tokens))
    self._shift = dict(logp_shift_mean=float(shift.mean()), logp_shift_max=float(shift.max()))
    logging.info('sampler: %s weights move log-probs by %.4f nats in the mean, %.4f at most, over %d tokens',
                 self.limits.weight_dtype, *self._shift.values(), len(shift))

  def load_draft(self, state: nnx.State) -> None:
    """Guesses with these weights from now on; `state` may be donated or changed afterwards. Drops cached prefixes.

    Raises:
      ValueError: the engine has no draft model, or a path, shape or dtype differs from its.
      RuntimeError: requests are in flight.
    """
    if not self._has_draft:
      raise ValueError('this engine was made without draft_config')
    if not self.idle:
      raise RuntimeError('load_draft needs an idle engine: finish or cancel what was submitted')
    self._runner.load_draft(state)
    self._scheduler.cache.clear()

  def warm_up(self) -> None:
    """Compiles every program that any request may need; afterwards nothing compiles.

    Raises:
      RuntimeError: no weights are loaded.
    """
    self._check_ready()
    self._runner.warm_up()

  # Requests

  @property
  def idle(self) -> bool:
    """Nothing is queued or live, and every event has been handed out."""
    return self._scheduler.idle and not self._events

  def submit(self, request: Request) -> int:
    """Queues a request and returns its ticket.

    Raises:
      ValueError: it could never be served, by name.
    """
    self._check(request)
    limit = min(request.max_tokens, self.limits.max_context - len(request.prompt_ids))
    scores = PromptScores(len(request.prompt_ids), request.top_logp) if request.prompt_logp else None
    for sample in range(request.samples):
      stops = None
      if request.stop_strings:
        stops = StopStrings(request.stop_strings, self._decode_text, min_tokens=request.min_tokens)
      self._scheduler.add(Sequence(self._tickets, sample, request, limit, scores=scores, stops=stops))
    self._tickets += 1
    return self._tickets - 1

  def _check(self, request: Request) -> None:
    limits, prompt, V = self.limits, request.prompt_ids, self.config.vocab_size
    who = f'request {request.id!r}: '
    if len(prompt) + min(1, request.max_tokens) > limits.max_context:
      raise ValueError(f'{who}prompt of {len(prompt)} tokens leaves no room to answer in a context of '
                       f'{limits.max_context}; fix: a shorter prompt or a larger sampler max_context')
    if prompt.min() < 0 or prompt.max() >= V or not all(0 <= i < V for i in request.stop_ids):
      raise ValueError(f'{who}token ids must be in [0, {V})')
    if len(request.stop_ids) > limits.stop_ids:
      raise ValueError(f'{who}{len(request.stop_ids)} stop ids, at most {limits.stop_ids}')
    if request.stop_strings and self._decode_text is None:
      raise ValueError(f'{who}stop strings need an engine that was given decode_text')
    if request.top_logp > limits.top_logp:
      raise ValueError(f'{who}top_logp = {request.top_logp}, at most sampler top_logp = {limits.top_logp}')
    if request.logit_bias is None:
      allowed = np.ones(V, bool)
    elif request.logit_bias.shape != (V,) or np.isnan(request.logit_bias).any() or request.logit_bias.max() == np.inf:
      raise ValueError(f'{who}logit_bias must be {V} numbers, none of them nan or +inf')
    elif not limits.biases:
      raise ValueError(f'{who}logit_bias needs sampler biases >= 1')
    else:
      allowed = np.isfinite(request.logit_bias)
    if request.min_tokens:
      allowed[list(request.stop_ids)] = False
    if not allowed.any():
      raise ValueError(f'{who}logit_bias and min_tokens leave no token that may be drawn')

  def cancel(self, ticket: int) -> list[tuple[int, types.Rollout]]:
    """Ends a request now; returns (sample, rollout so far) of each sample that had not finished."""
    scheduler = self._scheduler
    ended = []
    for sequence in [*scheduler.waiting, *scheduler.filling, *scheduler.running]:
      if sequence.ticket == ticket:
        if sequence in scheduler.waiting:
          scheduler.waiting.remove(sequence)
        else:
          scheduler.release(sequence)
        ended.append((sequence.sample, _rollout(sequence, 'cancelled')))
    return ended

  def pause(self) -> None:
    """Makes `step` do nothing until `resume`; requests, pages and cache stay."""
    self._paused = True

  def resume(self) -> None:
    self._paused = False

  def drain(self) -> list[Event]:
    """Runs what has begun to its end and admits nothing; what is queued stays queued. Returns the events.

    Raises:
      RuntimeError: the engine is paused.
    """
    if self._paused:
      raise RuntimeError('a paused engine does not drain: resume it first')
    scheduler, events = self._scheduler, []
    for sequence in scheduler.waiting:
      sequence.held = not sequence.drawn  # one that was preempted has begun
    try:
      while scheduler.live or any(not s.held for s in scheduler.waiting):
        events += self.step()
    finally:
      for sequence in scheduler.waiting:
        sequence.held = False
    return events + self._taken()

  def step(self) -> list[Event]:
    """Computes waiting prompts within the prefill budget, then one window; returns what happened to each sample.

    Blocks until the device is done.

    Raises:
      RuntimeError: no weights are loaded.
    """
    self._check_ready()
    if self._paused:
      return []
    started = time.perf_counter()
    scheduler, spent = self._scheduler, 0
    while pieces := scheduler.next_chunk():
      self._prefill(pieces)
      spent += sum(piece.stop - piece.start for piece in pieces)
      if 0 < self.limits.prefill_budget <= spent and scheduler.running:
        break
    for sequence in [s for s in scheduler.running if not s.limit]:
      self._finish(sequence, 'length')
    if scheduler.running:
      self._decode_window()
    scheduler.counts['seconds'] += time.perf_counter() - started
    return self._taken()

  def generate(self, requests: list[Request], on_finish: OnFinish | None = None) -> list[list[types.Rollout]]:
    """All samples of all requests, in the order asked; `on_finish` sees each rollout as it ends.

    Raises:
      ValueError: a request can't be served; nothing has run then.
      RuntimeError: submitted requests are still in flight, or the engine is paused.
    """
    if not self.idle or self._paused:
      raise RuntimeError('generate needs an idle engine: finish or cancel what was submitted, resume what is paused')
    tickets: dict[int, int] = {}
    results: list[list] = [[None] * request.samples for request in requests]
    try:
      for index, request in enumerate(requests):
        tickets[self.submit(request)] = index
      while not self.idle:
        for event in self.step():
          if event.rollout is not None:
            results[tickets[event.ticket]][event.sample] = event.rollout
            if on_finish:
              on_finish(event.rollout)
    finally:
      for ticket in tickets if not self._scheduler.idle else ():
        self.cancel(ticket)
    return results

  def stats(self) -> dict[str, float]:
    """Counts and rates since the engine was made or `reset_stats`, and what is in use now.

    occupancy: live rows / rows of the windows that ran; cache_hit_frac: prompt tokens found in the cache / all;
    chunk_padding_frac: padding in prefill chunks; accept_frac: drafted tokens that were drawn; pages_peak_frac: most
    pages that live sequences held; with `weight_dtype`, logp_shift_mean and logp_shift_max: what that did to
    log-probs, nats, measured at the latest `load_params`.
    """
    counts, scheduler = self._scheduler.counts, self._scheduler
    names = ('tokens_drawn', 'tokens_prefilled', 'tokens_cached', 'tokens_drafted', 'tokens_accepted', 'preemptions',
             'evictions', 'windows', 'chunks', 'seconds')
    ratio = lambda part, whole: float(counts[part] / counts[whole]) if counts[whole] else 0.0
    asked = counts['tokens_cached'] + counts['tokens_prefilled']
    return {name: float(counts[name]) for name in names} | dict(
        tokens_per_s=ratio('tokens_drawn', 'seconds'), occupancy=ratio('row_steps', 'slot_steps'),
        accept_frac=ratio('tokens_accepted', 'tokens_drafted'),
        cache_hit_frac=counts['tokens_cached'] / asked if asked else 0.0,
        chunk_padding_frac=1 - ratio('tokens_prefilled', 'chunk_tokens') if counts['chunk_tokens'] else 0.0,
        pages_peak_frac=scheduler.peak_pages / (scheduler.pool.pages - 1), pages_free=float(scheduler.pool.free),
        pages_cached=float(len(scheduler.cache)), running=float(scheduler.live), waiting=float(len(scheduler.waiting)),
        compiles=float(self._runner.compiles), **self._shift)

  def reset_stats(self) -> None:
    self._scheduler.counts.clear()
    self._scheduler.peak_pages = 0

  # Device calls

  def _check_ready(self) -> None:
    if not self._runner.ready:
      raise RuntimeError('no weights: call load_params (and load_draft, with a draft model) before sampling')

  def _taken(self) -> list[Event]:
    events, self._events = self._events, []
    return events

  def _prefill(self, pieces: list[Piece]) -> None:
    counts = self._scheduler.counts
    if any(len(piece.sequence.scored) < len(piece.sequence.prefix) for piece in pieces):
      tokens, scores = self._runner.score(pieces)
      self._keep_scores(pieces, scores)
    else:
      tokens = self._runner.fill(pieces)
    counts['chunks'] += 1
    counts['chunk_tokens'] += tokens
    self._scheduler.computed(pieces)

  def _keep_scores(self, pieces: list[Piece], scores) -> None:
    at = 0
    for piece in pieces:
      span = slice(at, at + piece.stop - piece.start)
      at = span.stop
      sequence = piece.sequence
      if len(sequence.scored) < len(sequence.prefix):
        A = sequence.request.top_logp
        n = len(sequence.request.prompt_ids) - 1 - piece.start  # what was drawn before a preemption is no prompt
        logp_T, top_id_TA, top_logp_TA = (x[span][:n] for x in scores)
        sequence.scores.add(piece.start, logp_T, top_id_TA[:, :A], top_logp_TA[:, :A])

  def _decode_window(self) -> None:
    scheduler, counts = self._scheduler, self._scheduler.counts
    if copies := scheduler.grant(self.limits.window):
      self._runner.copy(copies)
    self._runner.set_biases(scheduler.biases.unwritten)
    scheduler.biases.unwritten.clear()
    sequences = list(scheduler.running)
    drafts = self._drafting.choose()
    if drafts and self._has_draft:
      self._catch_up(sequences)
    started = time.perf_counter()
    compiles = self._runner.compiles
    window = self._runner.window(sequences, self._least_live(len(sequences), drafts), drafts)
    drawn, bucket = int(window.drawn_B.sum()), len(window.drawn_B)
    if compiles == self._runner.compiles:
      self._drafting.learn(bucket, drafts, drawn, time.perf_counter() - started)
    counts.update(windows=1, row_steps=int(window.steps_B.sum()), slot_steps=int(window.steps) * bucket,
                  tokens_drafted=int(window.drafted_B.sum()), tokens_accepted=int(window.accepted_B.sum()),
                  tokens_drawn=drawn)
    for b, sequence in enumerate(sequences):
      self._record(sequence, window, b, drafts)

  def _catch_up(self, sequences: list[Sequence]) -> None:
    """Lets the draft model read what was drawn while it did not guess."""
    for sequence in sequences:
      for start in range(sequence.draft_computed, sequence.length - 1, self.limits.prefill_chunk):
        stop = min(sequence.length - 1, start + self.limits.prefill_chunk)
        self._runner.fill_draft([Piece(sequence, start, stop)])
      sequence.draft_computed = sequence.length - 1

  def _least_live(self, rows: int, drafts: int) -> int:
    """A window ends when fewer rows live: enough to refill if others wait, or few enough for a smaller bucket."""
    if any(not sequence.held for sequence in self._scheduler.waiting):
      return rows - max(1, rows // 8) + 1
    smaller = max((bucket for bucket in self.limits.slot_buckets if bucket < rows), default=0)
    return 1 + max(smaller, rows // 2 if drafts else 0)  # rows whose guesses are right wait for the others

  def _record(self, sequence: Sequence, window, b: int, drafts: int) -> None:
    """Appends what a window drew; a sequence that ended leaves with its rollout."""
    n, at, A = int(window.drawn_B[b]), sequence.drawn, sequence.request.top_logp
    ids_n = window.token_BX[b, :n]
    stop = sequence.stops.see(ids_n) if sequence.stops else None
    if stop is not None:
      n = stop.tokens - at
      ids_n = ids_n[:n]
    new = slice(at, at + n)
    sequence.tokens[sequence.length:sequence.length + n] = ids_n
    sequence.behavior_logp[new] = window.behavior_logp_BX[b, :n]
    sequence.model_logp[new] = window.model_logp_BX[b, :n]
    sequence.top_ids[new], sequence.top_logp[new] = window.top_id_BXA[b, :n, :A], window.top_logp_BXA[b, :n, :A]
    sequence.version[new] = self._scheduler.version
    sequence.drawn += n
    if sequence.draft_computed == sequence.computed and drafts:
      sequence.draft_computed = sequence.length - 1
    sequence.computed = sequence.length - 1
    sequence.steps += int(window.steps_B[b])
    sequence.drafted += int(window.drafted_B[b])
    sequence.accepted += int(window.accepted_B[b])
    stopped = stop is not None or (n > 0 and int(ids_n[-1]) in sequence.request.stop_ids)
    if stopped or sequence.drawn == sequence.limit:
      self._finish(sequence, 'stop' if stopped else 'length', stop)
    elif n:
      self._tell(sequence, None)

  def _finish(self, sequence: Sequence, reason: str, stop=None) -> None:
    self._scheduler.release(sequence)
    self._latest = sequence.tokens[:sequence.length]
    self._tell(sequence, _rollout(sequence, reason, stop))

  def _tell(self, sequence: Sequence, rollout: types.Rollout | None) -> None:
    new = slice(sequence.reported, sequence.drawn)
    sequence.reported = sequence.drawn
    prompt = len(sequence.request.prompt_ids)
    self._events.append(Event(
        sequence.ticket, sequence.sample, new.start, sequence.tokens[prompt:][new].copy(),
        sequence.behavior_logp[new].copy(), sequence.model_logp[new].copy(), sequence.top_ids[new].copy(),
        sequence.top_logp[new].copy(), rollout))


class _Drafting:
  """Whether the next window guesses: whichever way has drawn more tokens per second, tried again now and then.

  Either way draws the same tokens, so the clock decides about time alone.
  """

  _RETRY = 32  # windows

  def __init__(self, drafts: int):
    self._drafts, self._windows = drafts, 0
    self._rate: dict[tuple[int, int], float] = {}  # (bucket, drafts) -> tokens per second, a moving mean
    self._bucket = 0

  def choose(self) -> int:
    if not self._drafts:
      return 0
    self._windows += 1
    plain, drafted = (self._rate.get((self._bucket, n)) for n in (0, self._drafts))
    if drafted is None or plain is None:
      return self._drafts if drafted is None else 0
    best, other = (self._drafts, 0) if drafted >= plain else (0, self._drafts)
    return other if self._windows % self._RETRY == 0 else best

  def learn(self, bucket: int, drafts: int, tokens: int, seconds: float) -> None:
    if bucket != self._bucket:
      self._bucket = bucket
    rate = tokens / max(seconds, 1e-9)
    known = self._rate.get((bucket, drafts), rate)
    self._rate[bucket, drafts] = 0.7 * known + 0.3 * rate


def _check_draft(config: ModelConfig, draft: ModelConfig, limits: SamplerLimits) -> None:
  rules = (
      (draft.vocab_size == config.vocab_size, f'its vocabulary has {draft.vocab_size} tokens, the model\'s '
       f'{config.vocab_size}'),
      (draft.max_position >= limits.max_context, f'its max_position = {draft.max_position} is below sampler '
       f'max_context = {limits.max_context}'),
      (limits.draft_tokens > 0, 'sampler draft_tokens = 0: it would never guess'),
  )
  if problems := [problem for fine, problem in rules if not fine]:
    raise ValueError('draft model: ' + '; '.join(problems))


def _rollout(sequence: Sequence, finish_reason: str, stop=None) -> types.Rollout:
  request, n = sequence.request, sequence.drawn
  prompt, scores = len(request.prompt_ids), sequence.scores
  alternatives = {}
  if request.top_logp:
    alternatives = dict(top_ids=sequence.top_ids[:n].copy(), top_logp=sequence.top_logp[:n].copy())
    if scores:
      alternatives |= dict(prompt_top_ids=scores.top_id_PA, prompt_top_logp=scores.top_logp_PA)
  return types.Rollout(
      task_id=request.id, group_id=request.group_id, prompt_ids=request.prompt_ids,
      token_ids=sequence.tokens[prompt:sequence.length].copy(), mask=np.ones(n, bool),
      behavior_logp=sequence.behavior_logp[:n].copy(), model_logp=sequence.model_logp[:n].copy(),
      version=sequence.version[:n].copy(), finish_reason=finish_reason, temperature=request.temperature,
      prompt_logp=scores.logp_P if scores else None, stop_string=stop.string if stop else '',
      stop_start=stop.start if stop else -1, steps=sequence.steps, drafted=sequence.drafted,
      accepted=sequence.accepted, **alternatives)
