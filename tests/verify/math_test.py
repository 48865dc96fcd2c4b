r"""math: every case of tests/data/math.json, and more of the same kinds."""

import json
import pathlib
import time
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
      (r'\sin 2x', r'2\sin x\cos x', True), ('xy=1', r'y=\frac1x', True),
      (r'\frac{2003!}{2004!}', r'\frac{1}{2004}', True),
  )
  def test_equal_is_exact(self, gold, answer, right):
    self.assertEqual(verify(gold, f'\\boxed{{{answer}}}').status, 'pass' if right else 'fail')

  @parameterized.parameters(
      ('3:30 PM', '3:30 AM', False), ('3:30 PM', '3:30 p.m.', True), ('3:30', r'3:30\text{ PM}', True),
      ('12:05', '12:5', False), ('3:05', '03:05', True), ('1:2:3', '1:3:2', False), ('3:4:5', '6:8:10', True),
      ('3:2', r'3\colon2', True), ('10:20', '1:2', True), ('a:b:c', 'a:c:b', False),
      ('5', r'5\text{ (or maybe 6)}', False), ('5', r'5\text{ or less}', False), ('5', r'5\text{ (false)}', False),
      ('5', '5 apples, 6 pears', False), ('5', r'5 \text{ apples, } 6 \text{ pears}', False), ('3', '3t', False),
      ('3', r'3\text{ million}', False), ('3000000', r'3\text{ million}', True), ('24', '2 dozen', True),
      ('2', r'2\text{ dozen}', False), ('2', r'2\text{ half}', False), ('2', '2 hours and 30 minutes', False),
      ('2', r'2\text{ hours and }30\text{ minutes}', False), (r'3\text{ million dollars}', '3000000', True),
      ('2', r'2 \text{ times } x', False), ('5', r'\frac{10}{2} x', False), ('5xy', '5 xy', True), ('5', '5t', False),
      ('12', '12 cm^2', True), ('12', '12 cm²', True), ('5', '5cm', True), ('60', r'60\text{ km/h}', True),
      ('5', r'5\text{ squared}', False), ('5', r'5\text{ factorial}', False), ('5', '5_2', False),
      ('x_2', 'x_{2}', True), ('a_{12}', '10', False), (r'33.\overline{3}\%', r'\frac13', True),
      (r'25\%', r'x = 25\%', True), (r'10+5\%', '0.15', False), ('25', r'25\%', True), (r'10\%,20\%', '0.1, 0.2', True),
      ('5', r'5\text{ feet squared}', True), ('-5', r'\text{negative }5', True),
      ('5', r'5\,\mathrm{cm}', True), ('5i', r'5\mathrm{i}', True), ('1.5', r'1\frac12\text{ cups}', True),
      (r'20^\circ\text{C}', '20°C', True), (r'y=3x', r'y=3x \text{ where } x>0', False),
      ('AB', 'BA', False), ('ab', 'ba', True), ('BC', 'B, C', True), (r'\text{A and C}', r'\text{A, C}', True),
      ('A,C', 'AC', True), ('A,C', 'C,A', True), ('A', 'A, B', False), ('D', r'\text{D. }5', True),
      ('D', '(D) 5', True),
      ('C', 'C: Paris', True), ('D', r'\text{(D) }5\text{ or (C) }6', False), ('B', 'b', True),
      (r'0.\overline{3}', r'\frac13', True), (r'\frac13', r'0.\dot{3}', True), (r'0.\overline{9}', '1', True),
      (r'2.1\overline{36}', r'\frac{47}{22}', True), (r'0.\overline{3}', '0.3', False),
      (r'33\frac13\%', r'\frac13', True), (r'\langle 1,2,3\rangle', '(1,2,3)', True),
      (r'\langle 1,2,3\rangle', r'\langle 1,3,2\rangle', False), ('√2', r'\sqrt2', True), ('½', '0.5', True),
      ('√(x+1)', r'\sqrt{x+1}', True), ('x²+3½', r'x^2+\frac72', True), ('3½', '3.5', True), ('x¹²', 'x^{12}', True),
      (r'7\bmod 3', '1', True), (r'\frac{1\pm\sqrt5}{2}', r'\frac{1+\sqrt5}{2},\frac{1-\sqrt5}{2}', True),
      (r'1\pm\sqrt5', r'1+\sqrt5', False), (r'\cos60^\circ', r'\frac12', True), (r'\frac12', r'\sin 30^\circ', True),
      (r'\frac{\pi}{3}', r'60^\circ', True), (r'\frac{\pi}{3}', '60', False), (r'90^\circ', '90', True),
      (r'45\text{ degrees}', r'45^\circ', True), (r'\varnothing', r'\emptyset', True),
      (r'(-\infty,1)\cup(2,\infty)', r'x<1 \text{ or } x>2', True), (r'x<1\text{ or }x>2', 'x<1, x>2', True),
      (r'x<1\text{ or }x>2', r'x<1\text{ or }x>3', False), ('2,3', r'x=2 \text{ or } x=3', True),
      (r'\sqrt[3]{-8}', '-2', True), ('2x>6', 'x>3', True), ('2x>6', 'x<3', False), ('x^2<4', '-2<x<2', True),
      (r'2\mathbf{i}+3\mathbf{j}', r'3\mathbf j+2\mathbf i', True), (r'\{x : x>0\}', r'(0,\infty)', True),
      (r'2\mathbf{i}+3\mathbf{j}', r'3\mathbf{i}+2\mathbf{j}', False), ('-3', 'minus 3', True),
      ('-3', 'negative 3', True), ('4', r'\text{four}', True), (r'\text{two}', '2', True),
      (r'\{1,2,\ldots,10\}', r'\{1,\dots,10\}', True), (r'\{1,2,\ldots,10\}', r'\{1,2,10\}', False),
      (r'\{2,4,\ldots,8\}', r'\{2,4,6,8\}', True), (r'\{1,2,3\}', r'\{1,2,3,\ldots\}', False),
      (r'\{1,2,\ldots\}', r'\{1, 2, \ldots\}', True), ('1,1,\\ldots,1', '1,1,1', False),
      (r'\begin{cases}x&x>0\\-x&x<0\end{cases}', r'\begin{cases} x & x>0 \\ -x & x<0 \end{cases}', True),
      (r'\begin{cases}x&x>0\\-x&x<0\end{cases}', r'\begin{cases}-x&x>0\\x&x<0\end{cases}', False),
  )
  def test_as_it_is_written(self, gold, answer, right):
    self.assertEqual(verify(gold, f'\\boxed{{{answer}}}').status, 'pass' if right else 'fail')

  @parameterized.parameters(
      ('3', 'the answer is not 3', False), ('3', 'The answer is less than 3.', False),
      ('7', 'Answer: 7\nAnswer:', True), ('3', 'The answer is not $3$', False), ('6', 'Answer: $6$ or $7$', False),
      ('6,7', 'Answer: $6$ or $7$', True),
      ('7', 'The answer is 7, not 8.', True), ('-3', 'The answer is negative 3', True), ('D', 'Answer: (D) 5', True),
      ('D', 'Answer: D. 5 apples', True), ('C', 'Answer: C: Paris', True), ('5', 'The answer is $5$ apples', True),
      ('3000000', 'The answer is 3 million dollars.', True), ('2', 'Answer: 2 hours and 30 minutes', False),
      (r'x<1\text{ or }x>2', 'Answer: $x<1$ or $x>2$', True), ('3:30 PM', 'Answer: 3:30 AM', False),
      ('7', r'<think>so \boxed{7}</think> I do not know.', False), ('7', r'<think>\boxed{3}</think>\boxed{7}', True),
      ('7', r'<think> \boxed{7}', True), (r'2\sqrt3', r'Answer: 2\sqrt{3} meters', True),
      (r'\frac{3}{4}', 'Answer: $\\frac{3}{4}$ hours, or 45 minutes', True), ('12', 'Answer: 3 + 9 = 12 apples', True),
  )
  def test_as_it_is_stated(self, gold, text, right):
    self.assertEqual(verify(gold, text).status, 'pass' if right else 'fail')

  @parameterized.parameters(
      '\\(', '\\[', '\\(a', '$', '$$', '$a', 'answer:\n', 'answer: ', 'answer is a ', '####', '#### \n', '\\boxed{',
      ' ', '1,111', '</think>', ':  ', 'answer' + ' ' * 300, 'a\n', '$1$ or ', '#### $1$ or ', '\\) ', '*')
  def test_no_text_takes_long(self, part):
    text = part * (100_000 // len(part))
    start = time.process_time()
    math.extract(text)
    self.assertLess(time.process_time() - start, 0.5)  # 0.2 where nothing else runs

  @parameterized.parameters(r'\frac{1}{', '1+', r'\frac{1}{0', '', '41=42', None)
  def test_a_reference_that_cannot_be_read_is_refused(self, reference):
    with self.assertRaisesRegex(ValueError, 'field "reference"'):
      math.check(types.Task('t', 'd', (), 'math', reference))

  @parameterized.parameters(
      42, 0.5, r'\text{Paris}', 'ABD', r'\frac{1\pm\sqrt5}{2}', r'\langle 1,2\rangle', r'5\text{ cm}', '√2',
      r'7\bmod 3')
  def test_a_reference_that_can_be_read(self, reference):
    math.check(types.Task('t', 'd', (), 'math', reference))

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
