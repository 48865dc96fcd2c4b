"""Packing: trees by hand, packed equals unpacked, every broken promise of a batch is named."""

from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np

from ptjax import types
from ptjax.data import batching


def completion(*ids, mask=None, advantage=None):
  done = {'token_ids': np.array(ids, np.int32), 'mask': np.array(mask if mask else [True] * len(ids), bool)}
  return done if advantage is None else done | {'advantage': np.full(len(ids), advantage, np.float32)}


def tree(prompt, *completions):
  return types.TokenizedSequence(np.array(prompt, np.int32), list(completions))


def rollout(task, prompt, ids, logp=-1.0):
  n = len(ids)
  return types.Rollout(task, task, np.array(prompt, np.int32), np.array(ids, np.int32), np.ones(n, bool),
                       np.full(n, logp, np.float32), np.zeros(n, np.int32), 'stop', 1.0)


def paths(batches):
  """What a model would be trained on: for each trained token its whole visible context, following parents."""
  seen = []
  for batch in batches:
    for b, t in np.argwhere(batch.mask_BT):
      context, s = [int(batch.token_BT[b, t])], t
      while batch.position_BT[b, s]:
        s = batch.parent_BT[b, s]
        context.append(int(batch.token_BT[b, s]))
      seen.append((tuple(context), float(batch.advantage_BT[b, t])))
  return sorted(seen)


class PackTest(parameterized.TestCase):

  def test_two_segments_in_one_row_by_hand(self):
    trees = [tree([1, 2], completion(3, 4, advantage=0.5), completion(5, mask=[True], advantage=-1.0)),
             tree([6], completion(7, 8, mask=[False, True]))]
    (batch,), dropped = batching.pack(trees, rows=1, seq_len=10, max_branches=4)
    self.assertEqual(dropped, 0)
    #                                                  trunk | br 1 | 2 | trunk | br 3 | padding
    np.testing.assert_array_equal(batch.token_BT[0],    [1, 2, 3, 4, 5, 6, 7, 8, 0, 0])
    np.testing.assert_array_equal(batch.segment_BT[0],  [1, 1, 1, 1, 1, 2, 2, 2, 0, 0])
    np.testing.assert_array_equal(batch.branch_BT[0],   [0, 0, 1, 1, 2, 0, 3, 3, 0, 0])
    np.testing.assert_array_equal(batch.position_BT[0], [0, 1, 2, 3, 2, 0, 1, 2, 0, 0])
    np.testing.assert_array_equal(batch.parent_BT[0],   [0, 0, 1, 2, 1, 5, 5, 6, 8, 9])
    np.testing.assert_array_equal(batch.mask_BT[0],     [0, 0, 1, 1, 1, 0, 0, 1, 0, 0])
    np.testing.assert_allclose(batch.advantage_BT[0],   [0, 0, 0.5, 0.5, -1, 0, 1, 1, 0, 0])
    batching.check_batch(batch, max_branches=4, vocab_size=9)

  def test_rows_fill_batches_of_one_shape(self):
    packed = batching.pack([tree([1], completion(*range(2, 6)))] * 3, rows=2, seq_len=8, max_branches=2)
    self.assertEqual([b.token_BT.shape for b in packed.batches], [(2, 8), (2, 8)])
    self.assertEqual(packed.batches[1].mask_BT.sum(axis=1).tolist(), [4, 0])

  def test_nothing_gives_one_batch_of_padding(self):
    (batch,), dropped = batching.pack([], rows=2, seq_len=4, max_branches=1)
    self.assertEqual((batch.token_BT.shape, dropped, batch.mask_BT.any()), ((2, 4), 0, False))
    batching.check_batch(batch, max_branches=1, vocab_size=1)

  def test_takes_the_width_with_least_padding(self):
    short = [tree([1], completion(2, 3))]
    (batch,), _ = batching.pack(short, rows=1, seq_len=(4, 16), max_branches=1)
    self.assertEqual(batch.token_BT.shape, (1, 4))
    (batch,), _ = batching.pack(short + [tree([1], completion(*range(9)))], rows=1, seq_len=(4, 16), max_branches=2)
    self.assertEqual(batch.token_BT.shape, (1, 16))

  def test_a_group_too_wide_for_a_row_repeats_its_prompt(self):
    wide = tree([1, 2], *(completion(n, n) for n in (3, 4, 5)))
    packed = batching.pack([wide], rows=1, seq_len=6, max_branches=8)
    self.assertLen(packed.batches, 2)
    whole = batching.pack([wide], rows=1, seq_len=8, max_branches=8)
    self.assertEqual(paths(packed.batches), paths(whole.batches))

  @parameterized.parameters(dict(max_branches=2), dict(max_branches=9, loss_tokens=4))
  def test_row_limits_hold(self, **limits):
    wide = tree([1], *(completion(n, n) for n in (3, 4, 5, 6)))
    packed = batching.pack([wide], rows=1, seq_len=32, **limits)
    self.assertLen(packed.batches, 2)
    for batch in packed.batches:
      self.assertEqual((batch.branch_BT.max(), batch.mask_BT.sum()), (2, 4))

  def test_pairs_stay_together(self):
    pairs = batching.preference([1], [([2, 3], [4]), ([5], [6, 7]), ([8, 8], None)])
    packed = batching.pack([pairs], rows=1, seq_len=8, max_branches=4, unit=2)
    kept = [[(b.token_BT[0][b.branch_BT[0] == k]).tolist() for k in range(1, 5)] for b in packed.batches]
    self.assertEqual(sorted(kept), [[[2, 3], [4], [5], [6, 7]], [[8, 8], [], [], []]])

  def test_preference_masks_leave_tokens_out(self):
    pairs = batching.preference([1], [([2, 3], [4])], [([True, False], [True])])
    (batch,), _ = batching.pack([pairs], rows=1, seq_len=4, max_branches=2, unit=2)
    self.assertEqual(batch.mask_BT[0].tolist(), [False, True, False, True])

  def test_too_long(self):
    trees = [tree([1, 2, 3], completion(4, 5), completion(6)), tree([1], completion(2))]
    with self.assertRaisesRegex(ValueError, 'sequence 0: prompt and completion take 5 tokens .* 4 and 4'):
      batching.pack(trees, rows=1, seq_len=4, max_branches=2)
    packed = batching.pack(trees, rows=1, seq_len=4, max_branches=2, too_long='drop')
    self.assertEqual(packed.dropped, 1)
    self.assertEqual(sum(b.mask_BT.sum() for b in packed.batches), 2)
    with self.assertRaisesRegex(ValueError, "too_long is 'cut'"):
      batching.pack(trees, rows=1, seq_len=4, max_branches=2, too_long='cut')

  @parameterized.parameters(
      (tree([], completion(1)), 'prompt is empty'),
      (tree([1]), '0 completions'),
      (tree([1], {'token_ids': np.arange(3), 'mask': np.ones(2, bool)}), r'mask has shape \(2,\)'),
  )
  def test_malformed_sequences_are_named(self, sequence, message):
    with self.assertRaisesRegex(ValueError, 'sequence 0.*' + message):
      batching.pack([sequence], rows=1, seq_len=8, max_branches=2)

  @given(st.data())
  @settings(max_examples=40, deadline=None)
  def test_packed_equals_unpacked(self, data):
    ids = st.lists(st.integers(1, 99), min_size=1, max_size=6)
    several = st.lists(ids, min_size=1, max_size=4)
    trees = [tree(data.draw(ids), *(completion(*c, advantage=n) for n, c in enumerate(data.draw(several))))
             for _ in range(data.draw(st.integers(1, 5)))]
    alone = [batching.pack([tree(t.prompt_ids, c)], rows=1, seq_len=12, max_branches=1).batches[0]
             for t in trees for c in t.completions]
    packed = batching.pack(trees, rows=2, seq_len=(12, 20), max_branches=5, loss_tokens=12)
    for batch in packed.batches:
      batching.check_batch(batch, max_branches=5, vocab_size=100)
      self.assertLessEqual(batch.mask_BT.sum(axis=1).max(), 12)
    self.assertEqual(paths(packed.batches), paths(alone))


class GroupsTest(absltest.TestCase):

  def test_group_shares_its_prompt_and_leaves_errors_out(self):
    rollouts = [rollout('a', [1, 2], [3]), rollout('a', [1, 2], [4, 5], -2.0), rollout('b', [6], [7]),
                rollout('b', [6], [8])]
    trainable_UR = np.array([[True, True], [True, False]])
    first, second = batching.groups(rollouts, np.array([[1.0, -1.0], [0.5, 9.0]]), trainable_UR)
    self.assertEqual([c['token_ids'].tolist() for c in first.completions], [[3], [4, 5]])
    np.testing.assert_allclose(first.completions[1]['advantage'], [-1, -1])
    np.testing.assert_allclose(first.completions[1]['behavior_logp'], [-2, -2])
    self.assertLen(second.completions, 1)

  def test_mixed_groups_are_refused(self):
    mixed = [rollout('a', [1], [3]), rollout('b', [2], [3])]
    with self.assertRaisesRegex(ValueError, 'do not share one prompt'):
      batching.groups(mixed, np.zeros((1, 2)), np.ones((1, 2), bool))
    with self.assertRaisesRegex(ValueError, 'must be U'):
      batching.groups(mixed, np.zeros((2, 2)), np.ones((2, 2), bool))


class SplitTest(absltest.TestCase):

  def test_parts_join_to_the_whole(self):
    (batch,), _ = batching.pack([tree([1], completion(*range(2, 6)))] * 4, rows=4, seq_len=5, max_branches=1)
    parts = batching.split(batch, 2)
    self.assertEqual([p.token_BT.shape for p in parts], [(2, 5)] * 2)
    np.testing.assert_array_equal(np.concatenate([p.token_BT for p in parts]), batch.token_BT)
    with self.assertRaisesRegex(ValueError, '4 rows do not split into 3'):
      batching.split(batch, 3)


class CheckBatchTest(parameterized.TestCase):

  @parameterized.parameters(
      ('token_BT', (0, 1), 50, r'token_BT\[0, 1\] is outside \[0, 50\)'),
      ('branch_BT', (0, 2), 7, r'branch_BT\[0, 2\] is outside \[0, 4\]'),
      ('mask_BT', (0, 1), True, r'mask_BT\[0, 1\] is true on a prompt'),
      ('advantage_BT', (0, 2), np.nan, r'advantage_BT\[0, 2\] is not finite'),
      ('behavior_logp_BT', (0, 3), np.inf, r'behavior_logp_BT\[0, 3\] is not finite'),
      ('position_BT', (0, 4), 3, r'position_BT\[0, 4\] is 3; .* 2'),
      ('parent_BT', (0, 4), 3, r'parent_BT\[0, 4\] is 3; .* 1'),
      ('branch_BT', (0, 4), 1, r'position_BT\[0, 4\] is 2; .* 4'),
      ('segment_BT', (0, 6), 1, r'row 0, column 6: segment 1, branch 2 breaks'),
      ('segment_BT', (0, 0), 0, r'row 0, column 0: segment 0'),
      ('segment_BT', (0, 7), 2, r'row 0, column 7: segment 2, branch 0'),
  )
  def test_broken_promises_are_named(self, field, at, value, message):
    trees = [tree([1, 2], completion(3, 4), completion(5)), tree([6], completion(7))]
    (batch,), _ = batching.pack(trees, rows=1, seq_len=9, max_branches=4)
    batching.check_batch(batch, max_branches=4, vocab_size=50)
    getattr(batch, field)[at] = value
    if field == 'segment_BT' and at == (0, 6):
      batch.branch_BT[0, 6] = 2
    with self.assertRaisesRegex(ValueError, message):
      batching.check_batch(batch, max_branches=4, vocab_size=50)

  def test_wrong_dtype_and_shape_are_named(self):
    (batch,), _ = batching.pack([], rows=1, seq_len=4, max_branches=1)
    with self.assertRaisesRegex(ValueError, r'mask_BT is int32\(1, 4\); need bool'):
      batching.check_batch(batch._replace(mask_BT=batch.mask_BT.astype(np.int32)), max_branches=1, vocab_size=5)
    with self.assertRaisesRegex(ValueError, r'ref_logp_BT is float32\(1, 3\)'):
      batching.check_batch(batch._replace(ref_logp_BT=batch.ref_logp_BT[:, :3]), max_branches=1, vocab_size=5)


if __name__ == '__main__':
  absltest.main()
