"""Attention over a paged key/value pool as one Pallas TPU kernel: decode, speculative verify and chunked prefill.

The grid is a list of work and not a rectangle. A unit is a block of one row's queries; its items are the blocks of
pages that any of its queries sees, from the first (of a sliding window) to the last. The list is made by XLA from the
table and the lengths and handed to the kernel in scalar memory, with the page that each item reads in each of its
slots: a row costs what it sees, however wide the table or long its neighbours, and pages that nobody sees are neither
fetched (a slot without a page repeats the one before, which the pipeline does not fetch again) nor visited. A softmax
runs online over a unit's items (arXiv 1805.02867, 2205.14135). Pages of a block are separate operands, each a whole
[heads, tokens, lanes] tile, so the pipeline fetches the next item's while one is computed; heads are split in two
groups where their number is even, for chips with two cores.

A pool's layout is that of paged_attention: key and value side by side, so heads of 64 fill the 128 lanes. Heads that
end within a lane tile are read with their values: queries are padded with zeros, and of the product with the weights
the values' part is kept.

The law is that of paged_attention, which the tests compare with in the interpreter on a CPU; the TPU compiler takes the
kernel ahead of time for v5e, v5p, v6e and 7x without copies of the pool. No TPU has run it: its speed is not known.
"""

import functools
import math
from typing import NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from ptjax.sample import paged_attention
from ptjax.sample.paged_attention import NEVER, Partial, Pool

_LANES = 128
_PAGE_BYTES = 2 ** 20  # of one page's heads in a group, at most if there is a way
_ITEM_BYTES = 2 ** 20  # of the pages of an item; the pipeline holds two items
_ITEM_TOKENS = 512  # of an item
_ITEM_PAGES = 16  # of an item: each is an operand
_UNIT_ROWS = 1024  # query rows of a unit, over the heads of a group
_UNIT_SCORES = 2 ** 18  # scores of a unit and an item
_LIST_BYTES = 3 * 2 ** 18  # of the list of work, in a scalar memory of 1 MiB


def attend(q_BQNH: jax.Array, pool: Pool, table_BJ: jax.Array, length_BQ: jax.Array, *, window: int | None = None,
           soft_cap: float | None = None, scale: float | None = None, value_dim: int | None = None,
           interpret: bool = False) -> jax.Array:
  """Q queries per row over the row's pages: out_BQNH; arguments as in paged_attention.decode.

  Args:
    interpret: run in Pallas' interpreter, on any device.

  Raises:
    ValueError: rows, queries and pages make a list of work that does not fit into the scalar memory.
  """
  start_BQ = paged_attention.first_seen(length_BQ, window)
  return _attend(q_BQNH, pool, table_BJ, start_BQ, length_BQ, soft_cap=soft_cap, scale=scale, value_dim=value_dim,
                 interpret=interpret, partial=False)[0]


def partials(q_BQNH: jax.Array, pool: Pool, table_BJ: jax.Array, start_BQ: jax.Array, stop_BQ: jax.Array, *,
             soft_cap: float | None = None, scale: float | None = None, value_dim: int | None = None,
             interpret: bool = False) -> Partial:
  """`attend` before its division, over tokens [start, stop) of each query's row; as paged_attention.partials."""
  out_BQNH, stat_BQNX = _attend(q_BQNH, pool, table_BJ, start_BQ, stop_BQ, soft_cap=soft_cap, scale=scale,
                                value_dim=value_dim, interpret=interpret, partial=True)
  return Partial(out_BQNH, stat_BQNX[..., 0], stat_BQNX[..., 1])


class _Sizes(NamedTuple):
  """What is fixed by the shapes of a call."""

  heads: int  # key/value heads in a group
  rows: int  # of a unit per key/value head: its queries times G, padded
  queries: int  # of a unit
  units: int  # per row of the batch
  pages: int  # of an item
  page_size: int
  keys: slice  # lanes of a pool's row that the queries are multiplied with
  values: slice  # lanes that the weights are multiplied with
  out: slice  # of the product with the weights, the values

  @property
  def tokens(self) -> int:
    return self.pages * self.page_size


def _sizes(q_shape: tuple[int, ...], pool: Pool, width: int, value_dim: int | None) -> _Sizes:
  _, Q, N, H = q_shape
  _, K, C, lanes = pool.kv_ZKCH.shape
  row_bytes = -(-lanes // _LANES) * _LANES * pool.kv_ZKCH.dtype.itemsize
  fits = [d for d in range(1, K + 1) if K % d == 0 and (d == 1 or d * C * row_bytes <= _PAGE_BYTES)]
  heads = max(d for d in fits if K % 2 or d < K)
  G = N // K
  queries = min(Q, max(1, _UNIT_ROWS // (heads * G)))
  rows = -(-queries * G // 16) * 16
  tokens = min(_ITEM_TOKENS, _ITEM_BYTES // (heads * row_bytes), max(_LANES, _UNIT_SCORES // (heads * rows)))
  keys, values, out = _lanes(lanes, H, value_dim)
  return _Sizes(heads, rows, queries, -(-Q // queries), max(1, min(tokens // C, width, _ITEM_PAGES)), C, keys, values,
                out)


def _lanes(lanes: int, head_dim: int, value_dim: int | None) -> tuple[slice, slice, slice]:
  """Lanes of a row to read for keys and for values, and which of the latter are values: whole tiles or whole rows."""
  if value_dim is None:
    if head_dim % _LANES == 0:
      return slice(0, head_dim), slice(head_dim, lanes), slice(0, head_dim)
    return slice(0, lanes), slice(0, lanes), slice(head_dim, lanes)
  read = value_dim if value_dim % _LANES == 0 else lanes
  return slice(0, lanes), slice(0, read), slice(0, value_dim)


class _Work(NamedTuple):
  """The list of items, unit by unit."""

  unit_W: jax.Array
  begin_U: jax.Array  # each unit's first item, and after the last unit the number of items
  block_U: jax.Array  # each unit's first block of pages
  low_U: jax.Array  # first token that any query of the unit sees
  high_U: jax.Array  # and the one after the last
  page_X: jax.Array  # items times slots: what is read


def _work(table_BJ: jax.Array, start_BQ: jax.Array, stop_BQ: jax.Array, sizes: _Sizes) -> _Work:
  """The list of work over queries that are a whole number of units."""
  B, J = table_BJ.shape
  P, C = sizes.pages, sizes.page_size
  start_UX, stop_UX = (x.reshape(-1, sizes.queries) for x in (start_BQ, stop_BQ))
  U, blocks = start_UX.shape[0], -(-J // P)
  some_UX = start_UX < stop_UX
  high_U = jnp.max(jnp.where(some_UX, stop_UX, 0), axis=1)
  low_U = jnp.minimum(jnp.min(jnp.where(some_UX, start_UX, np.iinfo(np.int32).max), axis=1), high_U)
  block_U = low_U // sizes.tokens
  count_U = jnp.maximum(-(-high_U // sizes.tokens) - block_U, 1)  # one even if nothing is seen: zeros are written
  begin_U = jnp.pad(jnp.cumsum(count_U), (1, 0))
  item_W = jnp.arange(U * blocks)
  unit_W = jnp.minimum(jnp.searchsorted(begin_U[1:], item_W, side='right', method='compare_all'), U - 1)
  block_W = jnp.minimum(block_U[unit_W] + item_W - begin_U[unit_W], blocks - 1)
  table_BJP = jnp.pad(table_BJ, ((0, 0), (0, blocks * P - J))).reshape(B, blocks, P)
  page_WP = table_BJP[unit_W // sizes.units, block_W]
  place_WP = (block_W[:, None] * P + jnp.arange(P)[None]) * C
  live_WP = (place_WP < high_U[unit_W][:, None]) & (place_WP + C > low_U[unit_W][:, None])

  def later(a, b):
    return a[0] | b[0], jnp.where(b[0], b[1], a[1])

  _, page_WP = jax.lax.associative_scan(later, (live_WP, jnp.where(live_WP, page_WP, 0)))
  work = _Work(*(x.astype(jnp.int32) for x in (unit_W, begin_U, block_U, low_U, high_U, page_WP.reshape(-1))))
  size = sum(4 * x.size for x in work)
  if size > _LIST_BYTES:
    raise ValueError(f'{B} rows of {J} pages in {U} units need {size} bytes of a scalar memory of {_LIST_BYTES}: '
                     'use larger pages, fewer rows or fewer queries at once')
  return work


def _attend(q_BQNH, pool, table_BJ, start_BQ, stop_BQ, *, soft_cap, scale, value_dim, interpret, partial):
  """out_BQNH, divided or (`partial`) with [largest score, sum of weights]_BQNX beside it."""
  B, Q, N, H = q_BQNH.shape
  K = pool.kv_ZKCH.shape[1]
  sizes = _sizes(q_BQNH.shape, pool, table_BJ.shape[1], value_dim)
  padding = ((0, 0), (0, sizes.units * sizes.queries - Q))
  start_BQ, stop_BQ = (jnp.pad(x, padding, mode='edge') for x in (start_BQ, stop_BQ))
  work = _work(table_BJ, start_BQ, stop_BQ, sizes)
  span_BQNX = jnp.broadcast_to(jnp.stack([start_BQ, stop_BQ], axis=-1)[:, :, None], (*start_BQ.shape, N // K, 2))
  span_UMX = _pad_rows(span_BQNX.reshape(B * sizes.units, -1, 2), sizes)
  lanes = sizes.keys.stop - sizes.keys.start
  q_BQNH = jnp.pad(q_BQNH, (*padding, (0, 0), (0, lanes - H)))
  q_UQKGH = q_BQNH.reshape(B * sizes.units, sizes.queries, K, N // K, lanes)
  q_UKMH = _pad_rows(q_UQKGH.swapaxes(1, 2).reshape(B * sizes.units, K, -1, lanes), sizes)
  law = paged_attention.Law(scale or 1 / math.sqrt(H), soft_cap)
  outs = _call(work, q_UKMH, span_UMX, pool, sizes, law, interpret, partial)

  def unpacked(x_UKMH):
    x_UKQGH = x_UKMH[:, :, :sizes.queries * N // K].reshape(B * sizes.units, K, sizes.queries, N // K, -1)
    return x_UKQGH.swapaxes(1, 2).reshape(B, sizes.units * sizes.queries, N, -1)[:, :Q]

  out_BQNH, *rest = map(unpacked, outs)
  return out_BQNH[..., sizes.out], *rest


def _pad_rows(x, sizes: _Sizes):
  """x [..., M, H] with M padded to the rows of a unit."""
  return jnp.pad(x, ((0, 0),) * (x.ndim - 2) + ((0, sizes.rows - x.shape[-2]), (0, 0)))


def _call(work: _Work, q_UKMH, span_UMX, pool: Pool, sizes: _Sizes, law, interpret, partial) -> tuple[jax.Array, ...]:
  U, K, M, _ = q_UKMH.shape
  heads, P = sizes.heads, sizes.pages
  value_lanes = sizes.values.stop - sizes.values.start

  def per_unit(*block):
    return pl.BlockSpec((None, heads, *block), lambda group, item, unit_W, *_: (unit_W[item], group, 0, 0))

  def per_page(slot, *block):
    return pl.BlockSpec((None, heads, *block),
                        lambda group, item, *refs: (refs[-1][item * P + slot], group, 0, 0))

  pages = [(pool.kv_ZKCH, per_page(slot, *pool.kv_ZKCH.shape[2:])) for slot in range(P)]
  if pool.scale_ZKXC is not None:
    pages += [(pool.scale_ZKXC, per_page(slot, *pool.scale_ZKXC.shape[2:])) for slot in range(P)]
  out_lanes = [(value_lanes, jnp.float32), (2, jnp.float32)] if partial else [(value_lanes, q_UKMH.dtype)]
  span_spec = pl.BlockSpec((None, *span_UMX.shape[1:]), lambda group, item, unit_W, *_: (unit_W[item], 0, 0))
  run = pl.pallas_call(
      functools.partial(_kernel, sizes=sizes, law=law, scaled=pool.scale_ZKXC is not None, partial=partial),
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=len(work),
          grid=(K // heads, work.begin_U[-1]),
          in_specs=[per_unit(*q_UKMH.shape[2:]), span_spec, *(spec for _, spec in pages)],
          out_specs=[per_unit(M, lanes) for lanes, _ in out_lanes],
          scratch_shapes=[pltpu.VMEM((heads, M, 1), jnp.float32), pltpu.VMEM((heads, M, 1), jnp.float32),
                          pltpu.VMEM((heads, M, value_lanes), jnp.float32)]),
      out_shape=[jax.ShapeDtypeStruct((U, K, M, lanes), dtype) for lanes, dtype in out_lanes],
      compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'arbitrary')),
      interpret=interpret, name='paged_attention')
  return run(*work, q_UKMH, span_UMX, *(operand for operand, _ in pages))


def _kernel(unit_W, begin_U, block_U, low_U, high_U, page_X, q_ref, span_ref, *refs, sizes: _Sizes, law, scaled,
            partial):
  """One item: the scores of a unit's rows with its pages' keys, folded into the unit's online softmax."""
  del page_X  # read by the index maps
  P = sizes.pages
  kv_refs, scale_refs, refs = refs[:P], refs[P:2 * P] if scaled else (), refs[(1 + scaled) * P:]
  *out_refs, top_ref, total_ref, sum_ref = refs
  item = pl.program_id(1)
  unit = unit_W[item]
  begin = begin_U[unit]
  at = (block_U[unit] + item - begin) * sizes.tokens

  @pl.when(item == begin)
  def _():
    top_ref[...] = jnp.full_like(top_ref, NEVER)
    total_ref[...] = jnp.zeros_like(total_ref)
    sum_ref[...] = jnp.zeros_like(sum_ref)

  q_KMH, span_MX = q_ref[...], span_ref[...]
  dtype = q_KMH.dtype if scaled else jnp.promote_types(q_KMH.dtype, kv_refs[0].dtype)
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32,
                              precision='highest' if dtype == jnp.float32 else 'default')
  joined = lambda parts, axis: parts[0] if P == 1 else jnp.concatenate(parts, axis)
  row_KSH = joined([ref[...].astype(dtype) for ref in kv_refs], 1)
  score_KMS = product('KMH,KSH->KMS', q_KMH.astype(dtype), row_KSH[:, :, sizes.keys])
  if scaled:
    score_KMS *= joined([ref[:, :1, :] for ref in scale_refs], 2)
  place_1S = at + jax.lax.broadcasted_iota(jnp.int32, (1, sizes.tokens), 1)
  live_MS = (place_1S >= span_MX[:, :1]) & (place_1S < span_MX[:, 1:])
  score_KMS = jnp.where(live_MS[None], law(score_KMS), NEVER)
  top_KM1 = jnp.maximum(top_ref[...], jnp.max(score_KMS, axis=2, keepdims=True))
  weight_KMS = jnp.where(live_MS[None], jnp.exp(score_KMS - top_KM1), 0.0)
  decay_KM1 = jnp.exp(top_ref[...] - top_KM1)
  top_ref[...] = top_KM1
  total_ref[...] = total_ref[...] * decay_KM1 + jnp.sum(weight_KMS, axis=2, keepdims=True)
  if scaled:
    value_scale_K1S = joined([ref[:, -1:, :] for ref in scale_refs], 2)
    weight_KMS = jnp.where(live_MS[None], weight_KMS * value_scale_K1S, 0.0)
  place_S1 = at + jax.lax.broadcasted_iota(jnp.int32, (sizes.tokens, 1), 0)
  seen_S1 = (place_S1 >= low_U[unit]) & (place_S1 < high_U[unit])
  value_KSH = jnp.where(seen_S1[None], row_KSH[:, :, sizes.values], 0)  # 0 * nan is nan: a freed page holds anything
  sum_ref[...] = sum_ref[...] * decay_KM1 + product('KMS,KSH->KMH', weight_KMS.astype(dtype), value_KSH)

  @pl.when(item + 1 == begin_U[unit + 1])
  def _():
    if partial:
      out_refs[0][...] = sum_ref[...]
      first_KMX = jax.lax.broadcasted_iota(jnp.int32, out_refs[1].shape, 2) == 0
      out_refs[1][...] = jnp.where(first_KMX, top_ref[...], total_ref[...])
    else:
      out_refs[0][...] = (sum_ref[...] / jnp.maximum(total_ref[...], 1e-30)).astype(out_refs[0].dtype)
