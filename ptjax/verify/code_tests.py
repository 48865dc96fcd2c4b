"""The program that runs tests in a sandbox of their own. `solution` is a proxy: calls travel on descriptor 3.

usage: code_tests.py asserts|unittest|pytest, with the tests in tests.py. It reports how many tests ran and how many
passed; skipped, expected to fail, or never finished is not passed.
"""

import ast
import builtins
import importlib
import json
import os
import sys
import types
import unittest

sys.path.insert(0, os.getcwd())
import plain_values  # pylint: disable=g-import-not-at-top,wrong-import-position

_CHANNEL = os.fdopen(os.dup(3), 'rb')
_STOPS = (StopIteration, StopAsyncIteration)


class RemoteError(Exception):
  """The solution raised something that is not a built-in exception."""


def send(message):
  data = json.dumps(message).encode() + b'\n'
  while data:
    data = data[os.write(3, data):]


def receive():
  line = _CHANNEL.readline()
  if not line:
    os._exit(1)
  return json.loads(line)


def proxy(name):
  """A function that calls the solution's function of that name, by value."""

  def call(*args, **kwargs):
    send({'call': name, 'args': plain_values.encode(args), 'kwargs': plain_values.encode(kwargs)})
    reply = receive()
    if 'error' in reply:
      raise remote_error(str(reply['error']), reply.get('message', ''))
    return plain_values.decode(reply['value'])

  call.__name__ = call.__qualname__ = name
  return call


def remote_error(name, message):
  """What to raise for the solution's exception: the built-in one of that name, or the nearest that takes a message.

  StopIteration is none of them: raised in the tests' own loops it would end them early, as if all had been seen.
  """
  kind = getattr(builtins, name, None)
  if not (isinstance(kind, type) and issubclass(kind, Exception)) or issubclass(kind, _STOPS):
    return RemoteError(message)
  for known in kind.__mro__:
    try:
      return known(message)
    except TypeError:
      continue


def make_solution(source):
  """The `solution` module of proxies, as importable as the real one."""
  module = types.ModuleType('solution')
  for name, value in plain_values.decode(receive()['names']).items():
    setattr(module, name, proxy(name) if value is None else value[0])
  # `from solution import *` brings what the tests read, which is no hook of their framework, and does not replace what
  # they judge with.
  read = {n.id for n in walk(source) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
  judges = {*dir(builtins), *bound_names(source)}
  module.__all__ = [name for name in vars(module) if not name.startswith('_') and name in read - judges]
  sys.modules['solution'] = module
  return module


def walk(source):
  try:
    return list(ast.walk(ast.parse(source)))
  except (SyntaxError, ValueError, RecursionError):
    return []  # running them will say so


def redefined(source, solution):
  """Builtins that the tests use and do not import from the solution, which has its own: it would judge itself."""
  nodes = walk(source)
  used = {n.id for n in nodes if isinstance(n, ast.Name)}
  asked_for = {a.name for n in nodes if isinstance(n, ast.ImportFrom) and n.module == 'solution' for a in n.names}
  own = {name for name in vars(solution) if not name.startswith('_')}
  return sorted((used & set(dir(builtins)) & own) - asked_for)


def bound_names(source):
  """The names that the tests import from elsewhere, define or assign."""
  names = set()
  for node in walk(source):
    if isinstance(node, (ast.Import, ast.ImportFrom)) and getattr(node, 'module', None) != 'solution':
      for alias in node.names:
        names |= public_names(node.module) if alias.name == '*' else {(alias.asname or alias.name).partition('.')[0]}
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
      names.add(node.name)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
      names.add(node.id)
  return names


def public_names(module):
  try:
    members = vars(importlib.import_module(module))
  except ImportError:
    return set()  # running the tests will say so
  return set(members.get('__all__', [name for name in members if not name.startswith('_')]))


class _CountAsserts(ast.NodeTransformer):
  """Counts each assert statement as it is reached."""

  def visit_Assert(self, node):
    count = ast.parse('_count_assert()').body[0]
    return [ast.copy_location(count, node), node]


def run_asserts(source, solution):
  """Runs the text with the solution's names in scope; a test is an assert that was reached."""
  reached = [0]

  def count():
    reached[0] += 1

  namespace = {k: v for k, v in vars(solution).items() if not k.startswith('__')}
  namespace.update(__name__='tests', _count_assert=count)
  tree = ast.parse(source)
  asserts = sum(isinstance(node, ast.Assert) for node in ast.walk(tree))
  tree = ast.fix_missing_locations(_CountAsserts().visit(tree))
  try:
    exec(compile(tree, 'tests.py', 'exec'), namespace)  # pylint: disable=exec-used
  except BaseException as e:  # pylint: disable=broad-except
    # What failed is the last assert reached, or what came after it; those not reached count as well.
    passed = max(reached[0] - 1, 0)
    return {'tests': max(reached[0], asserts, 1), 'passed': passed, 'failure': failure_of(e)}
  return {'tests': reached[0], 'passed': reached[0]}


def failure_of(error):
  return ('%s: %s' % (type(error).__name__, error))[:500]


class _Count(unittest.TestResult):
  """A result that counts successes itself: everything else is not one."""

  passed = 0

  def addSuccess(self, test):
    self.passed += 1


def run_unittest(source, solution):
  del solution
  module = load_tests(source)
  result = _Count()
  unittest.TestLoader().loadTestsFromModule(module).run(result)
  bad = result.errors + result.failures + result.skipped + result.expectedFailures
  report = {'tests': max(result.testsRun, result.passed + len(bad)), 'passed': result.passed}
  if bad:
    report['failure'] = ('%s: %s' % (bad[0][0], bad[0][1].strip().split('\n')[-1]))[:500]
  return report


def load_tests(source):
  module = types.ModuleType('tests')
  module.__file__ = 'tests.py'
  sys.modules['tests'] = module
  exec(compile(source, 'tests.py', 'exec'), module.__dict__)  # pylint: disable=exec-used
  return module


class _PytestCount:
  """A pytest plugin that counts items that passed in all of their phases."""

  def __init__(self):
    self.items = {}
    self.failure = ''

  def pytest_runtest_logreport(self, report):
    good = report.passed and not hasattr(report, 'wasxfail')
    self.items[report.nodeid] = self.items.get(report.nodeid, True) and good
    if not good and not self.failure:
      self.failure = ('%s: %s' % (report.nodeid, report.longreprtext.strip().split('\n')[-1]))[:500]

  def pytest_collectreport(self, report):
    if not report.passed:
      self.items[report.nodeid] = False
      self.failure = self.failure or report.longreprtext[-500:]


def run_pytest(source, solution):
  del source, solution
  import pytest  # pylint: disable=g-import-not-at-top
  count = _PytestCount()
  status = pytest.main(['-q', '-p', 'no:cacheprovider', '--noconftest', '-c', os.devnull, '--rootdir=.',
                        '--confcutdir=.', '--import-mode=importlib', 'tests.py'], plugins=[count])
  report = {'tests': len(count.items), 'passed': sum(count.items.values())}
  if status != 0 and report['passed'] == report['tests']:
    report['tests'] += 1  # something failed that is no test
    count.failure = count.failure or 'pytest ended with status %s' % status
  return dict(report, failure=count.failure) if count.failure else report


RUNNERS = {'asserts': run_asserts, 'unittest': run_unittest, 'pytest': run_pytest}


def main():
  runner = RUNNERS[sys.argv[1]]
  with open('tests.py', encoding='utf-8') as f:
    source = f.read()
  sys.path.insert(0, os.path.join(os.getcwd(), 'pytest.zip'))
  solution = make_solution(source)
  taken = redefined(source, solution)
  try:
    report = runner(source, solution) if not taken else {
        'tests': 1, 'passed': 0, 'failure': 'the solution redefines %s, which the tests use' % taken}
  except BaseException as e:  # pylint: disable=broad-except
    report = {'tests': 1, 'passed': 0, 'failure': failure_of(e)}
  send({'report': report})
  os._exit(0)


main()
