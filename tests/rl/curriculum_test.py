"""Curriculum: guaranteed shares, levels that follow the pass rate, rehearsal, and resume to the task."""

import collections
import json

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from ptjax import types
from ptjax.rl import curriculum

SETTINGS = dict(seed=1, weights=dict(code=1.0, math=3.0), min_share=0.1, raise_at=0.8, lower_at=0.2, window=4,
                rehearsal_frac=0.25)


def pool(domain, level, size=6):
  return [types.Task(f'{domain}/{level}/{i}', domain, (), 'math', level=level) for i in range(size)]


def make(**more):
  pools = {d: {level: pool(d, level) for level in (0, 1, 4)} for d in ('code', 'math')}
  return curriculum.Curriculum(**(dict(pools=pools, **SETTINGS) | more))


def reward(tasks, value, trainable=True):
  return np.full((len(tasks), 4), value, np.float32), np.full((len(tasks), 4), trainable)


class SharesTest(parameterized.TestCase):

  @parameterized.parameters(
      (dict(a=1, b=3), 0.1, dict(a=0.25, b=0.75)),
      (dict(a=0, b=1, c=3), 0.2, dict(a=0.2, b=0.2, c=0.6)),
      (dict(a=1, b=1), 0.5, dict(a=0.5, b=0.5)),
      (dict(a=0, b=5), 0.0, dict(a=0.0, b=1.0)),
  )
  def test_guaranteed_shares(self, weights, least, want):
    got = curriculum.guaranteed_shares(weights, least)
    self.assertSameElements(got, want)
    np.testing.assert_allclose([got[d] for d in want], list(want.values()))

  def test_impossible_share_is_refused(self):
    with self.assertRaisesRegex(ValueError, r'min_share 0.6 for 2 domains: must be in \[0, 0.5\]'):
      curriculum.guaranteed_shares(dict(a=1, b=1), 0.6)

  def test_shares_are_equal_unless_weighed(self):
    drawn = collections.Counter(t.domain for t in make(weights=None).draw(10))
    self.assertEqual(drawn, dict(code=5, math=5))

  @parameterized.parameters(1, 3, 8)
  def test_quotas_hold_whatever_the_step_size(self, n):
    course = make()
    drawn = collections.Counter(t.domain for _ in range(48 // n) for t in course.draw(n))
    self.assertEqual(drawn, dict(code=12, math=36))
    np.testing.assert_allclose([course.shares()[f'{d}/share_frac'] for d in ('code', 'math')], [0.25, 0.75])

  def test_a_small_share_is_met_over_steps(self):
    course = make(weights=dict(code=0.0, math=1.0))
    drawn = collections.Counter(t.domain for _ in range(50) for t in course.draw(2))
    self.assertEqual(drawn, dict(code=10, math=90))


class LevelTest(absltest.TestCase):

  def test_solved_rises_failed_falls_between_stays(self):
    course = make()
    for value, want in ((1.0, 1), (0.5, 1), (0.9, 4), (1.0, 4), (0.0, 1), (0.1, 0), (0.0, 0)):
      tasks = [t for t in course.draw(40) if t.domain == 'math' and t.level == course.level('math')][:1]
      course.observe(tasks, *reward(tasks, value))
      self.assertEqual(course.level('math'), want, value)
    self.assertEqual(course.level('code'), 0)

  def test_errors_and_other_levels_do_not_move_it(self):
    course = make()
    tasks = pool('math', 0)
    course.observe(tasks, *reward(tasks, 1.0, trainable=False))
    course.observe(pool('math', 4), *reward(tasks, 1.0))
    self.assertEqual(course.level('math'), 0)

  def test_decides_on_a_full_window_only(self):
    course = make(window=8)
    tasks = pool('math', 0, 1)
    course.observe(tasks, *reward(tasks, 1.0))
    self.assertEqual(course.level('math'), 0)
    course.observe(tasks, *reward(tasks, 1.0))
    self.assertEqual((course.level('math'), course.shares()['math/pass_rate']), (1, 1.0))

  def test_rehearsal_takes_its_fraction_from_every_easier_level(self):
    course = make()
    for level in (0, 1):
      tasks = pool('math', level)
      course.observe(tasks, *reward(tasks, 1.0))
    levels = collections.Counter(t.level for t in course.draw(64) if t.domain == 'math')
    self.assertEqual(levels, {4: 36, 0: 6, 1: 6})


class StateTest(absltest.TestCase):

  def test_a_pool_is_used_up_before_it_repeats(self):
    ids = [t.id for t in make().draw(48) if t.domain == 'math']
    for i in range(0, 36, 6):
      self.assertLen(set(ids[i:i + 6]), 6)
    self.assertNotEqual(ids[:6], ids[6:12])

  def test_resume_draws_the_same_tasks(self):
    course, again = make(), make()

    def step(c):
      tasks = c.draw(7)
      c.observe(tasks, *reward(tasks, 0.9))
      return [t.id for t in tasks]
    for _ in range(5):
      step(course)
    again.load_state_dict(json.loads(json.dumps(course.state_dict())))
    self.assertEqual([step(course) for _ in range(9)], [step(again) for _ in range(9)])
    self.assertEqual(course.state_dict(), again.state_dict())
    self.assertEqual(course.shares(), again.shares())

  def test_seed_changes_the_order(self):
    self.assertNotEqual([t.id for t in make().draw(20)], [t.id for t in make(seed=2).draw(20)])

  def test_state_of_other_pools_is_refused(self):
    state = make().state_dict()
    with self.assertRaisesRegex(ValueError, 'saved curriculum has levels per domain'):
      make(pools={'code': {0: pool('code', 0)}, 'math': {0: pool('math', 0)}}).load_state_dict(state)


class ErrorsTest(parameterized.TestCase):

  @parameterized.parameters(
      (dict(pools={}), 'has no domain'),
      (dict(pools={'code': {}, 'math': {0: pool('math', 0)}}), "domain 'code' has no task; add"),
      (dict(pools={'code': {0: pool('code', 0), 2: []}}), "domain 'code' has no task at level 2"),
      (dict(pools={'code': {1: pool('code', 0)}}), "task code/0/0 of domain 'code', level 0 lies in .* level 1"),
      (dict(weights=dict(code=1.0)), "weights name .'code'., but the task pools are .'code', 'math'."),
      (dict(raise_at=0.2), 'lower_at 0.2, raise_at 0.2'),
      (dict(window=0), 'window 0'),
      (dict(rehearsal_frac=1.0), 'rehearsal_frac 1.0'),
  )
  def test_are_sentences(self, more, message):
    with self.assertRaisesRegex(ValueError, message):
      make(**more)


if __name__ == '__main__':
  absltest.main()
