"""Solutions in compiled languages: graded like Python ones, and nothing a solution does to its compiler is an error."""

import json
import shutil
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from ptjax import types
from ptjax.verify import base
from ptjax.verify import code
from ptjax.verify import code_blocks
from ptjax.verify import languages
from ptjax.verify import sandbox

# Programs that print twice the number they read; {change} is put behind it.
DOUBLES = {
    'c': '#include <stdio.h>\nint main(void) {{ long x; scanf("%ld", &x); printf("%ld\\n", x * 2 {change}); }}',
    'cpp': '#include <iostream>\nint main() {{ long x; std::cin >> x; std::cout << x * 2 {change} << "\\n"; }}',
    'rust': 'fn main() {{ let mut s = String::new(); std::io::stdin().read_line(&mut s).unwrap();\n'
            '  let x: i64 = s.trim().parse().unwrap(); println!("{{}}", x * 2 {change}); }}',
    'javascript': 'console.log(Number(require("fs").readFileSync(0, "utf8")) * 2 {change})',
}
_POOL = None


def setUpModule():
  global _POOL
  _POOL = base.VerifierPool()


def tearDownModule():
  _POOL.close()


def task_in(language, **fields):
  text = json.dumps({'cases': [{'stdin': '2\n', 'expected': '4'}, {'stdin': '-5\n', 'expected': '-10\n'}]})
  tests = {'style': 'stdio', 'text': text, 'language': language, **fields}
  return types.Task(language, 'd', (), 'code', tests=tests)


class GradeTest(parameterized.TestCase):

  def works(self, language) -> bool:
    """Whether the language is here; where it is not, it must be refused with what to do."""
    if languages._locate(language) is None:
      with self.assertRaisesRegex(ValueError, 'on the PATH, and it must run; fix: '):
        code.check(task_in(language))
      return False
    box = _POOL._sandbox()
    if languages.try_out(language, box) and box.tier in ('uid', 'landlock'):  # its folder is out of reach
      verdict = _POOL.verify(task_in(language), 'x')
      self.assertEqual(verdict.status, 'error')
      self.assertIn('does not work in sandbox tier', verdict.evidence['error'])
      return False
    return True

  @parameterized.parameters(*DOUBLES)
  def test_right_and_wrong(self, language):
    if not self.works(language):
      return
    program = DOUBLES[language]
    for change, status, score in (('', 'pass', 1.0), ('+ 1', 'fail', 0.0), ('+ (', 'fail', 0.0)):
      verdict = _POOL.verify(task_in(language), f'```{language}\n{program.format(change=change)}\n```')
      self.assertEqual((verdict.status, verdict.score, verdict.format_ok), (status, score, True), verdict)

  @parameterized.parameters(
      ('#include "/proc/1/environ"\nint main(void) {}', 'fail'),
      ('#include "/dev/zero"\nint main(void) {}', 'any'),
      ('#include "solution.c"\n#include "solution.c"', 'any'),
      ('char much[90 << 20] = {1}; int main(void) { return much[5]; }', 'fail'),
      ('int main(void) { for (;;) ; }', 'timeout'),
      ('#include <stdio.h>\nint main(void) { puts("4"); return 1; }', 'fail'),
      ('', 'fail'))
  def test_what_a_solution_does_is_its_own_fault(self, source, status):
    if not self.works('c'):
      return
    verdict = _POOL.verify(task_in('c'), f'```c\n{source}\n```')
    self.assertIn(verdict.status, ('fail', 'timeout') if status == 'any' else (status,), verdict)
    self.assertEqual(verdict.score, 0.0)

  def test_a_compiler_out_of_reach_is_the_hosts_fault(self):
    class Broken:
      tier = 'uid'

      def run(self, *unused, **also_unused):
        return sandbox.JobResult('contained', 127, b'', b'cannot execute', {}, 0, 0, 0, 'uid')

    if not self.works('c'):
      return
    with self.assertRaisesRegex(RuntimeError, 'gcc does not work in sandbox tier uid: .*cannot execute'):
      languages.build('c', b'', {}, Broken(), 1)


class CheckTest(parameterized.TestCase):

  @parameterized.parameters(
      (dict(language='cobol'), "unknown language 'cobol'"), (dict(language=3), 'must be text'),
      (dict(language='c', style='asserts', text='assert 1'), 'stdio only'), (dict(credit='half'), 'tests.credit'),
      (dict(points=1), 'field "tests" must be'))
  def test_message(self, fields, message):
    task = task_in(**{'language': 'python', **fields})
    with self.assertRaisesRegex(ValueError, message):
      code.check(task)

  def test_a_compiler_that_is_not_there_is_named_before_anything_runs(self):
    with mock.patch.object(shutil, 'which', return_value=None):
      with self.assertRaisesRegex(ValueError, 'field "tests.language": .*rustc on the PATH, and it must run; fix:'):
        code.check(task_in('rust'))
      self.assertEqual(languages.readable(), [])


class CreditTest(parameterized.TestCase):

  @parameterized.parameters(
      ('stdio', '{"cases": [{"stdin": "1", "expected": "1"}, {"stdin": "2", "expected": "4"}]}', 'print(input())', 0.5),
      ('call', '{"entry": "f", "cases": [{"args": [1], "expected": 1}, {"args": [2], "expected": 4}, '
       '{"args": [3], "expected": 3}]}', 'def f(x):\n  return x', 2 / 3),
      ('asserts', 'assert f(1) == 1\nassert f(2) == 4\nassert f(3) == 9\nassert f(4) == 4', 'def f(x):\n  return x',
       0.25),
      ('unittest', 'import unittest\nfrom solution import f\nclass T(unittest.TestCase):\n  def test_a(self):\n'
       '    self.assertEqual(f(1), 1)\n  def test_b(self):\n    self.assertEqual(f(2), 4)\n',
       'def f(x):\n  return x', 0.5))
  def test_fraction_of_the_tests(self, style, text, solution, score):
    for credit, wanted in (('fraction', score), ('all', 0.0)):
      tests = {'style': style, 'text': text, 'credit': credit}
      verdict = _POOL.verify(types.Task('t', 'd', (), 'code', tests=tests), solution)
      self.assertEqual(verdict.status, 'fail')
      self.assertAlmostEqual(verdict.score, wanted, msg=str(verdict))


class ExtractTest(parameterized.TestCase):

  @parameterized.parameters(
      ('```c\nint a;\n```', 'int a;\n', True), ('So:\n```cpp\nx\n```\n```c\nint a;\n```\n', 'int a;\n', False),
      ('```\nint a;\n```\n```text\n3\n```', 'int a;\n', False), ('int a;', 'int a;', True), ('', '', False))
  def test_source(self, text, source, format_ok):
    self.assertEqual(code_blocks.extract(text, language='c'), (source, format_ok))


if __name__ == '__main__':
  absltest.main()
