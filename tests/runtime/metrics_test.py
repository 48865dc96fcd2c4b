"""Metrics survive a kill without a step twice; bars and tables stay plain where there is no terminal."""

import io
import json
import os

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np
from rich import console as rich_console

from ptjax.runtime import metrics


def write_steps(workdir, stage, steps, resume_step=-1):
  with metrics.Metrics(workdir, stage, resume_step) as writer:
    for step in steps:
      writer.write(step, rl={'reward_mean': step / 10})


def keys(workdir):
  return [(record['stage'], record['step']) for record in metrics.read(workdir)]


class MetricsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = self.create_tempdir().full_path
    self.path = os.path.join(self.workdir, 'metrics.jsonl')

  def test_names_values_and_types(self):
    with metrics.Metrics(self.workdir, 'rl') as writer:
      writer.write(1, rl={'kl': jnp.float32(0.5), 'share': {'gcd': np.float64(0.25)}, 'bf16': jnp.bfloat16(2)},
                   verify={'pass': 3, 'all': np.bool_(True)})
      record = json.loads(open(self.path, encoding='utf-8').read())  # flushed before close
    self.assertGreater(record.pop('time'), 1.7e9)
    self.assertEqual(record, {'stage': 'rl', 'step': 1, 'rl/kl': 0.5, 'rl/share/gcd': 0.25, 'rl/bf16': 2.0,
                              'verify/pass': 3, 'verify/all': 1})

  def test_numbers_that_are_not_finite_stay_valid_json(self):
    with metrics.Metrics(self.workdir, 'rl') as writer:
      writer.write(1, a={'x': float('nan'), 'y': np.inf, 'z': -jnp.inf})
    refuse = lambda name: self.fail(f'{name} is not JSON')
    record = json.loads(open(self.path, encoding='utf-8').read(), parse_constant=refuse)
    self.assertEqual([record[k] for k in ('a/x', 'a/y', 'a/z')], ['NaN', 'Infinity', '-Infinity'])
    [back] = metrics.read(self.workdir)
    np.testing.assert_array_equal([back['a/x'], back['a/y'], back['a/z']], [np.nan, np.inf, -np.inf])

  def test_resume_drops_only_this_stages_later_steps(self):
    write_steps(self.workdir, 'sft', [1, 2, 3])
    write_steps(self.workdir, 'rl', [1, 2, 3, 4])
    with open(self.path, 'a', encoding='utf-8') as f:
      f.write('{"stage": "rl", "st')  # the kill came in the middle of a line
    write_steps(self.workdir, 'rl', [3, 4, 5], resume_step=2)
    self.assertEqual(keys(self.workdir), [('sft', s) for s in (1, 2, 3)] + [('rl', s) for s in (1, 2, 3, 4, 5)])
    self.assertFalse(os.path.exists(self.path + '.partial'))

  def test_start_from_nothing_drops_all_of_the_stage(self):
    write_steps(self.workdir, 'rl', [0, 1])
    write_steps(self.workdir, 'rl', [0])
    self.assertEqual(keys(self.workdir), [('rl', 0)])

  def test_a_step_is_written_once(self):
    with metrics.Metrics(self.workdir, 'rl', resume_step=2) as writer:
      for step in (2, 0):
        with self.assertRaisesRegex(ValueError, 'each step is written once'):
          writer.write(step, rl={'kl': 0.0})
      writer.write(3, rl={'kl': 0.0})
      with self.assertRaisesRegex(ValueError, 'step 3 of rl comes after step 3'):
        writer.write(3, rl={'kl': 0.0})

  @parameterized.parameters(([1.0, 2.0],), ('0.5',), (None,))
  def test_only_scalars(self, value):
    with metrics.Metrics(self.workdir, 'rl') as writer:
      with self.assertRaisesRegex(ValueError, 'metric rl/kl must be one number'):
        writer.write(1, rl={'kl': value})
    self.assertEmpty(metrics.read(self.workdir))

  def test_a_broken_line_in_the_middle_is_an_error_that_names_it(self):
    with open(self.path, 'w', encoding='utf-8') as f:
      f.write('{"stage": "rl", "step": 1}\noops\n{"stage": "rl", "step": 2}\n')
    with self.assertRaisesRegex(RuntimeError, 'metrics.jsonl, line 2 is not JSON'):
      metrics.Metrics(self.workdir, 'rl', 1)

  def test_a_line_of_something_else_is_an_error_that_names_it(self):
    for text in ('[1]', '{"stage": "rl"}', '{"step": 1}', '{"stage": "rl", "step": "1"}'):
      with open(self.path, 'w', encoding='utf-8') as f:
        f.write(text + '\n')
      with self.assertRaisesRegex(RuntimeError, 'metrics.jsonl, line 1 has no "stage" and whole "step"'):
        metrics.read(self.workdir)

  def test_a_full_disk_is_a_sentence(self):
    with metrics.Metrics(self.workdir, 'rl') as writer:
      writer._file.close()
      writer._file = open('/dev/full', 'w', encoding='utf-8')
      with self.assertRaisesRegex(RuntimeError, 'No space left.*goes on from the last checkpoint'):
        writer.write(1, rl={'kl': 0.0})
      writer._file = io.StringIO()

  def test_events_for_tensorboard(self):
    write_steps(self.workdir, 'rl', [1, 2])
    [name] = os.listdir(os.path.join(self.workdir, 'tensorboard', 'rl'))
    with open(os.path.join(self.workdir, 'tensorboard', 'rl', name), 'rb') as f:
      self.assertEqual(f.read().count(b'rl/reward_mean'), 2)

  def test_no_file_is_no_lines(self):
    self.assertEmpty(metrics.read(self.workdir))


class TerminalTest(parameterized.TestCase):

  def test_plain_log_lines_without_a_terminal(self):
    console = rich_console.Console(file=io.StringIO())
    with self.assertLogs('absl', 'INFO') as logs:
      with metrics.Progress('sft', 3, console=console) as bar:
        for step in (1, 2, 3):
          bar.update(step, loss=0.5 / step, tokens_per_s=1234.5)
    self.assertLen(logs.output, 2)  # the first and the last; the second came too soon
    self.assertIn('sft step 3/3  loss 0.1667  1,234 tokens/s  0:00 left', logs.output[1])
    self.assertEmpty(console.file.getvalue())

  def test_a_bar_on_a_terminal(self):
    console = rich_console.Console(file=io.StringIO(), force_terminal=True, width=120)
    with metrics.Progress('rl', 10, start=4, console=console) as bar:
      bar.update(5, reward=0.25, tokens_per_s=80)
    shown = console.file.getvalue()
    for part in ('rl', '5/10', 'reward 0.25', '80 tokens/s', 'left'):
      self.assertIn(part, shown)

  def test_table(self):
    console = rich_console.Console(file=io.StringIO(), width=100)
    metrics.table([{'domain': '[red]gcd', 'base': 0.25}, {'domain': 'sum', 'base': None, 'rl': 1}], 'held-out',
                  console=console)
    shown = console.file.getvalue()
    for part in ('held-out', '[red]gcd', '0.250', 'rl', '-'):
      self.assertIn(part, shown)


if __name__ == '__main__':
  absltest.main()
