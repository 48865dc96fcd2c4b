"""What each kind of stage minimises, assembled from the loss tables into the one form that `update` takes.

An objective is `(logp_BT, entropy_BT, batch) -> (sum, weight, {metric: (sum, weight)})`. Names are looked up here,
once, before anything is compiled; the compiled step never sees them.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from ptjax.learn import losses, off_policy, policy_losses
from ptjax.learn.update import Objective


def supervised() -> Objective:
  """Negative log-likelihood of the trained tokens; every token counts the same."""

  def objective(logp_BT, entropy_BT, batch):
    total, weight = losses.nll(logp_BT, batch.mask_BT)
    return total, weight, dict(entropy=(losses.masked(entropy_BT, batch.mask_BT).sum(), weight))

  return objective


def preference(settings: Mapping) -> Objective:
  """The preference loss `settings['loss']` over chosen/rejected branches; the batch holds the reference's log-probs."""
  loss = losses.bind(losses.PREFERENCE_LOSSES, settings['loss'], settings, what='preference loss')
  branches, beta = settings['branches'], settings['beta']

  def objective(logp_BT, entropy_BT, batch):
    del entropy_BT
    pairs = losses.pairs(logp_BT, batch.ref_logp_BT, batch.mask_BT, batch.branch_BT, max_branches=branches)
    total, weight = loss(pairs)
    return total, weight, losses.preference_metrics(pairs, beta=beta)

  return objective


def policy(settings: Mapping) -> Objective:
  """Policy loss plus KL to the reference, under the aggregation `settings` names.

  The loss is clipped around batch.old_logp_BT. Left at the sampler's own log-probs, its ratio is the importance weight
  of the drawn token. When they are replaced by the learner's at the start of the step (Trainer.with_old), the rest,
  old / behavior, is paid for by the weight `settings['correction']` names; what separates the two is reported.
  """
  settings = dict(settings, eps_low=settings['clip_low'], eps_high=settings['clip_high'],
                  max_branches=settings['branches'], norm_tokens=settings['max_tokens'],
                  cap=settings['correction_cap'], floor=settings['correction_floor'])
  loss = losses.bind(policy_losses.POLICY_LOSSES, settings['policy_loss'], settings, what='policy loss')
  correct = losses.bind(off_policy.CORRECTIONS, settings['correction'], settings, what='off-policy correction')
  aggregate = losses.bind(policy_losses.AGGREGATIONS, settings['aggregation'], settings, what='aggregation')
  kl = losses.bind(policy_losses.KL_ESTIMATORS, settings['kl'], settings, what='KL estimator')

  def objective(logp_BT, entropy_BT, batch):
    mask_BT, behavior_BT = batch.mask_BT, batch.behavior_logp_BT
    loss_BT, metrics = loss(logp_BT, batch.old_logp_BT, batch.advantage_BT, mask_BT, batch.branch_BT)
    loss_BT *= correct(batch.old_logp_BT, behavior_BT, mask_BT, batch.branch_BT)
    kl_BT = kl(logp_BT, batch.ref_logp_BT, behavior_BT, mask_BT)
    total, weight = aggregate(loss_BT + settings['kl_coef'] * kl_BT, mask_BT, batch.branch_BT)
    tokens = mask_BT.sum(dtype=jnp.float32)
    k1_BT = policy_losses.kl_k1(logp_BT, batch.ref_logp_BT, mask_BT)
    return total, weight, dict(
        metrics, kl=(k1_BT.sum(), tokens), entropy=(losses.masked(entropy_BT, mask_BT).sum(), tokens),
        **off_policy.mismatch(logp_BT, behavior_BT, mask_BT))

  return objective
