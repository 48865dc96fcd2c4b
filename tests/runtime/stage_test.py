"""A stage's directory: rollouts after the restored step go, whatever characters they hold."""

import json

from absl.testing import absltest

from ptjax.runtime.stage import Stage


class NeverStopped:

  def stop_requested(self):
    return False


class Trainer:
  """A state that orbax can save: one number."""

  state = {'x': 0.0}


class RolloutsTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.stage = Stage('rl', self.create_tempdir().full_path, every=5, keep=2, interrupt=NeverStopped())
    self.path = self.stage.directory / 'rollouts.jsonl'

  def begin(self):
    next(self.stage.steps(1, Trainer()))

  def test_unfinished_and_later_lines_go_and_odd_line_ends_inside_a_text_are_text(self):
    self.stage.add_rollouts([dict(step=-1, completion='a\u2028b\x85c\x0cd\re'), dict(step=0, completion='later')])
    with open(self.path, 'a', encoding='utf-8') as f:
      f.write('{"step": -1, "compl')
    self.begin()
    lines = self.path.read_text(encoding='utf-8').split('\n')
    self.assertLen(lines, 2)
    self.assertEqual(json.loads(lines[0])['completion'], 'a\u2028b\x85c\x0cd\re')

  def test_a_broken_line_is_named(self):
    self.path.write_text('{"step": -1}\nnonsense\n', encoding='utf-8')
    with self.assertRaisesRegex(RuntimeError, r'rollouts\.jsonl:2: is not a rollout.*fix:'):
      self.begin()


class LastTest(absltest.TestCase):

  def test_a_stage_stopped_after_its_last_step_still_knows_that_step(self):
    workdir = self.create_tempdir().full_path
    for _ in range(2):
      stage = Stage('rl', workdir, every=5, keep=2, interrupt=NeverStopped())
      for step in stage.steps(2, Trainer()):
        stage.log(step, progress={}, tokens_per_s=2.0, rl={'kl': step / 2, 'reward': {'gcd': 1.0}})
      self.assertEqual(stage.last, {'rl/kl': 0.5, 'perf/tokens_per_s': 2.0})


if __name__ == '__main__':
  absltest.main()
