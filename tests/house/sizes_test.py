"""Files and functions stay short, names say what a file holds, and a few things are never written."""

import ast
import collections
import pathlib
import re

from absl.testing import absltest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = sorted(
    p for folder in ('ptjax', 'configs', 'tests') for p in (ROOT / folder).rglob('*.py')
    if not p.is_relative_to(ROOT / 'tests' / 'data')
)
PACKAGE = [p for p in SOURCES if p.is_relative_to(ROOT / 'ptjax')]

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_LOOP_LINES = 120  # of functions that are the loop of a job
MAX_COLUMNS = 120
LOOPS = ('ptjax/rl/', 'ptjax/pipeline.py', 'ptjax/jobs.py')
BANNED_NAMES = ('util', 'utils', 'common', 'helper', 'helpers', 'lib', 'misc', 'core')
READS_ENVIRONMENT = ('ptjax/main.py', 'ptjax/runtime/devices.py', 'ptjax/verify/')


def name(path: pathlib.Path) -> str:
  return path.relative_to(ROOT).as_posix()


def functions(path: pathlib.Path) -> list[ast.FunctionDef]:
  return [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


class SizesTest(absltest.TestCase):

  def test_files(self):
    long = [f'{name(p)}: {n} lines' for p in SOURCES if (n := len(p.read_text().splitlines())) > MAX_FILE_LINES]
    self.assertEqual(long, [])

  def test_functions(self):
    long = []
    for path in PACKAGE:
      limit = MAX_LOOP_LINES if name(path).startswith(LOOPS) else MAX_FUNCTION_LINES
      for f in functions(path):
        if (lines := f.end_lineno - f.lineno + 1) > limit:
          long.append(f'{name(path)}: {f.name} has {lines} lines, at most {limit}')
    self.assertEqual(long, [])

  def test_columns(self):
    wide = [
        f'{name(p)}:{i}: {len(line)} columns'
        for p in SOURCES for i, line in enumerate(p.read_text().splitlines(), 1) if len(line) > MAX_COLUMNS
    ]
    self.assertEqual(wide, [])

  def test_names(self):
    banned = [
        name(p) for p in SOURCES if set(p.relative_to(ROOT).with_suffix('').parts) & set(BANNED_NAMES)
    ]
    self.assertEqual(banned, [])

  def test_every_file_says_why_it_exists(self):
    silent = [
        name(p) for p in SOURCES
        if p.read_text().strip() and (p.name != '__init__.py') and not ast.get_docstring(ast.parse(p.read_text()))
    ]
    self.assertEqual(silent, [])


class NeverTest(absltest.TestCase):

  def test_print(self):
    found = [
        f'{name(p)}:{n.lineno}' for p in PACKAGE for n in ast.walk(ast.parse(p.read_text()))
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == 'print'
        and 'file' not in {k.arg for k in n.keywords}  # a process inside the sandbox writes to its own stderr
    ]
    self.assertEqual(found, [])

  def test_swallowed_exceptions(self):
    found = []
    for path in PACKAGE:
      for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
          if node.type is None:
            found.append(f'{name(path)}:{node.lineno}: bare except')
          elif len(node.body) == 1 and isinstance(node.body[0], ast.Pass):
            found.append(f'{name(path)}:{node.lineno}: except ...: pass')
    self.assertEqual(found, [])

  def test_environment_is_read_at_the_edges(self):
    found = [
        name(p) for p in PACKAGE
        if not name(p).startswith(READS_ENVIRONMENT) and re.search(r'\bos\.(environ|getenv)\b', p.read_text())
    ]
    self.assertEqual(found, [])

  def test_unfinished_work(self):
    mark = re.compile('# *(TO' + r'DO|FIX' + r'ME)|NotImplemented' + r'Error|skip' + r'Test|pytest\.mark\.sk' + 'ip')
    self.assertEqual([name(p) for p in SOURCES if mark.search(p.read_text())], [])

  def test_module_names_of_tests_mirror_the_package(self):
    names = collections.Counter(p.name for p in SOURCES if p.name.endswith('_test.py'))
    self.assertGreater(len(names), 10)
    self.assertEqual([name(p) for p in (ROOT / 'tests').rglob('__init__.py')], [])


if __name__ == '__main__':
  absltest.main()
