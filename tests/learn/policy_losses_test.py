"""Policy losses, KL and aggregations: signs, splits, trees against plain rows, clean gradients."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from ptjax.learn import losses
from ptjax.learn import policy_losses

SETTINGS = dict(eps_low=0.2, eps_high=0.3, max_branches=3, norm_tokens=4.0)
# three sequences as rows, and the same three as branches of one row behind a trunk of one token
LOGP_BT = jnp.array([[-1.0, -2.0, -0.5], [-0.3, -1.2, 0.0], [-2.0, 0.0, 0.0]])
OLD_BT = jnp.array([[-1.1, -1.5, -0.5], [-0.9, -1.0, 0.0], [-2.1, 0.0, 0.0]])
ADVANTAGE_BT = jnp.array([[1.0] * 3, [-2.0] * 3, [0.5] * 3])
MASK_BT = jnp.array([[1, 1, 1], [1, 1, 0], [1, 0, 0]], bool)
ROWS_BT = jnp.ones((3, 3), jnp.int32)
TREE_BT = jnp.array([[0, 1, 1, 1, 2, 2, 3, 0]])


def as_tree(x_BT):
  kept = np.asarray(x_BT)[np.asarray(MASK_BT)]
  return jnp.asarray(np.concatenate([kept[:1] * 0, kept, kept[:1] * 0])[None])


class PolicyLossTest(parameterized.TestCase):

  def bound(self, name):
    return losses.bind(policy_losses.POLICY_LOSSES, name, SETTINGS, what='loss')

  @parameterized.parameters(*policy_losses.POLICY_LOSSES)
  def test_on_policy_gradient_pushes_with_the_advantage(self, name):
    loss = lambda logp: self.bound(name)(logp, LOGP_BT, ADVANTAGE_BT, MASK_BT, ROWS_BT)[0].sum()
    grad_BT = jax.grad(loss)(LOGP_BT)
    np.testing.assert_allclose(grad_BT, jnp.where(MASK_BT, -ADVANTAGE_BT, 0.0), rtol=1e-5)

  @parameterized.product(name=list(policy_losses.POLICY_LOSSES), how=list(policy_losses.AGGREGATIONS))
  def test_tree_equals_rows(self, name, how):
    aggregate = losses.bind(policy_losses.AGGREGATIONS, how, SETTINGS, what='aggregation')

    def loss(logp, old, advantage, mask, branch):
      loss_BT, _ = self.bound(name)(logp, old, advantage, mask, branch)
      return aggregate(loss_BT, mask, branch)
    rows = loss(LOGP_BT, OLD_BT, ADVANTAGE_BT, MASK_BT, ROWS_BT)
    tree = loss(as_tree(LOGP_BT), as_tree(OLD_BT), as_tree(ADVANTAGE_BT), as_tree(MASK_BT) > 0, TREE_BT)
    np.testing.assert_allclose(rows, tree, rtol=1e-6)
    parts = [loss(*(x[i:i + 1] for x in (LOGP_BT, OLD_BT, ADVANTAGE_BT, MASK_BT, ROWS_BT))) for i in range(3)]
    np.testing.assert_allclose(rows, np.sum(parts, axis=0), rtol=1e-6)

  @parameterized.product(name=list(policy_losses.POLICY_LOSSES), how=list(policy_losses.AGGREGATIONS))
  def test_masked_nan_leaves_no_trace(self, name, how):
    aggregate = losses.bind(policy_losses.AGGREGATIONS, how, SETTINGS, what='aggregation')
    spoil = lambda x_BT: jnp.where(MASK_BT, x_BT, jnp.nan)

    def loss(logp, old, advantage):
      loss_BT, metrics = self.bound(name)(logp, old, advantage, MASK_BT, ROWS_BT)
      return aggregate(loss_BT, MASK_BT, ROWS_BT)[0], metrics
    (clean, metrics), clean_grad = jax.value_and_grad(loss, has_aux=True)(LOGP_BT, OLD_BT, ADVANTAGE_BT)
    (dirty, dirty_metrics), grad_BT = jax.value_and_grad(loss, has_aux=True)(
        *(spoil(x) for x in (LOGP_BT, OLD_BT, ADVANTAGE_BT)))
    np.testing.assert_allclose(clean, dirty)
    np.testing.assert_allclose(clean_grad, grad_BT)
    self.assertEqual(metrics, dirty_metrics)

  def test_clip_frac_counts_clipped_trained_tokens(self):
    logp_BT, old_BT = jnp.log(jnp.array([[1.5, 1.5, 0.5, 1.5]])), jnp.zeros((1, 4))
    advantage_BT, mask_BT = jnp.array([[1.0, -1.0, -1.0, 1.0]]), jnp.array([[True, True, True, False]])
    _, metrics = policy_losses.ppo_clip(
        logp_BT, old_BT, advantage_BT, mask_BT, mask_BT.astype(int), eps_low=0.2, eps_high=0.2)
    self.assertEqual(tuple(map(float, metrics['clip_frac'])), (2.0, 3.0))
    np.testing.assert_allclose(metrics['ratio'], (3.5, 3.0), rtol=1e-6)

  def test_dual_clip_bounds_the_loss_and_stops_its_gradient(self):
    def loss(logp_BT, bound):
      return policy_losses.ppo_clip(logp_BT, jnp.zeros((1, 2)), jnp.array([[-1.0, 1.0]]), jnp.ones((1, 2), bool),
                                    jnp.ones((1, 2), jnp.int32), eps_low=0.2, eps_high=0.2, dual_clip=bound)[0].sum()
    logp_BT = jnp.log(jnp.array([[5.0, 1.0]]))
    value, grad_BT = jax.value_and_grad(loss)(logp_BT, 3.0)
    np.testing.assert_allclose(value, 3.0 - 1.0, rtol=1e-6)
    np.testing.assert_allclose(grad_BT, [[0.0, -1.0]])
    np.testing.assert_allclose(loss(logp_BT, 0.0), 5.0 - 1.0, rtol=1e-6)

  def test_extreme_log_probs_stay_finite(self):
    logp_BT = jnp.array([[-1e4, 0.0]])
    for name in policy_losses.POLICY_LOSSES:
      loss = lambda x: self.bound(name)(
          x, logp_BT[:, ::-1], jnp.array([[0.0, -1.0]]), jnp.ones((1, 2), bool), jnp.ones((1, 2), jnp.int32))[0].sum()
      value, grad_BT = jax.value_and_grad(loss)(logp_BT)
      self.assertTrue(np.isfinite(value) and np.isfinite(grad_BT).all(), name)


class ShardingTest(absltest.TestCase):

  def test_rows_over_eight_devices_equal_one(self):
    rng = np.random.default_rng(0)
    branch_BT = np.sort(rng.integers(0, 4, (8, 16)), axis=1)
    arrays = [*rng.normal(size=(3, 8, 16)).astype(np.float32), rng.random((8, 16)) < 0.5, branch_BT]
    arrays[3] &= branch_BT > 0

    def loss(logp, old, advantage, mask, branch):
      loss_BT, _ = policy_losses.gspo(logp, old, advantage, mask, branch, eps_low=0.1, eps_high=0.1, max_branches=3)
      total, weight = policy_losses.seq_mean_token_mean(loss_BT, mask, branch, max_branches=3)
      return total / weight
    grad = jax.jit(jax.value_and_grad(loss))
    mesh = jax.make_mesh((8,), ('data',))
    spread = jax.device_put(arrays, jax.NamedSharding(mesh, jax.P('data')))
    for one, eight in zip(grad(*arrays), grad(*spread)):
      np.testing.assert_allclose(one, eight, rtol=1e-5, atol=1e-7)


class KlTest(parameterized.TestCase):

  @parameterized.parameters(*policy_losses.KL_ESTIMATORS)
  def test_descending_the_estimator_lowers_the_kl(self, name):
    ref_V, theta_V = jnp.log(jnp.array([0.5, 0.3, 0.2])), jnp.array([0.2, -0.1, 0.4])
    mask_BT = jnp.ones((1, 3), bool)

    def true_kl(theta):
      logp_V = jax.nn.log_softmax(theta)
      return (jnp.exp(logp_V) * (logp_V - ref_V)).sum()

    def expected(theta, behavior_V):
      kl_BT = policy_losses.KL_ESTIMATORS[name](
          jax.nn.log_softmax(theta)[None], ref_V[None], behavior_V[None], mask_BT)
      return (jnp.exp(behavior_V) * kl_BT[0]).sum()
    before = true_kl(theta_V)
    for _ in range(20):
      theta_V = theta_V - 0.5 * jax.grad(expected)(theta_V, jax.nn.log_softmax(theta_V))
    self.assertLess(true_kl(theta_V), 0.1 * before)

  def test_ratio_times_k3_is_right_for_a_stale_behavior_policy(self):
    ref_V, theta_V, behavior_V = jnp.log(jnp.array([0.5, 0.3, 0.2])), jnp.array([0.2, -0.1, 0.4]), jnp.log(
        jnp.array([0.6, 0.2, 0.2]))

    def true_kl(theta):
      logp_V = jax.nn.log_softmax(theta)
      return (jnp.exp(logp_V) * (logp_V - ref_V)).sum()

    def expected(theta):
      kl_BT = policy_losses.kl_k3_ratio(
          jax.nn.log_softmax(theta)[None], ref_V[None], behavior_V[None], jnp.ones((1, 3), bool))
      return (jnp.exp(behavior_V) * kl_BT[0]).sum()
    np.testing.assert_allclose(expected(theta_V), true_kl(theta_V), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(expected)(theta_V), jax.grad(true_kl)(theta_V), atol=1e-6)

  @parameterized.parameters(*policy_losses.KL_ESTIMATORS)
  def test_masked_nan_leaves_no_trace(self, name):
    nan_BT = jnp.array([[-1.0, jnp.nan]])
    loss = lambda x: policy_losses.KL_ESTIMATORS[name](x, nan_BT, nan_BT, jnp.array([[True, False]])).sum()
    value, grad_BT = jax.value_and_grad(loss)(nan_BT)
    self.assertEqual((float(value), grad_BT.tolist()), (0.0, [[0.0, 0.0]]))


if __name__ == '__main__':
  absltest.main()
