"""Rewards: broken verifiers and cancelled rollouts are no evidence; cutting by length alone decides nothing."""

from absl.testing import absltest
import numpy as np

from ptjax import types
from ptjax.rl import reward


def rollout(task, finish='stop', drawn=3, tool=0):
  n = drawn + tool
  return types.Rollout(task, task, np.array([1]), np.arange(n), np.arange(n) < drawn, np.zeros(n, np.float32),
                       np.zeros(n, np.int32), finish, 1.0)


class ScoreTest(absltest.TestCase):

  def test_by_hand(self):
    verdicts = [types.Verdict('pass', 1.0), types.Verdict('fail', 0.0), types.Verdict('timeout', 0.0),
                types.Verdict('error', 1.0), types.Verdict('pass', 0.5), types.Verdict('pass', 1.0)]
    rollouts = [rollout('a'), rollout('a'), rollout('a'), rollout('b'), rollout('b', 'length'),
                rollout('b', 'cancelled')]
    reward_UR, trainable_UR = reward.score([verdicts[:3], verdicts[3:]], [rollouts[:3], rollouts[3:]])
    np.testing.assert_array_equal(reward_UR, np.array([[1, 0, 0], [0, 0.5, 0]], np.float32))
    np.testing.assert_array_equal(trainable_UR, [[True, True, True], [False, True, False]])
    self.assertEqual((reward_UR.dtype, trainable_UR.dtype), (np.float32, np.bool_))

  def test_mismatched_inputs_are_refused(self):
    good = types.Verdict('pass', 1.0)
    a = rollout('a')
    for verdicts, groups in (([[good]], [[a, a]]), ([[good], [good] * 2], [[a], [a] * 2]), ([[good]], []), ([], [])):
      with self.assertRaisesRegex(ValueError, 'all must have the same size'):
        reward.score(verdicts, groups)
    with self.assertRaisesRegex(ValueError, "group 0 mixes rollouts of .'a', 'b'."):
      reward.score([[good] * 2], [[a, rollout('b')]])


class ShapeOverlongTest(absltest.TestCase):

  def test_counts_drawn_tokens_alone(self):
    rollouts = [rollout('a', drawn=15, tool=9), rollout('a', drawn=18), rollout('a', drawn=20), rollout('a', drawn=30)]
    got_UR = reward.shape_overlong(np.ones((1, 4), np.float32), [rollouts], max_tokens=20, cache_tokens=5)
    np.testing.assert_allclose(got_UR, [[1, 0.4, 0, 0]], atol=1e-6)

  def test_zero_cache_leaves_rewards_alone(self):
    reward_UR = np.ones((1, 1), np.float32)
    self.assertIs(reward.shape_overlong(reward_UR, [[rollout('a', drawn=99)]], max_tokens=5, cache_tokens=0),
                  reward_UR)


if __name__ == '__main__':
  absltest.main()
