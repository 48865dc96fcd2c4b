"""From verdicts to rewards, keeping what is evidence about the policy apart from what is not.

A verdict of `error` says that the verifier or the host broke, and a cancelled rollout that nobody let it finish:
neither is evidence, so neither is trained on, and their reward of 0 stands for nothing. `timeout` is the policy's own
fault and earns its verdict's score. A rollout cut by length keeps its verdict: cutting alone neither pays nor fails it.
"""

from collections.abc import Sequence

import numpy as np

from ptjax import types
from ptjax.learn import advantages


def score(
    verdicts: Sequence[Sequence[types.Verdict]], groups: Sequence[Sequence[types.Rollout]]
) -> tuple[np.ndarray, np.ndarray]:
  """Rewards f32 `[U, R]` and which of them may be trained on, bool `[U, R]`, from U groups of R rollouts of one task.

  Raises:
    ValueError: groups of different sizes, not one verdict per rollout, or a group that mixes tasks.
  """
  sizes = [(len(graded), len(group)) for graded, group in zip(verdicts, groups)]
  if len(verdicts) != len(groups) or len({n for pair in sizes for n in pair}) != 1:
    raise ValueError(f'{len(verdicts)} groups of verdicts for {len(groups)} of rollouts, with sizes {sizes}: all must '
                     'have the same size')
  for u, group in enumerate(groups):
    tasks = {r.task_id for r in group}
    if len(tasks) > 1 or len({r.group_id for r in group}) > 1:
      raise ValueError(f'group {u} mixes rollouts of {sorted(tasks)} or of several groups')
  trainable_UR = np.array([[v.status != 'error' and r.finish_reason != 'cancelled' for v, r in zip(graded, group)]
                           for graded, group in zip(verdicts, groups)], bool)
  score_UR = np.array([[v.score for v in graded] for graded in verdicts], np.float32)
  return np.where(trainable_UR, score_UR, np.float32(0.0)), trainable_UR


def shape_overlong(
    reward_UR: np.ndarray, groups: Sequence[Sequence[types.Rollout]], *, max_tokens: int, cache_tokens: int
) -> np.ndarray:
  """Rewards plus the soft penalty on drawn tokens, f32 `[U, R]` (2503.14476); cache_tokens = 0 leaves them as they are.

  Filter groups and move the curriculum by the rewards before this: they are the verifiers' outcome.

  Args:
    reward_UR: from `score`.
    groups: the same ones in the same order.
    max_tokens: drawn tokens at which the penalty reaches -1.
    cache_tokens: drawn tokens before that over which it grows from 0.
  """
  if not cache_tokens:
    return reward_UR
  tokens_UR = np.array([[r.mask.sum() for r in group] for group in groups])
  penalty_UR = advantages.overlong_penalty(tokens_UR, max_tokens=max_tokens, cache_tokens=cache_tokens)
  return (reward_UR + penalty_UR).astype(np.float32)
