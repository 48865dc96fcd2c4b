"""Rates and intervals against numbers worked by hand."""

import math
import os

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from ptjax import types
from ptjax.evals import suites


def make_task(id_, domain='sum', reference='4'):
  return types.Task(id=id_, domain=domain, messages=({'role': 'user', 'content': f'task {id_}'},),
                    verifier='math', reference=reference)


def make_rollout(task, text, finish_reason='stop'):
  return types.Rollout(
      task_id=task.id, group_id=task.id, prompt_ids=np.zeros(1, np.int32), token_ids=np.zeros(1, np.int32),
      mask=np.ones(1, bool), behavior_logp=np.zeros(1, np.float32), version=np.zeros(1, np.int32),
      finish_reason=finish_reason, temperature=1.0, text=text)


def verify(tasks, texts):
  """'4' is right, '?' breaks the verifier; a leading '=' is the asked form."""
  verdicts = []
  for task, text in zip(tasks, texts):
    answer = text.lstrip('=')
    status = 'error' if answer == '?' else 'pass' if answer == task.reference else 'fail'
    verdicts.append(types.Verdict(status, float(status == 'pass'), format_ok=text.startswith('=')))
  return verdicts


def from_table(table):
  """Returns a `generate` that gives the texts of a table, task id -> samples."""
  def generate(tasks, samples):
    return [[make_rollout(task, text) for text in table[task.id][:samples]] for task in tasks]
  return generate


class EstimatorsTest(parameterized.TestCase):

  @parameterized.parameters((1, 0.3), (5, 1 - 21 / 252), (8, 1.0), (10, 1.0))
  def test_pass_at_k(self, k, expected):
    self.assertAlmostEqual(suites.pass_at_k(10, 3, k), expected)

  @parameterized.parameters((0, 0, 1), (3, 4, 1), (3, -1, 1), (3, 1, 0), (3, 1, 4))
  def test_pass_at_k_refuses(self, n, c, k):
    with self.assertRaisesRegex(ValueError, 'pass_at_k needs'):
      suites.pass_at_k(n, c, k)

  @parameterized.parameters(
      # z = 1.959964, z^2 = 3.841459: centre (c/n + z^2/2n) / (1 + z^2/n), half as in Wilson's formula
      (3, 10, 0.107791, 0.603222), (0, 20, 0.0, 0.161125), (20, 20, 0.838875, 1.0), (0, 0, 0.0, 1.0))
  def test_wilson(self, right, n, low, high):
    np.testing.assert_allclose(suites.wilson_interval(right, n), (low, high), atol=1e-6)

  def test_wilson_at_another_confidence(self):
    # z = 1.644854: centre (0.5 + 0.135277) / 1.270554 = 0.5, half 1.644854 / 1.270554 * sqrt(0.025 + 0.006764)
    np.testing.assert_allclose(suites.wilson_interval(5, 10, 0.9), (0.269272, 0.730728), atol=1e-6)

  def test_confidence_is_checked(self):
    with self.assertRaisesRegex(ValueError, 'between 0 and 1'):
      suites.wilson_interval(1, 2, 95)


class EvaluateTest(parameterized.TestCase):

  def evaluate(self, table, domains=None, **kwargs):
    tasks = [make_task(id_, (domains or {}).get(id_, 'sum')) for id_ in table]
    kwargs = {'samples': len(next(iter(table.values()))), 'majority': {}, **kwargs}
    return suites.evaluate(tasks, from_table(table), verify, **kwargs)

  def test_answer_and_format_are_two_columns(self):
    result = self.evaluate({'a': ['=4'], 'b': ['4'], 'c': ['=5'], 'd': ['5']}, majority={'sum': 0.25})
    summary = result.domains['sum']
    self.assertEqual((summary.accuracy, summary.format_frac, summary.strict_frac), (0.5, 0.5, 0.25))
    self.assertEqual(summary.majority_frac, 0.25)
    self.assertEqual(result.tasks[0].text, '=4')

  def test_errors_are_counted_and_in_no_rate(self):
    result = self.evaluate({'a': ['=4', '?'], 'b': ['5', '5'], 'c': ['?', '?']}, ks=(1, 2))
    summary = result.domains['sum']
    self.assertEqual((summary.tasks, summary.errors, summary.accuracy), (3, 3, 0.5))
    self.assertEqual((summary.low, summary.high), suites.wilson_interval(1, 2))
    self.assertEqual(summary.pass_at, {1: 0.5, 2: 0.0})  # only b has two graded samples
    self.assertAlmostEqual(summary.format_frac, 1 / 3)

  def test_several_samples(self):
    result = self.evaluate({'a': ['4', '5', '5', '5'], 'b': ['5'] * 4}, ks=(1, 4))
    self.assertEqual(result.macro.accuracy, 0.125)
    self.assertEqual(result.macro.pass_at, {1: 0.125, 4: 0.5})

  def test_macro_weighs_domains_equally(self):
    table = {'a': ['4'], 'b': ['4'], 'c': ['4'], 'd': ['5']}
    result = self.evaluate(table, {'d': 'other'})
    self.assertEqual(result.macro.accuracy, 0.5)
    (low3, _), (_, high1) = suites.wilson_interval(3, 3), suites.wilson_interval(0, 1)
    self.assertAlmostEqual(result.macro.low, 0.5 - (1 - low3) / 2)
    self.assertAlmostEqual(result.macro.high, 0.5 + high1 / 2)

  def test_a_domain_without_a_verdict_has_no_accuracy(self):
    result = self.evaluate({'a': ['4'], 'b': ['?']}, {'b': 'broken'})
    self.assertTrue(math.isnan(result.domains['broken'].accuracy))
    self.assertTrue(math.isnan(result.macro.accuracy))
    self.assertEqual((result.macro.low, result.macro.high), (0.0, 1.0))

  def test_truncated(self):
    tasks = [make_task('a'), make_task('b')]
    generate = lambda tasks, samples: [[make_rollout(tasks[0], '4', 'length')], [make_rollout(tasks[1], '4')]]
    self.assertEqual(suites.evaluate(tasks, generate, verify, samples=1, majority={}).macro.truncated_frac, 0.5)

  def test_saved_is_loaded_the_same(self):
    result = self.evaluate({'a': ['=4', '?'], 'b': ['5', '<script>']}, {'b': 'other'}, ks=(1, 2),
                           majority={'sum': 0.1, 'other': 0.2}, confidence=0.9)
    path = os.path.join(self.create_tempdir(), 'eval.json')
    suites.save(result, path)
    loaded = suites.load(path)
    self.assertEqual(str(loaded), str(result))  # nan is not equal to itself, its text is
    self.assertNotIn('NaN', open(path, encoding='utf-8').read())

  def test_another_file_is_refused(self):
    path = self.create_tempfile('eval.json', '{"tasks": 3}').full_path
    with self.assertRaisesRegex(ValueError, 'not an evaluation result'):
      suites.load(path)

  def test_requests_are_checked(self):
    with self.assertRaisesRegex(ValueError, 'empty'):
      suites.evaluate([], from_table({}), verify, samples=1, majority={})
    with self.assertRaisesRegex(ValueError, "more than once.*'a'"):
      suites.evaluate([make_task('a'), make_task('a')], from_table({}), verify, samples=1, majority={})
    with self.assertRaisesRegex(ValueError, 'pass@k'):
      self.evaluate({'a': ['4']}, ks=(2,))
    with self.assertRaisesRegex(RuntimeError, '2 for each of 1 tasks'):
      self.evaluate({'a': ['4']}, samples=2)
    with self.assertRaisesRegex(RuntimeError, '0 verdicts for 1'):
      suites.evaluate([make_task('a')], from_table({'a': ['4']}), lambda tasks, texts: [], samples=1, majority={})


if __name__ == '__main__':
  absltest.main()
