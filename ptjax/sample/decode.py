"""The device programs of the sampler: prefill a chunk, decode a window, copy pages. Pure functions of arrays.

They run the trainer's own Block, handing it an `attend` that writes to and reads from a paged pool. Layers are
unrolled, one pool array each, so that donated pools are updated in place. Neither program knows what a request is: a
chunk is T packed tokens, a window is B rows, and whatever is padding or finished writes to the sink page.
"""

from typing import NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from ptjax.models import attention, transformer
from ptjax.models.families import ModelConfig
from ptjax.sample import paged_attention, sampling, speculative
from ptjax.sample.page_pool import SINK

Layers = tuple[paged_attention.Pool, ...]  # of one model, a pool per layer

_SCORED_AT_ONCE = 128  # prompt tokens whose logits exist at one time


class Params(NamedTuple):
  """Weights laid out for decoding: one state per layer; matrices output-first on CPU; the head always [V, D]."""

  embed_VD: jax.Array
  layers: tuple[nnx.State, ...]
  final_norm: nnx.State
  head_VD: jax.Array | None  # None when tied to the embedding


class Models(NamedTuple):
  """Weights of the model that is sampled and of the one that guesses for it."""

  target: Params
  draft: Params | None


class Pools(NamedTuple):
  """Keys and values; a page's number means the same tokens in every layer of both models."""

  target: Layers
  draft: Layers  # none without a draft model


class Rows(NamedTuple):
  """B sequences in a window. A row with nothing remaining is finished or padding."""

  token_B: jax.Array  # last token, whose key and value are not in the pool yet
  position_B: jax.Array  # its position
  remaining_B: jax.Array  # tokens still allowed; the pages hold that many more
  law: sampling.Law
  table_BJ: jax.Array  # pages
  token_BS: jax.Array | None  # all tokens so far, when guesses are looked up in them

  @property
  def end_B(self) -> jax.Array:
    """First position without a page."""
    return self.position_B + self.remaining_B


class Chunk(NamedTuple):
  """T packed prompt tokens of several rows, and the list of the J earlier pages that they look at."""

  token_T: jax.Array
  position_T: jax.Array
  row_T: jax.Array  # which row a token belongs to, -1 for padding
  page_T: jax.Array  # where its key and value go
  offset_T: jax.Array
  page_J: jax.Array
  pages: jax.Array  # real entries of page_J
  live_RJ: jax.Array  # tokens of each listed page that row r sees


class Window(NamedTuple):
  """What a window drew: row b the first drawn_B[b] of its X entries."""

  drawn_B: jax.Array
  token_BX: jax.Array
  behavior_logp_BX: jax.Array
  model_logp_BX: jax.Array
  top_id_BXA: jax.Array
  top_logp_BXA: jax.Array
  steps: jax.Array  # decode steps that ran
  steps_B: jax.Array  # of those, how many row b was live in
  drafted_B: jax.Array  # tokens guessed, and of those
  accepted_B: jax.Array  # drawn


class Scores(NamedTuple):
  """Log-prob under temperature 1 of the token after each of a chunk's tokens, and the A most likely ones."""

  logp_T: jax.Array
  top_id_TA: jax.Array
  top_logp_TA: jax.Array


def quantize(w: jax.Array, in_axes: list[int], dtype: str) -> tuple[jax.Array, jax.Array]:
  """(w / scale in `dtype`, f32 scale without the input axes): each output's weights fill the range of `dtype`."""
  largest = paged_attention.SCALED_DTYPES[dtype]
  scale = jnp.max(jnp.abs(w.astype(jnp.float32)), axis=tuple(in_axes), keepdims=True) / largest
  scale = jnp.maximum(scale, 1e-20)
  fitted = w / scale
  return (jnp.round(fitted) if dtype == 'int8' else fitted).astype(dtype), jnp.squeeze(scale, tuple(in_axes))


class Decoder:
  """The model's structure without its weights, and the programs over it; `draft` is the model that guesses, if any."""

  def __init__(self, config: ModelConfig, *, out_first: bool, weight_dtype: str = '',
               mesh: jax.sharding.Mesh | None = None, draft: 'Decoder | None' = None):
    self.config, self.draft, self._weight_dtype = config, draft, weight_dtype
    self.kv_copies = _kv_copies(config, mesh.shape['tensor']) if mesh else 1  # of each kv head in the pool
    model = nnx.eval_shape(lambda: transformer.Transformer(config, nnx.Rngs(0)))
    block = nnx.eval_shape(lambda: transformer.Block(config, nnx.Rngs(0)))
    self._linears = {}  # path -> how many input axes its matrix has, whether they come last
    for path, module in nnx.iter_modules(block):
      if isinstance(module, transformer.Linear):
        module.out_first = out_first
        self._linears[path] = len(module.in_axes), out_first
        if weight_dtype:
          module.scaled, module.w_scale = True, nnx.Param(jnp.zeros(()), axes=module.out_axes)
    self._block_def = nnx.graphdef(block)
    self._norm_def, self._model_def = nnx.graphdef(model.final_norm), nnx.graphdef(model)
    self.state_shapes = nnx.state(model)  # what `layout` takes

  def layout(self, state: nnx.State) -> Params:
    """Params copied from a stacked Transformer state; shares no buffer with `state`.

    Matrices are in the compute dtype, or those of the layers as `quantize` makes them.
    """
    dtype = self.config.compute_dtype

    def slices_of(path, variable, index):
      axes = variable.get_metadata()['axes'][1:]  # without L
      if path[-1] != 'w':
        return [(path, variable.replace(variable[...][index], axes=axes))]
      ins, order = self._order(path, len(axes))
      w, stored_axes = jnp.transpose(variable[...][index], order), ''.join(axes[i] for i in order)
      if not self._weight_dtype:
        return [(path, variable.replace(w.astype(dtype), axes=stored_axes))]
      w, scale = quantize(w, [order.index(i) for i in ins], self._weight_dtype)
      scale_axes = ''.join(axes[i] for i in range(len(axes)) if i not in ins)
      return [(path, variable.replace(w, axes=stored_axes)),
              ((*path[:-1], 'w_scale'), variable.replace(scale, axes=scale_axes))]

    def layer(index):
      stacked = nnx.to_flat_state(state['layers'])
      return nnx.from_flat_state([entry for path, v in stacked for entry in slices_of(path, v, index)])

    embed_VD = jnp.copy(state['embed']['w'][...]).astype(dtype)
    head_VD = None if self.config.tied_head else jnp.swapaxes(state['head']['w'][...], 0, 1).astype(dtype)
    layers = tuple(layer(index) for index in range(self.config.layers))
    return Params(embed_VD, layers, jax.tree.map(jnp.copy, state['final_norm']), head_VD)

  def _order(self, path: tuple, rank: int) -> tuple[list[int], list[int]]:
    """Input axes of the matrix at `path`, and all its axes as they are laid out."""
    ins, out_first = self._linears[path[:-1]]
    ins, outs = list(range(ins)), list(range(ins, rank))
    return ins, outs + ins if out_first else ins + outs

  def logp_shift(self, params: Params, state: nnx.State, token_T: jax.Array, tokens: jax.Array) -> jax.Array:
    """Log-prob of each token after the first under `params` minus that under `state`, nats; 0 from `tokens` on."""
    T = token_T.shape[0]
    position_BT, mask_BTS = np.arange(T)[None], np.tri(T, dtype=bool)[None]
    model = nnx.merge(self._model_def, state)
    exact_TD = model.hidden(token_T[None], position_BT, mask_BTS)[0]
    attend = lambda pool, q, k, v: (pool, attention.masked_attention(q, k, v, mask_BTS))
    stored_BTD, _ = self._hidden(params, (None,) * self.config.layers, token_T[None], position_BT, attend)
    logits = model.logits(exact_TD[None])[0], self._logits(params, stored_BTD)[0]
    exact_T, stored_T = (sampling.log_prob(logits_TV[:-1], token_T[1:]) for logits_TV in logits)
    return jnp.where(np.arange(1, T) < tokens, stored_T - exact_T, 0.0)

  def window(self, models: Models, pools: Pools, rows: Rows, bias_YV: jax.Array, steps: jax.Array,
             least_live: jax.Array, *, width: int, drafts: int, ngram: int, alternatives: int) -> tuple[Pools, Window]:
    """Up to `steps` decode steps, ended early when fewer than `least_live` rows are live.

    A step feeds each row's last token and up to W = `drafts` guesses of the next ones, draws a token after each, and
    keeps the draws up to and with the first that differs from its guess. Guesses that are looked up leave the draws
    what they are without guesses, as each depends on its own position's random numbers alone; those of a draft model
    are kept or replaced by speculative sampling (see sampling.draw), which leaves their law what it is.

    Args:
      width: X, tokens that a row can draw in one window.
    """
    B, Q = rows.token_B.shape[0], 1 + drafts
    after_Q = np.arange(Q)
    law = sampling.each_of(rows.law, Q)

    def going(carry):
      step, _, state = carry
      return (step < steps) & (jnp.sum(state.remaining_B > 0) >= jnp.maximum(least_live, 1))

    def body(carry):
      step, pools, now = carry
      live_B = now.remaining_B > 0
      guess_BW, proposal, pools = self._guess(models, pools, rows, now, live_B, bias_YV, drafts, ngram)
      token_BQ = jnp.concatenate([now.token_B[:, None], jnp.maximum(guess_BW, 0)], axis=1)
      position_BQ = now.position_B[:, None] + after_Q[None]
      hidden_BQD, filled = self._feed(models.target, pools.target, rows, token_BQ, position_BQ, live_B)
      logits_XV = self._logits(models.target, hidden_BQD).reshape(B * Q, -1)
      drawn = sampling.draw(logits_XV, law, position_BQ.reshape(-1), bias_YV, alternatives=alternatives,
                            proposal=proposal)
      drawn = jax.tree.map(lambda x: x.reshape(B, Q, *x.shape[1:]), drawn)
      return step + 1, pools._replace(target=filled), _advance(now, rows, drawn, guess_BW, live_B)

    none_B, looks_up = jnp.zeros(B, jnp.int32), drafts and not self.draft
    state = _State(
        rows.token_B, rows.position_B, rows.remaining_B, rows.token_BS if looks_up else None,
        Window(none_B, jnp.zeros((B, width), jnp.int32), jnp.zeros((B, width), jnp.float32),
               jnp.zeros((B, width), jnp.float32), jnp.zeros((B, width, alternatives), jnp.int32),
               jnp.zeros((B, width, alternatives), jnp.float32), jnp.int32(0), none_B, none_B, none_B))
    steps_run, pools, state = jax.lax.while_loop(going, body, (jnp.int32(0), pools, state))
    return pools, state.out._replace(steps=steps_run)

  def _guess(self, models: Models, pools: Pools, rows: Rows, now: '_State', live_B: jax.Array, bias_YV: jax.Array,
             count: int, ngram: int) -> tuple[jax.Array, sampling.Proposal | None, Pools]:
    """guess_BW of the tokens after each row's last, their laws when a draft model made them, and the pools."""
    B = live_B.shape[0]
    if not count:
      return jnp.zeros((B, 0), jnp.int32), None, pools
    if self.draft is None:
      return speculative.look_up(now.token_BS, now.position_B, count, ngram), None, pools

    def feed(filled, token_B, position_B):
      return self.draft._feed(models.draft, filled, rows, token_B[:, None], position_B[:, None], live_B)

    def guess(carry, after):
      filled, token_B = carry
      position_B = now.position_B + after
      hidden_B1D, filled = feed(filled, token_B, position_B)
      proposal = sampling.propose(self.draft._logits(models.draft, hidden_B1D)[:, 0], rows.law, position_B, bias_YV)
      return (filled, proposal.token_B), proposal

    (filled, last_B), made = jax.lax.scan(guess, (pools.draft, now.token_B), np.arange(count))
    _, filled = feed(filled, last_B, now.position_B + count)  # its keys are needed if all guesses are kept
    guess_BW, prob_BWV = made.token_B.T, jnp.moveaxis(made.prob_BV, 0, 1)
    token_BQ = jnp.pad(guess_BW, ((0, 0), (0, 1)), constant_values=-1)  # nothing is proposed after the last guess
    prob_BQV = jnp.pad(prob_BWV, ((0, 0), (0, 1), (0, 0)))
    proposal = sampling.Proposal(token_BQ.reshape(-1), prob_BQV.reshape(B * (count + 1), -1))
    return guess_BW, proposal, pools._replace(draft=filled)

  def _feed(self, params: Params, pools: Layers, rows: Rows, token_BQ: jax.Array,
            position_BQ: jax.Array, live_B: jax.Array) -> tuple[jax.Array, Layers]:
    """Hidden states of Q tokens of each row after those in its pages, and the pools with their keys and values."""
    C, (B, Q) = pools[0].page_size, token_BQ.shape
    end_B1 = rows.end_B[:, None]
    held_BQ = live_B[:, None] & (position_BQ < end_B1)
    page_BQ = jnp.take_along_axis(rows.table_BJ, jnp.minimum(position_BQ // C, rows.table_BJ.shape[1] - 1), axis=1)
    page_BQ = jnp.where(held_BQ, page_BQ, SINK)
    length_BQ = jnp.where(live_B[:, None], jnp.minimum(position_BQ + 1, end_B1), 1)

    def attend(pool, q_BQNH, k_BQKH, v_BQKH):
      flat = lambda x: x.reshape(B * Q, *x.shape[2:])
      k_BQKH, v_BQKH = self._copied(k_BQKH), self._copied(v_BQKH)
      pool = paged_attention.write(pool, flat(k_BQKH), flat(v_BQKH), flat(page_BQ), flat(position_BQ % C))
      return pool, paged_attention.decode(q_BQNH, pool, rows.table_BJ, length_BQ)

    return self._hidden(params, pools, token_BQ, position_BQ, attend)

  def _chunk(self, params: Params, pools: Layers, chunk: Chunk) -> tuple[jax.Array, Layers]:
    """Hidden states [T, D] of the chunk's tokens, and the pools with their keys and values."""
    T = chunk.token_T.shape[0]
    mask_TS = (chunk.row_T[:, None] == chunk.row_T[None, :]) & np.tri(T, dtype=bool)
    live_TJ = jnp.where((chunk.row_T >= 0)[:, None], chunk.live_RJ[chunk.row_T], 0)

    def attend(pool, q_BTNH, k_BTKH, v_BTKH):
      # Written before it is read: the other order makes XLA copy the whole pool.
      k_TKH, v_TKH = self._copied(k_BTKH)[0], self._copied(v_BTKH)[0]
      pool = paged_attention.write(pool, k_TKH, v_TKH, chunk.page_T, chunk.offset_T)
      out_TNH = paged_attention.chunk(q_BTNH[0], k_TKH, v_TKH, mask_TS, pool, chunk.page_J, chunk.pages,
                                      live_TJ)
      return pool, out_TNH[None]

    hidden_BTD, pools = self._hidden(params, pools, chunk.token_T[None], chunk.position_T[None], attend)
    return hidden_BTD[0], pools

  def fill_draft(self, models: Models, pools: Pools, chunk: Chunk) -> Pools:
    """The draft model's pools with the keys and values of the chunk's tokens, if there is such a model."""
    if self.draft is None:
      return pools
    return pools._replace(draft=self.draft._chunk(models.draft, pools.draft, chunk)[1])

  def fill(self, models: Models, pools: Pools, chunk: Chunk) -> Pools:
    """The pools with the keys and values of the chunk's tokens."""
    pools = self.fill_draft(models, pools, chunk)
    return pools._replace(target=self._chunk(models.target, pools.target, chunk)[1])

  def score(self, models: Models, pools: Pools, chunk: Chunk, next_T: jax.Array, *,
            alternatives: int) -> tuple[Pools, Scores]:
    """`fill`, and what each token predicts of next_T, the token after it."""
    pools = self.fill_draft(models, pools, chunk)
    hidden_TD, filled = self._chunk(models.target, pools.target, chunk)
    T = next_T.shape[0]
    X = min(_SCORED_AT_ONCE, T)
    padded = lambda x: jnp.pad(x, ((0, -T % X),) + ((0, 0),) * (x.ndim - 1)).reshape(-1, X, *x.shape[1:])

    def some(inputs):
      hidden_XD, next_X = inputs
      logits_XV = self._logits(models.target, hidden_XD[None])[0]
      wanted_X = jnp.ones(X, bool)
      return Scores(sampling.log_prob(logits_XV, next_X), *sampling.top(logits_XV, wanted_X, alternatives))

    scores = jax.lax.map(some, (padded(hidden_TD), padded(next_T)))
    return pools._replace(target=filled), jax.tree.map(
        lambda x: x.reshape(x.shape[0] * X, *x.shape[2:])[:T], scores)

  def copy(self, pools: Pools, source_X: jax.Array, target_X: jax.Array) -> Pools:
    """The pools with pages copied; unused entries name the sink twice."""
    return jax.tree.map(lambda x: x.at[target_X].set(x[source_X]), pools)

  def _copied(self, x_BTKH: jax.Array) -> jax.Array:
    return jnp.repeat(x_BTKH, self.kv_copies, axis=2) if self.kv_copies > 1 else x_BTKH

  def _hidden(self, params: Params, pools: Layers, token_BT: jax.Array, position_BT: jax.Array, attend):
    x_BTD = params.embed_VD[token_BT].astype(self.config.compute_dtype)
    filled = list(pools)
    for index, state in enumerate(params.layers):

      def attend_here(q_BTNH, k_BTKH, v_BTKH, index=index):
        filled[index], out_BTNH = attend(filled[index], q_BTNH, k_BTKH, v_BTKH)
        return out_BTNH

      x_BTD = nnx.merge(self._block_def, state)(x_BTD, position_BT, attend_here)
    return nnx.merge(self._norm_def, params.final_norm)(x_BTD), tuple(filled)

  def _logits(self, params: Params, hidden_BTD: jax.Array) -> jax.Array:
    head_VD = params.embed_VD if params.head_VD is None else params.head_VD
    return transformer.out_first_product(hidden_BTD, head_VD.astype(hidden_BTD.dtype), 1, jnp.float32)


def _kv_copies(config: ModelConfig, tensor: int) -> int:
  """How often each kv head is stored, so that every shard of `tensor` has the one that its query heads use."""
  fewer = tensor > config.kv_heads and tensor % config.kv_heads == 0 and config.heads % tensor == 0
  return tensor // config.kv_heads if fewer else 1


class _State(NamedTuple):
  """A window in progress."""

  token_B: jax.Array
  position_B: jax.Array
  remaining_B: jax.Array
  token_BS: jax.Array | None
  out: Window


def _advance(now: _State, rows: Rows, drawn: sampling.Drawn, guess_BW: jax.Array, live_B: jax.Array) -> _State:
  """The state after a step that drew a token after each of a row's Q inputs."""
  B, Q = drawn.token_B.shape  # the fields of Drawn are [B, Q, ...] here
  token_BQ = drawn.token_B
  right_BW = (guess_BW == token_BQ[:, :-1]).astype(jnp.int32)
  fine_B = 1 + jnp.sum(jnp.cumprod(right_BW, axis=1), axis=1)  # draws that follow nothing but right guesses
  stop_BQ = jnp.any(token_BQ[:, :, None] == rows.law.stop_BX[:, None], axis=2)
  stop_B = jnp.where(jnp.any(stop_BQ, axis=1), jnp.argmax(stop_BQ, axis=1), Q)  # its place
  kept_B = jnp.minimum(jnp.minimum(fine_B, stop_B + 1), now.remaining_B) * live_B
  stopped_B = stop_B < kept_B
  out, after_Q = now.out, np.arange(Q)
  place_BQ = jnp.where(after_Q[None] < kept_B[:, None], out.drawn_B[:, None] + after_Q[None], out.token_BX.shape[1])
  row_B1 = np.arange(B)[:, None]
  put = lambda old, new: old.at[row_B1, place_BQ].set(new, mode='drop')
  last_B = jnp.take_along_axis(token_BQ, jnp.maximum(kept_B - 1, 0)[:, None], axis=1)[:, 0]
  token_BS = now.token_BS
  if token_BS is not None:
    at_BQ = jnp.where(after_Q[None] < kept_B[:, None], now.position_B[:, None] + 1 + after_Q[None], token_BS.shape[1])
    token_BS = token_BS.at[row_B1, at_BQ].set(token_BQ, mode='drop')
  guessed_BW = (guess_BW >= 0) & live_B[:, None]
  out = Window(
      out.drawn_B + kept_B, put(out.token_BX, token_BQ), put(out.behavior_logp_BX, drawn.behavior_logp_B),
      put(out.model_logp_BX, drawn.model_logp_B), put(out.top_id_BXA, drawn.top_id_BA),
      put(out.top_logp_BXA, drawn.top_logp_BA), out.steps, out.steps_B + live_B,
      out.drafted_B + jnp.sum(guessed_BW, axis=1), out.accepted_B + jnp.maximum(kept_B - 1, 0))
  return _State(
      jnp.where(live_B, last_B, now.token_B), now.position_B + kept_B,
      jnp.where(stopped_B, 0, now.remaining_B - kept_B), token_BS, out)
