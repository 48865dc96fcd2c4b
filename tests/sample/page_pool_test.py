"""Pages are lent once, shared by count, and all come back."""

from absl.testing import absltest

from ptjax.sample.page_pool import SINK, PagePool


class PagePoolTest(absltest.TestCase):

  def test_a_page_is_free_again_after_its_last_holder(self):
    pool = PagePool(4)
    self.assertEqual(pool.free, 3)
    a, b = pool.take(2)
    self.assertNotIn(SINK, (a, b))
    pool.hold(a)
    pool.release(a)
    self.assertEqual(pool.free, 1)
    pool.release(a)
    self.assertEqual(pool.free, 2)
    self.assertLen({b, *pool.take(2)}, 3)

  def test_pages_of_a_sequence_lie_in_the_shards_in_turn(self):
    pool = PagePool(12, shards=3)  # runs 0-3, 4-7, 8-11; 0 is the sink
    self.assertEqual((pool.free, pool.longest), (11, 9))
    pages = pool.take(4) + pool.take(2, 4)
    self.assertEqual([page // 4 for page in pages], [0, 1, 2, 0, 1, 2])
    self.assertEqual(pool.short(3), 0)
    self.assertEqual([pool.short(2, first) for first in range(3)], [0, 0, 0])
    self.assertEqual(pool.short(4), 1)  # a fourth page would be the second of shard 0, which has one left
    self.assertEqual(pool.short(4, 1), 0)
    with self.assertRaisesRegex(RuntimeError, '4 pages wanted, 5 of 12 are free and 1 are missing'):
      pool.take(4)
    pool.release(pages[3])
    self.assertIn(pages[3], pool.take(4))

  def test_wrong_counts_are_errors(self):
    pool = PagePool(3)
    (a,) = pool.take(1)
    with self.assertRaisesRegex(RuntimeError, '2 pages wanted, 1 of 3'):
      pool.take(2)
    pool.release(a)
    with self.assertRaisesRegex(RuntimeError, 'released more often'):
      pool.release(a)
    with self.assertRaisesRegex(RuntimeError, 'cannot be shared'):
      pool.hold(a)
    with self.assertRaisesRegex(RuntimeError, 'released more often'):
      pool.release(SINK)


if __name__ == '__main__':
  absltest.main()
