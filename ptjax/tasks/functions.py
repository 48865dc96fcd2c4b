"""Small Python functions from a description, with hidden unit tests: the code domain that needs no data set.

Each template is a description and a body with a parameter, so distinct descriptions have distinct functions. Expected
values come from the reference body, run here: it is this file's own text. A solution's text never runs here.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator

_SMALL = (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 15, 20)
_FEW = (1, 2, 3, 4, 5)
_LETTERS = tuple('aeinorst')

# (argument names, parameter values, description, expression); {k} is the parameter.
_TEMPLATES = (
    ('x', _SMALL, 'x plus {k}', 'x + {k}'),
    ('x', _SMALL, 'x minus {k}', 'x - {k}'),
    ('x', _SMALL, '{k} minus x', '{k} - x'),
    ('x', _SMALL, 'x times {k}', 'x * {k}'),
    ('x', _SMALL, 'x squared plus {k}', 'x * x + {k}'),
    ('x', _SMALL, 'x squared minus {k}', 'x * x - {k}'),
    ('x', _SMALL, 'the remainder of x divided by {k}', 'x % {k}'),
    ('x', _SMALL, 'x divided by {k} with floor division', 'x // {k}'),
    ('x', _SMALL, 'True if x is greater than {k}', 'x > {k}'),
    ('x', _SMALL, 'True if x is less than {k}', 'x < {k}'),
    ('x', _SMALL, 'True if x is divisible by {k}', 'x % {k} == 0'),
    ('x', _SMALL, 'True if x is not equal to {k}', 'x != {k}'),
    ('x', _SMALL, 'the larger of x and {k}', 'max(x, {k})'),
    ('x', _SMALL, 'the smaller of x and {k}', 'min(x, {k})'),
    ('x', _SMALL, 'the absolute difference of x and {k}', 'abs(x - {k})'),
    ('x, y', _SMALL, 'x plus y plus {k}', 'x + y + {k}'),
    ('x, y', _SMALL, 'x times y plus {k}', 'x * y + {k}'),
    ('x, y', _SMALL, 'x plus {k} times y', 'x + {k} * y'),
    ('x, y', _SMALL, 'True if x plus y is greater than {k}', 'x + y > {k}'),
    ('s', _FEW, 'the first {k} characters of the string s', 's[:{k}]'),
    ('s', _FEW, 'the last {k} characters of the string s', 's[-{k}:]'),
    ('s', _FEW, 'the string s without its first {k} characters', 's[{k}:]'),
    ('s', _FEW, 'the string s without its last {k} characters', 's[:-{k}]'),
    ('s', _SMALL, 'the string s repeated {k} times', 's * {k}'),
    ('s', _SMALL, 'the length of the string s plus {k}', 'len(s) + {k}'),
    ('s', _SMALL, 'True if the string s is longer than {k}', 'len(s) > {k}'),
    ('s', _LETTERS, 'how often "{k}" is in the string s', "s.count('{k}')"),
    ('s', _LETTERS, 'True if "{k}" is in the string s', "'{k}' in s"),
    ('s', _LETTERS, 'the string s with "{k}" added at the end', "s + '{k}'"),
    ('s', _LETTERS, 'the string s with "{k}" added at the start', "'{k}' + s"),
    ('s', _LETTERS, 'True if the string s starts with "{k}"', "s.startswith('{k}')"),
    ('s', _LETTERS, 'True if the string s ends with "{k}"', "s.endswith('{k}')"),
    ('s', _LETTERS, 'the string s without any "{k}"', "s.replace('{k}', '')"),
    ('a', _SMALL, 'the list a with {k} added to each item', '[x + {k} for x in a]'),
    ('a', _SMALL, 'the list a with each item times {k}', '[x * {k} for x in a]'),
    ('a', _SMALL, 'the items of the list a greater than {k}', '[x for x in a if x > {k}]'),
    ('a', _SMALL, 'the items of the list a less than {k}', '[x for x in a if x < {k}]'),
    ('a', _SMALL, 'the items of the list a divisible by {k}', '[x for x in a if x % {k} == 0]'),
    ('a', _SMALL, 'the sum of the list a plus {k}', 'sum(a) + {k}'),
    ('a', _SMALL, 'the sum of the list a times {k}', 'sum(a) * {k}'),
    ('a', _SMALL, 'how often {k} is in the list a', 'a.count({k})'),
    ('a', _SMALL, 'True if {k} is in the list a', '{k} in a'),
    ('a', _SMALL, 'the list a with {k} added at the end', 'a + [{k}]'),
    ('a', _SMALL, 'the list a without any {k}', '[x for x in a if x != {k}]'),
    ('a', _FEW, 'the first {k} items of the list a', 'a[:{k}]'),
    ('a', _FEW, 'the last {k} items of the list a', 'a[-{k}:]'),
)
# Level 1: two steps, from every pair of these.
_STEPS = (
    ('add {k}', '{x} + {k}'),
    ('subtract {k}', '{x} - {k}'),
    ('multiply by {k}', '{x} * {k}'),
    ('take the remainder by {k}', '{x} % {k}'),
    ('floor-divide by {k}', '{x} // {k}'),
)
_SPREAD = (-7, -1, 0, 1, 2, 3, 4, 5, 6, 8, 11, 23, 50, 101)
LEVELS = (0, 1)


@dataclasses.dataclass(frozen=True)
class Function:
  """One function to write: `source` is a right solution and `tests` the call-style unit tests (JSON text)."""

  description: str
  source: str
  tests: str


def all_functions(level: int) -> Iterator[Function]:
  """Every function of a level, in a fixed order.

  Raises:
    ValueError: for an unknown level.
  """
  if level not in LEVELS:
    raise ValueError(f'functions has no level {level}; its levels are {LEVELS}')
  if level == 0:
    for names, values, description, expression in _TEMPLATES:
      for k in values:
        yield _function(names, description.format(k=k), expression.format(k=k), k)
    return
  for (say1, do1), (say2, do2) in itertools.permutations(_STEPS, 2):
    for k1, k2 in itertools.product((2, 3, 4, 5, 7), (2, 4, 6, 8, 9)):
      inner = do1.format(x='x', k=k1)
      made = _function('x', f'x after you {say1.format(k=k1)}, then {say2.format(k=k2)}',
                       do2.format(x=f'({inner})', k=k2), _SPREAD)
      if len({case['expected'] for case in json.loads(made.tests)['cases']}) > 1:  # some pairs give a constant
        yield made


def _function(names: str, returns: str, expression: str, parameter: int | str | tuple[int, ...]) -> Function:
  source = f'def f({names}):\n    return {expression}'
  namespace = {}
  exec(source, namespace)  # pylint: disable=exec-used
  cases = [{'args': args, 'expected': namespace['f'](*args)} for args in _arguments(names, parameter)]
  return Function(f'Write f({names}) that returns {returns}.', source,
                  json.dumps({'style': 'call', 'entry': 'f', 'cases': cases}))


def _arguments(names: str, k: int | str | tuple[int, ...]) -> list[list]:
  """Argument lists around the parameter (or the ones given) and at the edges: zero, negative, empty, repeated."""
  if isinstance(k, tuple):
    return [[x] for x in k]
  if names == 'x':
    return [[0], [1], [-7], [k - 1], [k], [k + 1], [6 * k], [101]]
  if names == 'x, y':
    return [[0, 0], [1, 2], [-4, 3], [k, 0], [0, k], [k, 1], [25, -5]]
  if names == 's' and isinstance(k, str):
    return [[''], [k], ['banana'], [k + 'x' + k], ['x' + k], [k.upper()], ['nearest iron note'], [f'{k}{k}yz']]
  if names == 's':
    return [[''], ['a'], ['ab c'], ['q' * k], ['w' * (k + 1)], ['abcdefghij'], ['Post training']]
  return [[[]], [[k]], [[k - 1, k, k + 1]], [[3, 1, 2, 0, 1]], [[k, -k, 2 * k, k, 0]], [[-5, 40, 7, 12, 60]]]
