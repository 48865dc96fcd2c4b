"""Losses: values by hand, invariance to splitting, clean gradients at masked positions."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from ptjax.learn import losses

SETTINGS = dict(beta=0.1, label_smoothing=0.1, margin=0.5, odds_weight=0.2)
# two rows: trunk, branch 1, branch 2, padding; the second row's pair has no rejected side
BRANCH_BT = jnp.array([[0, 1, 1, 2, 0], [0, 1, 1, 1, 0]])
MASK_BT = jnp.array([[0, 1, 1, 1, 0], [0, 1, 0, 1, 0]], bool)
LOGP_BT = jnp.array([[9.0, -1.0, -2.0, -4.0, 9.0], [9.0, -1.0, 9.0, -2.0, 9.0]])
REF_BT = jnp.array([[9.0, -2.0, -2.0, -3.0, 9.0], [9.0, -2.0, 9.0, -2.0, 9.0]])
NAN_BT = jnp.where(MASK_BT, LOGP_BT, jnp.nan)


class BranchTest(absltest.TestCase):

  def test_sums_counts_and_last_tokens_by_hand(self):
    np.testing.assert_allclose(losses.branch_sum(NAN_BT, MASK_BT, BRANCH_BT, max_branches=2), [[-3, -4], [-3, 0]])
    np.testing.assert_allclose(losses.branch_count(MASK_BT, BRANCH_BT, max_branches=2), [[2, 1], [2, 0]])
    np.testing.assert_array_equal(losses.last_token(BRANCH_BT, max_branches=2), [[2, 3], [3, -1]])

  def test_to_tokens_gives_each_token_its_own_branch(self):
    got_BT = losses.to_tokens(jnp.array([[5.0, 7.0], [3.0, 0.0]]), BRANCH_BT)
    np.testing.assert_allclose(got_BT, [[0, 5, 5, 7, 0], [0, 3, 3, 3, 0]])


class NllTest(absltest.TestCase):

  def test_sum_and_weight(self):
    total, weight = losses.nll(NAN_BT, MASK_BT)
    self.assertEqual((float(total), float(weight)), (10.0, 5.0))

  def test_gradient_is_clean_where_masked(self):
    grad_BT = jax.grad(lambda x: losses.nll(x, MASK_BT)[0])(NAN_BT)
    np.testing.assert_array_equal(grad_BT, -MASK_BT.astype(np.float32))

  def test_nothing_trained_is_zero_over_zero_weight(self):
    total, weight = losses.nll(jnp.full((2, 3), jnp.nan), jnp.zeros((2, 3), bool))
    self.assertEqual((float(total), float(weight)), (0.0, 0.0))


class PreferenceTest(parameterized.TestCase):

  def loss(self, name, logp_BT, mask_BT=MASK_BT, ref_BT=REF_BT):
    pairs = losses.pairs(logp_BT, ref_BT, mask_BT, BRANCH_BT, max_branches=2)
    return losses.bind(losses.PREFERENCE_LOSSES, name, SETTINGS, what='loss')(pairs)

  def test_pairs_by_hand(self):
    pairs = losses.pairs(NAN_BT, REF_BT, MASK_BT, BRANCH_BT, max_branches=2)
    # row 0: chosen -3 against -4, rejected -4 against -3, margin 1 + 1; row 1 is no pair
    np.testing.assert_allclose(pairs.margin_BR, [[2], [0]])
    np.testing.assert_array_equal(pairs.valid_BR, [[True], [False]])

  def test_dpo_by_hand(self):
    total, weight = self.loss('dpo', NAN_BT)
    # e = 0.1: -0.9 log sigmoid(0.2) - 0.1 log sigmoid(-0.2)
    np.testing.assert_allclose(total, 0.9 * np.log1p(np.exp(-0.2)) + 0.1 * np.log1p(np.exp(0.2)), rtol=1e-6)
    self.assertEqual(float(weight), 1.0)

  def test_hinge_and_simpo_by_hand(self):
    np.testing.assert_allclose(self.loss('hinge', LOGP_BT)[0], 0.8, rtol=1e-6)
    # means -1.5 and -4: 0.1 * 2.5 - 0.5 = -0.25
    np.testing.assert_allclose(self.loss('simpo', LOGP_BT)[0], np.log1p(np.exp(0.25)), rtol=1e-6)

  def test_kto_counts_a_single_side(self):
    total, weight = self.loss('kto', LOGP_BT)
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    # chosen rewards 1 and 1, rejected -1
    np.testing.assert_allclose(total, 3 * sigmoid(-0.1), rtol=1e-6)
    self.assertEqual(float(weight), 3.0)

  @parameterized.parameters(*losses.PREFERENCE_LOSSES)
  def test_masked_nan_leaves_no_trace(self, name):
    clean, dirty = (jax.value_and_grad(lambda x: self.loss(name, x)[0])(x) for x in (LOGP_BT, NAN_BT))
    np.testing.assert_allclose(clean[0], dirty[0])
    np.testing.assert_allclose(clean[1], dirty[1])
    self.assertTrue(np.isfinite(dirty[1]).all())
    self.assertFalse(np.asarray(dirty[1])[~np.asarray(MASK_BT)].any())

  @parameterized.parameters(*losses.PREFERENCE_LOSSES)
  def test_no_pair_is_zero_with_zero_gradient(self, name):
    none_BT = jnp.zeros_like(MASK_BT)
    (total, weight), grad_BT = self.loss(name, NAN_BT, none_BT), jax.grad(
        lambda x: self.loss(name, x, none_BT)[0])(NAN_BT)
    self.assertEqual((float(total), float(weight)), (0.0, 0.0))
    self.assertFalse(np.asarray(grad_BT).any())

  @parameterized.parameters(*losses.PREFERENCE_LOSSES)
  def test_raising_chosen_and_lowering_rejected_lowers_the_loss(self, name):
    if name.startswith('ipo'):
      self.assertLess(losses.PREFERENCE_LOSSES[name](self.pairs_with_margin(4.9), beta=0.1)[0],
                      losses.PREFERENCE_LOSSES[name](self.pairs_with_margin(2.0), beta=0.1)[0])
      return
    grad_BT = jax.grad(lambda x: self.loss(name, x)[0])(LOGP_BT)
    self.assertLess(grad_BT[0, 1], 0)
    self.assertGreater(grad_BT[0, 3], 0)

  def pairs_with_margin(self, margin):
    one, zero = jnp.ones((1, 1)), jnp.zeros((1, 1))
    return losses.Pairs(jnp.full((1, 1), margin), zero, zero, zero, one, one)

  def test_metrics(self):
    pairs = losses.pairs(NAN_BT, REF_BT, MASK_BT, BRANCH_BT, max_branches=2)
    metrics = {k: (float(s), float(w)) for k, (s, w) in losses.preference_metrics(pairs, beta=0.5).items()}
    self.assertEqual(metrics, {'accuracy': (1.0, 1.0), 'reward_margin': (1.0, 1.0), 'chosen_reward': (1.0, 2.0),
                               'rejected_reward': (-0.5, 1.0)})

  def test_odd_branches_are_refused(self):
    with self.assertRaisesRegex(ValueError, 'use 4'):
      losses.pairs(LOGP_BT, REF_BT, MASK_BT, BRANCH_BT, max_branches=3)


class BindTest(absltest.TestCase):

  def test_takes_the_declared_keywords_only(self):
    function = losses.bind(losses.PREFERENCE_LOSSES, 'ipo_sum', dict(beta=0.2, other=1), what='loss')
    self.assertEqual(function.keywords, {'beta': 0.2})

  def test_unknown_name_lists_the_known(self):
    with self.assertRaisesRegex(ValueError, "unknown preference loss 'dop'; known: dpo, hinge, "):
      losses.bind(losses.PREFERENCE_LOSSES, 'dop', {}, what='preference loss')

  def test_missing_keyword_is_named(self):
    with self.assertRaisesRegex(ValueError, "'simpo' needs a setting 'margin'"):
      losses.bind(losses.PREFERENCE_LOSSES, 'simpo', dict(beta=1.0), what='loss')


class ValueAndRewardTest(absltest.TestCase):

  def test_value_loss_ignores_masked_nan(self):
    value_BT = jnp.array([[1.0, jnp.nan]])
    loss = lambda v: losses.value_loss(v, v, jnp.array([[3.0, jnp.nan]]), jnp.array([[True, False]]), clip=0.2)[0]
    value, grad_BT = jax.value_and_grad(loss)(value_BT)
    self.assertEqual(float(value), 2.0)
    self.assertTrue(np.isfinite(grad_BT).all())

  def test_bradley_terry_leaves_out_invalid_pairs(self):
    total, weight = losses.bradley_terry(
        jnp.array([[0.0, jnp.nan]]), jnp.array([[0.0, 1.0]]), jnp.array([[True, False]]))
    np.testing.assert_allclose((total, weight), (np.log(2), 1.0), rtol=1e-6)


if __name__ == '__main__':
  absltest.main()
