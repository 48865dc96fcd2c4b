"""Mixtures: exact counts in every block, each epoch a permutation, resume to the record."""

import collections
import json

from absl.testing import absltest
from absl.testing import parameterized

from ptjax.data import mixture

SOURCES = {'code': [('code', i) for i in range(5)], 'math': [('math', i) for i in range(7)]}


def make(**more):
  return mixture.Mixture(SOURCES, dict(code=0.3, math=0.7), **(dict(block=10, seed=3) | more))


class LargestRemainderTest(parameterized.TestCase):

  @parameterized.parameters(
      ([0.5, 0.3, 0.2], 7, [4, 2, 1]), ([1, 1], 3, [2, 1]), ([0.3, 0.7], 10, [3, 7]), ([1, 0], 2, [2, 0]),
      ([1 / 3] * 3, 3, [1, 1, 1]), ([0.1] * 10, 10, [1] * 10))
  def test_counts(self, weights, total, want):
    self.assertEqual(mixture.largest_remainder(weights, total), want)

  def test_bad_weights(self):
    for weights in ([0.0], [-1.0, 2.0]):
      with self.assertRaisesRegex(ValueError, 'positive sum'):
        mixture.largest_remainder(weights, 3)


class MixtureTest(absltest.TestCase):

  def test_every_block_is_exact(self):
    stream = make()
    for _ in range(20):
      self.assertEqual(collections.Counter(name for name, _ in stream.draw(10)), {'code': 3, 'math': 7})

  def test_uneven_counts_are_exact_in_every_block(self):
    sources = {k: [(k, i) for i in range(9)] for k in 'abc'}
    stream = mixture.Mixture(sources, dict(a=0.5, b=0.3, c=0.2), block=7, seed=0)
    for _ in range(20):
      self.assertEqual(collections.Counter(name for name, _ in stream.draw(7)), {'a': 4, 'b': 2, 'c': 1})

  def test_each_epoch_of_a_source_is_another_permutation(self):
    drawn = [i for name, i in make().draw(100) if name == 'code']
    epochs = [drawn[i:i + 5] for i in range(0, 30, 5)]
    for epoch in epochs:
      self.assertCountEqual(epoch, range(5))
    self.assertGreater(len(set(map(tuple, epochs))), 1)

  def test_resume_goes_on_with_the_same_records(self):
    stream, again = make(), make()
    stream.draw(13)
    again.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    self.assertEqual(stream.draw(40), again.draw(40))

  def test_seed_changes_the_order(self):
    self.assertNotEqual(make().draw(30), make(seed=4).draw(30))

  def test_errors_are_sentences(self):
    with self.assertRaisesRegex(ValueError, "weights name .'code'., but the sources are .'code', 'math'."):
      mixture.Mixture(SOURCES, dict(code=1.0), block=10, seed=0)
    with self.assertRaisesRegex(ValueError, "source 'math' is empty"):
      mixture.Mixture(SOURCES | {'math': []}, dict(code=0.3, math=0.7), block=10, seed=0)
    with self.assertRaisesRegex(ValueError, "source 'code' with weight 0.01 gets none of the 10"):
      mixture.Mixture(SOURCES, dict(code=0.01, math=0.99), block=10, seed=0)


if __name__ == '__main__':
  absltest.main()
