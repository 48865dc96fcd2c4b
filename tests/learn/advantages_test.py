"""Advantages: errors stay out of every statistic, equal groups give exactly zero, order does not matter."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from ptjax.learn import advantages

ALL = tuple(advantages.ADVANTAGES)
GROUP_RELATIVE = ('grpo', 'grpo_population_std', 'dr_grpo', 'rloo', 'reinforce_pp_baseline')
REWARD_UR = np.array([[1.0, 0.0, 0.5], [0.1, 0.1, 0.1], [0.0, 1.0, 0.3]])
ALL_UR = np.ones(REWARD_UR.shape, bool)


class AdvantagesTest(parameterized.TestCase):

  @parameterized.parameters(*ALL)
  def test_an_error_enters_nothing(self, name):
    compute = advantages.ADVANTAGES[name]
    wide_UR = np.concatenate([REWARD_UR, np.full((3, 1), np.nan)], axis=1)
    trainable_UR = np.concatenate([ALL_UR, np.zeros((3, 1), bool)], axis=1)
    got_UR = compute(wide_UR, trainable_UR)
    np.testing.assert_allclose(got_UR[:, :3], compute(REWARD_UR, ALL_UR), rtol=1e-6)
    np.testing.assert_array_equal(got_UR[:, 3], np.zeros(3))
    self.assertEqual(got_UR.dtype, np.float32)

  @parameterized.parameters(*GROUP_RELATIVE)
  def test_fewer_than_two_trainable_give_zero(self, name):
    trainable_UR = np.array([[True, False, False], [False, False, False], [True, True, True]])
    got_UR = advantages.ADVANTAGES[name](REWARD_UR, trainable_UR)
    self.assertFalse(got_UR[:2].any())
    self.assertTrue(got_UR[2].any())

  @parameterized.parameters(*GROUP_RELATIVE)
  def test_equal_rewards_give_exactly_zero(self, name):
    got_UR = advantages.ADVANTAGES[name](REWARD_UR, ALL_UR)
    np.testing.assert_array_equal(got_UR[1], np.zeros(3))

  @parameterized.parameters(*ALL)
  def test_shuffling_groups_permutes(self, name):
    compute, order = advantages.ADVANTAGES[name], [2, 0, 1]
    np.testing.assert_allclose(compute(REWARD_UR[order], ALL_UR), compute(REWARD_UR, ALL_UR)[order], rtol=1e-6)

  @parameterized.parameters(*ALL)
  def test_a_batch_without_trainable_rollouts_is_zero(self, name):
    self.assertFalse(advantages.ADVANTAGES[name](REWARD_UR, ~ALL_UR).any())

  def test_reinforce_pp_by_hand(self):
    # mean 0.5, population variance 0.25
    got_UR = advantages.reinforce_pp(np.array([[1.0, 0.0], [1.0, 0.0]]), np.ones((2, 2), bool))
    np.testing.assert_allclose(got_UR, [[1, -1], [1, -1]], rtol=1e-6)

  def test_reinforce_pp_baseline_by_hand(self):
    # centred 0.5 -0.5 | 1 -1, population deviation sqrt(0.625)
    got_UR = advantages.reinforce_pp_baseline(np.array([[1.0, 0.0], [2.0, 0.0]]), np.ones((2, 2), bool))
    np.testing.assert_allclose(got_UR, np.array([[0.5, -0.5], [1, -1]]) / np.sqrt(0.625), rtol=1e-6)

  def test_informative_ignores_errors(self):
    reward_UR = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    trainable_UR = np.array([[True, True], [True, False], [True, True]])
    self.assertEqual(advantages.informative(reward_UR, trainable_UR).tolist(), [True, False, False])


class GaeTest(absltest.TestCase):

  def test_tool_tokens_equal_the_compressed_run(self):
    rng = np.random.default_rng(0)
    mask_BT = rng.random((4, 9)) < 0.6
    reward_BT, value_BT = rng.normal(size=(2, 4, 9))
    bootstrap_B = rng.normal(size=4)
    got_BT, returns_BT = advantages.gae(
        np.where(mask_BT, reward_BT, np.nan), value_BT, mask_BT, bootstrap_B, gamma=0.9, lam=0.8)
    for b in range(4):
      keep = mask_BT[b]
      want, want_returns = advantages.gae(
          reward_BT[b:b + 1, keep], value_BT[b:b + 1, keep], np.ones((1, keep.sum()), bool), bootstrap_B[b:b + 1],
          gamma=0.9, lam=0.8)
      np.testing.assert_allclose(got_BT[b, keep], want[0])
      np.testing.assert_allclose(returns_BT[b, keep], want_returns[0])
    self.assertFalse(got_BT[~mask_BT].any() or returns_BT[~mask_BT].any())

  def test_score_lands_on_the_last_trained_token(self):
    mask_BT = np.array([[False, True, True, False]])
    reward_BT = advantages.kl_rewards(np.zeros((1, 4)), np.zeros((1, 4)), mask_BT, np.array([2.0]), beta=0.1)
    np.testing.assert_allclose(reward_BT, [[0, 0, 2, 0]])
    np.testing.assert_allclose(advantages.returns(reward_BT, mask_BT, gamma=0.5), [[0, 1, 2, 0]])


if __name__ == '__main__':
  absltest.main()
