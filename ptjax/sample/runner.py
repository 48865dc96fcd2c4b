"""The device side of the sampler: weights, pools and compiled programs, called with sequences, answering with arrays.

Programs are compiled once per declared bucket; new weights of the same shapes compile nothing. What runs next is the
scheduler's business, what a result means the engine's.
"""

from collections.abc import Callable
import functools
from typing import Any

from absl import logging
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from ptjax.models.families import ModelConfig
from ptjax.runtime import devices
from ptjax.sample import decode, paged_attention, sampling
from ptjax.sample.page_pool import SINK
from ptjax.sample.requests import SamplerLimits
from ptjax.sample.scheduler import Piece, Sequence


class Runner:
  """Runs prefill chunks and decode windows of one model shape; see Engine for the arguments."""

  def __init__(self, model_config: ModelConfig, limits: SamplerLimits, mesh: jax.sharding.Mesh | None,
               draft_config: ModelConfig | None):
    here = mesh.devices.flat[0] if mesh else jax.local_devices()[0]
    self.config, self.limits, self._mesh, self._here = model_config, limits, mesh, here
    out_first = here.platform == 'cpu'
    draft = decode.Decoder(draft_config, out_first=out_first, mesh=mesh) if draft_config else None
    self._decoder = decode.Decoder(model_config, out_first=out_first, weight_dtype=limits.weight_dtype, mesh=mesh,
                                   draft=draft)
    self._programs: dict[tuple, Any] = {}
    self._models = decode.Models(None, None)
    self._pools: decode.Pools | None = None

  @property
  def ready(self) -> bool:
    return self._models.target is not None and (self._decoder.draft is None or self._models.draft is not None)

  @property
  def compiles(self) -> int:
    return sum(program.compiled for program in self._programs.values())

  def load(self, state: nnx.State) -> None:
    """Takes a copy of the parameters; the pools are made at the first call and stay.

    Raises:
      ValueError: a path, shape or dtype differs from the model's.
    """
    checked = _checked(state, self._decoder)
    self._models = self._models._replace(target=None)  # the old copy may go before the next one is made
    self._models = self._models._replace(target=self._laid_out('layout', self._decoder, checked))
    self._make_pools()

  def logp_shift(self, state: nnx.State, token_ids: np.ndarray) -> np.ndarray:
    """What storing the loaded weights in few bits does to the log-probs of tokens: [n - 1] differences, nats."""
    T = max(2, self.limits.prefill_chunk)
    tokens = token_ids[-T:]
    run = self._program('shift', self._decoder.logp_shift, (), out=self._everywhere)
    checked = _checked(state, self._decoder)
    shift_T = run(self._models.target, jax.device_put(checked, self._spread(checked)),
                  np.pad(tokens, (0, T - len(tokens))).astype(np.int32), np.int32(len(tokens)))
    return jax.device_get(shift_T)[:len(tokens) - 1]

  def load_draft(self, state: nnx.State) -> None:
    """Takes a copy of the draft model's parameters.

    Raises:
      ValueError: as `load`.
    """
    checked = _checked(state, self._decoder.draft)
    self._models = self._models._replace(draft=None)
    self._models = self._models._replace(draft=self._laid_out('draft layout', self._decoder.draft, checked))

  def _laid_out(self, key: str, decoder: decode.Decoder, state: nnx.State) -> decode.Params:
    shapes = jax.eval_shape(decoder.layout, state)
    layout = self._program(key, decoder.layout, (), out=self._param_shardings(shapes))
    return layout(jax.device_put(state, self._spread(state)))

  def _make_pools(self) -> None:
    if self._pools is not None:
      return
    draft = self._decoder.draft
    makes, placed = zip(self._layers(self._decoder), self._layers(draft) if draft else (tuple, ()))
    self._pool_shardings = decode.Pools(*placed)
    self._pools = jax.jit(lambda: decode.Pools(*(make() for make in makes)), out_shardings=self._pool_shardings)()
    shape = (1 + self.limits.biases, self.config.vocab_size)
    self._bias_YV = jnp.zeros(shape, jnp.float32, device=self._everywhere)

  def _layers(self, decoder: decode.Decoder) -> tuple[Callable[[], decode.Layers], decode.Layers]:
    """What makes a model's empty pools, and their shardings."""
    c = decoder.config
    dtype = self.limits.kv_dtype or c.compute_dtype
    shape = (self.limits.pages, c.kv_heads * decoder.kv_copies, self.limits.page_size, 2 * c.head_dim)
    scales = (*shape[:2], 2, shape[2]) if dtype in paged_attention.SCALED_DTYPES else None
    placed = paged_attention.Pool(self._place(shape, 'ZKCH'), self._place(scales, 'ZKXC') if scales else None)

    def make():
      return paged_attention.Pool(jnp.zeros(shape, dtype), jnp.zeros(scales, jnp.float32) if scales else None)

    return lambda: tuple(make() for _ in range(c.layers)), (placed,) * c.layers

  def warm_up(self) -> None:
    """Compiles every program by running it on nothing but padding."""
    limits = self.limits
    for T in limits.chunk_buckets:
      self.fill([], T)
      self.score([], T)
      if self._decoder.draft:
        self.fill_draft([], T)
    for B in limits.slot_buckets:
      for drafts in sorted({0, limits.draft_tokens}):
        self.window([], 0, drafts, rows=B)
    self.copy([])
    self.set_biases({0: np.zeros(self.config.vocab_size, np.float32)})

  def fill(self, pieces: list[Piece], tokens: int = 0) -> int:
    """Computes the pieces' keys and values; returns the tokens of the bucket that ran."""
    chunk = self._pack(pieces, tokens)
    run = self._program(('fill', len(chunk.token_T)), self._decoder.fill, (1,), out=self._pool_shardings)
    self._pools = run(self._models, self._pools, chunk)
    return len(chunk.token_T)

  def fill_draft(self, pieces: list[Piece], tokens: int = 0) -> None:
    """`fill` for the draft model alone."""
    chunk = self._pack(pieces, tokens)
    run = self._program(('fill_draft', len(chunk.token_T)), self._decoder.fill_draft, (1,), out=self._pool_shardings)
    self._pools = run(self._models, self._pools, chunk)

  def score(self, pieces: list[Piece], tokens: int = 0) -> tuple[int, decode.Scores]:
    """`fill` with the scores of the tokens that follow the pieces' tokens, in the pieces' order."""
    chunk = self._pack(pieces, tokens)
    next_T = np.zeros_like(chunk.token_T)
    at = 0
    for piece in pieces:
      n = piece.stop - piece.start
      next_T[at:at + n] = piece.sequence.tokens[piece.start + 1:piece.stop + 1]
      at += n
    score = functools.partial(self._decoder.score, alternatives=self.limits.top_logp)
    run = self._program(('score', len(next_T)), score, (1,), out=(self._pool_shardings, self._everywhere))
    self._pools, scores = run(self._models, self._pools, chunk, next_T)
    return len(next_T), jax.device_get(scores)

  def window(self, sequences: list[Sequence], least_live: int, drafts: int, rows: int = 0) -> decode.Window:
    """A decode window over the sequences, in their order; blocks until it has run."""
    limits = self.limits
    B = rows or next(bucket for bucket in limits.slot_buckets if bucket >= len(sequences))
    window = functools.partial(self._decoder.window, width=limits.window, drafts=drafts, ngram=limits.ngram,
                               alternatives=limits.top_logp)
    run = self._program(('window', B, drafts), window, (1,), out=(self._pool_shardings, self._everywhere))
    steps = limits.window if sequences else 0
    self._pools, drawn = run(self._models, self._pools, self._rows(sequences, B, drafts), self._bias_YV,
                             np.int32(steps), np.int32(least_live))
    return jax.device_get(drawn)

  def copy(self, copies: list[tuple[int, int]]) -> None:
    """Copies pages (source, target); all sources are read before a target is written."""
    X = self.limits.slots
    source_X, target_X = np.full((2, X), SINK, np.int32)
    if copies:
      source_X[:len(copies)], target_X[:len(copies)] = np.asarray(copies, np.int32).T
    run = self._program('copy', self._decoder.copy, (0,), out=self._pool_shardings)
    self._pools = run(self._pools, source_X, target_X)

  def set_biases(self, bias_by_row: dict[int, np.ndarray]) -> None:
    """Writes rows of the bias table."""
    run = self._program('bias', lambda table_YV, row, bias_V: table_YV.at[row].set(bias_V), (0,), out=self._everywhere)
    for row, bias_V in bias_by_row.items():
      self._bias_YV = run(self._bias_YV, np.int32(row), bias_V)

  # What goes in

  def _pack(self, pieces: list[Piece], tokens: int) -> decode.Chunk:
    limits, C = self.limits, self.limits.page_size
    total = sum(piece.stop - piece.start for piece in pieces)
    T = tokens or next(bucket for bucket in limits.chunk_buckets if bucket >= total)
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

  def _rows(self, sequences: list[Sequence], B: int, drafts: int) -> decode.Rows:
    limits = self.limits
    table_BJ = np.full((B, limits.pages_per_sequence), SINK, np.int32)
    stop_BX = np.full((B, limits.stop_ids), -1, np.int32)
    looks_up = drafts and not self._decoder.draft
    token_BS = np.full((B, limits.max_context), -1, np.int32) if looks_up else None
    for b, sequence in enumerate(sequences):
      table_BJ[b, :len(sequence.pages)] = sequence.pages
      stop_BX[b, :len(sequence.request.stop_ids)] = sequence.request.stop_ids
      if looks_up:
        token_BS[b, :sequence.length] = sequence.tokens[:sequence.length]

    def column(value, dtype, fill=0):
      return np.asarray([value(s) for s in sequences] + [fill] * (B - len(sequences)), dtype)

    law = sampling.Law(
        temperature_B=column(lambda s: s.request.temperature, np.float32),
        top_k_B=column(lambda s: min(s.request.top_k, self.config.vocab_size), np.int32),
        top_p_B=column(lambda s: s.request.top_p, np.float32, 1.0),
        min_p_B=column(lambda s: s.request.min_p, np.float32),
        seed_B2=column(lambda s: divmod(s.request.seed, 2 ** 32), np.uint32, (0, 0)),
        sample_B=column(lambda s: s.sample, np.int32), bias_B=column(lambda s: s.bias_row, np.int32), stop_BX=stop_BX,
        stop_from_B=column(lambda s: len(s.request.prompt_ids) + s.request.min_tokens, np.int32),
        top_B=column(lambda s: s.request.top_logp > 0, bool))
    return decode.Rows(
        token_B=column(lambda s: s.tokens[s.length - 1], np.int32), position_B=column(lambda s: s.length - 1, np.int32),
        remaining_B=column(lambda s: min(s.limit - s.drawn, limits.window), np.int32), law=law, table_BJ=table_BJ,
        token_BS=token_BS)

  # Programs and placement

  def _program(self, key, function, donate: tuple[int, ...], *, out):
    """The compiled program of a bucket; its shapes are fixed by the first call, any other shape is an error."""
    if key not in self._programs:
      self._programs[key] = _Compiled(key, jax.jit(function, donate_argnums=donate, out_shardings=out))
    return self._programs[key]

  def _place(self, shape: tuple[int, ...], axes: str) -> jax.sharding.Sharding:
    """Where an array goes by the letters of its axes; '' is replicated."""
    if self._mesh is None:
      return jax.sharding.SingleDeviceSharding(self._here)
    return devices.sharding(self._mesh, axes, fit=shape)

  @property
  def _everywhere(self):
    return self._place((), '')

  def _spread(self, state: nnx.State):
    """The state with each array's sharding in its place."""
    return nnx.from_flat_state([
        (path, x.replace(self._place(x.shape, x.get_metadata()['axes']))) for path, x in nnx.to_flat_state(state)])

  def _param_shardings(self, shapes: decode.Params) -> decode.Params:
    head = None if shapes.head_VD is None else self._place(shapes.head_VD.shape, 'VD')
    return decode.Params(self._place(shapes.embed_VD.shape, 'VD'), tuple(map(self._spread, shapes.layers)),
                         self._spread(shapes.final_norm), head)


def _checked(state: nnx.State, decoder: decode.Decoder) -> nnx.State:
  """The state's arrays under the model's own metadata, once their paths, shapes and dtypes are known to fit."""
  shapes, given = dict(nnx.to_flat_state(decoder.state_shapes)), dict(nnx.to_flat_state(state))

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

  @property
  def compiled(self) -> bool:
    return self._run is not None

  def __call__(self, *args):
    if self._run is None:
      logging.info('sampler: compiling %s', self._key)
      self._run = self._jitted.lower(*args).compile()
    return self._run(*args)
