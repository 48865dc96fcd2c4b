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

from ptjax.models import transformer
from ptjax.models.families import ModelConfig
from ptjax.sample import paged_attention, sampling
from ptjax.sample.page_pool import SINK

Pools = tuple[jax.Array, ...]  # one pool_ZKCH per layer


class Params(NamedTuple):
  """Weights laid out for decoding: one state per layer; matrices output-first on CPU; the head always [V, D]."""

  embed_VD: jax.Array
  layers: tuple[nnx.State, ...]
  final_norm: nnx.State
  head_VD: jax.Array | None  # None when tied to the embedding


class Rows(NamedTuple):
  """B sequences in a window. A row with nothing remaining is finished or padding."""

  token_B: jax.Array  # last token, whose key and value are not in the pool yet
  position_B: jax.Array  # its position
  remaining_B: jax.Array  # tokens still allowed
  law: sampling.Law
  stop_BX: jax.Array  # X token ids that end the row, -1 for none
  table_BJ: jax.Array  # pages


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


class Decoder:
  """The model's structure without its weights, and the programs over it."""

  def __init__(self, config: ModelConfig, *, out_first: bool):
    self.config = config
    model = nnx.eval_shape(lambda: transformer.Transformer(config, nnx.Rngs(0)))
    block = nnx.eval_shape(lambda: transformer.Block(config, nnx.Rngs(0)))
    self._in_ranks = {}
    for path, module in nnx.iter_modules(block):
      if isinstance(module, transformer.Linear):
        module.out_first = out_first
        self._in_ranks[path] = len(module.in_axes) if out_first else 0
    self._block_def = nnx.graphdef(block)
    self._norm_def = nnx.graphdef(model.final_norm)
    self.state_shapes = nnx.state(model)  # what `layout` takes

  def layout(self, state: nnx.State) -> Params:
    """Params copied from a stacked Transformer state, matrices in the compute dtype; shares no buffer with `state`."""
    dtype = self.config.compute_dtype

    def slice_of(path, variable, index):
      axes = variable.get_metadata()['axes'][1:]  # without L
      if path[-1] != 'w':
        return variable.replace(variable[...][index], axes=axes)
      order = self._order(path, len(axes))
      w = jnp.transpose(variable[...][index], order).astype(dtype)
      return variable.replace(w, axes=''.join(axes[i] for i in order))

    def layer(index):
      return nnx.from_flat_state([(path, slice_of(path, v, index)) for path, v in nnx.to_flat_state(state['layers'])])

    embed_VD = jnp.copy(state['embed']['w'][...]).astype(dtype)
    head_VD = None if self.config.tied_head else jnp.swapaxes(state['head']['w'][...], 0, 1).astype(dtype)
    layers = tuple(layer(index) for index in range(self.config.layers))
    return Params(embed_VD, layers, jax.tree.map(jnp.copy, state['final_norm']), head_VD)

  def _order(self, path: tuple, rank: int) -> list[int]:
    """Axes of the matrix at `path` as they are laid out."""
    ins = self._in_ranks[path[:-1]]
    return [*range(ins, rank), *range(ins)]

  def window(self, params: Params, pools: Pools, rows: Rows, steps: jax.Array, least_live: jax.Array, *, width: int):
    """Up to `steps` <= width decode steps, ended early when fewer than `least_live` rows are live.

    Returns:
      pools, token_WB, logp_WB, drawn_B: row b drew the first drawn_B[b] entries of column b.
    """
    C = pools[0].shape[2]
    B = rows.token_B.shape[0]

    def going(carry):
      step, _, _, _, remaining_B, *_ = carry
      return (step < steps) & (jnp.sum(remaining_B > 0) >= jnp.maximum(least_live, 1))

    def body(carry):
      step, pools, token_B, position_B, remaining_B, token_WB, logp_WB, drawn_B = carry
      live_B = remaining_B > 0
      page_B = jnp.take_along_axis(rows.table_BJ, (position_B // C)[:, None], axis=1)[:, 0]
      page_B = jnp.where(live_B, page_B, SINK)
      length_B = jnp.where(live_B, position_B + 1, 1)

      def attend(pool_ZKCH, q_BTNH, k_BTKH, v_BTKH):
        pool_ZKCH = paged_attention.write(pool_ZKCH, k_BTKH[:, 0], v_BTKH[:, 0], page_B, position_B % C)
        return pool_ZKCH, paged_attention.decode(q_BTNH[:, 0], pool_ZKCH, rows.table_BJ, length_B)[:, None]

      hidden_BTD, pools = self._hidden(params, pools, token_B[:, None], position_B[:, None], attend)
      next_B, logp_B = sampling.draw(self._logits(params, hidden_BTD)[:, 0], rows.law, position_B)
      stopped_B = jnp.any(next_B[:, None] == rows.stop_BX, axis=1)
      remaining_B = jnp.where(live_B & ~stopped_B, remaining_B - 1, 0)
      return (step + 1, pools, jnp.where(live_B, next_B, token_B), position_B + live_B, remaining_B,
              jax.lax.dynamic_update_index_in_dim(token_WB, next_B, step, 0),
              jax.lax.dynamic_update_index_in_dim(logp_WB, logp_B, step, 0), drawn_B + live_B)

    carry = (jnp.int32(0), pools, rows.token_B, rows.position_B, rows.remaining_B, jnp.zeros((width, B), jnp.int32),
             jnp.zeros((width, B), jnp.float32), jnp.zeros(B, jnp.int32))
    _, pools, _, _, _, token_WB, logp_WB, drawn_B = jax.lax.while_loop(going, body, carry)
    return pools, token_WB, logp_WB, drawn_B

  def chunk(self, params: Params, pools: Pools, chunk: Chunk) -> Pools:
    """The pools with the keys and values of the chunk's tokens."""
    T = chunk.token_T.shape[0]
    mask_TS = (chunk.row_T[:, None] == chunk.row_T[None, :]) & np.tri(T, dtype=bool)
    live_TJ = jnp.where((chunk.row_T >= 0)[:, None], chunk.live_RJ[chunk.row_T], 0)

    def attend(pool_ZKCH, q_BTNH, k_BTKH, v_BTKH):
      # Written before it is read: the other order makes XLA copy the whole pool.
      pool_ZKCH = paged_attention.write(pool_ZKCH, k_BTKH[0], v_BTKH[0], chunk.page_T, chunk.offset_T)
      out_TNH = paged_attention.chunk(q_BTNH[0], k_BTKH[0], v_BTKH[0], mask_TS, pool_ZKCH, chunk.page_J, chunk.pages,
                                      live_TJ)
      return pool_ZKCH, out_TNH[None]

    _, pools = self._hidden(params, pools, chunk.token_T[None], chunk.position_T[None], attend)
    return pools

  def copy(self, pools: Pools, source_X: jax.Array, target_X: jax.Array) -> Pools:
    """The pools with pages copied; unused entries name the sink twice."""
    return tuple(pool_ZKCH.at[target_X].set(pool_ZKCH[source_X]) for pool_ZKCH in pools)

  def _hidden(self, params: Params, pools: Pools, token_BT: jax.Array, position_BT: jax.Array, attend):
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
