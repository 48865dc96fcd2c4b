"""Off-policy weights: one on-policy, no gradient, whole sequences rejected, denominators kept."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from ptjax.learn import losses
from ptjax.learn import off_policy
from ptjax.learn import policy_losses

SETTINGS = dict(cap=2.0, floor=0.5, max_branches=2)
BRANCH_BT = jnp.array([[0, 1, 1, 2, 2, 0]])
MASK_BT = BRANCH_BT > 0
LOGP_BT = jnp.log(jnp.array([[1.0, 0.6, 0.9, 0.2, 0.2, 1.0]]))
BEHAVIOR_BT = jnp.log(jnp.array([[1.0, 0.2, 0.9, 0.4, 0.1, 1.0]]))  # ratios 3, 1 | 0.5, 2


def weight(name, logp_BT=LOGP_BT, behavior_BT=BEHAVIOR_BT):
  return losses.bind(off_policy.CORRECTIONS, name, SETTINGS, what='correction')(
      logp_BT, behavior_BT, MASK_BT, BRANCH_BT)


class CorrectionsTest(parameterized.TestCase):

  @parameterized.parameters(
      ('none', [1, 1, 1, 1]),
      ('token_tis', [2, 1, 0.5, 2]),
      ('token_mis', [0, 1, 0.5, 2]),
      ('icepop', [0, 1, 0.5, 2]),
      ('sequence_tis', [2, 2, 1, 1]),
      ('sequence_mis', [0, 0, 1, 1]),
      ('geometric_mis', [3**0.5, 3**0.5, 1, 1]),
  )
  def test_by_hand(self, name, want):
    # a hair of room at the bounds, which the ratios 0.5 and 2 meet exactly
    settings = dict(SETTINGS, cap=2.0 + 1e-5, floor=0.5 - 1e-5)
    got_BT = losses.bind(off_policy.CORRECTIONS, name, settings, what='correction')(
        LOGP_BT, BEHAVIOR_BT, MASK_BT, BRANCH_BT)
    np.testing.assert_allclose(got_BT, [[0, *want, 0]], rtol=1e-5)

  def test_table_is_covered(self):
    self.assertLen(off_policy.CORRECTIONS, 7)

  @parameterized.parameters(*off_policy.CORRECTIONS)
  def test_same_policy_gives_one_and_no_gradient(self, name):
    np.testing.assert_allclose(weight(name, LOGP_BT, LOGP_BT), MASK_BT.astype(np.float32), rtol=1e-6)
    grad_BT = jax.grad(lambda x: weight(name, x).sum())(LOGP_BT)
    self.assertFalse(np.asarray(grad_BT).any())

  @parameterized.parameters(*off_policy.CORRECTIONS)
  def test_masked_nan_leaves_no_trace(self, name):
    spoil = lambda x_BT: jnp.where(MASK_BT, x_BT, jnp.nan)
    np.testing.assert_array_equal(weight(name), weight(name, spoil(LOGP_BT), spoil(BEHAVIOR_BT)))

  def test_rejected_tokens_stay_in_the_denominator(self):
    total, count = policy_losses.token_mean(weight('token_mis') * 1.0, MASK_BT, BRANCH_BT)
    np.testing.assert_allclose((total, count), (3.5, 4.0), rtol=1e-5)


class MismatchTest(absltest.TestCase):

  def test_by_hand(self):
    got = off_policy.mismatch(LOGP_BT, BEHAVIOR_BT, MASK_BT)
    means = {k: float(s / w) for k, (s, w) in got.items()}
    logs = np.log([3, 1, 0.5, 2])
    np.testing.assert_allclose(means['logp_diff_mean'], np.abs(logs).mean(), rtol=1e-5)
    np.testing.assert_allclose(means['logp_diff_max'], np.log(3), rtol=1e-5)
    np.testing.assert_allclose(means['behavior_kl'], (6.5 - logs.sum() - 4) / 4, rtol=1e-5)
    np.testing.assert_allclose(means['behavior_ratio_max'], 3, rtol=1e-5)
    got_ess = off_policy.ess_frac(means['behavior_ratio'], means['behavior_ratio_square'])
    np.testing.assert_allclose(got_ess, 6.5**2 / (4 * 14.25), rtol=1e-5)

  def test_kl_is_unbiased_under_the_behavior_law(self):
    behavior_BT, logp_BT = jnp.log(jnp.array([[0.7, 0.3]])), jnp.log(jnp.array([[0.4, 0.6]]))
    each = [off_policy.mismatch(logp_BT, behavior_BT, jnp.arange(2)[None] == t)['behavior_kl'][0] for t in range(2)]
    want = 0.7 * np.log(0.7 / 0.4) + 0.3 * np.log(0.3 / 0.6)
    np.testing.assert_allclose(0.7 * each[0] + 0.3 * each[1], want, rtol=1e-5)

  def test_equal_policies_and_empty_batches(self):
    same = off_policy.mismatch(LOGP_BT, LOGP_BT, MASK_BT)
    self.assertEqual(float(same['logp_diff_max'][0]), 0.0)
    self.assertEqual(off_policy.ess_frac(1.0, 1.0), 1.0)
    empty = off_policy.mismatch(jnp.full((1, 2), jnp.nan), jnp.zeros((1, 2)), jnp.zeros((1, 2), bool))
    self.assertTrue(all(float(s) == 0.0 for s, _ in empty.values()))
    self.assertEqual(off_policy.ess_frac(0.0, 0.0), 0.0)


if __name__ == '__main__':
  absltest.main()
