"""The code in a completion is found as a reader would find it, and no text takes long to look through."""

import time

from absl.testing import absltest
from absl.testing import parameterized

from ptjax.verify import code_blocks

F = 'def f(x):\n  return x + 1\n'


class ExtractTest(parameterized.TestCase):

  @parameterized.parameters(
      ('def f(x):\n  return 1', 'def f(x):\n  return 1', True),
      ('```python\ndef f(x):\n  return 1\n```', 'def f(x):\n  return 1\n', True),
      ('Sure:\n```python\ndef f(x):\n  return 1\n```\nUse it:\n```\nf(2)\n```', 'def f(x):\n  return 1\n', False),
      ('Here it is:\n\ndef f(x):\n  return 1\n\nIt is good, isn\'t it.', 'def f(x):\n  return 1\n', False),
      ('```python\ndef f(x):\n  return 1', 'def f(x):\n  return 1', True),
      ('no code here', 'no code here', False),
      ('', '', False),
  )
  def test_extract(self, text, source, format_ok):
    self.assertEqual(code_blocks.extract(text, ['f']), (source, format_ok))

  @parameterized.parameters(
      '```python\n{}```\nExample:\n```\nf(2) -> 4\n```', '```python\n{}```\nIt prints\n```\n3\n```',
      '```\n{}```\nInput:\n```\n3\n```\n', '```json\n{{"a": 1}}\n```\n```py\n{}```',
      '```python\nprint(0)\n```\nBetter:\n```python\n{}```')
  def test_without_an_entry_examples_are_not_the_solution(self, text):
    source = 'n = int(input())\nprint(n * 2)\n'
    self.assertEqual(code_blocks.extract(text.format(source))[0], source)

  @parameterized.parameters(
      '1. Do this:\n\n   ```python\n   def f(x):\n     return x + 1\n   ```\n', f'````python\n{F}````',
      f'~~~\n{F}~~~\nDone.',
      f'```python\n{F}```\nUsage:\n```python\nprint(f(2))\n```', f'```\n{F}```\nwhere\n```\ndef f(x) -> int\n```',
      f'<think>\n```python\ndef f(x):\n  return 0\n```\n</think>\n{F}', f'from what is asked we add one.\n\n{F}\nDone.',
      f'\ufeff{F}', f'Wrong:\n```python\ndef f(x):\n  return x\n```\nRight:\n```python\n{F}```')
  def test_the_last_that_defines_what_is_wanted(self, text):
    self.assertEqual(code_blocks.extract(text, ['f'])[0].strip(), F.strip())

  def test_a_fence_in_a_docstring(self):
    source = 'def f(x):\n  """\n  ```\n  f(1)\n  ```\n  """\n  return x + 1\n'
    self.assertEqual(code_blocks.extract(f'```python\n{source}```\nDone.', ['f']), (source, False))

  def test_earlier_blocks_that_the_last_one_needs_come_along(self):
    text = '```python\nimport math\n```\nNot this:\n```\ng = 0\n```\nThen\n```python\ndef f(x):\n  return math.pi\n```'
    self.assertEqual(code_blocks.extract(text, ['f']), ('import math\n\ndef f(x):\n  return math.pi\n', False))

  @parameterized.parameters(
      '```python\n' + '\n' * 60_000 + 'x\n```', '```python\n' + ' \n' * 30_000 + 'x\n```', '```' + 'a' * 65_000,
      F + 'prose prose is\n' * 4_000, '`' * 65_000, '```\n' * 16_000, '(' * 65_000, 'x = (\n' * 9_000,
      '```\nx = (\n```\n' * 5_000)
  def test_no_text_takes_long(self, text):
    began = time.process_time()
    code_blocks.extract(text, ['f'])
    self.assertLess(time.process_time() - began, 3)


if __name__ == '__main__':
  absltest.main()
