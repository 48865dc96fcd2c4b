r"""math: every case of tests/data/math.json, and more of the same kinds."""

import json
import pathlib
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from ptjax import types
from ptjax.verify import math

_CASES = json.loads((pathlib.Path(__file__).parents[1] / 'data' / 'math.json').read_text())


def verify(gold, text):
  return math.verify(types.Task('t', 'd', (), 'math', gold), text)


class CasesTest(parameterized.TestCase):

  @parameterized.named_parameters((f'{c["category"]}_{c["id"]}', c) for c in _CASES)
  def test_case(self, case):
    verdict = verify(case['gold'], case['answer'])
    self.assertEqual(verdict.status == 'pass', case['expected'], f'{case["why"]}: {verdict}')

  @parameterized.parameters(
      ('1234', r'1{,}234', True), ('1234', r'\$1,234.00', True), ('5', '5 cm', True), ('42', '+42', True),
      (r'\frac{1}{\sqrt{2}}', r'\frac{\sqrt{2}}{2}', True), (r'\sqrt{x^2}', '|x|', True), (r'\pi', '3.14159', False),
      ('10^{20}', '100000000000000000001', False), ('0.1', '0.10000000000000001', False),
      (r'(-\infty,2)\cup(3,\infty)', r'(3,\infty)\cup(-\infty,2)', True), ('(1,2)', '(2,1)', False),
      ('1,2', r'1 \text{ and } 2', True), ('42', r'42 \text{ or } 43', False), ('42', '1, 42', False),
      ('1010_2', '10', True), ('1010_2', '1010_2', True), ('1011_2', '10', False), (r'3\frac{1}{2}', '3.5', True),
      ('3\\times 10^{8}', '3e8', True), ('x^2-1', '(x-1)(x+1)', True), ('3+4i', '3-4i', False), ('2x', 'x', False),
      (r'5\text{ cm}', '5 cm', True), (r'5\text{ cm}', r'5\text{ m}', False), ('5xy', '5yx', True),
      ('42', '41=42', False), (r'[2,\infty)', r'x \ge 2', True), (r'\{1,2\}', '(1,2)', False),
      ('3+4i', r'\sqrt{-16}+3', True), ('i^2', '-1', True),
      (r'\text{(B)}', 'C', False), ('(0,1)', '1 < i', False), ('(0,1)', '[0, i]', False),
      (r'\binom{5}{2}', '10', True), ('5!', '121', False),
  )
  def test_boxed(self, gold, answer, right):
    verdict = verify(gold, f'Therefore $\\boxed{{{answer}}}$.')
    self.assertEqual(verdict.status, 'pass' if right else 'fail', verdict)

  @parameterized.parameters(
      (r'\frac{1}{2004!}', r'\frac{1}{2006!}', False), (r'\sqrt2+10^{-50}', r'\sqrt2', False),
      (r'\sin(10^{-30})', '10^{-30}', False), (r'\sin(10^{-2000})', '10^{-2000}', False),
      (r'\sqrt{10^{40}+1}', '10^{20}', False), (r'\ln(10^{40}+1)', r'40\ln 10', False),
      (r'\{10^{-20},1\}', r'\{10^{-21},1\}', False), ('[10^{-20},1]', '[10^{-21},1]', False),
      ('(10^{-20},1,2)', '(10^{-21},1,2)', False), (r'x<\sqrt2+10^{-300}', r'x<\sqrt2', False),
      (r'x=\sqrt2+10^{-300}', r'x=\sqrt2', False), (r'\frac{x}{2004!}', r'\frac{x}{2006!}', False),
      (r'(0,\sqrt2+10^{-300})\cup(3,4)', r'(0,\sqrt2)\cup(3,4)', False), ('x^2+1=0', 'x^2+2=0', False),
      (r'\begin{pmatrix}10^{-20}\\2\end{pmatrix}', r'\begin{pmatrix}10^{-21}\\2\end{pmatrix}', False),
      (r'\arctan\frac12+\arctan\frac13', r'\frac{\pi}{4}', True),
      (r'\arctan\frac12+\arctan\frac13', r'\frac{\pi}{4}+10^{-3000}', False),
      (r'\arctan\frac12+\arctan\frac13', r'\frac{\pi}{4}+e^{-e^{10}}', False),
      (r'\sqrt[3]{2+\sqrt5}+\sqrt[3]{2-\sqrt5}', '1', True), (r'\sqrt{3+2\sqrt2}', r'1+\sqrt2', True),
      ('n!', 'n(n-1)!', True), (r'\binom{n}{2}', r'\frac{n(n-1)}{2}', True), ('2^{x+1}', r'2\cdot 2^x', True),
      (r'\sin 2x', r'2\sin x\cos x', True), ('xy=1', r'y=\frac1x', True), (r'\frac{2003!}{2004!}', r'\frac{1}{2004}', True),
  )
  def test_equal_is_exact(self, gold, answer, right):
    self.assertEqual(verify(gold, f'\\boxed{{{answer}}}').status, 'pass' if right else 'fail')

  @parameterized.parameters(
      ('I think \\boxed{3}. Answer: 4', '4', True), ('Answer: 4, so \\boxed{3}', '3', True),
      ('#### 1,234', '1,234', True), ('The answer is 42 apples.', '42', False), ('It is $x=3$.', 'x=3', False),
      ('That makes 12.', '12', False), ('\\boxed{7', None, False), ('nothing', None, False),
      ('Answer: 4', '4', True),
  )
  def test_extract(self, text, answer, format_ok):
    self.assertEqual(math.extract(text), (answer, format_ok))

  def test_a_killed_worker_is_replaced(self):
    with mock.patch.object(math, '_CPU_S', 0.3):
      self.assertEqual(verify('1', r'\boxed{100000000!}').status, 'timeout')
    self.assertEqual(verify('1', r'\boxed{2^{0}}').status, 'pass')


if __name__ == '__main__':
  absltest.main()
