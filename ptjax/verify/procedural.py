"""Grades answers to procedurally generated tasks, exactly.

A task passes only when its answer is right as a whole: there is no credit for containing, resembling or nearing the
right one. Where a reasoning-gym family has one right answer, that answer decides. Where many can be right, the rules
of ptjax.verify.puzzles decide, in a worker that can be killed. The same workers make the families' tasks, since some
generators never end and some depend on the seed of Python's hashes, which is fixed there.
"""

import dataclasses
import decimal
import fractions
import functools
import json
import math
import re
import sys

from ptjax import types
from ptjax.verify import answers
from ptjax.verify import puzzles
from ptjax.verify import worker

_MAX_ANSWER_CHARS = 20_000
_MAX_ENTRY_CHARS = 300_000  # of a task; longer ones are not for a model
# What levels of some curricula need to be made at all, to be made in time, or to have an answer: (lowest, highest).
_LIMITS = {
    'caesar_cipher': {'max_rotation': (1, 25)},
    'jugs': {'num_jugs': (3, 3)},  # its own answers use three
    # What makes its boards impossible is not shown, and short ways on small boards are rare.
    'knight_swap': {'min_nodes': (11, 12), 'max_nodes': (11, 12), 'max_pieces': (2, 2), 'max_steps': (14, 30),
                    'impossible_ratio': (0.0, 0.0)},
    'modulo_grid': {'max_target': (1, 1000)},
    'survo': {'max_empty': (1, 9)},
    'word_ladder': {'size': (1, 20_000)},
}
# Level 0 where the curriculum's own has only a handful of tasks, or none that can be found.
_EASIEST = {
    'n_queens': {'n': 5},
    'propositional_logic': {'max_complexity': 2},
    'sokoban': {'min_boxes': 3, 'max_boxes': 3},
    'tower_of_hanoi': {'max_disks': 4, 'max_pegs': 4},
}
_UNMADE = {'composite': 'it mixes other families, so take those'}
_CONCLUSION = '\n- The conclusion must need more than one of the premises, and hold at most one of ∨, ∧, → and ↔.'
_WORKERS = worker.WorkerPool(__name__, size=2)
_TYPES = {'kind': str, 'family': str, 'level': int, 'seed': int, 'size': int, 'index': int, 'config': dict,
          'metadata': dict}
_FIELDS = {'answer', *_TYPES}
_VERIFY_S = {'cpu_s': 10.0, 'wall_s': 60.0}
_MAKE_S = {'cpu_s': 30.0, 'wall_s': 120.0}


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
  answer, puzzle = task.reference['answer'], puzzles.PUZZLES.get(task.reference.get('family'))
  if not isinstance(answer, str) and not (answer is None and puzzle):
    raise ValueError(f'field "reference.answer" must be text, not {answer!r:.60}')
  kind, kinds = task.reference.get('kind', 'text'), ('text',) if puzzle else answers.KINDS
  if kind not in kinds:
    raise ValueError(f'field "reference.kind" must be one of {kinds}, not {kind!r:.60}')
  if puzzle:
    _check_puzzle(task.reference, puzzle)
  elif kind != 'text' and not same(answers.extract(f'Answer: {answer}', kind)[0] or '', answer, kind):
    raise ValueError(f'field "reference.answer" {answer!r:.60} is not a {kind} as it is compared: nothing would pass')


def _check_puzzle(reference: dict, puzzle: puzzles.Puzzle) -> None:
  lacking = [field for field in puzzle.fields if field not in reference.get('metadata', puzzle.fields)]
  if lacking:
    raise ValueError(f'field "reference.metadata" lacks {lacking}, on which {reference["family"]} is scored')
  answer = reference['answer']
  try:
    right = _WORKERS.call({'reference': reference, 'answer': answer or ''}, **_VERIFY_S)['right']
  except (worker.Killed, RuntimeError) as e:
    raise ValueError(f'field "reference" cannot be scored: {e}') from e
  if not right and answer is not None:
    raise ValueError(f'field "reference.answer" {answer!r:.60} does not solve its own task')


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
  family in puzzles.PUZZLES adds `family` and the entry's `metadata` that it is scored on; or else what makes its entry
  again: `seed`, `size`, `index` and `level` or `config`.

  Raises:
    RuntimeError: the metadata lacks what the task is scored on.
  """
  if not isinstance(task.reference, dict):
    return verify_exact(task, text)
  reference = task.reference
  oracle, scored = reference['answer'], reference.get('family') in puzzles.PUZZLES
  verdict, answer = _compare(text, oracle, 'text' if scored else reference.get('kind') or kind_of(oracle))
  if verdict.status == 'pass' or answer is None or not scored:
    return verdict
  evidence = dict(verdict.evidence, compared=f'the rules of {reference["family"]}')
  try:
    right = _WORKERS.call({'reference': reference, 'answer': answer}, **_VERIFY_S)['right']
  except worker.Killed as e:
    return types.Verdict('timeout', 0.0, dict(evidence, why=str(e)), format_ok=verdict.format_ok)
  return types.Verdict('pass' if right else 'fail', float(right), evidence, format_ok=verdict.format_ok)


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
  if answer is not None and len(answer) > max(_MAX_ANSWER_CHARS, 2 * len(oracle or '')):
    answer = None
  right = answer is not None and oracle is not None and same(answer, oracle, kind)
  evidence = {'answer': answer[:500] if answer else answer, 'reference': oracle, 'compared': kind}
  return types.Verdict('pass' if right else 'fail', float(right), evidence, format_ok=format_ok), answer


def make_entry(family: str, *, level: int, seed: int, size: int, index: int) -> dict:
  """An entry of a family, the same in every process: `question`, `answer`, and the `metadata` it is scored on.

  An entry that cannot be made, or has no right answer, is {'skipped': why}.

  Raises:
    ValueError: there is no such family or level, or it takes too long.
  """
  try:
    return _WORKERS.call({'make': [family, level, None, seed, size], 'index': index}, **_MAKE_S)
  except worker.Killed as e:
    raise ValueError(f'family {family!r} at level {level} takes too long to make a task: {e}') from e


def respond(request: dict) -> dict:
  """The worker's side: makes an entry, or scores one answer."""
  if 'make' in request:
    try:
      return _entry(json.dumps(request['make']), request['index'])
    except Exception as e:  # pylint: disable=broad-except
      return {'skipped': f'{type(e).__name__}: {e}'[:200]}
  reference = request['reference']
  metadata = reference.get('metadata')
  if metadata is None:
    made = [reference.get(name, default) for name, default in
            (('family', ''), ('level', 0), ('config', None), ('seed', 0), ('size', 1))]
    metadata = _entry(json.dumps(made), reference.get('index', 0))['metadata']
  return {'right': puzzles.right(reference['family'], metadata, request['answer'])}


def _entry(made_from: str, index: int) -> dict:
  family = json.loads(made_from)[0]
  entry = _dataset(made_from)[index]
  question, answer, puzzle = entry['question'], entry['answer'], puzzles.PUZZLES.get(family)
  metadata = {field: entry['metadata'][field] for field in puzzle.fields} if puzzle else {}
  if family == 'propositional_logic':
    answer, question = puzzles.conclusion(**metadata), question.replace('\n\nHere is', f'{_CONCLUSION}\n\nHere is')
  if answer is None and family not in puzzles.UNANSWERED or answer is not None and not answer.strip():
    raise ValueError('there is no answer')
  plain = json.dumps({'question': question, 'answer': answer, 'metadata': metadata})
  if len(plain) > _MAX_ENTRY_CHARS:
    raise ValueError(f'{len(plain)} characters are too many')
  made = json.loads(plain)
  if puzzle and answer is not None and not puzzles.right(family, made['metadata'], answer):
    raise ValueError(f'its answer {answer!r:.60} is not right')
  return made


@functools.lru_cache(maxsize=16)
def _dataset(made_from: str):
  import numpy as np  # pylint: disable=g-import-not-at-top
  from reasoning_gym.cognition import number_sequences  # pylint: disable=g-import-not-at-top
  np.set_printoptions(threshold=sys.maxsize)  # questions show whole boards
  rule = number_sequences.PatternRule
  if not hasattr(rule.apply, '__wrapped__'):
    rule.apply = _bounded(rule.apply)
  family, level, config, seed, size = json.loads(made_from)
  return make_dataset(family, level=level, config=config, seed=seed, size=size)


def _bounded(apply):
  """Sequences of such terms are thrown away later; made in full, they may take for ever."""
  @functools.wraps(apply)
  def bounded(*args):
    term = apply(*args)
    if abs(term) > 10**12:
      raise OverflowError(term.bit_length())
    return term
  return bounded


def make_dataset(family: str, *, level: int, config: dict | None, seed: int, size: int):
  """The reasoning-gym dataset of a family: by explicit config, else at a level.

  Raises:
    ValueError: reasoning-gym has no such family, or no such level of it.
  """
  import reasoning_gym  # pylint: disable=g-import-not-at-top
  from reasoning_gym import factory  # pylint: disable=g-import-not-at-top
  made = level_configs(family)
  if config is not None:
    return reasoning_gym.create_dataset(family, seed=seed, size=size, **config)
  if not 0 <= level < len(made):
    raise ValueError(f'family {family!r} has no level {level}: its levels are 0 to {len(made) - 1}')
  chosen = _within_limits(family, dataclasses.replace(made[level], seed=seed, size=size))
  return factory.DATASETS[family][0](chosen)


@functools.lru_cache
def level_configs(family: str) -> tuple:
  """The configurations of a family's levels: its curriculum's, without those that are not valid or stand there twice.

  Raises:
    ValueError: reasoning-gym has no such family, or none of its levels can be made.
  """
  from reasoning_gym import factory  # pylint: disable=g-import-not-at-top
  if family not in factory.DATASETS:
    raise ValueError(f'reasoning-gym has no family {family!r}; it has {sorted(factory.DATASETS)}')
  if family in _UNMADE:
    raise ValueError(f'family {family!r} has no level that can be made: {_UNMADE[family]}')
  if family not in factory.CURRICULA:
    return (factory.DATASETS[family][1](),)
  curriculum, found = factory.create_curriculum(family), []
  for level in range(max(len(attribute.levels) for attribute in curriculum.attributes.values())):
    curriculum.set_global_level(level)
    config = _within_limits(family, curriculum.generate_configuration())
    if level == 0:
      config = dataclasses.replace(config, **_EASIEST.get(family, {}))
    if _is_valid(config) and config not in found:
      found.append(config)
  return tuple(found)


def _within_limits(family: str, config):
  limits = _LIMITS.get(family, {}).items()
  return dataclasses.replace(config, **{k: min(max(getattr(config, k), low), high) for k, (low, high) in limits})


def _is_valid(config) -> bool:
  try:
    getattr(config, 'validate', lambda: None)()
  except AssertionError:
    return False
  return True
