"""Grades answers to procedurally generated tasks, exactly.

A task passes only when its answer is right as a whole: there is no credit for containing, resembling or nearing the
right one. Where a reasoning-gym family has one right answer, that answer decides. Where many can be right, the
family's own scorer decides and must give full marks; it runs in a worker that can be killed, and only on text that
its parser cannot mistake for code, since several scorers hand the answer to Python's `eval`.
"""

import decimal
import fractions
import functools
import json
import math
import re
from typing import Any

from ptjax import types
from ptjax.verify import answers
from ptjax.verify import worker

_MAX_ANSWER_CHARS = 20_000
_ANYTHING = re.compile(r'.*', re.DOTALL)
_ARITHMETIC = re.compile(r'(?s)(?!.*\*\s*\*)(?!.*\d{20})[\d\s+\-*/().×÷]{1,200}')
# Names are the families' variables and functions; exponents are small and never stacked, so that expansion ends.
_SYMBOLIC = re.compile(
    r'(?s)(?!.*\d{20})(?:\b(?:[A-Za-z]|sin|cos|tan|exp|log|sqrt|asin|acos|atan|sinh|cosh|tanh|pi)\b|\d++(?:\.\d++)?+'
    r'|[\s+\-/(),]|\*\*\s*(?:\d{1,2}|\(\s*-?\d{1,2}(?:\s*/\s*\d{1,2})?\s*\))(?!\s*\*\s*\*|\d)|\*(?!\s*\*)){1,400}')
# Families in which more than one answer can be right, with the only text their scorers are given.
MANY_ANSWERS = {
    'boxnet': _ANYTHING,
    'countdown': _ARITHMETIC,
    'graph_color': _ANYTHING,
    'group_anagrams': _ANYTHING,
    'intermediate_integration': _SYMBOLIC,
    'jugs': _ANYTHING,
    'knight_swap': _ANYTHING,
    'n_queens': re.compile(r'[Q_\s]+'),
    'palindrome_generation': _ANYTHING,
    'palindrome_partitioning': _ANYTHING,
    'polynomial_multiplication': _SYMBOLIC,
    'prime_factorization': re.compile(r'[\d\s×x*]+'),
    'propositional_logic': _ANYTHING,
    'puzzle24': _ARITHMETIC,
    'quantum_lock': _ANYTHING,
    'rubiks_cube': _ANYTHING,
    'rush_hour': _ANYTHING,
    'shortest_path': _ANYTHING,
    'simple_integration': _SYMBOLIC,
    'sokoban': _ANYTHING,
    'tower_of_hanoi': _ANYTHING,
    'word_ladder': _ANYTHING,
}
_WORKERS = worker.WorkerPool(__name__, size=2)
_TYPES = {'kind': str, 'family': str, 'level': int, 'seed': int, 'size': int, 'index': int, 'config': dict,
          'metadata': dict}
_FIELDS = {'answer', *_TYPES}


def check_exact(task: types.Task) -> None:
  """Raises ValueError unless the reference is a string or a number."""
  if isinstance(task.reference, bool) or not isinstance(task.reference, (str, int, float)):
    raise ValueError(f'field "reference" must be text or a number for verifier {task.verifier!r}, not '
                     f'{task.reference!r:.60}')
  if task.reference == '' or isinstance(task.reference, float) and not math.isfinite(task.reference):
    raise ValueError(f'field "reference" {task.reference!r} is no answer')


def check(task: types.Task) -> None:
  """Raises ValueError unless the reference is what `verify` takes."""
  if not isinstance(task.reference, dict):
    check_exact(task)
    return
  unknown = sorted(set(task.reference) - _FIELDS)
  if unknown or 'answer' not in task.reference:
    raise ValueError(f'field "reference" needs "answer" and knows {sorted(_FIELDS)}; it has {sorted(task.reference)}')
  for name, wanted in _TYPES.items():
    if name in task.reference and not isinstance(task.reference[name], wanted):
      raise ValueError(f'field "reference.{name}" must be {wanted.__name__}, not {task.reference[name]!r:.60}')
  answer, family = task.reference['answer'], task.reference.get('family')
  if not isinstance(answer, str) and not (answer is None and family in MANY_ANSWERS):
    raise ValueError(f'field "reference.answer" must be text, not {answer!r:.60}')
  kind = task.reference.get('kind', 'text')
  if kind not in answers.KINDS:
    raise ValueError(f'field "reference.kind" must be one of {answers.KINDS}, not {kind!r:.60}')
  if answer is not None and kind != 'text' and not same(
      answers.extract(f'Answer: {answer}', kind)[0] or '', answer, kind):
    raise ValueError(f'field "reference.answer" {answer!r:.60} is not a {kind} as it is compared: nothing would pass')


def verify_exact(task: types.Task, text: str) -> types.Verdict:
  """Passes when the last stated answer equals `task.reference`, a string or a number.

  Numbers are equal by value, single words whatever their case, longer text up to white space.
  """
  oracle = str(task.reference)
  if isinstance(task.reference, float):
    oracle = format(decimal.Decimal(oracle), 'f')  # 1e-07 as 0.0000001
  return _compare(text, oracle, kind_of(oracle))[0]


def verify(task: types.Task, text: str) -> types.Verdict:
  """Passes when the last stated answer is exactly right.

  `task.reference` is a string, or a dict with `answer` and optionally `kind` (a row of answers.KINDS). A task of a
  reasoning-gym family adds `family` and what makes its entry again: `seed`, `size`, `index` and `level` or `config`;
  or else the entry's own `metadata`.

  Raises:
    RuntimeError: the scorer broke on its own right answer.
  """
  if not isinstance(task.reference, dict):
    return verify_exact(task, text)
  reference = task.reference
  oracle = reference['answer']
  verdict, answer = _compare(text, oracle, reference.get('kind') or kind_of(oracle))
  if verdict.status == 'pass' or answer is None or reference.get('family') not in MANY_ANSWERS:
    return verdict
  return _scored(reference, answer, verdict)


def kind_of(oracle: str | None) -> str:
  """The kind of answer ('number', 'word' or 'text') that a right answer shows."""
  if oracle is None:
    return 'text'
  if number(oracle) is not None:
    return 'number'
  return 'word' if re.fullmatch(r'[^\W\d_]+', oracle) else 'text'


def number(text: str) -> fractions.Fraction | None:
  """The exact value of a plainly written number (sign, decimals, a/b), or None."""
  if not re.fullmatch(r'-?\d{1,400}(?:\.\d{1,400})?(?:/\d{1,400})?', text.strip()):
    return None
  try:
    numerator, _, denominator = text.strip().partition('/')
    return fractions.Fraction(numerator) / fractions.Fraction(denominator or 1)
  except ZeroDivisionError:
    return None


def same(answer: str, oracle: str, kind: str) -> bool:
  """Whether two answers are the same value: exactly, not nearly."""
  if kind == 'number':
    value = number(answer)
    return value is not None and value == number(oracle)
  if kind in ('word', 'list'):
    return answer.casefold() == oracle.casefold()
  return _lines(answer) == _lines(oracle)


def _lines(text: str) -> list[str]:
  """Lines without what people do not mean: spacing, and a full stop at the end."""
  return [' '.join(line.split()) for line in text.strip().rstrip('.').splitlines()]


def _compare(text: str, oracle: str | None, kind: str) -> tuple[types.Verdict, str | None]:
  answer, format_ok = answers.extract(text, kind)
  if answer is not None and len(answer) > _MAX_ANSWER_CHARS:
    answer = None
  right = answer is not None and oracle is not None and same(answer, oracle, kind)
  evidence = {'answer': answer[:500] if answer else answer, 'reference': oracle, 'compared': kind}
  return types.Verdict('pass' if right else 'fail', float(right), evidence, format_ok=format_ok), answer


def _scored(reference: dict, answer: str, verdict: types.Verdict) -> types.Verdict:
  family = reference['family']
  if not MANY_ANSWERS[family].fullmatch(answer):
    evidence = dict(verdict.evidence, why='the answer holds text that has no place in it')
    return types.Verdict('fail', 0.0, evidence, format_ok=verdict.format_ok)
  try:
    reply = _WORKERS.call({'reference': reference, 'answer': answer}, cpu_s=10.0, wall_s=60.0)
  except worker.Killed as e:
    return types.Verdict('timeout', 0.0, dict(verdict.evidence, why=str(e)), format_ok=verdict.format_ok)
  right = reply['score'] == 1.0
  evidence = dict(verdict.evidence, compared=f'reasoning-gym scorer of {family}', scorer=reply['score'])
  return types.Verdict('pass' if right else 'fail', float(right), evidence, format_ok=verdict.format_ok)


def respond(request: dict) -> dict:
  """The worker's side: the family's score of one answer. A scorer that breaks on the answer alone gives 0."""
  reference = request['reference']
  dataset, entry = _entry(json.dumps(reference, sort_keys=True))
  try:
    return {'score': float(dataset.score_answer(request['answer'], entry))}
  except Exception:  # pylint: disable=broad-except
    if entry['answer'] is not None:
      dataset.score_answer(entry['answer'], entry)  # raises again where the scorer itself is broken
    return {'score': 0.0}


@functools.lru_cache(maxsize=256)
def _entry(reference_json: str) -> tuple[Any, dict]:
  reference = json.loads(reference_json)
  dataset = make_dataset(
      reference['family'], level=reference.get('level', 0), config=reference.get('config'),
      seed=reference.get('seed', 0), size=reference.get('size', 1))
  if 'metadata' in reference:
    return dataset, {'question': '', 'answer': reference['answer'], 'metadata': reference['metadata']}
  entry = dataset[reference.get('index', 0)]
  if entry['answer'] != reference['answer']:
    raise RuntimeError(f'reasoning-gym made another entry than the one referred to: {entry["answer"]!r}')
  return dataset, entry


def make_dataset(family: str, *, level: int, config: dict | None, seed: int, size: int):
  """The reasoning-gym dataset of a family: by explicit config, else at a curriculum level.

  Raises:
    ValueError: reasoning-gym has no such family, or no such level of it.
  """
  import reasoning_gym  # pylint: disable=g-import-not-at-top
  from reasoning_gym import factory  # pylint: disable=g-import-not-at-top
  if family not in factory.DATASETS:
    raise ValueError(f'reasoning-gym has no family {family!r}; it has {sorted(factory.DATASETS)}')
  if config is not None:
    return reasoning_gym.create_dataset(family, seed=seed, size=size, **config)
  if family not in factory.CURRICULA:
    if level:
      raise ValueError(f'family {family!r} has no curriculum: its only level is 0, not {level}')
    return reasoning_gym.create_dataset(family, seed=seed, size=size)
  curriculum = factory.create_curriculum(family)
  curriculum.set_global_level(level)
  made = curriculum.generate_configuration({'seed': seed, 'size': size})
  return factory.DATASETS[family][0](made)
