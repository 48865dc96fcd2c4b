"""Weights that correct a policy loss for tokens that another policy drew, and measures of how far apart the two are.

The other policy is the sampler with its own numerics, an older version of the learner, or both. Each weight multiplies
the loss per token; no gradient flows through it. A token whose weight is 0 stays in the denominators of the
aggregation: the sum shrinks, the count does not, so that rejecting tokens never turns up the rest.
A sequence is one branch (id >= 1) of one row.
"""

import jax
import jax.numpy as jnp

from ptjax.learn.losses import branch_count, branch_sum, masked, to_tokens
from ptjax.learn.policy_losses import MAX_LOG_RATIO, Metrics, log_ratio, ppo_clip


def _token_ratio(logp_BT, behavior_logp_BT, mask_BT) -> jax.Array:
  """exp(learner - behavior) on trained tokens, 0 elsewhere, without gradient."""
  ratio_BT = jnp.exp(log_ratio(logp_BT, behavior_logp_BT, mask_BT))
  return jax.lax.stop_gradient(masked(ratio_BT, mask_BT))


def _sequence_ratio(logp_BT, behavior_logp_BT, mask_BT, branch_BT, max_branches, *, mean: bool) -> jax.Array:
  """Product of a sequence's token ratios (their geometric mean if `mean`) on its trained tokens, without gradient."""
  difference_BT = masked(logp_BT, mask_BT) - masked(behavior_logp_BT, mask_BT)
  log_BR = branch_sum(difference_BT, mask_BT, branch_BT, max_branches=max_branches)
  if mean:
    log_BR = log_BR / jnp.maximum(branch_count(mask_BT, branch_BT, max_branches=max_branches), 1.0)
  ratio_BR = jnp.exp(jnp.clip(log_BR, -MAX_LOG_RATIO, MAX_LOG_RATIO))
  return jax.lax.stop_gradient(masked(to_tokens(ratio_BR, branch_BT), mask_BT))


def no_correction(
    logp_BT: jax.Array, behavior_logp_BT: jax.Array, mask_BT: jax.Array, branch_BT: jax.Array
) -> jax.Array:
  """1 on trained tokens."""
  del logp_BT, behavior_logp_BT, branch_BT
  return mask_BT.astype(jnp.float32)


def token_tis(
    logp_BT: jax.Array, behavior_logp_BT: jax.Array, mask_BT: jax.Array, branch_BT: jax.Array, *, cap: float
) -> jax.Array:
  """min(ratio, cap) per token: truncated importance sampling."""
  del branch_BT
  return jnp.minimum(_token_ratio(logp_BT, behavior_logp_BT, mask_BT), cap)


def token_mis(
    logp_BT: jax.Array, behavior_logp_BT: jax.Array, mask_BT: jax.Array, branch_BT: jax.Array, *, cap: float
) -> jax.Array:
  """ratio where it is at most cap, else 0, per token: masked importance sampling."""
  del branch_BT
  ratio_BT = _token_ratio(logp_BT, behavior_logp_BT, mask_BT)
  return jnp.where(ratio_BT <= cap, ratio_BT, 0.0)


def icepop(
    logp_BT: jax.Array,
    behavior_logp_BT: jax.Array,
    mask_BT: jax.Array,
    branch_BT: jax.Array,
    *,
    floor: float,
    cap: float,
) -> jax.Array:
  """ratio where floor <= ratio <= cap, else 0, per token: masked on both sides (2510.18855)."""
  del branch_BT
  ratio_BT = _token_ratio(logp_BT, behavior_logp_BT, mask_BT)
  return jnp.where((ratio_BT >= floor) & (ratio_BT <= cap), ratio_BT, 0.0)


def sequence_tis(
    logp_BT: jax.Array,
    behavior_logp_BT: jax.Array,
    mask_BT: jax.Array,
    branch_BT: jax.Array,
    *,
    cap: float,
    max_branches: int,
) -> jax.Array:
  """min(product of the sequence's ratios, cap) on each of its tokens."""
  ratio_BT = _sequence_ratio(logp_BT, behavior_logp_BT, mask_BT, branch_BT, max_branches, mean=False)
  return jnp.minimum(ratio_BT, cap)


def sequence_mis(
    logp_BT: jax.Array,
    behavior_logp_BT: jax.Array,
    mask_BT: jax.Array,
    branch_BT: jax.Array,
    *,
    cap: float,
    max_branches: int,
) -> jax.Array:
  """The product of the sequence's ratios where it is at most cap, else 0 for the whole sequence."""
  ratio_BT = _sequence_ratio(logp_BT, behavior_logp_BT, mask_BT, branch_BT, max_branches, mean=False)
  return jnp.where(ratio_BT <= cap, ratio_BT, 0.0)


def geometric_mis(
    logp_BT: jax.Array,
    behavior_logp_BT: jax.Array,
    mask_BT: jax.Array,
    branch_BT: jax.Array,
    *,
    floor: float,
    cap: float,
    max_branches: int,
) -> jax.Array:
  """The geometric mean of the sequence's ratios where floor <= it <= cap, else 0 for the whole sequence.

  Unlike a product it does not drift with length, so one pair of bounds fits long and short sequences.
  """
  ratio_BT = _sequence_ratio(logp_BT, behavior_logp_BT, mask_BT, branch_BT, max_branches, mean=True)
  return jnp.where((ratio_BT >= floor) & (ratio_BT <= cap), ratio_BT, 0.0)


# name -> (logp, behavior_logp, mask, branch, **keywords) -> weight_BT
CORRECTIONS = {
    'none': no_correction,
    'token_tis': token_tis,
    'token_mis': token_mis,
    'icepop': icepop,
    'sequence_tis': sequence_tis,
    'sequence_mis': sequence_mis,
    'geometric_mis': geometric_mis,
}


def decoupled_ppo(
    logp_BT: jax.Array,
    proximal_logp_BT: jax.Array,
    behavior_logp_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    branch_BT: jax.Array,
    *,
    eps_low: float,
    eps_high: float,
    cap: float,
) -> tuple[jax.Array, Metrics]:
  """The clipped loss around a proximal policy, times min(proximal / behavior, cap) without gradient (2110.00641).

  The clip bounds the step from a recent learner, the weight pays for the sampler being older still.
  """
  loss_BT, metrics = ppo_clip(
      logp_BT, proximal_logp_BT, advantage_BT, mask_BT, branch_BT, eps_low=eps_low, eps_high=eps_high
  )
  return token_tis(proximal_logp_BT, behavior_logp_BT, mask_BT, branch_BT, cap=cap) * loss_BT, metrics


def mismatch(logp_BT: jax.Array, behavior_logp_BT: jax.Array, mask_BT: jax.Array) -> Metrics:
  """How far the learner's log-probs lie from those recorded at sampling, over trained tokens.

  Returns:
    `(sum, weight)` by name, a name ending in `_max` holding `(value, 1)`: `logp_diff_mean` and `logp_diff_max`, of
    absolute differences in nats; `behavior_kl`, the k3 estimate of KL(behavior || learner), nats; `behavior_ratio`,
    `behavior_ratio_max` and `behavior_ratio_square`, of which the means give `ess_frac`.
  """
  ratio_BT = _token_ratio(logp_BT, behavior_logp_BT, mask_BT)
  difference_BT = jax.lax.stop_gradient(log_ratio(logp_BT, behavior_logp_BT, mask_BT))
  tokens, one = mask_BT.sum(dtype=jnp.float32), jnp.ones((), jnp.float32)
  return {
      'logp_diff_mean': (jnp.abs(difference_BT).sum(), tokens),
      'logp_diff_max': (jnp.abs(difference_BT).max(), one),
      'behavior_kl': (masked(ratio_BT - difference_BT - 1.0, mask_BT).sum(), tokens),
      'behavior_ratio': (ratio_BT.sum(), tokens),
      'behavior_ratio_max': (ratio_BT.max(), one),
      'behavior_ratio_square': ((ratio_BT**2).sum(), tokens),
  }


def ess_frac(ratio_mean: float, ratio_square_mean: float) -> float:
  """Effective sample size as a fraction of the tokens, (mean w)^2 / mean w^2; 1 when the policies agree, 0 if empty."""
  return ratio_mean**2 / ratio_square_mean if ratio_square_mean > 0 else 0.0
