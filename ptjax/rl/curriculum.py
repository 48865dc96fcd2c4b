"""What to practise next: a guaranteed quota per domain, a difficulty that follows the pass rate, and rehearsal.

Quotas are met by largest remainder over *all* draws so far: each draw goes to the domain furthest behind its share, so
a share too small for one step still gets its tasks over the steps, whatever their size. Within a domain the level rises
when tasks of the present level are mostly solved and falls when they are mostly failed; a fixed fraction of draws goes
back to easier levels. Every draw follows from the seed and the state, which is JSON: a resumed run draws the same
tasks. Rewards are only looked at, never changed, here.
"""

from collections.abc import Mapping, Sequence
import zlib

import numpy as np

from ptjax import types


def guaranteed_shares(weights: Mapping[str, float], min_share: float) -> dict[str, float]:
  """Shares that sum to 1, in proportion to the weights but none below min_share.

  Raises:
    ValueError: min_share is negative or more than an equal share, or no weight is above 0.
  """
  if not 0 <= min_share * len(weights) <= 1 + 1e-9:
    raise ValueError(f'min_share {min_share} for {len(weights)} domains: must be in [0, {1 / len(weights):.4g}]')
  if min(weights.values()) < 0 or not sum(weights.values()) > 0:
    raise ValueError(f'domain weights {dict(weights)}: need numbers >= 0 with a positive sum')
  raised, shares = set(), {}
  while True:
    free = sum(w for d, w in weights.items() if d not in raised) or 1.0
    left = 1.0 - min_share * len(raised)
    shares = {d: min_share if d in raised else left * w / free for d, w in weights.items()}
    low = {d for d, share in shares.items() if share < min_share} - raised
    if not low:
      return shares
    raised |= low


class Curriculum:
  """Draws tasks from pools by domain and level, and learns from the rewards which level comes next."""

  def __init__(
      self,
      pools: Mapping[str, Mapping[int, Sequence[types.Task]]],
      *,
      seed: int,
      min_share: float,
      raise_at: float,
      lower_at: float,
      rehearsal_frac: float,
      weights: Mapping[str, float] | None = None,
      window: int = 16,
  ):
    """Args:
      pools: tasks by domain and level.
      seed: of the order within each pool and of rehearsal.
      min_share: smallest share of the draws that any domain gets, in [0, 1 / domains].
      raise_at, lower_at: mean reward over the window at or above (below) which the level goes up (down) by one.
      rehearsal_frac: fraction of a domain's draws taken from levels below the present one, while there are any.
      weights: relative share by domain, for exactly the domains of the pools; equal shares when not given.
      window: trainable rollouts of the present level after which the level is decided on.

    Raises:
      ValueError: a domain or level without tasks, other domains in `weights`, or numbers out of their ranges.
    """
    self._pools = {d: {level: list(tasks) for level, tasks in sorted(levels.items())}
                   for d, levels in sorted(pools.items())}
    weights = dict.fromkeys(self._pools, 1.0) if weights is None else weights
    _check(self._pools, weights, raise_at, lower_at, window, rehearsal_frac)
    self._shares = guaranteed_shares({d: weights[d] for d in self._pools}, min_share)
    self._seed, self._window, self._rehearsal_frac = seed, window, rehearsal_frac
    self._raise_at, self._lower_at = raise_at, lower_at
    self._drawn = dict.fromkeys(self._pools, 0)
    self._rehearsed = dict.fromkeys(self._pools, 0)  # draws from below, so that their fraction is met exactly too
    self._practised = dict.fromkeys(self._pools, 0)  # draws while there was a level below
    self._place = dict.fromkeys(self._pools, 0)  # index into the domain's sorted levels
    self._recent = {d: [0.0, 0] for d in self._pools}  # reward sum and rollouts at the present level
    self._rate = dict.fromkeys(self._pools, 0.0)  # mean reward when the level was last decided on
    self._cursor = {d: {level: 0 for level in levels} for d, levels in self._pools.items()}

  def draw(self, n: int) -> list[types.Task]:
    """The next n tasks, domains interleaved."""
    return [self._draw_one(self._most_owed()) for _ in range(n)]

  def observe(self, tasks: Sequence[types.Task], reward_UR: np.ndarray, trainable_UR: np.ndarray) -> None:
    """Moves each domain's level by the rewards of its tasks at the present level; untrainable rollouts do not count."""
    for u, task in enumerate(tasks):
      if task.level == self.level(task.domain):
        recent = self._recent[task.domain]
        recent[0] += float(np.sum(reward_UR[u], where=trainable_UR[u], dtype=np.float64))
        recent[1] += int(np.sum(trainable_UR[u]))
    for domain, (total, count) in self._recent.items():
      if count >= self._window:
        self._decide(domain, total / count)

  def level(self, domain: str) -> int:
    """The domain's present level."""
    return list(self._pools[domain])[self._place[domain]]

  def shares(self) -> dict[str, float]:
    """Metrics by `domain/name`: share of all draws, present level, mean reward when the level was last decided on."""
    total = max(sum(self._drawn.values()), 1)
    return {f'{d}/{name}': float(value) for d in self._pools for name, value in (
        ('share_frac', self._drawn[d] / total), ('level', self.level(d)), ('pass_rate', self._rate[d]))}

  def state_dict(self) -> dict:
    """JSON-able; the same pools and settings with this state draw the same tasks."""
    cursor = {d: [self._cursor[d][level] for level in levels] for d, levels in self._pools.items()}
    return {
        'drawn': dict(self._drawn), 'rehearsed': dict(self._rehearsed), 'practised': dict(self._practised),
        'place': dict(self._place), 'recent': {d: list(r) for d, r in self._recent.items()}, 'rate': dict(self._rate),
        'cursor': cursor,
    }

  def load_state_dict(self, state: Mapping) -> None:
    """Raises ValueError when the state is of other pools."""
    levels = {d: len(levels) for d, levels in self._pools.items()}
    saved = {d: len(cursor) for d, cursor in state['cursor'].items()}
    if saved != levels:
      raise ValueError(f'the saved curriculum has levels per domain {saved}, the task pools have {levels}')
    self._drawn, self._rehearsed, self._practised, self._place, self._rate = (
        dict(state[key]) for key in ('drawn', 'rehearsed', 'practised', 'place', 'rate'))
    self._recent = {d: list(r) for d, r in state['recent'].items()}
    self._cursor = {d: dict(zip(levels, state['cursor'][d])) for d, levels in self._pools.items()}

  def _most_owed(self) -> str:
    """The domain whose share of one more draw is furthest ahead of what it got; ties go to the first by name."""
    total = sum(self._drawn.values()) + 1
    return max(self._pools, key=lambda d: round(self._shares[d] * total - self._drawn[d], 9))

  def _draw_one(self, domain: str) -> types.Task:
    levels = list(self._pools[domain])
    place = self._place[domain]
    if place:
      self._practised[domain] += 1
      if self._rehearsed[domain] < int(self._rehearsal_frac * self._practised[domain] + 1e-9):
        self._rehearsed[domain] += 1
        place = (self._rehearsed[domain] - 1) % place  # each easier level in turn
    self._drawn[domain] += 1
    return self._next_of(domain, levels[place])

  def _next_of(self, domain: str, level: int) -> types.Task:
    """The pool's next task, in an order shuffled anew each time the pool has been used up."""
    pool, cursor = self._pools[domain][level], self._cursor[domain][level]
    self._cursor[domain][level] += 1
    epoch, index = divmod(cursor, len(pool))
    rng = np.random.default_rng([self._seed, zlib.crc32(domain.encode()), level, epoch])
    return pool[rng.permutation(len(pool))[index]]

  def _decide(self, domain: str, rate: float) -> None:
    move = int(rate >= self._raise_at) - int(rate <= self._lower_at)
    self._place[domain] = min(max(self._place[domain] + move, 0), len(self._pools[domain]) - 1)
    self._rate[domain] = rate
    self._recent[domain] = [0.0, 0]


def _check(pools, weights, raise_at, lower_at, window, rehearsal_frac) -> None:
  if not pools:
    raise ValueError('the curriculum has no domain: give it at least one pool of tasks')
  for domain, levels in pools.items():
    empty = [level for level, tasks in levels.items() if not tasks]
    if empty or not levels:
      raise ValueError(f'domain {domain!r} has no task{f" at level {empty[0]}" if empty else ""}; '
                       'add tasks for it or take it out of the domains')
    for level, tasks in levels.items():
      wrong = next((t for t in tasks if (t.domain, t.level) != (domain, level)), None)
      if wrong:
        raise ValueError(f'task {wrong.id} of domain {wrong.domain!r}, level {wrong.level} lies in the pool of '
                         f'{domain!r}, level {level}')
  if set(weights) != set(pools):
    raise ValueError(f'domain weights name {sorted(weights)}, but the task pools are {sorted(pools)}')
  if not 0 <= lower_at < raise_at <= 1:
    raise ValueError(f'lower_at {lower_at}, raise_at {raise_at}: need 0 <= lower_at < raise_at <= 1')
  if window < 1 or not 0 <= rehearsal_frac < 1:
    raise ValueError(f'window {window}, rehearsal_frac {rehearsal_frac}: need window >= 1, 0 <= rehearsal_frac < 1')
