"""Paired statistics against numbers worked by hand; gates that block, pass, warn and refuse."""

import json
import math

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from ptjax.evals import gates
from ptjax.evals import suites


def make_suite(outcomes, form=None, digest='d'):
  """Returns a suite from domain -> string of outcomes, one letter per task: 1 right, 0 wrong, e error."""
  tasks = []
  for domain, letters in outcomes.items():
    for i, letter in enumerate(letters):
      status = {'1': 'pass', '0': 'fail', 'e': 'error'}[letter]
      ok = True if form is None else form[domain][i] == '1'
      tasks.append(suites.TaskResult(f'{domain}/{i}', domain, digest, (float(letter == '1'),), (status,), (ok,),
                                     (False,), ''))
  return suites.summarise(tasks, name='heldout', samples=1, ks=(1,), majority={}, confidence=0.95)


def compare(parent, child, **kwargs):
  kwargs = {'confidence': 0.95, 'max_drop': 0.0, **kwargs}
  return gates.compare(make_suite(parent), make_suite(child), **kwargs)


class StatisticsTest(parameterized.TestCase):

  @parameterized.parameters(
      (0, 0, 1.0), (1, 0, 1.0), (5, 0, 2 / 32), (0, 6, 2 / 64), (8, 2, 2 * (1 + 10 + 45) / 1024), (3, 3, 1.0))
  def test_sign_test(self, gained, lost, expected):
    self.assertAlmostEqual(gates.sign_test(gained, lost), expected)

  def test_one_stratum_is_bonett_and_price(self):
    # 20 pairs, 6 gained, 1 lost: p12 = 7/22, p21 = 2/22, difference 5/22,
    # variance ((7 + 2)/22 - (5/22)^2) / 22 = (0.409091 - 0.051653) / 22 = 0.0162472, half 1.959964 * 0.127464
    low, high = gates.paired_interval({'a': [1] * 6 + [-1] + [0] * 13}, 0.95)
    np.testing.assert_allclose((low, high), (5 / 22 - 0.249826, 5 / 22 + 0.249826), atol=1e-5)

  def test_two_strata(self):
    # Half a pair of +1 and -1 in each: n = 5; a: mean 2/5, E x^2 = 3/5, variance (0.6 - 0.16)/5 = 0.088;
    # b: mean 0, E x^2 = 1/5, variance 0.04. Mean of means 0.2, variance (0.088 + 0.04)/4 = 0.032.
    low, high = gates.paired_interval({'a': [1, 1, 0, 0], 'b': [0, 0, 0, 0]}, 0.95)
    half = 1.959964 * math.sqrt(0.032)
    np.testing.assert_allclose((low, high), (0.2 - half, 0.2 + half), atol=1e-6)

  def test_never_of_width_zero_and_within_bounds(self):
    low, high = gates.paired_interval({'a': [0.0] * 4}, 0.95)
    self.assertLess(low, 0.0)
    self.assertAlmostEqual(low, -high)
    self.assertGreaterEqual(gates.paired_interval({'a': [-1.0] * 3}, 0.95)[0], -1.0)
    self.assertEqual(gates.paired_interval({'a': [], 'b': [1.0]}, 0.95), (-1.0, 1.0))

  def test_coverage(self):
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(1000):
      changes = {d: rng.choice([1, 0, -1], size=25, p=[0.25, 0.65, 0.1]) for d in 'abc'}
      low, high = gates.paired_interval(changes, 0.95)
      hits += low <= 0.15 <= high
    self.assertBetween(hits, 930, 975)


class CompareTest(parameterized.TestCase):

  def test_pairing_is_by_task(self):
    result = compare({'a': '1100'}, {'a': '1010'})
    self.assertEqual((result.macro.gained, result.macro.lost, result.macro.change), (1, 1, 0.0))
    self.assertTrue(result.passed)

  def test_a_gain_passes_and_is_significant(self):
    result = compare({'a': '0' * 40, 'b': '1' * 20 + '0' * 20}, {'a': '1' * 20 + '0' * 20, 'b': '1' * 25 + '0' * 15})
    self.assertTrue(result.passed)
    self.assertTrue(result.macro.improved)
    self.assertAlmostEqual(result.macro.change, (0.5 + 0.125) / 2)
    self.assertAlmostEqual(result.domains['b'].p_value, 2 / 32)
    self.assertLen(result.reasons, 1)

  def test_one_fallen_domain_blocks_though_the_average_gains(self):
    result = compare({'a': '0' * 40, 'b': '1' * 40}, {'a': '1' * 40, 'b': '1' * 25 + '0' * 15})
    self.assertFalse(result.passed)
    self.assertGreater(result.macro.low, 0)
    self.assertLen(result.reasons, 1)
    self.assertStartsWith(result.reasons[0], 'b: accuracy fell by 37.5 points, from 100.0% to 62.5% (15 tasks lost')

  def test_many_small_falls_block_by_the_average(self):
    domains = 'abcdefgh'
    result = compare({d: '1' * 10 for d in domains}, {d: '1' * 8 + '00' for d in domains})
    self.assertFalse(result.passed)
    self.assertLen(result.reasons, 1)
    self.assertStartsWith(result.reasons[0], 'the average over domains: accuracy fell by 20.0 points')
    self.assertLen(result.warnings, 8)

  def test_a_fall_within_noise_is_a_warning(self):
    result = compare({'a': '1' * 20}, {'a': '1' * 18 + '00'})
    self.assertTrue(result.passed)
    self.assertIn('within the noise of 20 tasks', result.warnings[0])

  def test_max_drop_allows_a_fall(self):
    parent, child = {'a': '1' * 100}, {'a': '1' * 80 + '0' * 20}
    self.assertFalse(compare(parent, child).passed)
    self.assertTrue(compare(parent, child, max_drop=0.15).passed)
    with self.assertRaisesRegex(ValueError, r'must lie in \[0, 1\]'):
      compare(parent, child, max_drop=5)

  def test_domains_share_the_level(self):
    alone = compare({'a': '1' * 30}, {'a': '1' * 24 + '0' * 6})
    among = compare({'a': '1' * 30, **{d: '1' * 30 for d in 'bcdefghij'}},
                    {'a': '1' * 24 + '0' * 6, **{d: '1' * 30 for d in 'bcdefghij'}})
    self.assertLess(alone.domains['a'].bound, 0)
    self.assertGreater(among.domains['a'].bound, alone.domains['a'].bound)
    self.assertEqual(among.domains['a'].high, alone.domains['a'].high)  # what is shown stays at 95%

  def test_false_blocks_are_rare(self):
    rng = np.random.default_rng(1)
    blocked = 0
    for _ in range(150):
      draw = lambda: {d: ''.join(rng.choice(['0', '1'], size=30)) for d in 'abcdef'}
      blocked += not compare(draw(), draw()).passed
    self.assertLessEqual(blocked, 15)  # 5% of 150 is 7.5, its standard deviation 2.7

  def test_errors_fail_closed(self):
    result = compare({'a': '1' * 10, 'b': '11'}, {'a': '1' * 8 + 'ee', 'b': 'ee'})
    self.assertFalse(result.passed)
    self.assertEqual((result.domains['a'].pairs, result.domains['a'].excluded), (8, 2))
    self.assertIn('a: 2 of 10 tasks have no verdict', ' '.join(result.reasons))
    self.assertIn('b: 2 of 2 tasks have no verdict', ' '.join(result.reasons))
    self.assertTrue(compare({'a': '1' * 10}, {'a': '1' * 9 + 'e'}).passed)

  def test_other_tasks_are_refused_by_name(self):
    with self.assertRaisesRegex(ValueError, 'the child lacks 1 tasks: a/2; the parent lacks 1 tasks: b/0'):
      compare({'a': '111'}, {'a': '11', 'b': '1'})
    with self.assertRaisesRegex(ValueError, '2 tasks have the same id but another prompt.*a/0, a/1'):
      gates.compare(make_suite({'a': '11'}), make_suite({'a': '11'}, digest='e'), confidence=0.95, max_drop=0.0)

  def test_json(self):
    record = json.loads(json.dumps(compare({'a': '10'}, {'a': '11'}).to_json()))
    self.assertEqual((record['passed'], record['domains']['a']['gained']), (True, 1))


class GainTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ('format_only', '1' * 10 + '0' * 30, '0' * 40, '1' * 10 + '0' * 30, '1' * 40, 0.0, 0.25, 'A gain in format only'),
      ('answers', '0' * 40, '1' * 40, '1' * 20 + '0' * 20, '1' * 40, 0.5, 0.0, 'A gain in right answers'),
      ('both', '1' * 10 + '0' * 30, '0' * 40, '1' * 30 + '0' * 10, '1' * 40, 0.5, 0.25, 'A gain in right answers'),
      ('loss', '1' * 40, '1' * 40, '1' * 20 + '0' * 20, '1' * 40, -0.5, 0.0, 'A loss of right answers'),
      ('form_within_noise', '1' * 10 + '0' * 30, '1' * 39 + '0', '1' * 11 + '0' * 29, '1' * 40, 0.025, 0.0,
       'No change beyond noise'),
      ('nothing', '10' * 20, '1' * 40, '10' * 20, '1' * 40, 0.0, 0.0, 'No change beyond noise'))
  def test_split(self, old, old_form, new, new_form, answer, format_only, sentence):
    parent, child = make_suite({'a': old}, {'a': old_form}), make_suite({'a': new}, {'a': new_form})
    diff = gates.compare(parent, child, confidence=0.95, max_drop=0.0).macro
    self.assertAlmostEqual(diff.answer, answer)
    self.assertAlmostEqual(diff.format_only, format_only)
    self.assertStartsWith(gates.describe_gain(diff), sentence)


if __name__ == '__main__':
  absltest.main()
