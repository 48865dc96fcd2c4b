"""Supervised, preference, reward-model and value losses: arrays and floats in, `(sum, weight)` out.

A loss never divides by a count. The update adds sums and weights over micro-batches, devices and hosts and divides
once, so the result does not depend on how a batch was split. Masked positions may hold anything, NaN included: they are
replaced before any arithmetic, which keeps both values and gradients clean.

A sequence is one branch of one row of a packed batch (`types.Batch`). Arrays that end in `_BR` hold one number per
sequence, slot r for branch r + 1; preference losses see R pairs per row, chosen on odd branches, rejected on even ones.
Nothing here reads a config, a model or a clock.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

MAX_MEAN_LOGP = -1e-6  # odds are infinite at probability 1


def bind(table: Mapping[str, Callable], name: str, settings: Mapping, *, what: str) -> Callable:
  """The function called `name` with the keywords it declares taken from `settings`; other settings are left alone.

  Args:
    table: one of the literal tables of this package.
    name: a row of it.
    settings: values by keyword name, for example the section of a config that the table belongs to.
    what: what the table holds, for the error message.

  Raises:
    ValueError: unknown name (lists the known ones), or a keyword without default that `settings` lacks.
  """
  if name not in table:
    raise ValueError(f'unknown {what} {name!r}; known: {", ".join(sorted(table))}')
  chosen = {}
  for key, parameter in inspect.signature(table[name]).parameters.items():
    if parameter.kind is not parameter.KEYWORD_ONLY:
      continue
    if key in settings:
      chosen[key] = settings[key]
    elif parameter.default is parameter.empty:
      raise ValueError(f'{what} {name!r} needs a setting {key!r}; got {", ".join(sorted(settings)) or "none"}')
  return functools.partial(table[name], **chosen)


def masked(x_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
  """x where the mask is true, 0 elsewhere, with a zero gradient there whatever x holds."""
  return jnp.where(mask_BT, x_BT, 0.0)


def branch_sum(x_BT: jax.Array, mask_BT: jax.Array, branch_BT: jax.Array, *, max_branches: int) -> jax.Array:
  """Sum of x over the masked-in tokens of each branch, `[B, max_branches]`; slot r is branch r + 1."""
  def one_row(x_T, branch_T):
    return jax.ops.segment_sum(x_T, branch_T, num_segments=max_branches + 1)[1:]
  return jax.vmap(one_row)(masked(x_BT, mask_BT), branch_BT)


def branch_count(mask_BT: jax.Array, branch_BT: jax.Array, *, max_branches: int) -> jax.Array:
  """Number of masked-in tokens of each branch, f32 `[B, max_branches]`."""
  return branch_sum(jnp.ones(mask_BT.shape, jnp.float32), mask_BT, branch_BT, max_branches=max_branches)


def to_tokens(x_BR: jax.Array, branch_BT: jax.Array) -> jax.Array:
  """Each token's own sequence value, `[B, T]`; 0 on the trunk and on padding."""
  padded_BR = jnp.pad(x_BR, ((0, 0), (1, 0)))
  return jnp.take_along_axis(padded_BR, branch_BT, axis=1)


def last_token(branch_BT: jax.Array, *, max_branches: int) -> jax.Array:
  """Row index of the last token of each branch, int32 `[B, max_branches]`; -1 where the branch is absent.

  It is found by structure, never by comparing ids with a pad id, which may be the end token's own id.
  """
  def one_row(branch_T):
    index_T = jnp.arange(branch_T.shape[0], dtype=jnp.int32)
    last_R = jax.ops.segment_max(index_T, branch_T, num_segments=max_branches + 1)[1:]
    return jnp.maximum(last_R, -1)
  return jax.vmap(one_row)(branch_BT)


def nll(logp_BT: jax.Array, mask_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Negative log-likelihood in nats summed over trained tokens, and their number."""
  return -masked(logp_BT, mask_BT).sum(), mask_BT.sum(dtype=jnp.float32)


def value_loss(
    value_BT: jax.Array, old_value_BT: jax.Array, return_BT: jax.Array, mask_BT: jax.Array, *, clip: float
) -> tuple[jax.Array, jax.Array]:
  """Half the larger of the plain and the clipped squared error, summed over trained tokens (1707.06347)."""
  value_BT, old_value_BT, return_BT = (masked(x, mask_BT) for x in (value_BT, old_value_BT, return_BT))
  near_BT = jnp.clip(value_BT, old_value_BT - clip, old_value_BT + clip)
  loss_BT = 0.5 * jnp.maximum((value_BT - return_BT) ** 2, (near_BT - return_BT) ** 2)
  return loss_BT.sum(), mask_BT.sum(dtype=jnp.float32)


def bradley_terry(
    chosen_score_BR: jax.Array, rejected_score_BR: jax.Array, valid_BR: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """-log sigmoid(chosen - rejected) summed over valid pairs (2203.02155), and their number."""
  margin_BR = masked(chosen_score_BR, valid_BR) - masked(rejected_score_BR, valid_BR)
  return -masked(jax.nn.log_sigmoid(margin_BR), valid_BR).sum(), valid_BR.sum(dtype=jnp.float32)


class Pairs(NamedTuple):
  """Per-sequence sums of log-probs in nats and token counts; a side with no token is absent."""

  chosen_BR: jax.Array
  rejected_BR: jax.Array
  ref_chosen_BR: jax.Array
  ref_rejected_BR: jax.Array
  chosen_count_BR: jax.Array
  rejected_count_BR: jax.Array
  kl: jax.Array | float = 0.0  # nats, policy to reference over mismatched completions; only `kto` reads it

  @property
  def valid_BR(self) -> jax.Array:
    return (self.chosen_count_BR > 0) & (self.rejected_count_BR > 0)

  @property
  def margin_BR(self) -> jax.Array:
    """(policy - reference) of chosen minus the same of rejected; 0 where the pair is not whole."""
    difference_BR = (self.chosen_BR - self.ref_chosen_BR) - (self.rejected_BR - self.ref_rejected_BR)
    return masked(difference_BR, self.valid_BR)

  @property
  def mean_chosen_BR(self) -> jax.Array:
    return self.chosen_BR / jnp.maximum(self.chosen_count_BR, 1.0)

  @property
  def mean_rejected_BR(self) -> jax.Array:
    return self.rejected_BR / jnp.maximum(self.rejected_count_BR, 1.0)


def pairs(
    logp_BT: jax.Array, ref_logp_BT: jax.Array, mask_BT: jax.Array, branch_BT: jax.Array, *, max_branches: int
) -> Pairs:
  """Sums a packed batch's token log-probs into pairs: branch 2i + 1 is chosen, 2i + 2 is rejected.

  Raises:
    ValueError: max_branches is odd, so the last branch would have no partner.
  """
  if max_branches % 2:
    raise ValueError(f'max_branches is {max_branches}: preference pairs need an even number; use {max_branches + 1}')
  sum_BR = branch_sum(logp_BT, mask_BT, branch_BT, max_branches=max_branches)
  ref_BR = branch_sum(ref_logp_BT, mask_BT, branch_BT, max_branches=max_branches)
  count_BR = branch_count(mask_BT, branch_BT, max_branches=max_branches)
  return Pairs(sum_BR[:, ::2], sum_BR[:, 1::2], ref_BR[:, ::2], ref_BR[:, 1::2], count_BR[:, ::2], count_BR[:, 1::2])


def _total(loss_BR: jax.Array, valid_BR: jax.Array) -> tuple[jax.Array, jax.Array]:
  return masked(loss_BR, valid_BR).sum(), valid_BR.sum(dtype=jnp.float32)


def dpo(sums: Pairs, *, beta: float, label_smoothing: float = 0.0) -> tuple[jax.Array, jax.Array]:
  """-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), h the margin; e > 0 is conservative DPO (2305.18290)."""
  logit_BR = beta * sums.margin_BR
  right_BR, wrong_BR = jax.nn.log_sigmoid(logit_BR), jax.nn.log_sigmoid(-logit_BR)
  return _total(-(1.0 - label_smoothing) * right_BR - label_smoothing * wrong_BR, sums.valid_BR)


def robust_dpo(sums: Pairs, *, beta: float, label_smoothing: float) -> tuple[jax.Array, jax.Array]:
  """DPO made unbiased under labels flipped with probability label_smoothing < 0.5 (2403.00409)."""
  logit_BR = beta * sums.margin_BR
  right_BR, wrong_BR = jax.nn.log_sigmoid(logit_BR), jax.nn.log_sigmoid(-logit_BR)
  loss_BR = (label_smoothing * wrong_BR - (1.0 - label_smoothing) * right_BR) / (1.0 - 2.0 * label_smoothing)
  return _total(loss_BR, sums.valid_BR)


def ipo_sum(sums: Pairs, *, beta: float) -> tuple[jax.Array, jax.Array]:
  """(h - 1 / (2 beta))^2 with h over sequence sums, the paper's form (2310.12036)."""
  return _total((sums.margin_BR - 0.5 / beta) ** 2, sums.valid_BR)


def ipo_mean(sums: Pairs, *, beta: float) -> tuple[jax.Array, jax.Array]:
  """(h - 1 / (2 beta))^2 with h over per-token means; far from `ipo_sum` in scale."""
  chosen_BR = (sums.chosen_BR - sums.ref_chosen_BR) / jnp.maximum(sums.chosen_count_BR, 1.0)
  rejected_BR = (sums.rejected_BR - sums.ref_rejected_BR) / jnp.maximum(sums.rejected_count_BR, 1.0)
  return _total((chosen_BR - rejected_BR - 0.5 / beta) ** 2, sums.valid_BR)


def hinge(sums: Pairs, *, beta: float) -> tuple[jax.Array, jax.Array]:
  """max(0, 1 - beta h), h the margin (2309.06657)."""
  return _total(jax.nn.relu(1.0 - beta * sums.margin_BR), sums.valid_BR)


def simpo(sums: Pairs, *, beta: float, margin: float) -> tuple[jax.Array, jax.Array]:
  """-log sigmoid(beta (mean log-prob chosen - mean log-prob rejected) - margin); no reference (2405.14734)."""
  logit_BR = beta * (sums.mean_chosen_BR - sums.mean_rejected_BR) - margin
  return _total(-jax.nn.log_sigmoid(logit_BR), sums.valid_BR)


def orpo(sums: Pairs, *, odds_weight: float) -> tuple[jax.Array, jax.Array]:
  """Chosen NLL per token plus odds_weight * -log sigmoid(log odds ratio); no reference (2403.07691).

  Odds are p / (1 - p) with p the exponential of the mean log-prob.
  """
  def log_odds(mean_BR):
    mean_BR = jnp.minimum(mean_BR, MAX_MEAN_LOGP)
    return mean_BR - jnp.log(-jnp.expm1(mean_BR))
  ratio_BR = log_odds(sums.mean_chosen_BR) - log_odds(sums.mean_rejected_BR)
  return _total(-sums.mean_chosen_BR - odds_weight * jax.nn.log_sigmoid(ratio_BR), sums.valid_BR)


def kto(
    sums: Pairs, *, beta: float, chosen_weight: float = 1.0, rejected_weight: float = 1.0
) -> tuple[jax.Array, jax.Array]:
  """Prospect loss on single labelled sequences; a pair may have one side only (2402.01306).

  Chosen: weight * (1 - sigmoid(beta (r - z))); rejected: weight * (1 - sigmoid(beta (z - r))), where r is policy minus
  reference and z = max(0, sums.kl), without gradient. The weight counts sequences, not pairs.
  """
  zero = jax.lax.stop_gradient(jnp.maximum(jnp.asarray(sums.kl, jnp.float32), 0.0))
  chosen_BR = chosen_weight * jax.nn.sigmoid(beta * (zero - (sums.chosen_BR - sums.ref_chosen_BR)))
  rejected_BR = rejected_weight * jax.nn.sigmoid(beta * ((sums.rejected_BR - sums.ref_rejected_BR) - zero))
  chosen_sum, chosen_n = _total(chosen_BR, sums.chosen_count_BR > 0)
  rejected_sum, rejected_n = _total(rejected_BR, sums.rejected_count_BR > 0)
  return chosen_sum + rejected_sum, chosen_n + rejected_n


# name -> (pairs, **keywords) -> (sum, weight); the keywords are the settings that the loss reads
PREFERENCE_LOSSES = {
    'dpo': dpo,
    'robust_dpo': robust_dpo,
    'ipo_sum': ipo_sum,
    'ipo_mean': ipo_mean,
    'hinge': hinge,
    'simpo': simpo,
    'orpo': orpo,
    'kto': kto,
}


def preference_metrics(sums: Pairs, *, beta: float) -> dict[str, tuple[jax.Array, jax.Array]]:
  """`(sum, weight)` per name: accuracy of the implicit reward, its margin, and beta-scaled rewards of both sides."""
  valid_BR = sums.valid_BR
  return {
      'accuracy': _total((sums.margin_BR > 0).astype(jnp.float32), valid_BR),
      'reward_margin': _total(beta * sums.margin_BR, valid_BR),
      'chosen_reward': _total(beta * (sums.chosen_BR - sums.ref_chosen_BR), sums.chosen_count_BR > 0),
      'rejected_reward': _total(beta * (sums.rejected_BR - sums.ref_rejected_BR), sums.rejected_count_BR > 0),
  }
