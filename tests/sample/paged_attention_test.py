"""Paged attention against dense masked attention, with everything that is not live set to nan."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from ptjax.models import attention
from ptjax.sample import paged_attention
from ptjax.sample.paged_attention import Pool

K, G, H = 2, 3, 8


def poisoned_pool(rng, pages, page_size, rows):
  """Pages scattered over a pool of nan, holding `rows` of (keys, values) [S, K, H]; returns the pool and the tables."""
  pool = np.full((pages, K, page_size, 2 * H), np.nan, np.float32)
  free = list(rng.permutation(np.arange(1, pages)))
  tables = []
  for keys, values in rows:
    table = [free.pop() for _ in range(-(-len(keys) // page_size))]
    for s in range(len(keys)):
      pool[table[s // page_size], :, s % page_size] = np.concatenate([keys[s], values[s]], axis=-1)
    tables.append(table)
  return pool, tables


def dense(q_TNH, k_SKH, v_SKH, mask_TS, *, soft_cap=None, scale=None):
  """Attention in f64, with the scores capped."""
  q_TKGH = np.asarray(q_TNH, np.float64).reshape(len(q_TNH), k_SKH.shape[1], -1, q_TNH.shape[-1])
  score_KGTS = np.einsum('TKGH,SKH->KGTS', q_TKGH, k_SKH) * (scale or q_TNH.shape[-1] ** -0.5)
  if soft_cap:
    score_KGTS = soft_cap * np.tanh(score_KGTS / soft_cap)
  weight_KGTS = np.where(mask_TS, np.exp(score_KGTS - score_KGTS.max(-1, keepdims=True)), 0)
  weight_KGTS /= weight_KGTS.sum(-1, keepdims=True)
  return np.einsum('KGTS,SKH->TKGH', weight_KGTS, v_SKH).reshape(*q_TNH.shape[:2], -1)


class PagedAttentionTest(parameterized.TestCase):

  @parameterized.parameters((1, (1, 7, 130)), (4, (5, 4, 1)), (16, (16, 33, 200)), (64, (63, 64, 65)))
  def test_decode_equals_dense(self, page_size, lengths):
    rng = np.random.default_rng(0)
    rows = [(rng.normal(size=(s, K, H)), rng.normal(size=(s, K, H))) for s in lengths]
    pool, tables = poisoned_pool(rng, 240, page_size, rows)
    width = max(map(len, tables)) + 3
    table_BJ = np.asarray([t + [0] * (width - len(t)) for t in tables], np.int32)
    q_BNH = rng.normal(size=(3, K * G, H)).astype(np.float32)
    length_B1 = np.asarray(lengths, np.int32)[:, None]
    out_BNH = jax.jit(paged_attention.decode)(q_BNH[:, None], Pool(pool, None), table_BJ, length_B1)[:, 0]
    for b, (keys, values) in enumerate(rows):
      wanted = attention.masked_attention(
          q_BNH[b][None, None], keys[None].astype(np.float32), values[None].astype(np.float32),
          np.ones((1, 1, lengths[b]), bool))
      np.testing.assert_allclose(out_BNH[b], wanted[0, 0], atol=2e-6)

  @parameterized.parameters((5, None), (None, 2.0), (1, None), (17, 1.5))
  def test_windows_and_caps_equal_dense_and_pages_before_the_window_may_be_freed(self, window, soft_cap):
    """Three queries per row: what a row's first query no longer sees is nan, keys and values both."""
    rng = np.random.default_rng(4)
    rows = [(rng.normal(size=(s, K, H)), rng.normal(size=(s, K, H))) for s in (40, 3, 19)]
    given = [tuple(np.array(x) for x in row) for row in rows]
    if window:
      for keys, values in given:
        gone = max(0, len(keys) - 2 - window)
        keys[:gone], values[:gone] = np.nan, np.nan
    pool, tables = poisoned_pool(rng, 24, 4, given)
    table_BJ = np.asarray([t + [0] * (12 - len(t)) for t in tables], np.int32)
    length_BQ = np.asarray([[38, 39, 40], [1, 2, 3], [17, 18, 19]], np.int32)
    q_BQNH = 3 * rng.normal(size=(3, 3, K * G, H)).astype(np.float32)
    out_BQNH = paged_attention.decode(q_BQNH, Pool(jnp.asarray(pool), None), table_BJ, length_BQ, window=window,
                                      soft_cap=soft_cap)
    for b, (keys, values) in enumerate(rows):
      place_S = np.arange(len(keys))
      mask_QS = (place_S < length_BQ[b][:, None]) & (place_S >= length_BQ[b][:, None] - (window or 100))
      np.testing.assert_allclose(out_BQNH[b], dense(q_BQNH[b], keys, values, mask_QS, soft_cap=soft_cap), atol=5e-6)

  def test_latent_rows_are_their_own_values(self):
    """One key/value head of 12 + 4 lanes, its first 12 the value, under a scale that is not the row's width."""
    rng = np.random.default_rng(5)
    row_SH, q_QNH = rng.normal(size=(11, 16)).astype(np.float32), rng.normal(size=(2, 5, 16)).astype(np.float32)
    table, length_Q = np.asarray([2, 1, 4]), np.asarray([10, 11])
    mask_QS = np.arange(11) < length_Q[:, None]
    wanted = dense(q_QNH, row_SH[:, None], row_SH[:, None, :12], mask_QS, scale=0.3)
    for dtype, atol in (('float32', 5e-6), ('int8', 0.05)):
      scale_ZKXC = jnp.full((6, 1, 1, 4), jnp.nan) if dtype == 'int8' else None
      pool = Pool(jnp.zeros((6, 1, 4, 16), dtype), scale_ZKXC)
      pool = paged_attention.write(pool, row_SH[:, None], None, table[np.arange(11) // 4], np.arange(11) % 4)
      out_BQNH = paged_attention.decode(q_QNH[None], pool, table[None], length_Q[None], scale=0.3, value_dim=12)
      np.testing.assert_allclose(out_BQNH[0], wanted, atol=atol)

  def test_a_window_needs_to_let_a_token_see_itself(self):
    with self.assertRaisesRegex(ValueError, 'window = 0 must be at least 1'):
      paged_attention.first_seen(np.asarray([[3]]), 0)

  @parameterized.parameters((3, None), (6, 2.0), (None, 1.0))
  def test_chunk_with_a_window_and_a_cap_equals_dense(self, window, soft_cap):
    """Six new tokens after ten of their own row."""
    rng = np.random.default_rng(6)
    keys, values = rng.normal(size=(2, 16, K, H)).astype(np.float32)
    pool, (table,) = poisoned_pool(rng, 8, 4, [(keys[:10], values[:10])])
    q_TNH = 3 * rng.normal(size=(6, K * G, H)).astype(np.float32)
    position_T = np.arange(10, 16)
    live_TJ = np.tile(np.asarray([4, 4, 2], np.int32), (6, 1))
    given = (q_TNH, keys[10:], values[10:], np.tri(6, dtype=bool))
    given = (*given, Pool(jnp.asarray(pool), None), np.asarray(table), np.int32(3))
    out_TNH = paged_attention.chunk(*given, live_TJ, position_T=position_T, first_J=np.asarray([0, 4, 8]),
                                    window=window, soft_cap=soft_cap)
    past_TS = position_T[:, None] - np.arange(16)[None]
    mask_TS = (past_TS >= 0) & (past_TS < (window or 100))
    np.testing.assert_allclose(out_TNH, dense(q_TNH, keys, values, mask_TS, soft_cap=soft_cap), atol=5e-6)
    with self.assertRaisesRegex(ValueError, 'window = 3: needs position_T'):
      paged_attention.chunk(*given, live_TJ, window=3)

  def test_chunk_equals_dense_with_a_shared_prefix(self):
    """Row 0 has 6 earlier tokens, row 1 shares its first page of 4, row 2 has none; two padding tokens."""
    rng = np.random.default_rng(1)
    C, new, earlier = 4, (3, 5, 2), (6, 4, 0)
    draw = lambda n: rng.normal(size=(n, K, H)).astype(np.float32)
    old = [(draw(6), draw(6))]
    pool, (table,) = poisoned_pool(rng, 12, C, old)
    fresh = [(draw(n), draw(n)) for n in new]
    pad = draw(2)
    k_TKH, v_TKH = (np.concatenate([f[i] for f in fresh] + [pad]) for i in range(2))
    row_T = np.asarray([0] * 3 + [1] * 5 + [2] * 2 + [-1] * 2)
    mask_TS = (row_T[:, None] == row_T[None]) & np.tri(12, dtype=bool)
    live_RJ = np.asarray([[4, 2, 0], [4, 0, 0], [0, 0, 0], [0, 0, 0]], np.int32)  # the last row is padding's
    q_TNH = rng.normal(size=(12, K * G, H)).astype(np.float32)
    out_TNH = jax.jit(paged_attention.chunk)(
        q_TNH, k_TKH, v_TKH, mask_TS, Pool(pool, None), np.asarray([*table, 0], np.int32), np.int32(2), live_RJ[row_T])
    self.assertTrue(np.isfinite(out_TNH).all())
    for row, (keys, values) in enumerate(fresh):
      k = np.concatenate([old[0][0][:earlier[row]], keys])[None]
      v = np.concatenate([old[0][1][:earlier[row]], values])[None]
      mask = np.tri(k.shape[1], dtype=bool)[None, earlier[row]:]
      wanted = attention.masked_attention(q_TNH[row_T == row][None], k, v, mask)
      np.testing.assert_allclose(out_TNH[row_T == row], wanted[0], atol=2e-6)

  def test_write_touches_only_its_places(self):
    pool = Pool(jnp.zeros((3, K, 4, 2 * H)), None)
    ones = np.ones((2, K, H), np.float32)
    out = np.asarray(paged_attention.write(pool, ones, 2 * ones, np.asarray([1, 2]), np.asarray([3, 0])).kv_ZKCH)
    np.testing.assert_array_equal(out[[1, 2], :, [3, 0], :H], 1)
    np.testing.assert_array_equal(out[[1, 2], :, [3, 0], H:], 2)
    self.assertEqual(np.count_nonzero(out), 2 * K * 2 * H)

  @parameterized.parameters(('int8', 0.5 / 127), ('float8_e4m3fn', 2 ** -4))
  def test_scaled_pools_store_each_token_within_their_precision(self, dtype, precision):
    """Half a step of int8, half a unit in the last of e4m3's 3 bits; a token 1000 times larger costs no other."""
    rng = np.random.default_rng(2)
    pool = Pool(jnp.zeros((3, K, 4, 2 * H), dtype), jnp.full((3, K, 2, 4), jnp.nan))
    k_TKH, v_TKH = rng.normal(size=(2, 5, K, H)).astype(np.float32)
    k_TKH[3] *= 1000
    page_T, offset_T = np.asarray([1, 1, 2, 2, 1]), np.asarray([0, 3, 1, 2, 1])
    pool = paged_attention.write(pool, k_TKH, v_TKH, page_T, offset_T)
    stored = np.asarray(pool.kv_ZKCH.astype(jnp.float32))[page_T, :, offset_T].reshape(5, K, 2, H)
    for i, wanted in enumerate((k_TKH, v_TKH)):
      got = stored[:, :, i] * np.asarray(pool.scale_ZKXC)[page_T, :, i, offset_T][..., None]
      largest = np.abs(wanted).max(-1, keepdims=True)
      size = np.broadcast_to(largest, wanted.shape) if dtype == 'int8' else np.abs(wanted) + largest * 2 ** -9
      np.testing.assert_array_less(np.abs(got - wanted), 1.001 * precision * size)

  @parameterized.parameters('int8', 'float8_e4m3fn')
  def test_attention_over_a_scaled_pool_is_that_over_its_values(self, dtype):
    rng = np.random.default_rng(3)
    pool = Pool(jnp.zeros((6, K, 4, 2 * H), dtype), jnp.full((6, K, 2, 4), jnp.nan))
    k_TKH, v_TKH = rng.normal(size=(2, 10, K, H)).astype(np.float32)
    table = np.asarray([3, 1, 4])
    pool = paged_attention.write(pool, k_TKH, v_TKH, table[np.arange(10) // 4], np.arange(10) % 4)
    scale = np.repeat(np.asarray(pool.scale_ZKXC).swapaxes(2, 3), H, axis=-1)
    plain = Pool(pool.kv_ZKCH.astype(jnp.float32) * scale, None)
    q_BQNH = rng.normal(size=(1, 3, K * G, H)).astype(np.float32)
    length_BQ = np.asarray([[8, 9, 10]])
    ours, wanted = (paged_attention.decode(q_BQNH, p, table[None], length_BQ) for p in (pool, plain))
    np.testing.assert_allclose(ours, wanted, atol=2e-6)
    mask, live_TJ = np.ones((2, 2), bool), np.asarray([[4, 4, 2]] * 2)
    ours, wanted = (
        paged_attention.chunk(q_BQNH[0, :2], k_TKH[:2], v_TKH[:2], mask, p, table, np.int32(3), live_TJ)
        for p in (pool, plain))
    np.testing.assert_allclose(ours, wanted, atol=2e-6)


if __name__ == '__main__':
  absltest.main()
