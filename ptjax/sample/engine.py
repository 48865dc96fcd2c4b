"""The sampler: requests in, rollouts out, over a paged key/value pool with shared prefixes.

The host decides between device calls (scheduler), the device runs many tokens per call (decode). Tokens depend on a
request's seed, sample and prompt and on the weights, never on the slot, the pages, the order of arrival, the window
or the neighbours. Programs are compiled once per declared bucket; new weights of the same shapes compile nothing. The
engine has no tokenizer: token ids in, token ids out, `Rollout.text` is the caller's.
"""

from collections.abc import Callable
import functools
from typing import Any

from absl import logging
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from ptjax import types
from ptjax.models.families import ModelConfig
from ptjax.sample import decode, sampling
from ptjax.sample.page_pool import SINK
from ptjax.sample.scheduler import Piece, Request, SamplerLimits, Scheduler, Sequence

Place = Callable[[tuple[int, ...], str], jax.sharding.Sharding]  # (shape, axis letters; '' is replicated)
OnFinish = Callable[[types.Rollout], None]


class Engine:
  """A paged sampler for one model shape.

  Args:
    model_config: the shape.
    limits: sizes that fix memory and what is compiled.
    place: where an array of a shape and axis letters goes; None keeps everything on the first device. With a mesh:
      `lambda shape, axes: devices.sharding(mesh, axes, fit=shape)`.
  """

  def __init__(self, model_config: ModelConfig, limits: SamplerLimits, *, place: Place | None = None):
    if limits.max_context > model_config.max_position:
      raise ValueError(f'sampler max_context = {limits.max_context} exceeds the model\'s max_position = '
                       f'{model_config.max_position}')
    here = jax.local_devices()[0]
    self.config, self.limits = model_config, limits
    self._place = place or (lambda shape, axes: jax.sharding.SingleDeviceSharding(here))
    self._decoder = decode.Decoder(model_config, out_first=here.platform == 'cpu')
    self._scheduler = Scheduler(limits)
    self._programs: dict[tuple, Any] = {}
    self._params: decode.Params | None = None
    self._pools: decode.Pools = ()
    self._tickets = 0
    self._finished: list[tuple[int, int, types.Rollout]] = []

  # Weights

  def load_params(self, state: nnx.State, version: int) -> None:
    """Samples from these weights from now on; nothing recompiles and `state` may be donated or changed afterwards.

    Sequences in flight keep the tokens they have (with their versions and log-probs) and go on under the new weights;
    all cached prefixes are dropped.

    Args:
      state: a Transformer's parameters with stacked layers and no adapters beside them.
      version: policy version, recorded with every token.

    Raises:
      ValueError: a path, shape or dtype differs from the model's, or the version is negative.
    """
    if version < 0:
      raise ValueError(f'version = {version} must be >= 0')
    state = self._checked(state)
    first = self._params is None
    self._params = None  # the old copy may go before the next one is made
    shapes = jax.eval_shape(self._decoder.layout, state)
    layout = self._program('layout', self._decoder.layout, (), out=self._param_shardings(shapes))
    self._params = layout(jax.device_put(state, self._spread(state)))
    if first:
      c = self.config
      shape = (self.limits.pages, c.kv_heads, self.limits.page_size, 2 * c.head_dim)
      self._pool_sharding = self._place(shape, 'ZKCH')
      self._pools = tuple(
          jnp.zeros(shape, c.compute_dtype, device=self._pool_sharding) for _ in range(c.layers))
    self._scheduler.new_version(version)

  # Requests

  def submit(self, request: Request) -> int:
    """Queues a request and returns its ticket.

    Raises:
      ValueError: it could never be served, by name.
    """
    limits, prompt = self.limits, request.prompt_ids
    if len(prompt) + 1 > limits.max_context:
      raise ValueError(f'request {request.id!r}: prompt of {len(prompt)} tokens leaves no room to answer in a context '
                       f'of {limits.max_context}; fix: a shorter prompt or a larger sampler max_context')
    if prompt.min() < 0 or prompt.max() >= self.config.vocab_size:
      raise ValueError(f'request {request.id!r}: token ids must be in [0, {self.config.vocab_size})')
    if len(request.stop_ids) > limits.stop_ids:
      raise ValueError(f'request {request.id!r}: {len(request.stop_ids)} stop ids, at most {limits.stop_ids}')
    limit = min(request.max_tokens, limits.max_context - len(prompt))
    for sample in range(request.samples):
      tokens = np.concatenate([prompt, np.zeros(limit, np.int32)])
      self._scheduler.add(Sequence(ticket=self._tickets, sample=sample, request=request, limit=limit, tokens=tokens))
    self._tickets += 1
    return self._tickets - 1

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

  def step(self) -> list[tuple[int, int, types.Rollout]]:
    """Computes waiting prompts while there are slots, then one window; returns (ticket, sample, rollout) finished.

    Blocks until the device is done.
    """
    if self._params is None:
      raise RuntimeError('no weights: call load_params before sampling')
    while pieces := self._scheduler.next_chunk():
      self._prefill(pieces)
    if self._scheduler.running:
      self._decode_window()
    finished, self._finished = self._finished, []
    return finished

  def generate(self, requests: list[Request], on_finish: OnFinish | None = None) -> list[list[types.Rollout]]:
    """All samples of all requests, in the order asked; `on_finish` sees each rollout as it ends.

    Raises:
      ValueError: a request can't be served; nothing has run then.
      RuntimeError: submitted requests are still in flight.
    """
    if not self._scheduler.idle:
      raise RuntimeError('generate needs an idle engine: finish or cancel what was submitted first')
    tickets: dict[int, int] = {}
    results: list[list] = [[None] * request.samples for request in requests]
    try:
      for index, request in enumerate(requests):
        tickets[self.submit(request)] = index
      while not self._scheduler.idle:
        for ticket, sample, rollout in self.step():
          results[tickets[ticket]][sample] = rollout
          if on_finish:
            on_finish(rollout)
    finally:
      for ticket in tickets if not self._scheduler.idle else ():
        self.cancel(ticket)
    return results

  def stats(self) -> dict[str, float]:
    """Counts since the engine was made: tokens, occupancy (drawn / rows x steps run), cache, preemptions, compiles."""
    counts, pool = self._scheduler.counts, self._scheduler.pool
    names = ('tokens_drawn', 'tokens_prefilled', 'tokens_cached', 'preemptions', 'evictions', 'windows', 'chunks')
    return {name: float(counts[name]) for name in names} | dict(
        occupancy=counts['tokens_drawn'] / max(1, counts['row_steps']),
        chunk_padding_frac=1 - counts['tokens_prefilled'] / max(1, counts['chunk_tokens']),
        pages_free=float(pool.free), pages_cached=float(len(self._scheduler.cache)),
        compiles=float(len(self._programs)))

  # Device calls

  def _prefill(self, pieces: list[Piece]) -> None:
    chunk = self._pack(pieces)
    run = self._program(('chunk', len(chunk.token_T)), self._decoder.chunk, (1,), out=self._pool_out())
    self._pools = run(self._params, self._pools, chunk)
    self._scheduler.counts['chunks'] += 1
    self._scheduler.counts['chunk_tokens'] += len(chunk.token_T)
    self._scheduler.computed(pieces)

  def _pack(self, pieces: list[Piece]) -> decode.Chunk:
    limits, C = self.limits, self.limits.page_size
    total = sum(piece.stop - piece.start for piece in pieces)
    T = next(bucket for bucket in limits.chunk_buckets if bucket >= total)
    token_T, position_T, offset_T = (np.zeros(T, np.int32) for _ in range(3))
    row_T, page_T = np.full(T, -1, np.int32), np.full(T, SINK, np.int32)
    listed: dict[int, int] = {}  # page -> its place in the list
    J = limits.chunk_pages
    page_J, live_RJ = np.zeros(J, np.int32), np.zeros((T, J), np.int32)
    at = 0
    for row, piece in enumerate(pieces):
      sequence, n = piece.sequence, piece.stop - piece.start
      position = np.arange(piece.start, piece.stop, dtype=np.int32)
      span = slice(at, at + n)
      token_T[span], position_T[span], row_T[span] = sequence.tokens[piece.start:piece.stop], position, row
      page_T[span], offset_T[span] = np.asarray(sequence.pages, np.int32)[position // C], position % C
      for j in range(-(-piece.start // C)):
        place = listed.setdefault(sequence.pages[j], len(listed))
        live_RJ[row, place] = min(C, piece.start - j * C)
      at += n
    page_J[:len(listed)] = list(listed)
    return decode.Chunk(token_T, position_T, row_T, page_T, offset_T, page_J, np.int32(len(listed)), live_RJ)

  def _decode_window(self) -> None:
    scheduler, counts = self._scheduler, self._scheduler.counts
    self._copy(scheduler.grant(self.limits.window))
    sequences = list(scheduler.running)
    B = next(bucket for bucket in self.limits.slot_buckets if bucket >= len(sequences))
    window = functools.partial(self._decoder.window, width=self.limits.window)
    everywhere = self._place((), '')
    run = self._program(('window', B), window, (1,), out=(self._pool_out(), everywhere, everywhere, everywhere))
    least_live = self._least_live(len(sequences))
    self._pools, token_WB, logp_WB, drawn_B = run(
        self._params, self._pools, self._rows(sequences, B), np.int32(self.limits.window), np.int32(least_live))
    token_WB, logp_WB, drawn_B = jax.device_get((token_WB, logp_WB, drawn_B))
    counts['windows'] += 1
    counts['row_steps'] += int(drawn_B.max()) * B
    for b, sequence in enumerate(sequences):
      self._record(sequence, token_WB[:drawn_B[b], b], logp_WB[:drawn_B[b], b])

  def _least_live(self, rows: int) -> int:
    """A window ends when fewer rows live: enough to refill if others wait, or few enough for a smaller bucket."""
    if self._scheduler.waiting:
      return rows - max(1, rows // 8) + 1
    return 1 + max((bucket for bucket in self.limits.slot_buckets if bucket < rows), default=0)

  def _copy(self, copies: list[tuple[int, int]]) -> None:
    if not copies:
      return
    X = self.limits.slots
    source_X, target_X = np.full((2, X), SINK, np.int32)
    source_X[:len(copies)], target_X[:len(copies)] = np.asarray(copies, np.int32).T
    run = self._program('copy', self._decoder.copy, (0,), out=self._pool_out())
    self._pools = run(self._pools, source_X, target_X)

  def _rows(self, sequences: list[Sequence], B: int) -> decode.Rows:
    limits = self.limits
    table_BJ = np.full((B, limits.pages_per_sequence), SINK, np.int32)
    stop_BX = np.full((B, limits.stop_ids), -1, np.int32)
    for b, sequence in enumerate(sequences):
      table_BJ[b, :len(sequence.pages)] = sequence.pages
      stop_BX[b, :len(sequence.request.stop_ids)] = sequence.request.stop_ids

    def column(value, dtype, fill=0):
      return np.asarray([value(s) for s in sequences] + [fill] * (B - len(sequences)), dtype)

    law = sampling.Law(
        temperature_B=column(lambda s: s.request.temperature, np.float32),
        top_k_B=column(lambda s: min(s.request.top_k, self.config.vocab_size), np.int32),
        top_p_B=column(lambda s: s.request.top_p, np.float32, 1.0),
        min_p_B=column(lambda s: s.request.min_p, np.float32),
        seed_B2=column(lambda s: divmod(s.request.seed, 2 ** 32), np.uint32, (0, 0)),
        sample_B=column(lambda s: s.sample, np.int32))
    return decode.Rows(
        token_B=column(lambda s: s.tokens[s.length - 1], np.int32), position_B=column(lambda s: s.length - 1, np.int32),
        remaining_B=column(lambda s: s.limit - s.drawn, np.int32), law=law, stop_BX=stop_BX, table_BJ=table_BJ)

  def _record(self, sequence: Sequence, token_W: np.ndarray, logp_W: np.ndarray) -> None:
    """Appends what a window drew; a sequence that ended leaves with its rollout."""
    sequence.tokens[sequence.length:sequence.length + len(token_W)] = token_W
    sequence.drawn += len(token_W)
    sequence.computed = sequence.length - 1
    sequence.logp += logp_W.tolist()
    sequence.version += [self._scheduler.version] * len(token_W)
    self._scheduler.counts['tokens_drawn'] += len(token_W)
    stopped = int(sequence.tokens[sequence.length - 1]) in sequence.request.stop_ids
    if stopped or sequence.drawn == sequence.limit:
      self._scheduler.release(sequence)
      rollout = _rollout(sequence, 'stop' if stopped else 'length')
      self._finished.append((sequence.ticket, sequence.sample, rollout))

  # Programs and placement

  def _program(self, key, function, donate: tuple[int, ...], *, out):
    """The compiled program of a bucket; its shapes are fixed by the first call, any other shape is an error."""
    if key not in self._programs:
      self._programs[key] = _Compiled(key, jax.jit(function, donate_argnums=donate, out_shardings=out))
    return self._programs[key]

  def _pool_out(self):
    return (self._pool_sharding,) * self.config.layers

  def _spread(self, state: nnx.State):
    """The state with each array's sharding in its place."""
    return nnx.from_flat_state([
        (path, x.replace(self._place(x.shape, x.get_metadata()['axes']))) for path, x in nnx.to_flat_state(state)])

  def _param_shardings(self, shapes: decode.Params) -> decode.Params:
    head = None if shapes.head_VD is None else self._place(shapes.head_VD.shape, 'VD')
    return decode.Params(self._place(shapes.embed_VD.shape, 'VD'), tuple(map(self._spread, shapes.layers)),
                         self._spread(shapes.final_norm), head)

  def _checked(self, state: nnx.State) -> nnx.State:
    """The state's arrays under the model's own metadata, once their paths, shapes and dtypes are known to fit."""
    shapes, given = dict(nnx.to_flat_state(self._decoder.state_shapes)), dict(nnx.to_flat_state(state))

    def kind(variables, path):
      return (tuple(variables[path].shape), variables[path].dtype.name) if path in variables else 'nothing'

    problems = [f'{"/".join(map(str, path))}: wanted {kind(shapes, path)}, got {kind(given, path)}'
                for path in sorted(shapes | given, key=str) if kind(shapes, path) != kind(given, path)]
    if problems:
      raise ValueError('parameters do not fit the sampler\'s model (merge adapters first):\n  ' + '\n  '.join(problems))
    return nnx.from_flat_state([(path, v.replace(given[path][...])) for path, v in shapes.items()])


class _Compiled:
  """One program, compiled ahead at its first call."""

  def __init__(self, key, jitted):
    self._key, self._jitted, self._run = key, jitted, None

  def __call__(self, *args):
    if self._run is None:
      logging.info('sampler: compiling %s', self._key)
      self._run = self._jitted.lower(*args).compile()
    return self._run(*args)


def _rollout(sequence: Sequence, finish_reason: str) -> types.Rollout:
  prompt = len(sequence.request.prompt_ids)
  return types.Rollout(
      task_id=sequence.request.id, group_id=sequence.request.group_id, prompt_ids=sequence.request.prompt_ids,
      token_ids=sequence.tokens[prompt:sequence.length].copy(), mask=np.ones(sequence.drawn, bool),
      behavior_logp=np.asarray(sequence.logp, np.float32), version=np.asarray(sequence.version, np.int32),
      finish_reason=finish_reason, temperature=sequence.request.temperature)
