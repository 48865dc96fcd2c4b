"""Attention over a paged key/value pool in plain XLA: the path for CPU and GPU.

A pool has one array per layer, kv_ZKCH: Z pages of C tokens, kv head outside the token so that a page and head is one
tile; its last axis holds a token's key in the first half and its value in the second. int8 and fp8 pools have a second
array of f32 scales, one for each token's key and value per head. Reading loops over blocks of
pages up to the live length with an online softmax (arXiv 1805.02867), so cost and memory follow what is live and not
the width of the page table. Nothing here allocates pages, and values outside a sequence's length never reach a result,
even if they are not numbers.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

_BLOCK_TOKENS = 64  # of one row, read per loop step
_BLOCK_ROWS_TOKENS = 512  # of all rows together: what stays in a CPU's cache
_NEVER = -1e30  # a finite stand-in for -inf: an all-masked block must not make nan


class Pool(NamedTuple):
  """Keys and values of one layer."""

  kv_ZKCH: jax.Array  # H is twice the head's width
  scale_ZKCX: jax.Array | None  # X = 2: what a stored key and a stored value are multiplied by; None if stored as is

  @property
  def page_size(self) -> int:
    return self.kv_ZKCH.shape[2]


# What a pool may store, and the largest magnitude of those that need scales.
SCALED_DTYPES = {'int8': 127.0, 'float8_e4m3fn': 448.0}
KV_DTYPES = ('float32', 'bfloat16', *SCALED_DTYPES)


def write(pool: Pool, k_TKH: jax.Array, v_TKH: jax.Array, page_T: jax.Array, offset_T: jax.Array) -> Pool:
  """The pool with the keys and values of T tokens at their (page, offset); donated pools are updated in place."""
  put = lambda old, new: old.at[page_T, :, offset_T].set(new.astype(old.dtype), mode='promise_in_bounds')
  if pool.scale_ZKCX is None:
    return Pool(put(pool.kv_ZKCH, jnp.concatenate([k_TKH, v_TKH], axis=-1)), None)
  dtype = pool.kv_ZKCH.dtype
  kv_TKXH = jnp.stack([k_TKH, v_TKH], axis=2).astype(jnp.float32)
  scale_TKX = jnp.maximum(jnp.max(jnp.abs(kv_TKXH), axis=-1), 1e-20) / SCALED_DTYPES[dtype.name]
  kv_TKXH /= scale_TKX[..., None]
  if dtype == jnp.int8:
    kv_TKXH = jnp.round(kv_TKXH)
  kv_TKH = kv_TKXH.reshape(*k_TKH.shape[:2], -1)
  return Pool(put(pool.kv_ZKCH, kv_TKH), put(pool.scale_ZKCX, scale_TKX))


def _read(pool: Pool, page_J: jax.Array, dtype: jnp.dtype):
  """Keys and values of pages [..., K, C, H] in `dtype`, and their scales [..., K, C] (or None, None)."""
  k, v = jnp.split(pool.kv_ZKCH.at[page_J].get(mode='promise_in_bounds'), 2, axis=-1)
  if pool.scale_ZKCX is None:
    return k, v, None, None
  scale = pool.scale_ZKCX.at[page_J].get(mode='promise_in_bounds')
  return k.astype(dtype), v.astype(dtype), scale[..., 0], scale[..., 1]


def decode(q_BQNH: jax.Array, pool: Pool, table_BJ: jax.Array, length_BQ: jax.Array) -> jax.Array:
  """Q queries per row over the row's pages: out_BQNH.

  Args:
    q_BQNH: queries.
    pool: keys and values.
    table_BJ: the j-th page of each row; entries past the length may be anything in range.
    length_BQ: tokens that each query looks at, from the row's first: at least 1.
  """
  B, Q, N, H = q_BQNH.shape
  K, C = pool.kv_ZKCH.shape[1:3]
  J = table_BJ.shape[1]
  pages = _block_pages(C, rows=B, width=J)
  table_BJ = jnp.pad(table_BJ, ((0, 0), (0, -J % pages)))
  q_BKGQH = q_BQNH.reshape(B, Q, K, N // K, H).transpose(0, 2, 3, 1, 4)
  span_JC = jnp.arange(pages * C).reshape(pages, C)
  longest_B = jnp.max(length_BQ, axis=1)

  def fold(block, state):
    page_BJ = jax.lax.dynamic_slice_in_dim(table_BJ, block * pages, pages, axis=1)
    k_BJKCH, v_BJKCH, k_scale_BJKC, v_scale_BJKC = _read(pool, page_BJ, q_BQNH.dtype)
    place_JC = block * pages * C + span_JC
    live_BQJC = place_JC[None, None] < length_BQ[:, :, None, None]
    seen_BJC = place_JC[None] < longest_B[:, None, None]
    score_BKGQJC = jnp.einsum('BKGQH,BJKCH->BKGQJC', q_BKGQH, k_BJKCH, preferred_element_type=jnp.float32)
    if k_scale_BJKC is not None:
      score_BKGQJC *= k_scale_BJKC.swapaxes(1, 2)[:, :, None, None]
      v_BJKCH *= v_scale_BJKC[..., None].astype(v_BJKCH.dtype)
    return _fold(state, score_BKGQJC, live_BQJC[:, None, None], v_BJKCH, seen_BJC[:, :, None, :, None],
                 'BKGQJC,BJKCH->BKGQH', H)

  blocks = (jnp.max(longest_B) + pages * C - 1) // (pages * C)
  state = _empty((B, K, N // K, Q), H)
  _, total_BKGQ, out_BKGQH = jax.lax.fori_loop(0, blocks, fold, state)
  out_BKGQH /= total_BKGQ[..., None]
  return out_BKGQH.transpose(0, 3, 1, 2, 4).reshape(B, Q, N, H).astype(q_BQNH.dtype)


def chunk(q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, mask_TS: jax.Array, pool: Pool,
          page_J: jax.Array, pages: jax.Array, live_TJ: jax.Array) -> jax.Array:
  """T packed prompt tokens over each other and over the earlier pages of their rows: out_TNH.

  The earlier pages of all rows are one list, each page once, so a prefix that rows share is read once.

  Args:
    q_TNH: queries; k_TKH, v_TKH: keys and values of the same tokens.
    mask_TS: which of the T tokens each one sees; every token sees itself.
    pool: keys and values of earlier tokens.
    page_J: the list of earlier pages.
    pages: how many entries of page_J are real.
    live_TJ: how many tokens of each listed page each token sees (0 for a page of another row).
  """
  T, N, H = q_TNH.shape
  K, C = pool.kv_ZKCH.shape[1:3]
  q_TKGH = q_TNH.reshape(T, K, N // K, H)
  width = max(1, _BLOCK_TOKENS // C)
  padding = -page_J.shape[0] % width
  page_J = jnp.pad(page_J, (0, padding))
  live_TJ = jnp.pad(live_TJ, ((0, 0), (0, padding)))
  score_KGTS = jnp.einsum('TKGH,SKH->KGTS', q_TKGH, k_TKH, preferred_element_type=jnp.float32)
  state = _fold(_empty((K, N // K, T), H), score_KGTS[:, :, :, None], mask_TS[None, None, :, None], v_TKH[None], None,
                'KGTJC,JCKH->KGTH', H)

  def fold(block, state):
    here_J = jax.lax.dynamic_slice_in_dim(page_J, block * width, width)
    here_TJ = jax.lax.dynamic_slice_in_dim(live_TJ, block * width, width, axis=1)
    k_JKCH, v_JKCH, k_scale_JKC, v_scale_JKC = _read(pool, here_J, q_TNH.dtype)
    live_TJC = jnp.arange(C)[None, None] < here_TJ[:, :, None]
    score_KGTJC = jnp.einsum('TKGH,JKCH->KGTJC', q_TKGH, k_JKCH, preferred_element_type=jnp.float32)
    if k_scale_JKC is not None:
      score_KGTJC *= k_scale_JKC.swapaxes(0, 1)[:, None, None]
      v_JKCH *= v_scale_JKC[..., None].astype(v_JKCH.dtype)
    return _fold(state, score_KGTJC, live_TJC[None, None], v_JKCH, jnp.any(live_TJC, axis=0)[:, None, :, None],
                 'KGTJC,JKCH->KGTH', H)

  _, total_KGT, out_KGTH = jax.lax.fori_loop(0, (pages + width - 1) // width, fold, state)
  out_TKGH = jnp.moveaxis(out_KGTH / total_KGT[..., None], 2, 0)
  return out_TKGH.reshape(T, N, H).astype(q_TNH.dtype)


def _block_pages(page_size: int, *, rows: int, width: int) -> int:
  tokens = min(_BLOCK_TOKENS, _BLOCK_ROWS_TOKENS // rows)
  return min(width, max(1, tokens // page_size))


def _empty(lead: tuple[int, ...], head_dim: int):
  """(largest score, sum of weights, weighted values) of a softmax over nothing."""
  return (jnp.full(lead, _NEVER, jnp.float32), jnp.zeros(lead, jnp.float32), jnp.zeros((*lead, head_dim), jnp.float32))


def _fold(state, score, live, value, value_live, product: str, head_dim: int):
  """The online-softmax state with one more block of scores (its last two axes) and values."""
  top, total, out = state
  score = jnp.where(live, score / math.sqrt(head_dim), _NEVER)
  new_top = jnp.maximum(top, jnp.max(score, axis=(-2, -1)))
  weight = jnp.where(live, jnp.exp(score - new_top[..., None, None]), 0.0)
  if value_live is not None:  # 0 * nan is nan: a page that was freed may hold anything
    value = jnp.where(value_live, value, 0.0)
  decay = jnp.exp(top - new_top)
  more = jnp.einsum(product, weight.astype(value.dtype), value, preferred_element_type=jnp.float32)
  return new_top, total * decay + jnp.sum(weight, axis=(-2, -1)), out * decay[..., None] + more
