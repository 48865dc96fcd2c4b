"""The policy objective: what the ratio is taken to, and who pays for a sampler with numerics of its own."""

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

from configs import base
from ptjax import types
from ptjax.learn import objectives

# One row of three drawn tokens; the sampler is off by the log of these factors.
FACTORS = np.array([[1.0, 1.5, 4.0]], np.float32)
ADVANTAGE_BT = np.array([[1.0, -2.0, 0.5]], np.float32)
LOGP_BT = np.log(np.array([[0.5, 0.25, 0.8]], np.float32))
BEHAVIOR_BT = LOGP_BT - np.log(FACTORS)


def gradient(correction, old_BT):
  rl = base.get_config().rl
  rl.correction, rl.kl_coef, rl.aggregation = correction, 0.0, 'token_mean'
  ones = np.ones((1, 3), np.int32)
  batch = types.Batch(
      token_BT=ones, segment_BT=ones, branch_BT=ones, position_BT=ones, parent_BT=ones, mask_BT=ones > 0,
      advantage_BT=ADVANTAGE_BT, behavior_logp_BT=BEHAVIOR_BT, old_logp_BT=old_BT, ref_logp_BT=LOGP_BT)
  objective = objectives.policy(rl)
  loss = lambda logp_BT: objective(logp_BT, jnp.zeros_like(logp_BT), batch)
  (_, weight, metrics), grad_BT = loss(jnp.asarray(LOGP_BT)), jax.grad(lambda x: loss(x)[0])(jnp.asarray(LOGP_BT))
  return np.asarray(grad_BT), float(weight), {name: float(a / b) for name, (a, b) in metrics.items()}


class PolicyTest(absltest.TestCase):

  def test_uncorrected_the_ratio_is_to_the_sampler_and_the_clip_bounds_it(self):
    grad_BT, weight, metrics = gradient('none', BEHAVIOR_BT)
    # Ratios 1, 1.5 and 4: the second has A < 0 and ratio above the range (no bound), the third A > 0 and is clipped.
    np.testing.assert_allclose(grad_BT, [[-1.0, 1.5 * 2.0, 0.0]], rtol=1e-5)
    self.assertEqual(weight, 3.0)
    np.testing.assert_allclose(metrics['logp_diff_max'], np.log(4.0), rtol=1e-5)
    np.testing.assert_allclose(metrics['logp_diff_mean'], (np.log(1.5) + np.log(4.0)) / 3, rtol=1e-5)

  def test_corrected_the_ratio_is_to_the_learner_and_a_capped_weight_pays_for_the_sampler(self):
    grad_BT, weight, _ = gradient('token_tis', LOGP_BT)
    np.testing.assert_allclose(grad_BT, [[-1.0, 1.5 * 2.0, 2.0 * -0.5]], rtol=1e-5)
    self.assertEqual(weight, 3.0)
    masked_BT, weight, _ = gradient('icepop', LOGP_BT)
    np.testing.assert_allclose(masked_BT, [[-1.0, 1.5 * 2.0, 0.0]], rtol=1e-5)
    self.assertEqual(weight, 3.0)


if __name__ == '__main__':
  absltest.main()
