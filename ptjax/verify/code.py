"""Grades solutions by tests, so that a solution cannot forge its verdict.

The solution runs in a sandbox of its own and answers calls made by value; what it should answer never enters that
sandbox. `call` and `stdio` results are compared here. Tests that are programs run in a second sandbox, where the
module `solution` is a proxy that forwards calls. Only plain values cross (numbers, text, bytes and containers of
them, type for type): tests that need the solution's own classes, generators or patches cannot pass here. Solutions in
other languages (languages.LANGUAGES) are built in a job of their own and take stdio tests.
"""

import ast
import builtins
import dataclasses
import functools
import importlib.util
import io
import json
import marshal
import math
import pathlib
import time
import zipfile
from collections.abc import Iterator
from typing import Any

from ptjax import types
from ptjax.verify import code_blocks
from ptjax.verify import languages
from ptjax.verify import plain_values
from ptjax.verify import sandbox

STYLES = ('call', 'stdio', 'asserts', 'unittest', 'pytest')
CREDITS = ('all', 'fraction')  # a score of 1 or 0; or the fraction of the tests that passed
_FIELDS = {'style', 'text', 'language', 'credit'}
_PROGRAMS = {name: (pathlib.Path(__file__).parent / name).read_text()
             for name in ('plain_values.py', 'code_server.py', 'code_tests.py')}
_TESTS_START_S = 6.0
_OURS = {*_PROGRAMS, 'solution', 'solution.py', 'tests.py', *(row.source for row in languages.LANGUAGES.values())}
_PYTEST_PACKAGES = ('pytest', '_pytest', 'py', 'pluggy', 'iniconfig', 'packaging', 'pygments')
_LEXERS = ('__init__.py', '_mapping.py', 'python.py', 'diff.py')
_MAX_LINE_BYTES = 16 << 20
_WINDOW_BYTES = 1 << 16  # of calls sent before their replies are read
_DEFAULT_LIMITS = {'wall_s': 10.0, 'cpu_s': 5.0, 'memory_mb': 256, 'pids': 16}

class _Malformed(Exception):
  """The solution broke the protocol: it wrote to the channel itself, or ended early."""


def check(task: types.Task) -> None:
  """Raises ValueError, naming the field, unless tests, files and limits are what `verify` takes."""
  tests = task.tests if isinstance(task.tests, dict) else {}
  unknown = {'style', 'text'} - set(tests) or set(tests) - _FIELDS
  if unknown or _style(tests) not in STYLES or not isinstance(tests['text'], str):
    raise ValueError(f'field "tests" must be {{"style": one of {STYLES}, "text": text}}, and may have "language" and '
                     f'"credit", not {task.tests!r:.60}')
  if tests.get('credit', 'all') not in CREDITS:
    raise ValueError(f'field "tests.credit" must be one of {CREDITS}, not {tests["credit"]!r:.60}')
  _check_language(tests.get('language', 'python'), _style(tests))
  if _style(tests) in ('call', 'stdio'):
    _cases(tests['text'], _style(tests))
  elif not code_blocks.parses(tests['text']):
    raise ValueError('field "tests.text" is not Python that parses')
  for name, content in task.files.items():
    if not isinstance(content, str) or name in _OURS:
      raise ValueError(f'field "files" must be path -> text, without {sorted(_OURS)}; see {name!r:.60}')
  try:
    sandbox.check_paths(task.files)
    '\n'.join(task.files.values()).encode()
  except ValueError as e:
    raise ValueError(f'field "files": {e}') from e
  make_limits(task.limits)


def _check_language(language: str, style: str) -> None:
  if not isinstance(language, str):
    raise ValueError(f'field "tests.language" must be text, not {language!r:.60}')
  if language == 'python':
    return
  try:
    languages.lookup(language)
  except ValueError as e:
    raise ValueError(f'field "tests.language": {e}') from e
  if style != 'stdio':
    raise ValueError(f'field "tests.language" {language!r} takes tests of style stdio only, not {style!r}')


def verify(task: types.Task, text: str, box: sandbox.Sandbox) -> types.Verdict:
  """Runs `task.tests` against the solution in a completion; passes when all tests pass and there is at least one.

  Returns:
    Verdict with score 1 or 0, or with the fraction of tests that passed where `tests.credit` says so; evidence has
    `tests`, `passed`, the first failure, and the limit that ended the solution.
  Raises:
    sandbox.SandboxError: the host broke; nothing is known about the solution.
  """
  style, limits, language = _style(task.tests), make_limits(task.limits), task.tests.get('language', 'python')
  spec = _cases(task.tests['text'], style) if style in ('call', 'stdio') else {}
  wanted = [spec['entry']] if style == 'call' else [] if spec else _names_read(task.tests['text'])
  source, format_ok = code_blocks.extract(text, wanted, language)
  solution = source.encode('utf-8', 'replace')
  files = {**task.files, 'solution.py': solution}
  if style == 'call':
    outcome = _grade_calls(files, spec, limits, box)
  elif language != 'python':
    outcome = _grade_built(language, solution, task.files, spec, limits, box)
  elif style == 'stdio':
    outcome = _grade_stdio(languages.Program((sandbox.WARM_PYTHON, 'solution.py'), files, {}), spec, limits, box)
  else:
    outcome = _grade_program(files, task.files, style, task.tests['text'], limits, box)
  limit = outcome.get('limit', '')
  right = not limit and outcome['tests'] >= 1 and outcome['passed'] == outcome['tests']
  status = 'timeout' if limit in ('limit:time', 'limit:cpu') else 'pass' if right else 'fail'
  score = outcome['passed'] / max(outcome['tests'], 1) if task.tests.get('credit') == 'fraction' else float(right)
  return types.Verdict(status, score, dict(outcome, style=style), format_ok=format_ok)


@functools.lru_cache
def _names_read(tests: str) -> frozenset[str]:
  """What tests that are a program may want of the solution: the names they read or import from it, and do not bind."""
  nodes = list(ast.walk(ast.parse(tests)))
  imported = {a.name for n in nodes if isinstance(n, ast.ImportFrom) and n.module == 'solution' for a in n.names}
  names = [n for n in nodes if isinstance(n, ast.Name)]
  bound = {n.id for n in names if not isinstance(n.ctx, ast.Load)}
  attributes = {n.attr for n in nodes if isinstance(n, ast.Attribute) and getattr(n.value, 'id', '') == 'solution'}
  return frozenset(imported | attributes | {n.id for n in names} - bound - set(dir(builtins)))


def _style(tests: dict) -> str:
  """The style; a variant of one is written after it, as in call_float."""
  return str(tests['style']).partition('_')[0]


def make_limits(limits: dict) -> sandbox.Limits:
  """The sandbox limits of a task, over the defaults for one solution.

  Raises:
    ValueError: an unknown limit or a value that is not a number > 0.
  """
  known = set(sandbox.Limits.__dataclass_fields__)
  unknown = sorted(set(limits) - known)
  if unknown:
    raise ValueError(f'field "limits" has unknown {unknown}; known are {sorted(known)}')
  try:
    given = sandbox.Limits(**limits)
  except ValueError as e:
    raise ValueError(f'field "limits": {e}') from e
  merged = {**_DEFAULT_LIMITS, **limits}
  if 'cpu_s' not in limits:
    merged['cpu_s'] = min(merged['cpu_s'], given.wall_s)
  return sandbox.Limits(**merged)


def same_value(got: Any, expected: Any, tolerance: float | None = None) -> bool:
  """Type-strict equality of plain values: True is not 1, 1 is not 1.0, a tuple is not a list.

  With a tolerance, numbers other than bools are equal when they differ by at most it, absolutely or relatively.
  """
  if tolerance is not None and type(expected) in (int, float) and type(got) in (int, float):
    if got == expected or math.inf in (abs(got), abs(expected)):
      return got == expected
    try:
      return abs(got - expected) <= tolerance * max(1.0, abs(expected))
    except OverflowError:  # an int beyond every float
      return False
  if type(got) is not type(expected):
    return False
  if isinstance(expected, (list, tuple)):
    return len(got) == len(expected) and all(same_value(g, e, tolerance) for g, e in zip(got, expected))
  if isinstance(expected, dict):
    # 1, 1.0 and True are one key to Python, so the keys' types are compared as well.
    return ({(type(k), k) for k in got} == {(type(k), k) for k in expected}
            and all(same_value(got[k], expected[k], tolerance) for k in expected))
  if isinstance(expected, (set, frozenset)):
    return {(type(x), x) for x in got} == {(type(x), x) for x in expected}
  return got == expected or (got != got and expected != expected)


def _cases(text: str, style: str) -> dict:
  """The parsed tests of a call or stdio task."""
  fields = ('args', 'expected') if style == 'call' else ('stdin', 'expected')
  try:
    spec = json.loads(text)
    cases = [tuple(case[f] for f in fields) for case in spec['cases']]
    texts = [x for case in cases for x in case] if style == 'stdio' else [spec['entry']]
    lists = [args for args, _ in cases] if style == 'call' else []
    tolerance = spec.get('tolerance')
    if not cases or not all(isinstance(x, str) for x in texts) or not all(isinstance(x, list) for x in lists):
      raise TypeError('no case' if not cases else '"stdin" and "expected" must be text' if style == 'stdio' else
                      '"entry" must be text and "args" a list')
    if tolerance is not None and (type(tolerance) not in (int, float) or not 0 <= tolerance < math.inf):
      raise TypeError(f'"tolerance" {tolerance!r} must be a number >= 0')
    return {'entry': spec['entry'], 'cases': cases, 'tolerance': tolerance} if style == 'call' else {'cases': cases}
  except (ValueError, KeyError, TypeError, RecursionError) as e:
    wanted = '"entry" and ' if style == 'call' else ''
    raise ValueError(f'field "tests.text" of style {style} must be JSON with {wanted}"cases", each of {fields}; '
                     f'{type(e).__name__}: {e}') from e


def _programs(name: str, style: str = '') -> dict[str, bytes | str]:
  files = {name: _PROGRAMS[name], 'plain_values.py': _PROGRAMS['plain_values.py']}
  return files | {'pytest.zip': _pytest_zip()} if style == 'pytest' else files


def _compiled(name: pathlib.PurePath, path: pathlib.Path) -> tuple[str, bytes]:
  """A compiled file that is never checked against its source; another version of Python ignores it."""
  code = compile(path.read_bytes(), str(name), 'exec', dont_inherit=True)
  return f'{name}c', importlib.util.MAGIC_NUMBER + (1).to_bytes(4, 'little') + bytes(8) + marshal.dumps(code)


@functools.cache
def _pytest_zip() -> bytes:
  """The installed pytest and what it imports, as one importable file: a sandbox has the standard library only.

  Raises:
    RuntimeError: pytest is not installed.
  """
  packed = io.BytesIO()
  with zipfile.ZipFile(packed, 'w') as archive:
    for package in _PYTEST_PACKAGES:
      spec = importlib.util.find_spec(package)
      if spec is None or spec.origin is None:
        raise RuntimeError(f'tests of style pytest need the package {package}: pip install pytest')
      origin = pathlib.Path(spec.origin)
      paths = sorted(origin.parent.rglob('*.py')) if origin.name == '__init__.py' else [origin]
      root = origin.parent.parent if origin.name == '__init__.py' else origin.parent
      for name, path in ((path.relative_to(root), path) for path in paths):
        if name.parts[:2] != ('pygments', 'lexers') or path.name in _LEXERS:
          archive.writestr(*_compiled(name, path))
          archive.write(path, name)
  return packed.getvalue()


class _Solution:
  """A solution at work in its sandbox: calls by value go in, plain values or an error come out."""

  def __init__(self, box: sandbox.Sandbox, files: dict, limits: sandbox.Limits):
    self.job = box.start([sandbox.WARM_PYTHON, 'code_server.py'], files=files | _programs('code_server.py'),
                         limits=limits)
    self._channel = _Channel(self.job)
    self._deadline = time.monotonic() + limits.wall_s + 5.0
    self._count = 0

  def ask(self, *requests: dict) -> Iterator[dict]:
    """The replies in order: {'value'} encoded, or {'error', 'message'}. Requests are sent some at a time.

    Raises:
      _Malformed: the next reply is not one to its request, or there is none.
    """
    lines, size = [], 0
    for i, request in enumerate(requests):
      self._count += 1
      lines.append(_line(dict(request, id=self._count)))
      size += len(lines[-1])
      if size >= _WINDOW_BYTES or i + 1 == len(requests):
        self._channel.send(b''.join(lines))
        for id_ in range(self._count - len(lines) + 1, self._count + 1):
          yield self._receive(id_)
        lines, size = [], 0

  def _receive(self, id_: int) -> dict:
    reply = self._channel.receive(self._deadline - time.monotonic())
    if reply.get('id') != id_ or not {'value', 'error'} & set(reply):
      raise _Malformed('a reply that nobody asked for')
    return reply

  def close(self) -> str:
    """Lets the solution's server end, which its limits bound; returns the limit it broke, or ''."""
    verdict = self.job.finish().verdict
    return '' if verdict == 'contained' else verdict


class _Channel:
  """JSON lines over a job's descriptor 3, bounded."""

  def __init__(self, job: sandbox.Job):
    self._job = job
    self._pending = b''

  def send(self, lines: bytes):
    try:
      self._job.send(lines)
    except BrokenPipeError as e:
      raise _Malformed('it ended early') from e

  def receive(self, timeout_s: float) -> dict:
    deadline = time.monotonic() + timeout_s
    while b'\n' not in self._pending:
      try:
        chunk = self._job.receive(max(deadline - time.monotonic(), 0.0))
      except TimeoutError as e:
        raise _Malformed('no reply in time') from e
      if not chunk:
        raise _Malformed('it ended early')
      self._pending += chunk
      if len(self._pending) > _MAX_LINE_BYTES:
        raise _Malformed('a reply that is too large')
    line, _, self._pending = self._pending.partition(b'\n')
    try:
      message = json.loads(line)
    except (ValueError, RecursionError) as e:
      raise _Malformed('a reply that is not JSON') from e
    if not isinstance(message, dict):
      raise _Malformed('a reply that is not an object')
    return message


def _grade_calls(files: dict, spec: dict, limits: sandbox.Limits, box: sandbox.Sandbox) -> dict:
  outcome = {'tests': len(spec['cases']), 'passed': 0}
  solution = _Solution(box, files, limits)
  try:
    no_names = plain_values.encode({})
    requests = [{'call': spec['entry'], 'args': plain_values.encode(args), 'kwargs': no_names}
                for args, _ in spec['cases']]
    for (args, expected), reply in zip(spec['cases'], solution.ask(*requests)):
      got, failure = _decode(reply)
      if not failure and same_value(got, expected, spec['tolerance']):
        outcome['passed'] += 1
      elif 'failure' not in outcome:
        outcome['failure'] = f'{spec["entry"]}({_show(args)}): {failure or _show(got)}, expected {_show(expected)}'
  except _Malformed as e:
    outcome.setdefault('failure', str(e))
  finally:
    limit = solution.close()
  if limit:
    outcome['limit'] = limit
  return outcome


def _show(value: Any) -> str:
  try:
    return repr(value)[:150]
  except ValueError:  # Python refuses to print an int of very many digits
    return f'a {type(value).__name__} too long to print'


def _decode(reply: dict) -> tuple[Any, str]:
  """(value, '') or (None, what went wrong)."""
  if 'error' in reply:
    return None, f'{reply["error"]}: {reply.get("message", "")}'[:300]
  try:
    return plain_values.decode(reply['value']), ''
  except (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError) as e:
    raise _Malformed(f'a value that cannot be read: {type(e).__name__}') from e


def _grade_built(language: str, source: bytes, files: dict, spec: dict, limits: sandbox.Limits,
                 box: sandbox.Sandbox) -> dict:
  try:
    program = languages.build(language, source, files, box, most_bytes=limits.disk_mb << 19)  # half of its disk
  except languages.BuildFailed as e:
    outcome = {'tests': len(spec['cases']), 'passed': 0, 'failure': str(e)}
    return dict(outcome, limit=e.limit) if e.limit else outcome
  return _grade_stdio(program, spec, limits, box)


def _grade_stdio(program: languages.Program, spec: dict, limits: sandbox.Limits, box: sandbox.Sandbox) -> dict:
  outcome = {'tests': len(spec['cases']), 'passed': 0}
  for stdin, expected in spec['cases']:
    result = box.run(program.argv, files=program.files, limits=limits, stdin=stdin.encode('utf-8', 'replace'),
                     env=program.env)
    if result.verdict != 'contained':
      outcome['limit'] = result.verdict
      break
    got = result.stdout.decode('utf-8', 'replace')
    if result.returncode == 0 and _lines(got) == _lines(expected):
      outcome['passed'] += 1
    elif 'failure' not in outcome:
      outcome['failure'] = f'stdin {stdin!r}: status {result.returncode}, stdout {got!r}, expected {expected!r}'[:500]
  return outcome


def _lines(text: str) -> list[str]:
  """Lines without trailing blanks: what people mean by the same output."""
  return [line.rstrip() for line in text.rstrip().split('\n')]


def _grade_program(files: dict, task_files: dict, style: str, text: str, limits: sandbox.Limits,
                   box: sandbox.Sandbox) -> dict:
  """Runs tests that are a program beside the solution and relays its calls."""
  outcome = {'tests': 0, 'passed': 0}
  programs = _programs('code_tests.py', style)
  # The start of the test program is no fault of the solution, which waits for it.
  limits = dataclasses.replace(limits, wall_s=limits.wall_s + _TESTS_START_S)
  tests_limits = dataclasses.replace(limits, cpu_s=limits.cpu_s + _TESTS_START_S, memory_mb=limits.memory_mb + 256,
                                     pids=limits.pids + 8, disk_mb=limits.disk_mb + 16)
  solution = _Solution(box, files, limits)
  try:
    [names] = solution.ask({'names': True})
    if 'error' in names:
      return dict(outcome, failure=f'{names["error"]}: {names.get("message", "")}'[:500])
    with box.start([sandbox.WARM_PYTHON, 'code_tests.py', style],
                   files={**task_files, 'tests.py': text} | programs, limits=tests_limits, beside=solution.job) as job:
      outcome.update(_relay(_Channel(job), solution, names['value'], limits))
      job.finish()
  except _Malformed as e:
    outcome['failure'] = str(e)
  finally:
    limit = solution.close()
  if limit:
    outcome['limit'] = limit
  return outcome


def _relay(tests: _Channel, solution: _Solution, names: Any, limits: sandbox.Limits) -> dict:
  """Serves the tests' calls until they report; a solution that breaks the protocol raises in the tests."""
  deadline = time.monotonic() + limits.wall_s + 5.0
  tests.send(_line({'names': names}))
  while True:
    message = tests.receive(deadline - time.monotonic())
    if 'report' in message:
      return message['report']
    [reply] = solution.ask({k: message[k] for k in ('call', 'args', 'kwargs')})
    _decode(reply)
    tests.send(_line({k: reply[k] for k in ('value', 'error', 'message') if k in reply}))


def _line(message: dict) -> bytes:
  return json.dumps(message).encode() + b'\n'
