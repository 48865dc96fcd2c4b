"""Answers are taken where the model states them last, in the asked form or in chat."""

import time

from absl.testing import absltest
from absl.testing import parameterized

from ptjax.verify import answers


class ExtractTest(parameterized.TestCase):

  @parameterized.parameters(
      ('Answer: 42', '42', True),
      ('Answer: 42.', '42', True),
      ('**Answer: 1,234**', '1234', True),
      ('First Answer: 3, no.\nAnswer: -7', '-7', True),
      ('answer: 12 apples', '12', False),
      ('Answer: 3 * 4 = 12', '12', False),
      ('Answer: 12 since 3 times 4', '12', False),
      ('The answer is 12.', '12', False),
      ('The result of 3 times 4 is 12.', '12', False),
      (r'so \boxed{5} apples in 3 bags', '5', True),
      ('It is 1,2', None, False),
      ('12-5', None, False),
      ('7 - 12 = -5', '-5', False),
      ('that makes −5', '-5', False),
      ('0.50 or 1/2', '1/2', False),
      ('It appears two times.', '2', False),
      ('It appears once', '1', False),
      ('12,345,678 people', '12345678', False),
      ('There is no such thing', None, False),
      ('Answer:', None, False),
      ('Answer: 3 or 4', None, False),
      ('**Answer:** 12', '12', True),
      ('Answer:\n12', '12', True),
      ('', None, False),
      ('Answer: $42', '42', True),
      ('Answer: 42 apples', '42', False),
      ('6 * 7 = 42', '42', False),
      ('Answer: x = 42', '42', False),
      ('Answer: .1', '0.1', False),
      ('Answer: -.5', '-0.5', False),
      (r'Answer: \frac{1}{2}', '1/2', False),
      ('Answer: minus 3', '-3', False),
      ('So 7 minus 3 is 4', '4', False),
      ('Answer: 3 thousand', '3000', False),
      ('Answer: 2.5 million people', '2500000', False),
      ('Answer: 7, not 8', '7', False),
      ('Answer: 3*4 = 12 (not 13)', '12', False),
      ('Answer: 42 km/h', '42', False),
      (r'\boxed{1{,}234}', '1234', True),
      (r'\boxed{5\text{ cm}}', '5', True),
      ('**42** apples', '42', False),
      ('Hence $x=42$.', '42', False),
      ('5 + 12 -> 17', '17', False),
      ('There is not much to it. So we get 42.', '42', False),
  )
  def test_number(self, text, answer, format_ok):
    self.assertEqual(answers.extract(text, 'number'), (answer, format_ok))

  @parameterized.parameters(
      '1e3', '1,5', '1:30', '1 000', '3^2', '3*2', '3 * 2', '3!', '3i', '3x', r'2\sqrt{3}', r'\sqrt{3}', '2 1/2',
      r'3\frac{1}{2}', '5%', r'5\%', '5 percent', 'not 7', 'at least 7', 'less than 7', '7 < 8', '7 or less', '3 or 4',
      '3 + 1', '3 -5', '--5', '1/2/3', '2(3)', 'f(3)', '2 times 3', '2 hours and 30 minutes', '5 apples, 6 pears',
      '10-7', r'2\pi', r'\ge 7', '1.2.3', '2**3', '2^{3}', 'x2', '1/2x')
  def test_part_of_a_value_is_no_number(self, text):
    for completion in (f'Answer: {text}', f'\\boxed{{{text}}}'):
      self.assertIsNone(answers.extract(completion, 'number')[0], completion)

  @parameterized.parameters('number', 'word', 'list', 'text')
  def test_thoughts_are_no_answer(self, kind):
    self.assertIsNone(answers.extract('<think>Answer: 7, 8</think>', kind)[0])
    self.assertEqual(answers.extract('<think>Answer: 1</think>Answer: 7, 8', kind),
                     answers.extract('Answer: 7, 8', kind))
    self.assertEqual(answers.extract('<think>Answer: 7', 'number'), ('7', True))

  @parameterized.parameters(
      ('Answer: nus', 'nus', True),
      ('Answer: "nus".', 'nus', True),
      ("The word 'sun' spelled backward is 'nus'.", 'nus', False),
      ('sun -> nus', 'nus', False),
      ('Answer: The reverse of sun is nus', 'nus', False),
      ('!!', None, False),
      ('Answer: Yes/No', None, False),
      ('Answer: Yes and No', None, False),
      ('Answer: Paris, France', 'Paris', False),
  )
  def test_word(self, text, answer, format_ok):
    self.assertEqual(answers.extract(text, 'word'), (answer, format_ok))

  @parameterized.parameters(
      ('Answer: 3, 12, 45', '3, 12, 45', True),
      ('**Answer:** -1, 2.5, 3.', '-1, 2.5, 3', True),
      ('Answer:\ncat, dog', 'cat, dog', True),
      ('Answer: 3, 12 and 45', '3, 12, 45', False),
      ('Answer: the order is 1, 2, 3.', '1, 2, 3', False),
      ('Answer: 1, 2 or 2, 1', None, False),
      ('Answer: 7', None, False),
      ('45, 3, 12 becomes 3, 12, and 45', '3, 12, 45', False),
      ('["3", "12"]', '3, 12', False),
      ('The answer is:\n\n- -3\n- 12\n', '-3, 12', False),
      ('Here it is:\n1. made\n2. set\n3. run', 'made, set, run', False),
      ('* one\n* two', 'one, two', False),
      ('1. 3\n\n2. 17\n\n3. 40', '3, 17, 40', False),
      ('Answer:\n3\n17\n40', '3, 17, 40', False),
      ('Answer: 3 17 40', '3, 17, 40', False),
      ('Answer: 3 -> 17 -> 40', '3, 17, 40', False),
      ("Answer: ['3', '17', '40']", '3, 17, 40', False),
      ('\\boxed{\\text{cat}, \\text{dog}}', 'cat, dog', True),
      ('Answer: 40, 3, 17 -> 3, 17, 40', '3, 17, 40', False),
      ('Answer: cat, dog. These are sorted, as asked.', 'cat, dog', False),
      ('Answer: cat, dog\nHope it is useful, thanks!', 'cat, dog', True),
      ('Answer: the, to, and\nok', 'the, to, and', True),
      ('Answer: 3, 17\nThe answer is sorted.', '3, 17', True),
      ('Answer: 3, 17; 17, 3', None, False),
      ('Answer: 3, 17 maybe 17, 3', None, False),
      ('Answer: not 3, 17', None, False),
      ('Answer: 50; 3, 17', None, False),
      ('Answer: 3, 17 50', None, False),
      ('\\boxed{17, 3 or 3, 17}', None, False),
      ('17, 3 or 3, 17', None, False),
      ('cat dog', None, False),
      ('so \\boxed{5} it is', None, False),
  )
  def test_list(self, text, answer, format_ok):
    self.assertEqual(answers.extract(text, 'list'), (answer, format_ok))

  @parameterized.parameters(
      '1' + ',111' * 8000 + ',1', 'a', 'a.', ' ', '- a\n', '1 ', 'answer:\n', 'answer: a ', 'answer: a,b\n',
      '\\boxed{', 'answer' + ' ' * 300, 'answer: 1 not ', '1-', '\\frac', '- ', '3 million ', 'minus ', "a'", 'a, and ',
      '1;', ':  ', '.', '1{,}', '(', 'at least ')
  def test_no_text_takes_long(self, part):
    text = part * (100_000 // len(part))
    for kind in answers.KINDS:
      start = time.process_time()
      answers.extract(text, kind)  # hours, were the patterns to try every way to split it
      self.assertLess(time.process_time() - start, 0.5, kind)  # 0.2 where nothing else runs

  @parameterized.parameters(
      ('Answer: 1 0\n0 1\n', '1 0\n0 1', True),
      ('Answer: _ Q\nQ _', '_ Q\nQ _', True),
      (' up right ', 'up right', False),
      ('', None, False),
  )
  def test_text(self, text, answer, format_ok):
    self.assertEqual(answers.extract(text, 'text'), (answer, format_ok))

  def test_unclosed_box_is_none(self):
    self.assertIsNone(answers.last_box(r'\boxed{1} then \boxed{\frac{1}{2}'))
    self.assertEqual(answers.last_box(r'\boxed{\frac{1}{2}} x'), r'\frac{1}{2}')

  def test_unknown_kind(self):
    with self.assertRaisesRegex(ValueError, "'letter' is not one of"):
      answers.extract('a', 'letter')


if __name__ == '__main__':
  absltest.main()
