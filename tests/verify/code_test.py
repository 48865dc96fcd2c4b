"""code: honest solutions pass, and nothing that a solution does to its own process or to any file forges a verdict."""

import json
import pathlib
import tempfile

from absl.testing import absltest
from absl.testing import parameterized

from ptjax import types
from ptjax.verify import base
from ptjax.verify import code
from ptjax.verify import plain_values

_DATA = pathlib.Path(__file__).parents[1] / 'data' / 'grading'
_CASES = json.loads((_DATA / 'cases.json').read_text())
# Every case is graded in its first style; these in all of theirs.
_IN_ALL_STYLES = ('control_honest', 'control_wrong', 'control_no_function', 'patch_test_code', 'eq_int_subclass',
                  'conftest_drop', 'read_expected_files', 'fake_passed_print')
_POOL = None


def setUpModule():
  global _POOL
  _POOL = base.VerifierPool()


def tearDownModule():
  _POOL.close()


def call_task(cases, entry='f', **fields):
  text = json.dumps({'entry': entry, 'cases': [{'args': a, 'expected': e} for a, e in cases], **fields})
  return types.Task('t', 'd', (), 'code', tests={'style': 'call', 'text': text})


def verify(task, text):
  return _POOL.verify(task, text)


class CorpusTest(absltest.TestCase):

  def test_verdicts(self):
    with tempfile.TemporaryDirectory() as folder:
      mark = pathlib.Path(folder) / 'mark'
      graded = []
      for case in _CASES:
        styles = list(case['tests']) if case['id'] in _IN_ALL_STYLES else list(case['tests'])[:1]
        for style in styles:
          tests = {'style': style, 'text': (_DATA / case['tests'][style]).read_text()}
          solution = (_DATA / case['solution']).read_text().replace('@PWNED@', str(mark))
          limits = case['limits'] | {'cpu_s': 2.0}
          task = types.Task(f'{case["id"]}/{style}', 'd', (), 'code', tests=tests, limits=limits)
          graded.append((case, task, solution))
      verdicts = _POOL.run([task for _, task, _ in graded], [solution for _, _, solution in graded])
      for (case, task, _), verdict in zip(graded, verdicts):
        with self.subTest(task.id, why=case['why']):
          self.assertIn(verdict.status, ('pass',) if case['verdict'] == 'pass' else ('fail', 'timeout'), verdict)
          self.assertEqual(verdict.score, float(case['verdict'] == 'pass'))
      self.assertFalse(mark.exists())


def program_task(style, text):
  return types.Task('t', 'd', (), 'code', tests={'style': style, 'text': text})


class CallTest(parameterized.TestCase):

  @parameterized.parameters(
      'def f(x):\n  return 10 ** 400',
      'import os, json\ndef f(x):\n  os.write(3, b\'{"id": 1, "value": ["f", "0x1p99999"]}\\n\')\n  return 1.5')
  def test_no_value_makes_the_verdict_an_error(self, source):
    self.assertEqual(verify(call_task([([1], 1.5)], tolerance=1e-6), source).status, 'fail')

  @parameterized.parameters(
      ('def f(x):\n  return x + 1', 2, 'pass'),
      ('def f(x):\n  return x + 1.0', 2, 'fail'),
      ('def f(x):\n  return True', 1, 'fail'),
      ('def f(x):\n  return (x,)', [1], 'fail'),
      ('def f(x):\n  return [x]', [1], 'pass'),
      ('def f(x):\n  return {"a": [x, None, "é"]}', {'a': [1, None, 'é']}, 'pass'),
      ('import collections\ndef f(x):\n  return collections.Counter("aab")', {'a': 2, 'b': 1}, 'pass'),
      ('def f(x):\n  return float("nan")', 1.5, 'fail'),
      ('def f(x):\n  return 10 ** 5000', 10**40, 'fail'),
      ('def f(x):\n  raise ValueError("no")', 1, 'fail'),
      ('def f(x):\n  a = []\n  a.append(a)\n  return a', [], 'fail'),
      ('f = 3', 3, 'fail'),
  )
  def test_values_are_compared_type_for_type(self, source, expected, status):
    verdict = verify(call_task([([1], expected)]), source)
    self.assertEqual(verdict.status, status, verdict)
    self.assertEqual(verdict.evidence['tests'], 1)

  def test_limits_are_the_solutions_fault_and_named(self):
    task = call_task([([1], 1)])
    for source, wall_s, status, limit in (
        ('def f(x):\n  while True: pass', 30.0, 'timeout', 'limit:cpu'),
        ('import time\ndef f(x):\n  time.sleep(60)', 1.0, 'timeout', 'limit:time'),
        ('def f(x):\n  return [bytearray(1 << 24) for _ in range(1000)]', 30.0, 'fail', 'limit:memory')):
      limits = {'wall_s': wall_s, 'cpu_s': 1.0, 'memory_mb': 128}
      verdict = verify(types.Task('t', 'd', (), 'code', tests=task.tests, limits=limits), source)
      self.assertEqual((verdict.status, verdict.evidence.get('limit')), (status, limit), verdict)

  def test_no_tests_is_no_pass(self):
    # A task that tests nothing is broken: it says nothing about the solution.
    self.assertEqual(verify(call_task([]), 'def f(x):\n  return 1').status, 'error')
    for style, text in (('asserts', 'x = 1'), ('unittest', 'import unittest'), ('pytest', 'x = 1')):
      task = types.Task('t', 'd', (), 'code', tests={'style': style, 'text': text})
      self.assertEqual(verify(task, 'def f(x):\n  return 1').status, 'fail', style)

  def test_an_infinite_value_is_near_to_nothing(self):
    task = call_task([([1], float('inf'))], tolerance=1e-6)
    self.assertEqual(verify(task, 'def f(x):\n  return 5').status, 'fail')
    self.assertEqual(verify(task, 'def f(x):\n  return float("inf")').status, 'pass')

  def test_many_large_values_come_back(self):
    values = list(range(10_000))
    tests = call_task([([values], values)] * 15).tests  # more than waits unread
    task = types.Task('t', 'd', (), 'code', tests=tests, limits={'wall_s': 60.0, 'cpu_s': 30.0})
    self.assertEqual(verify(task, 'def f(x):\n  return x').status, 'pass')

  def test_urgent_bytes_and_colliding_keys_are_the_solutions_fault(self):
    for source in ('import socket\ndef f(x):\n  socket.socket(fileno=3).send(b"x", socket.MSG_OOB)\n  return x',
                   'def f(x):\n  return {i * (2**61 - 1) for i in range(20000)}'):
      task = types.Task('t', 'd', (), 'code', tests=call_task([([1], 1)]).tests, limits={'cpu_s': 1.0})
      self.assertIn(verify(task, source).status, ('fail', 'timeout'))
    value = plain_values.encode({1}) [:1] + [[plain_values.encode(i * (2**61 - 1)) for i in range(50_000)]]
    with self.assertRaises(ValueError):
      plain_values.decode(value)

  def test_tolerance(self):
    task = call_task([([1], 0.3)], tolerance=1e-6)
    self.assertEqual(verify(task, 'def f(x):\n  return 0.1 + 0.2').status, 'pass')
    self.assertEqual(verify(task, 'def f(x):\n  return 0.31').status, 'fail')

  @parameterized.parameters(
      dict(limits={'wall_s': 10**400}), dict(limits={'cpu_s': 1e300}), dict(limits={'memory_mb': 10**15}),
      dict(files={'../x': 'a'}), dict(files={'': 'a'}), dict(files={'a\0b': 'a'}), dict(files={'a' * 300: 'a'}),
      dict(files={'a': '\ud800'}), dict(tests={'style': 'call', 'text': '[' * 100_000}))
  def test_what_no_job_could_have_is_named_before_any_runs(self, **fields):
    given = {'tests': call_task([([1], 1)]).tests, **fields}
    with self.assertRaisesRegex(ValueError, f'field "{next(iter(fields))}'):
      code.check(types.Task('t', 'd', (), 'code', **given))

  def test_files_are_there(self):
    task = types.Task('t', 'd', (), 'code', tests=call_task([([1], 'hello')]).tests, files={'data/a.txt': 'hello'})
    self.assertEqual(verify(task, 'def f(x):\n  return open("data/a.txt").read()').status, 'pass')


class ProgramTest(parameterized.TestCase):

  @parameterized.parameters(
      ('unittest', 'import unittest\nfrom solution import f\nclass T(unittest.TestCase):\n'
       '  def test_a(self):\n    self.assertEqual(f(1), 2)\n'
       '  @unittest.skip("x")\n  def test_b(self):\n    pass\n', 'fail'),
      ('unittest', 'import unittest, solution\nclass T(unittest.TestCase):\n'
       '  def test_a(self):\n    self.assertEqual(solution.f(1), 2)\n'
       '  def test_b(self):\n    with self.assertRaises(TypeError):\n      solution.f("a")\n', 'pass'),
      ('pytest', 'import pytest\nfrom solution import f\n@pytest.mark.parametrize("x", [1, 2])\n'
       'def test_a(x):\n  assert f(x) == x + 1\n'
       'def test_b():\n  with pytest.raises(TypeError):\n    f(None)\n', 'pass'),
      ('pytest', 'import pytest\nfrom solution import f\ndef test_a():\n  assert f(1) == 2\n'
       'def test_b():\n  pytest.skip("x")\n', 'fail'),
      ('asserts', 'assert f(1) == 2\nassert LIMIT == (1, 2)\nassert f(x=3) == 4', 'pass'),
      ('asserts', 'assert f(1) == 2\nassert f(1) == 3', 'fail'),
  )
  def test_program(self, style, text, status):
    task = types.Task('t', 'd', (), 'code', tests={'style': style, 'text': text})
    verdict = verify(task, 'LIMIT = (1, 2)\ndef f(x):\n  return x + 1')
    self.assertEqual(verdict.status, status, verdict)

  @parameterized.parameters(
      ('asserts', 'assert abs(f(1) - 2) < 1e-6'),
      ('pytest', 'from solution import *\ndef test_a():\n  assert abs(f(1) - 2) < 1e-6\n'),
  )
  def test_a_solution_does_not_replace_what_judges_it(self, style, text):
    task = types.Task('t', 'd', (), 'code', tests={'style': style, 'text': text})
    self.assertEqual(verify(task, 'def f(x):\n  return 7\ndef abs(x):\n  return 0').status, 'fail')
    self.assertEqual(verify(task, 'def f(x):\n  return 2').status, 'pass')

  @parameterized.parameters('StopIteration', 'StopAsyncIteration')
  def test_a_solution_does_not_end_the_loops_of_the_tests(self, stop):
    solution = f'import __main__\n__main__._STOPS = ()\ndef f(*a):\n  raise {stop}'
    for style, text in (
        ('asserts', 'from solution import f\nassert all(map(lambda x: f(x) == x + 1, [1, 2]))'),
        ('pytest', 'from solution import f\ndef test_a():\n  for got, want in zip(map(f, [1]), [2]):\n'
         '    assert got == want\n')):
      self.assertEqual(verify(program_task(style, text), solution).status, 'fail', style)

  @parameterized.parameters('from math import isclose', 'import math\nisclose = math.isclose',
                            'def isclose(a, b):\n  return abs(a - b) < 1e-6')
  def test_a_solution_does_not_replace_what_the_tests_bound(self, bind):
    text = f'{bind}\nfrom solution import *\nassert isclose(f(2), 1.5)'
    forged = 'def f(x):\n  return 0.0\ndef isclose(*a, **k):\n  return True'
    self.assertEqual(verify(program_task('asserts', text), forged).status, 'fail')
    self.assertEqual(verify(program_task('asserts', text), 'def f(x):\n  return 1.5').status, 'pass')

  @parameterized.parameters(
      ('asserts', 'from math import *\nfrom solution import *\nassert isclose(f(2), 1.5)', 'isclose'),
      ('unittest', 'import unittest\nfrom collections import *\nfrom solution import *\nclass T(unittest.TestCase):\n'
       '  def test_a(self):\n    self.assertEqual(Counter(str(f(2))), Counter("1.5"))', 'Counter'),
      ('pytest', 'from pytest import *\nfrom solution import *\ndef test_a():\n  assert f(2) == approx(1.5)', 'approx'))
  def test_nor_what_they_import_with_a_star(self, style, text, judge):
    forged = f'def f(x):\n  return 0.0\ndef {judge}(*a, **k):\n  return 0.0'
    self.assertEqual(verify(program_task(style, text), forged).status, 'fail')
    self.assertEqual(verify(program_task(style, text), 'def f(x):\n  return 1.5').status, 'pass')

  @parameterized.parameters('["solution"]', '"solution"', '["tests"]')
  def test_a_solution_brings_no_hooks_of_a_framework(self, plugins):
    text = 'from solution import *\ndef test_a():\n  assert f(1) == 2'
    hooks = f'pytest_plugins = {plugins}\ndef pytest_pyfunc_call(*a, **k):\n  return True\ndef f(x):\n  return 0'
    self.assertEqual(verify(program_task('pytest', text), hooks).status, 'fail')

  def test_a_function_named_like_a_builtin_is_tested_where_the_tests_import_it(self):
    wrong, right = 'def sum(x):\n  return 99', 'def sum(x):\n  t = 0\n  for i in x: t += i\n  return t'
    for imported, status in (('from solution import sum', 'pass'), ('from solution import *', 'fail')):
      text = f'import unittest\n{imported}\nclass T(unittest.TestCase):\n  def test_a(self):\n' \
             '    self.assertEqual(sum([1, 2]), 3)'
      self.assertEqual(verify(program_task('unittest', text), wrong).status, 'fail')
      self.assertEqual(verify(program_task('unittest', text), right).status, status)

  def test_tests_have_the_files_of_the_task(self):
    task = types.Task('t', 'd', (), 'code', files={'a.txt': '5'},
                      tests={'style': 'asserts', 'text': 'assert f(1) == int(open("a.txt").read())'})
    self.assertEqual(verify(task, 'def f(x):\n  return 5').status, 'pass')

  def test_an_exception_that_derives_from_a_builtin_is_one(self):
    text = ('import solution\nfor bad, kind in (("a", ValueError), ("b", KeyError)):\n  try:\n    solution.f(bad)\n'
            '    assert False\n  except kind as e:\n    assert e.args == (bad,)')
    source = ('class Mine(ValueError): pass\ndef f(x):\n  raise (Mine if x == "a" else KeyError)(x)')
    self.assertEqual(verify(program_task('asserts', text), source).status, 'pass')

  def test_an_exception_that_takes_more_than_a_message_comes_as_its_nearest_base(self):
    text = 'import solution\ntry:\n  solution.f()\n  assert False\nexcept ValueError:\n  assert True'
    self.assertEqual(verify(program_task('asserts', text), 'def f():\n  b"\\xff".decode()').status, 'pass')

  def test_counts(self):
    task = types.Task('t', 'd', (), 'code', tests={'style': 'asserts', 'text': 'assert f(1) == 2\nassert f(1) == 3'})
    self.assertEqual({k: verify(task, 'def f(x):\n  return x + 1').evidence[k] for k in ('tests', 'passed')},
                     {'tests': 2, 'passed': 1})


class StdioTest(parameterized.TestCase):

  @parameterized.parameters(
      ('print(int(input()) * 2)', 'pass'),
      ('print(int(input()) * 2, end="  \\n\\n")', 'pass'),
      ('print(int(input()) * 3)', 'fail'),
      ('print(int(input()) * 2); raise SystemExit(1)', 'fail'),
      ('print(" ", int(input()) * 2)', 'fail'),
  )
  def test_stdout(self, source, status):
    text = json.dumps({'cases': [{'stdin': '2\n', 'expected': '4\n'}, {'stdin': '5\n', 'expected': '10'}]})
    task = types.Task('t', 'd', (), 'code', tests={'style': 'stdio', 'text': text})
    self.assertEqual(verify(task, source).status, status)


class CheckTest(parameterized.TestCase):

  @parameterized.parameters(
      (dict(tests=None), 'field "tests" must be'),
      (dict(tests={'style': 'doctest', 'text': ''}), 'field "tests" must be'),
      (dict(tests={'style': 'call', 'text': '{'}), 'field "tests.text" of style call must be JSON'),
      (dict(tests={'style': 'call', 'text': '{"cases": []}'}), 'entry'),
      (dict(tests={'style': 'call', 'text': '{"entry": "f", "cases": []}'}), 'no case'),
      (dict(tests={'style': 'call', 'text': '{"entry": "f", "cases": [{"args": 3, "expected": 1}]}'}), '"args" a list'),
      (dict(tests={'style': 'call', 'text': '{"entry": "f", "tolerance": "", "cases": [{"args": [], "expected": 1}]}'}),
       '"tolerance" \'\' must be'),
      (dict(tests={'style': 'stdio', 'text': '{"cases": [{"stdin": 5, "expected": "1"}]}'}), '"stdin" and "expected"'),
      (dict(tests={'style': 'pytest', 'text': 'assert f(1 == 2'}), 'not Python that parses'),
      (dict(tests={'style': 'unittest', 'text': ''}), 'not Python that parses'),
      (dict(tests={'style': 'asserts', 'text': 'assert 1'}, limits={'ram': 1}), 'field "limits" has unknown'),
      (dict(tests={'style': 'asserts', 'text': 'assert 1'}, limits={'wall_s': -1}), 'field "limits"'),
      (dict(tests={'style': 'asserts', 'text': 'assert 1'}, files={'solution.py': ''}), 'field "files"'),
  )
  def test_message(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      code.check(types.Task('t', 'd', (), 'code', **fields))


if __name__ == '__main__':
  absltest.main()
