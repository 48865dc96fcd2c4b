"""Advantages: from the rewards of a step's rollouts to the weight each rollout or token gets in the policy loss.

Host side, numpy, once per step with the rollouts of *all* hosts, because some of these normalise over the whole batch.
A rollout that is not trainable (its verifier or host broke) enters no mean, no deviation and no count, and gets 0. A
group with fewer than two trainable rollouts says nothing about which was better and gets 0. A group of equal rewards
gets exactly 0, unless the baseline is the whole step's. Shape letters: U tasks, R rollouts per task, B sequences, T
tokens.
"""

import functools

import numpy as np

MIN_GROUP = 2  # trainable rollouts below which a group has no baseline of its own


def _group_mean(reward_UR: np.ndarray, trainable_UR: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Mean reward over each group's trainable rollouts, and their number, both float64 `[U, 1]`."""
  count_U1 = trainable_UR.sum(axis=1, keepdims=True, dtype=np.float64)
  total_U1 = np.where(trainable_UR, reward_UR, 0.0).sum(axis=1, keepdims=True, dtype=np.float64)
  return total_U1 / np.maximum(count_U1, 1.0), count_U1


def informative(reward_UR: np.ndarray, trainable_UR: np.ndarray) -> np.ndarray:
  """True for each group whose trainable rewards differ, `[U]`; the rest carry no group-relative signal (2503.14476).

  Give it the verifiers' outcomes, before any length shaping: shaping makes groups that failed alike look informative.
  """
  high_U = np.where(trainable_UR, reward_UR, -np.inf).max(axis=1)
  low_U = np.where(trainable_UR, reward_UR, np.inf).min(axis=1)
  return high_U > low_U


def _centred(reward_UR: np.ndarray, trainable_UR: np.ndarray) -> np.ndarray:
  """Reward minus its group's mean, exactly 0 where the group is uninformative or the rollout not trainable."""
  mean_U1, _ = _group_mean(reward_UR, trainable_UR)
  keep_UR = trainable_UR & informative(reward_UR, trainable_UR)[:, None]
  return np.where(keep_UR, np.where(trainable_UR, reward_UR, 0.0) - mean_U1, 0.0)


def grpo(reward_UR: np.ndarray, trainable_UR: np.ndarray, *, ddof: int, eps: float = 1e-6) -> np.ndarray:
  """(r - mean) / (std + eps) within each group, f32 `[U, R]` (2402.03300).

  Args:
    reward_UR: one per rollout; untrainable ones may hold anything.
    trainable_UR: False where the verdict is no evidence about the policy.
    ddof: 1 for the sample deviation, 0 for the population deviation; at R = 4 they differ by 15 percent.
    eps: added to the deviation.
  """
  centred_UR = _centred(reward_UR, trainable_UR)
  _, count_U1 = _group_mean(reward_UR, trainable_UR)
  variance_U1 = (centred_UR**2).sum(axis=1, keepdims=True) / np.maximum(count_U1 - ddof, 1.0)
  return (centred_UR / (np.sqrt(variance_U1) + eps)).astype(np.float32)


def dr_grpo(reward_UR: np.ndarray, trainable_UR: np.ndarray) -> np.ndarray:
  """r - mean within each group, without a deviation to favour easy and hard prompts, f32 `[U, R]` (2503.20783)."""
  return _centred(reward_UR, trainable_UR).astype(np.float32)


def rloo(reward_UR: np.ndarray, trainable_UR: np.ndarray) -> np.ndarray:
  """r minus the mean of the *other* trainable rollouts of the group, f32 `[U, R]` (2402.14740)."""
  _, count_U1 = _group_mean(reward_UR, trainable_UR)
  scale_U1 = count_U1 / np.maximum(count_U1 - 1.0, 1.0)
  return (scale_U1 * _centred(reward_UR, trainable_UR)).astype(np.float32)


def _whiten(x: np.ndarray, valid: np.ndarray, eps: float = 1e-8) -> np.ndarray:
  """(x - mean) / sqrt(var + eps) over all valid entries (population variance), 0 elsewhere and where none differ."""
  entries = np.asarray(x, np.float64)[valid]
  if entries.size == 0 or entries.max() == entries.min():
    return np.zeros(x.shape, np.float32)
  white = (np.where(valid, x, 0.0) - entries.mean()) / np.sqrt(entries.var() + eps)
  return np.where(valid, white, 0.0).astype(np.float32)


def reinforce_pp(reward_UR: np.ndarray, trainable_UR: np.ndarray) -> np.ndarray:
  """Rewards whitened over all trainable rollouts of the step, each counted once, f32 `[U, R]` (2501.03262).

  `reinforce_pp_tokens` is the form with a per-token KL in the reward, which weighs rollouts by their length.
  """
  return _whiten(reward_UR, trainable_UR)


def reinforce_pp_baseline(reward_UR: np.ndarray, trainable_UR: np.ndarray) -> np.ndarray:
  """Group-centred rewards over their deviation across all trainable rollouts of the step, f32 `[U, R]` (2501.03262).

  The mean across the step is 0 by construction and is not subtracted again, so equal groups stay at exactly 0.
  """
  centred_UR = _centred(reward_UR, trainable_UR)
  _, count_U1 = _group_mean(reward_UR, trainable_UR)
  used = max(int((trainable_UR & (count_U1 >= MIN_GROUP)).sum()), 1)
  return (centred_UR / np.sqrt((centred_UR**2).sum() / used + 1e-8)).astype(np.float32)


# name -> (reward_UR, trainable_UR) -> advantage_UR
ADVANTAGES = {
    'grpo': functools.partial(grpo, ddof=1),
    'grpo_population_std': functools.partial(grpo, ddof=0),
    'dr_grpo': dr_grpo,
    'rloo': rloo,
    'reinforce_pp': reinforce_pp,
    'reinforce_pp_baseline': reinforce_pp_baseline,
}
OVER_STEP = ('reinforce_pp',)  # rows whose baseline is the whole step's: a group of equal rewards says something too


def reinforce_pp_tokens(
    logp_BT: np.ndarray, ref_logp_BT: np.ndarray, mask_BT: np.ndarray, score_B: np.ndarray, *, beta: float, gamma: float
) -> np.ndarray:
  """Whitened discounted returns of r_t = -beta (log p - log ref) + [t last trained token] score, f32 `[B, T]`.

  One rollout per row. Mean and variance run over all trained tokens of the batch, which must be the global one.
  The score lands on the last trained token, not on the last column (2501.03262).
  """
  return _whiten(returns(kl_rewards(logp_BT, ref_logp_BT, mask_BT, score_B, beta=beta), mask_BT, gamma=gamma), mask_BT)


def kl_rewards(
    logp_BT: np.ndarray, ref_logp_BT: np.ndarray, mask_BT: np.ndarray, score_B: np.ndarray, *, beta: float
) -> np.ndarray:
  """Per-token rewards -beta (log p - log ref), plus the score on each row's last trained token; 0 elsewhere."""
  mask_BT = np.asarray(mask_BT, bool)
  difference_BT = np.where(mask_BT, logp_BT, 0.0) - np.where(mask_BT, ref_logp_BT, 0.0)
  last_BT = mask_BT & (np.cumsum(mask_BT[:, ::-1], axis=1)[:, ::-1] == 1)
  return -beta * difference_BT + np.where(last_BT, np.asarray(score_B)[:, None], 0.0)


def returns(reward_BT: np.ndarray, mask_BT: np.ndarray, *, gamma: float) -> np.ndarray:
  """Discounted sum of the rewards from each trained token on; other tokens give nothing and discount nothing."""
  zero_BT = np.zeros(reward_BT.shape)
  advantage_BT, _ = gae(reward_BT, zero_BT, mask_BT, np.zeros(len(reward_BT)), gamma=gamma, lam=1.0)
  return advantage_BT


def gae(
    reward_BT: np.ndarray,
    value_BT: np.ndarray,
    mask_BT: np.ndarray,
    bootstrap_B: np.ndarray,
    *,
    gamma: float,
    lam: float,
) -> tuple[np.ndarray, np.ndarray]:
  """Generalised advantage estimates and returns (advantage + value), float64 `[B, T]`, 0 off the mask (1506.02438).

  Args:
    reward_BT: per token, one rollout per row.
    value_BT: value of the state in which each token was drawn.
    mask_BT: True where the policy drew the token. Tool and padding tokens are skipped as if they were not there: no
      reward, no value, no decay.
    bootstrap_B: value after the last token of a rollout cut by length; 0 for one that ended by itself.
    gamma, lam: discount and trace decay per trained token.
  """
  mask_BT = np.asarray(mask_BT, bool)
  reward_BT, value_BT = np.where(mask_BT, reward_BT, 0.0), np.where(mask_BT, value_BT, 0.0)
  advantage_BT = np.zeros(reward_BT.shape)
  next_value_B = np.array(bootstrap_B, np.float64)
  next_advantage_B = np.zeros(len(reward_BT))
  for t in range(reward_BT.shape[1] - 1, -1, -1):
    on_B = mask_BT[:, t]
    delta_B = reward_BT[:, t] + gamma * next_value_B - value_BT[:, t]
    advantage_BT[:, t] = np.where(on_B, delta_B + gamma * lam * next_advantage_B, 0.0)
    next_advantage_B = np.where(on_B, advantage_BT[:, t], next_advantage_B)
    next_value_B = np.where(on_B, value_BT[:, t], next_value_B)
  return advantage_BT, advantage_BT + value_BT


def overlong_penalty(tokens_UR: np.ndarray, *, max_tokens: int, cache_tokens: int) -> np.ndarray:
  """Penalty in [-1, 0] to add to rewards: 0 up to max - cache tokens, then linear, -1 at max and beyond (2503.14476).

  Args:
    tokens_UR: completion lengths in tokens.
    max_tokens: length at which the penalty is -1.
    cache_tokens: width of the slope below it, >= 1.
  """
  return np.clip((max_tokens - cache_tokens - np.asarray(tokens_UR, np.float64)) / cache_tokens, -1.0, 0.0)
