"""Prompts share the pages of their longest cached prefix, and only under the parameters that filled them."""

import numpy as np
from absl.testing import absltest

from ptjax.sample.page_pool import PagePool
from ptjax.sample.prefix_cache import PrefixCache

A = np.arange(10, dtype=np.int32)  # two full pages of 4 and a tail of 2


class PrefixCacheTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.pool = PagePool(10)
    self.cache = PrefixCache(self.pool, 4)
    self.pages = self.pool.take(3)

  def test_full_pages_are_matched_and_held(self):
    self.cache.enter(0, A, self.pages)
    self.assertEqual(self.cache.match(0, A), (self.pages[:2], 8))
    self.assertEqual(self.pool.refs_Z[self.pages].tolist(), [3, 3, 1])
    self.assertEqual(self.cache.match(0, A[:7])[1], 4)
    other = A.copy()
    other[1] = 99
    self.assertEqual(self.cache.match(0, other), ([], 0))

  def test_the_second_page_counts_only_after_the_same_first_one(self):
    self.cache.enter(0, A, self.pages)
    self.assertEqual(self.cache.match(0, A[4:]), ([], 0))

  def test_another_version_never_matches(self):
    self.cache.enter(0, A, self.pages)
    self.assertEqual(self.cache.match(1, A), ([], 0))

  def test_a_tail_matches_exactly_itself(self):
    self.cache.enter(0, A, self.pages, tail=True)
    self.assertEqual(self.cache.match(0, A), (self.pages, 10))
    self.assertEqual(self.cache.match(0, np.append(A, 10).astype(np.int32))[1], 8)
    self.assertEqual(self.cache.match(0, A[:9])[1], 8)

  def test_next_key_names_the_first_unknown_page(self):
    self.assertIsNotNone(self.cache.next_key(0, A))
    self.assertEqual(self.cache.next_key(0, A), self.cache.next_key(0, A[:4]))
    self.cache.enter(0, A, self.pages)
    self.assertIsNone(self.cache.next_key(0, A[:8]))
    self.assertNotEqual(self.cache.next_key(0, A), self.cache.next_key(0, A[:9]))

  def test_eviction_takes_the_oldest_leaves_that_nobody_holds(self):
    self.cache.enter(0, A, self.pages)
    (b,) = self.pool.take(1)
    self.cache.enter(0, A[4:8], [b])
    for page in [*self.pages, b]:
      self.pool.release(page)
    held, _ = self.cache.match(0, A[4:8])  # b is in use
    self.assertEqual(self.cache.evict(1), 1)  # the second page of A goes before the first
    self.assertEqual(self.cache.match(0, A)[1], 4)
    self.pool.release(self.pages[0])
    self.assertEqual(self.cache.evict(5), 1)
    self.assertEqual(self.cache.pages, held)

  def test_a_known_page_is_kept_and_the_copy_stays_with_its_owner(self):
    self.cache.enter(0, A, self.pages)
    twin = self.pool.take(2)
    self.cache.enter(0, A, twin)
    self.assertEqual(self.pool.refs_Z[twin].tolist(), [1, 1])

  def test_clear_keeps_what_others_hold(self):
    self.cache.enter(0, A, self.pages)
    self.cache.clear()
    self.assertEqual(self.pool.refs_Z[self.pages].tolist(), [1, 1, 1])
    self.assertEmpty(self.cache)


if __name__ == '__main__':
  absltest.main()
