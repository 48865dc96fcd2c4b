"""Attention over a paged key/value pool in plain XLA: the path for CPU and GPU, and the law that paged_kernel follows.

A pool has one array per layer, kv_ZKCH: Z pages of C tokens, kv head outside the token so that a page and head is one
tile; its last axis holds a token's key in the first half and its value in the second, or one row of which the value is
a part (multi-head latent attention, arXiv 2405.04434: K = 1, the value is the first `value_dim` of the row). int8 and
fp8 pools have a second array of f32 scales, one for each token's key and value (or row) per head, with the tokens last:
a TPU keeps the last axis in lanes of 128. Reading loops over blocks of pages from the first to the last that is seen
with an online softmax (arXiv 1805.02867), so cost and memory follow what is live and not the width of the page table.
Nothing here allocates pages, and values that a query does not see never reach its result, even if they are not numbers.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

_BLOCK_TOKENS = 64  # of one row, read per loop step
_BLOCK_ROWS_TOKENS = 512  # of all rows together: what stays in a CPU's cache
NEVER = -1e30  # a finite stand-in for -inf: an all-masked block must not make nan


class Pool(NamedTuple):
  """Keys and values of one layer."""

  kv_ZKCH: jax.Array  # H is twice the head's width, or that of a latent row
  scale_ZKXC: jax.Array | None  # of key and value (X = 2) or of the row (X = 1); None: stored as they are

  @property
  def page_size(self) -> int:
    return self.kv_ZKCH.shape[2]


class Partial(NamedTuple):
  """Attention over a part of what a query sees; `merge` in context_parallel makes one of several."""

  out_BQNH: jax.Array  # f32, values weighted by exp(score - top)
  top_BQN: jax.Array  # f32, largest score; NEVER where nothing is seen
  total_BQN: jax.Array  # f32, sum of the weights

  def finished(self, dtype: jnp.dtype) -> jax.Array:
    """out_BQNH: the weighted mean of the values, 0 where nothing is seen."""
    return (self.out_BQNH / jnp.maximum(self.total_BQN, 1e-30)[..., None]).astype(dtype)


# What a pool may store, and the largest magnitude of those that need scales.
SCALED_DTYPES = {'int8': 127.0, 'float8_e4m3fn': 448.0}
KV_DTYPES = ('float32', 'bfloat16', *SCALED_DTYPES)


def write(pool: Pool, k_TKH: jax.Array, v_TKH: jax.Array | None, page_T: jax.Array, offset_T: jax.Array) -> Pool:
  """The pool with the keys and values of T tokens at their (page, offset); donated pools are updated in place.

  Args:
    v_TKH: values; None when k_TKH holds whole rows.
  """
  put = lambda old, new: old.at[page_T, :, offset_T].set(new.astype(old.dtype), mode='promise_in_bounds')
  parts = [k_TKH] if v_TKH is None else [k_TKH, v_TKH]
  if pool.scale_ZKXC is None:
    return Pool(put(pool.kv_ZKCH, jnp.concatenate(parts, axis=-1)), None)
  dtype = pool.kv_ZKCH.dtype
  kv_TKXH = jnp.stack(parts, axis=2).astype(jnp.float32)
  scale_TKX = jnp.maximum(jnp.max(jnp.abs(kv_TKXH), axis=-1), 1e-20) / SCALED_DTYPES[dtype.name]
  kv_TKXH /= scale_TKX[..., None]
  if dtype == jnp.int8:
    kv_TKXH = jnp.round(kv_TKXH)
  kv_TKH = kv_TKXH.reshape(*k_TKH.shape[:2], -1)
  scale_ZKXC = pool.scale_ZKXC.at[page_T, :, :, offset_T].set(scale_TKX, mode='promise_in_bounds')
  return Pool(put(pool.kv_ZKCH, kv_TKH), scale_ZKXC)


def _read(pool: Pool, page_J: jax.Array, dtype: jnp.dtype, value_dim: int | None):
  """Keys and values of pages [..., K, C, H] in `dtype`, and their scales [..., K, C] (or None, None)."""
  row = pool.kv_ZKCH.at[page_J].get(mode='promise_in_bounds')
  k, v = jnp.split(row, 2, axis=-1) if value_dim is None else (row, row[..., :value_dim])
  if pool.scale_ZKXC is None:
    return k, v, None, None
  scale = pool.scale_ZKXC.at[page_J].get(mode='promise_in_bounds')
  return k.astype(dtype), v.astype(dtype), scale[..., 0, :], scale[..., -1, :]


def decode(q_BQNH: jax.Array, pool: Pool, table_BJ: jax.Array, length_BQ: jax.Array, *, window: int | None = None,
           soft_cap: float | None = None, scale: float | None = None, value_dim: int | None = None) -> jax.Array:
  """Q queries per row over the row's pages: out_BQNH.

  Args:
    q_BQNH: queries.
    pool: keys and values.
    table_BJ: the j-th page of each row; entries that no query sees may be anything in range.
    length_BQ: tokens up to and with each query's own, from the row's first: at least 1.
    window: how many of them a query sees, the last ones; None is all.
    soft_cap: scores s become soft_cap * tanh(s / soft_cap) (arXiv 2408.00118); None leaves them.
    scale: what q . k is multiplied by; None is 1 / sqrt(H).
    value_dim: for pools of latent rows, how much of a row is the value; the output's H.
  """
  partial = partials(q_BQNH, pool, table_BJ, first_seen(length_BQ, window), length_BQ, soft_cap=soft_cap, scale=scale,
                     value_dim=value_dim)
  return partial.finished(q_BQNH.dtype)


def first_seen(length_BQ: jax.Array, window: int | None) -> jax.Array:
  """The first token that a query with `length` tokens up to its own sees."""
  if window is None:
    return jnp.zeros_like(length_BQ)
  if window < 1:
    raise ValueError(f'window = {window} must be at least 1: a token sees itself')
  return jnp.maximum(length_BQ - window, 0)


def partials(q_BQNH: jax.Array, pool: Pool, table_BJ: jax.Array, start_BQ: jax.Array, stop_BQ: jax.Array, *,
             soft_cap: float | None = None, scale: float | None = None, value_dim: int | None = None) -> Partial:
  """`decode` before its division, over tokens [start, stop) of each query's row; a query may see none."""
  B, Q, N, H = q_BQNH.shape
  K, C = pool.kv_ZKCH.shape[1:3]
  J = table_BJ.shape[1]
  pages = _block_pages(C, rows=B, width=J)
  table_BJ = jnp.pad(table_BJ, ((0, 0), (0, -J % pages)))
  q_BKGQH = q_BQNH.reshape(B, Q, K, N // K, H).transpose(0, 2, 3, 1, 4)
  span_JC = jnp.arange(pages * C).reshape(pages, C)
  first_B, last_B = jnp.min(start_BQ, axis=1), jnp.max(stop_BQ, axis=1)
  law = Law(scale or 1 / math.sqrt(H), soft_cap)

  def fold(block, state):
    page_BJ = jax.lax.dynamic_slice_in_dim(table_BJ, block * pages, pages, axis=1)
    k_BJKCH, v_BJKCH, k_scale_BJKC, v_scale_BJKC = _read(pool, page_BJ, q_BQNH.dtype, value_dim)
    place_JC = block * pages * C + span_JC
    place_BQJC = place_JC[None, None]
    live_BQJC = (place_BQJC >= start_BQ[:, :, None, None]) & (place_BQJC < stop_BQ[:, :, None, None])
    seen_BJC = (place_JC[None] >= first_B[:, None, None]) & (place_JC[None] < last_B[:, None, None])
    score_BKGQJC = jnp.einsum('BKGQH,BJKCH->BKGQJC', q_BKGQH, k_BJKCH, preferred_element_type=jnp.float32)
    if k_scale_BJKC is not None:
      score_BKGQJC *= k_scale_BJKC.swapaxes(1, 2)[:, :, None, None]
      v_BJKCH *= v_scale_BJKC[..., None].astype(v_BJKCH.dtype)
    return _fold(state, score_BKGQJC, live_BQJC[:, None, None], v_BJKCH, seen_BJC[:, :, None, :, None],
                 'BKGQJC,BJKCH->BKGQH', law)

  first, blocks = jnp.min(first_B) // (pages * C), (jnp.max(last_B) + pages * C - 1) // (pages * C)
  state = _empty((B, K, N // K, Q), value_dim or H)
  top_BKGQ, total_BKGQ, out_BKGQH = jax.lax.fori_loop(first, blocks, fold, state)
  flat = lambda x_BKGQ: x_BKGQ.transpose(0, 3, 1, 2).reshape(B, Q, N)
  out_BQNH = out_BKGQH.transpose(0, 3, 1, 2, 4).reshape(B, Q, N, -1)
  return Partial(out_BQNH, flat(top_BKGQ), flat(total_BKGQ))


def chunk(q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, mask_TS: jax.Array, pool: Pool,
          page_J: jax.Array, pages: jax.Array, live_TJ: jax.Array, *, position_T: jax.Array | None = None,
          first_J: jax.Array | None = None, window: int | None = None, soft_cap: float | None = None,
          scale: float | None = None, value_dim: int | None = None) -> jax.Array:
  """T packed prompt tokens over each other and over the earlier pages of their rows: out_TNH.

  The earlier pages of all rows are one list, each page once, so a prefix that rows share is read once.

  Args:
    q_TNH: queries; k_TKH, v_TKH: keys and values of the same tokens.
    mask_TS: which of the T tokens each one sees; every token sees itself.
    pool: keys and values of earlier tokens.
    page_J: the list of earlier pages.
    pages: how many entries of page_J are real.
    live_TJ: how many tokens of each listed page are the token's own row's (0 for a page of another row).
    position_T: positions of the tokens in their rows, and
    first_J: of each listed page's first token: needed for a window.
    window, soft_cap, scale, value_dim: as in `decode`.
  """
  if window is not None and (position_T is None or first_J is None):
    raise ValueError(f'window = {window}: needs position_T and first_J, the positions of tokens and pages')
  T, N, H = q_TNH.shape
  K, C = pool.kv_ZKCH.shape[1:3]
  q_TKGH = q_TNH.reshape(T, K, N // K, H)
  law = Law(scale or 1 / math.sqrt(H), soft_cap)
  width = max(1, _BLOCK_TOKENS // C)
  padding = -page_J.shape[0] % width
  page_J = jnp.pad(page_J, (0, padding))
  live_TJ = jnp.pad(live_TJ, ((0, 0), (0, padding)))
  dead_TJ = jnp.zeros((1, page_J.shape[0]), jnp.int32)  # tokens of each page that are before the window
  if window is not None:
    start_T = first_seen(position_T + 1, window)
    mask_TS &= position_T[None, :] >= start_T[:, None]
    dead_TJ = start_T[:, None] - jnp.pad(first_J, (0, padding))[None, :]
  score_KGTS = jnp.einsum('TKGH,SKH->KGTS', q_TKGH, k_TKH, preferred_element_type=jnp.float32)
  state = _fold(_empty((K, N // K, T), v_TKH.shape[-1]), score_KGTS[:, :, :, None], mask_TS[None, None, :, None],
                v_TKH[None], None, 'KGTJC,JCKH->KGTH', law)

  def fold(block, state):
    here_J = jax.lax.dynamic_slice_in_dim(page_J, block * width, width)
    here_TJ = jax.lax.dynamic_slice_in_dim(live_TJ, block * width, width, axis=1)
    from_TJ = jax.lax.dynamic_slice_in_dim(dead_TJ, block * width, width, axis=1)
    k_JKCH, v_JKCH, k_scale_JKC, v_scale_JKC = _read(pool, here_J, q_TNH.dtype, value_dim)
    span_C = jnp.arange(C)[None, None]
    live_TJC = (span_C < here_TJ[:, :, None]) & (span_C >= from_TJ[:, :, None])
    score_KGTJC = jnp.einsum('TKGH,JKCH->KGTJC', q_TKGH, k_JKCH, preferred_element_type=jnp.float32)
    if k_scale_JKC is not None:
      score_KGTJC *= k_scale_JKC.swapaxes(0, 1)[:, None, None]
      v_JKCH *= v_scale_JKC[..., None].astype(v_JKCH.dtype)
    return _fold(state, score_KGTJC, live_TJC[None, None], v_JKCH, jnp.any(live_TJC, axis=0)[:, None, :, None],
                 'KGTJC,JKCH->KGTH', law)

  _, total_KGT, out_KGTH = jax.lax.fori_loop(0, (pages + width - 1) // width, fold, state)
  out_TKGH = jnp.moveaxis(out_KGTH / total_KGT[..., None], 2, 0)
  return out_TKGH.reshape(T, N, -1).astype(q_TNH.dtype)


def _block_pages(page_size: int, *, rows: int, width: int) -> int:
  tokens = min(_BLOCK_TOKENS, _BLOCK_ROWS_TOKENS // rows)
  return min(width, max(1, tokens // page_size))


class Law(NamedTuple):
  """How products of queries and keys become scores."""

  scale: float
  soft_cap: float | None

  def __call__(self, product: jax.Array) -> jax.Array:
    score = product * self.scale
    return score if self.soft_cap is None else self.soft_cap * jnp.tanh(score / self.soft_cap)


def _empty(lead: tuple[int, ...], value_dim: int):
  """(largest score, sum of weights, weighted values) of a softmax over nothing."""
  return (jnp.full(lead, NEVER, jnp.float32), jnp.zeros(lead, jnp.float32), jnp.zeros((*lead, value_dim), jnp.float32))


def _fold(state, score, live, value, value_live, product: str, law: Law):
  """The online-softmax state with one more block of scores (its last two axes) and values."""
  top, total, out = state
  score = jnp.where(live, law(score), NEVER)
  new_top = jnp.maximum(top, jnp.max(score, axis=(-2, -1)))
  weight = jnp.where(live, jnp.exp(score - new_top[..., None, None]), 0.0)
  if value_live is not None:  # 0 * nan is nan: a page that was freed may hold anything
    value = jnp.where(value_live, value, 0.0)
  decay = jnp.exp(top - new_top)
  more = jnp.einsum(product, weight.astype(value.dtype), value, preferred_element_type=jnp.float32)
  return new_top, total * decay + jnp.sum(weight, axis=(-2, -1)), out * decay[..., None] + more
