"""Policy-gradient losses, KL estimators and the ways to reduce them: arrays and floats in, arrays out.

A policy loss maps token log-probs and advantages to a loss per token and metrics; an aggregation turns the loss per
token into `(sum, weight)`. Advantages are data, computed on the host by `advantages.py`; weights that correct for a
stale or different sampler come from `off_policy.py` and multiply the loss per token. Nothing here divides by a count of
the batch, knows a config, or looks at token ids.

A sequence is one branch (id >= 1) of one row; plain `[B, T]` rows are the case `branch = 1` everywhere.
Metrics are `(sum, weight)` too, so they can be added over micro-batches.
"""

import jax
import jax.numpy as jnp

from ptjax.learn.losses import branch_count, branch_sum, masked, to_tokens

MAX_LOG_RATIO = 20.0  # nats; keeps ratios finite, so that inf * 0 cannot make a NaN

Metrics = dict[str, tuple[jax.Array, jax.Array]]


def log_ratio(logp_BT: jax.Array, old_logp_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
  """Learner minus old log-prob in nats on trained tokens, 0 elsewhere, kept within +-MAX_LOG_RATIO."""
  difference_BT = masked(logp_BT, mask_BT) - masked(old_logp_BT, mask_BT)
  return jnp.clip(difference_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _metrics(ratio_BT: jax.Array, clipped_BT: jax.Array, mask_BT: jax.Array) -> Metrics:
  tokens = mask_BT.sum(dtype=jnp.float32)
  ratio_BT, clipped_BT = jax.lax.stop_gradient((ratio_BT, clipped_BT))
  return {
      'ratio': (masked(ratio_BT, mask_BT).sum(), tokens),
      'clip_frac': ((clipped_BT & mask_BT).sum(dtype=jnp.float32), tokens),
  }


def _clipped(ratio_BT, advantage_BT, mask_BT, eps_low, eps_high) -> tuple[jax.Array, jax.Array]:
  """max(-r A, -clip(r) A), and where the clipped side was taken, which is where the gradient is 0."""
  plain_BT = -ratio_BT * advantage_BT
  limited_BT = -jnp.clip(ratio_BT, 1.0 - eps_low, 1.0 + eps_high) * advantage_BT
  return masked(jnp.maximum(plain_BT, limited_BT), mask_BT), limited_BT > plain_BT


def ppo_clip(
    logp_BT: jax.Array,
    old_logp_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    branch_BT: jax.Array,
    *,
    eps_low: float,
    eps_high: float,
    dual_clip: float = 0.0,
) -> tuple[jax.Array, Metrics]:
  """max(-r A, -clip(r, 1 - eps_low, 1 + eps_high) A) per token (1707.06347; eps_high > eps_low is 2503.14476).

  Args:
    logp_BT: learner log-prob of each token, nats.
    old_logp_BT: log-prob under the policy the clip is anchored to, nats.
    advantage_BT: per token.
    mask_BT: True where the policy drew the token.
    branch_BT: unused here; every policy loss takes it.
    eps_low, eps_high: clip distances below and above ratio 1.
    dual_clip: with A < 0 the loss is at most -dual_clip A (1912.09729); above 1, or 0 for no such bound.
  """
  del branch_BT
  advantage_BT = masked(advantage_BT, mask_BT)
  ratio_BT = jnp.exp(log_ratio(logp_BT, old_logp_BT, mask_BT))
  loss_BT, clipped_BT = _clipped(ratio_BT, advantage_BT, mask_BT, eps_low, eps_high)
  if dual_clip:
    bound_BT = -dual_clip * advantage_BT
    over_BT = (advantage_BT < 0) & (loss_BT > bound_BT)
    loss_BT, clipped_BT = jnp.where(over_BT, bound_BT, loss_BT), clipped_BT | over_BT
  return loss_BT, _metrics(ratio_BT, clipped_BT, mask_BT)


def gspo(
    logp_BT: jax.Array,
    old_logp_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    branch_BT: jax.Array,
    *,
    eps_low: float,
    eps_high: float,
    max_branches: int,
) -> tuple[jax.Array, Metrics]:
  """The clipped loss with one ratio per sequence, s = exp(mean over its trained tokens of log r) (2507.18071).

  Each token carries its sequence's loss, so `seq_mean_token_mean` gives the paper's mean over sequences.
  """
  advantage_BT = masked(advantage_BT, mask_BT)
  count_BR = branch_count(mask_BT, branch_BT, max_branches=max_branches)
  sum_BR = branch_sum(log_ratio(logp_BT, old_logp_BT, mask_BT), mask_BT, branch_BT, max_branches=max_branches)
  ratio_BT = jnp.exp(to_tokens(sum_BR / jnp.maximum(count_BR, 1.0), branch_BT))
  loss_BT, clipped_BT = _clipped(ratio_BT, advantage_BT, mask_BT, eps_low, eps_high)
  return loss_BT, _metrics(ratio_BT, clipped_BT, mask_BT)


def cispo(
    logp_BT: jax.Array,
    old_logp_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    branch_BT: jax.Array,
    *,
    eps_low: float,
    eps_high: float,
) -> tuple[jax.Array, Metrics]:
  """-stop_gradient(clip(r)) A log p: the weight is clipped, the gradient never vanishes (2506.13585)."""
  del branch_BT
  logp_BT, advantage_BT = masked(logp_BT, mask_BT), masked(advantage_BT, mask_BT)
  ratio_BT = jax.lax.stop_gradient(jnp.exp(log_ratio(logp_BT, old_logp_BT, mask_BT)))
  weight_BT = jnp.clip(ratio_BT, 1.0 - eps_low, 1.0 + eps_high)
  return -weight_BT * advantage_BT * logp_BT, _metrics(ratio_BT, weight_BT != ratio_BT, mask_BT)


def reinforce(
    logp_BT: jax.Array, old_logp_BT: jax.Array, advantage_BT: jax.Array, mask_BT: jax.Array, branch_BT: jax.Array
) -> tuple[jax.Array, Metrics]:
  """-A log p: right on-policy, or with an off-policy weight; the ratio is only reported."""
  del branch_BT
  ratio_BT = jnp.exp(log_ratio(logp_BT, old_logp_BT, mask_BT))
  loss_BT = -masked(advantage_BT, mask_BT) * masked(logp_BT, mask_BT)
  return loss_BT, _metrics(ratio_BT, jnp.zeros(mask_BT.shape, bool), mask_BT)


# name -> (logp, old_logp, advantage, mask, branch, **keywords) -> (loss_BT, metrics)
POLICY_LOSSES = {'ppo_clip': ppo_clip, 'gspo': gspo, 'cispo': cispo, 'reinforce': reinforce}


def kl_k1(logp_BT: jax.Array, ref_logp_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
  """log p - log ref, without gradient: the unbiased estimate of KL(policy || reference), for reports and rewards.

  As a loss its expected gradient is exactly zero (the score function has mean zero), so it is no row of KL_ESTIMATORS.
  """
  return jax.lax.stop_gradient(masked(logp_BT, mask_BT) - masked(ref_logp_BT, mask_BT))


def kl_k2(
    logp_BT: jax.Array, ref_logp_BT: jax.Array, behavior_logp_BT: jax.Array, mask_BT: jax.Array
) -> jax.Array:
  """(log p - log ref)^2 / 2, biased in value.

  Its expected gradient, on tokens that the present policy drew, is that of KL(policy || reference).
  """
  del behavior_logp_BT
  return 0.5 * (masked(logp_BT, mask_BT) - masked(ref_logp_BT, mask_BT)) ** 2


def kl_k3(
    logp_BT: jax.Array, ref_logp_BT: jax.Array, behavior_logp_BT: jax.Array, mask_BT: jax.Array
) -> jax.Array:
  """exp(-d) + d - 1, d = log p - log ref: unbiased and never negative in value.

  Its expected gradient is that of the forward KL(reference || policy), not of the KL it estimates.
  """
  del behavior_logp_BT
  return jnp.exp(log_ratio(ref_logp_BT, logp_BT, mask_BT)) + log_ratio(logp_BT, ref_logp_BT, mask_BT) - 1.0


def kl_k3_ratio(
    logp_BT: jax.Array, ref_logp_BT: jax.Array, behavior_logp_BT: jax.Array, mask_BT: jax.Array
) -> jax.Array:
  """k3 times the differentiable ratio p / behavior: value and expected gradient are those of KL(policy || reference).

  It stays right when the behavior policy is stale, at the variance of an uncapped ratio.
  """
  ratio_BT = jnp.exp(log_ratio(logp_BT, behavior_logp_BT, mask_BT))
  return ratio_BT * kl_k3(logp_BT, ref_logp_BT, behavior_logp_BT, mask_BT)


# name -> (logp, ref_logp, behavior_logp, mask) -> kl_BT in nats, to be added to the loss
KL_ESTIMATORS = {'k2': kl_k2, 'k3': kl_k3, 'k3_ratio': kl_k3_ratio}


def token_mean(loss_BT: jax.Array, mask_BT: jax.Array, branch_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Every trained token counts the same."""
  del branch_BT
  return masked(loss_BT, mask_BT).sum(), mask_BT.sum(dtype=jnp.float32)


def seq_mean_token_mean(
    loss_BT: jax.Array, mask_BT: jax.Array, branch_BT: jax.Array, *, max_branches: int
) -> tuple[jax.Array, jax.Array]:
  """Every sequence counts the same, by the mean over its trained tokens; one without any does not count."""
  sum_BR = branch_sum(loss_BT, mask_BT, branch_BT, max_branches=max_branches)
  count_BR = branch_count(mask_BT, branch_BT, max_branches=max_branches)
  return (sum_BR / jnp.maximum(count_BR, 1.0)).sum(), (count_BR > 0).sum(dtype=jnp.float32)


def seq_mean_token_sum(
    loss_BT: jax.Array, mask_BT: jax.Array, branch_BT: jax.Array, *, max_branches: int
) -> tuple[jax.Array, jax.Array]:
  """The sum over trained tokens, averaged over the sequences that have any."""
  count_BR = branch_count(mask_BT, branch_BT, max_branches=max_branches)
  return masked(loss_BT, mask_BT & (branch_BT > 0)).sum(), (count_BR > 0).sum(dtype=jnp.float32)


def seq_mean_token_sum_norm(
    loss_BT: jax.Array, mask_BT: jax.Array, branch_BT: jax.Array, *, max_branches: int, norm_tokens: float
) -> tuple[jax.Array, jax.Array]:
  """`seq_mean_token_sum` over a constant length, so that no sequence's own length enters (2503.20783)."""
  total, sequences = seq_mean_token_sum(loss_BT, mask_BT, branch_BT, max_branches=max_branches)
  return total / norm_tokens, sequences


# name -> (loss, mask, branch, **keywords) -> (sum, weight)
AGGREGATIONS = {
    'token_mean': token_mean,
    'seq_mean_token_mean': seq_mean_token_mean,
    'seq_mean_token_sum': seq_mean_token_sum,
    'seq_mean_token_sum_norm': seq_mean_token_sum_norm,
}
