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
