"""Makes verifiable tasks from generators, with train and held-out tasks that can never meet.

Which side a task falls on is a property of its question alone: held out iff sha256(question) mod 8 is 0, whatever the
seed, the level or the count. Nothing here grades answers.
"""

import collections
import dataclasses
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator

from ptjax import types
from ptjax.tasks import functions
from ptjax.verify import procedural as grader
from ptjax.verify import puzzles

SPLITS = ('train', 'heldout')
ANSWER_SYSTEM = 'Be brief. End with "Answer:" and the result.'
CODE_SYSTEM = 'Reply with Python code only.'
_FUNCTION_LIMITS = {'wall_s': 6.0, 'cpu_s': 1.0, 'memory_mb': 128, 'pids': 8}
_TRIES_PER_TASK = 60
_MAX_SKIPPED = 50  # entries in a row that cannot be made


@dataclasses.dataclass(frozen=True)
class Domain:
  """A generator at a few levels, with a short wording of its own.

  `ask` is filled from the entry's metadata, where a list stands as its items with `between` them; `keep` drops entries
  that do not suit it.
  """

  source: str | Callable[..., dict]  # a reasoning-gym family, or a function (rng, **level) -> entry
  levels: tuple[dict, ...]  # what the source is configured with, easiest first
  ask: str
  kind: str  # of answer: a row of answers.KINDS
  keep: Callable[[dict], bool] = lambda metadata: True
  between: str = ', '


def _product(rng: random.Random, *, low: int, high: int, other: tuple[int, ...]) -> dict:
  """An entry like reasoning-gym's, whose own family never mixes factors of one and two digits."""
  factors = [rng.randint(low, high), rng.randint(low, rng.choice(other))]
  rng.shuffle(factors)
  return {'answer': str(factors[0] * factors[1]), 'metadata': {'expression': f'{factors[0]} * {factors[1]}'}}


def _sum(rng: random.Random, *, low: int, high: int, other: int) -> dict:
  """An entry like reasoning-gym's chain_sum, with the size of each term apart; differences may be negative."""
  terms = [rng.randint(low, high), rng.randint(low, other)]
  rng.shuffle(terms)
  sign = rng.choice('+-')
  answer = terms[0] + terms[1] if sign == '+' else terms[0] - terms[1]
  return {'answer': str(answer), 'metadata': {'expression': f'{terms[0]} {sign} {terms[1]}'}}


def _sorting(rng: random.Random, *, count: int, high: int) -> dict:
  """An entry like reasoning-gym's number_sorting, with whole numbers, which that family writes as decimals."""
  numbers = rng.sample(range(high + 1), count)
  while numbers == sorted(numbers):
    rng.shuffle(numbers)
  return {'answer': ', '.join(map(str, sorted(numbers))), 'metadata': {'numbers': numbers}}


def _ascending(metadata: dict) -> bool:
  return metadata['direction'] == 'ascending' and _disordered(metadata['original_words'], metadata['sorted_words'])


def _disordered(asked: list[str], answer: list[str]) -> bool:
  """A list that a copy of the question does not answer, and without the words that join or hedge answers."""
  return asked != answer and _plain_words(asked) and not {'and', 'or', 'not', 'either'} & set(asked)


def _plain_words(words: Iterable[str]) -> bool:
  return all(word.isascii() and word.isalpha() and word.islower() for word in words)


def _plain_word(metadata: dict) -> bool:
  return _plain_words([metadata['word']])


def _plain_span(metadata: dict) -> bool:
  """Lower-case words; most letters occur once, so two of three such entries go."""
  text = ' '.join(metadata['span'])
  once = text.count(metadata['target_letter']) == 1
  return _plain_words(metadata['span']) and not (once and random.Random(text).random() < 2 / 3)


DOMAINS = {
    'products': Domain(
        _product,
        ({'low': 0, 'high': 9, 'other': (9, 30)}, {'low': 2, 'high': 9, 'other': (99,)},
         {'low': 10, 'high': 99, 'other': (99,)}),
        'What is {expression}?', 'number'),
    'chain_sum': Domain(
        _sum,
        ({'low': 0, 'high': 99, 'other': 9}, {'low': 10, 'high': 99, 'other': 99},
         {'low': 100, 'high': 999, 'other': 999}),
        'What is {expression}?', 'number'),
    'letter_counting': Domain(
        'letter_counting', ({'min_words': 2, 'max_words': 4}, {'min_words': 5, 'max_words': 9}),
        'How many times does the letter "{target_letter}" appear in "{span}"?', 'number', _plain_span,
        between=' '),
    'gcd': Domain(
        'gcd',
        ({'min_numbers': 2, 'max_numbers': 2, 'min_value': 2, 'max_value': 30},
         {'min_numbers': 2, 'max_numbers': 2, 'min_value': 20, 'max_value': 200}),
        'What is the GCD of {numbers}?', 'number', between=' and '),
    'count_bits': Domain(
        'count_bits', ({'min_n': 1, 'max_n': 511}, {'min_n': 512, 'max_n': 65535}),
        'How many 1 bits are in {number}?', 'number'),
    'number_sorting': Domain(
        _sorting, ({'count': 3, 'high': 99}, {'count': 5, 'high': 999}),
        'Sort from smallest to largest: {numbers}', 'list'),
    'word_sorting': Domain(
        'word_sorting',
        ({'min_words': 3, 'max_words': 3, 'min_word_length': 3, 'max_word_length': 6},
         {'min_words': 4, 'max_words': 6, 'min_word_length': 3, 'max_word_length': 8}),
        'Put in alphabetical order: {original_words}', 'list', _ascending),
    'word_reversal': Domain(
        'word_sequence_reversal', ({'min_words': 3, 'max_words': 4}, {'min_words': 5, 'max_words': 7}),
        'Reverse the order of these words: {words}', 'list',
        lambda metadata: _disordered(metadata['words'], metadata['words'][::-1])),
    'spell_backward': Domain(
        'spell_backward', ({'min_word_len': 3, 'max_word_len': 4}, {'min_word_len': 5, 'max_word_len': 7}),
        'Spell "{word}" backward.', 'word', _plain_word),
    'functions': None,  # ptjax.tasks.functions, graded by hidden unit tests
}


def is_heldout(question: str) -> bool:
  """Whether a question belongs to the held-out split."""
  return int.from_bytes(hashlib.sha256(question.encode()).digest(), 'big') % 8 == 0


def levels(domain: str) -> int:
  """How many levels a domain or 'rg:<family>' has: 0 to that minus 1, no two with the same settings.

  Raises:
    ValueError: unknown domain, or a family of which no level can be made.
  """
  if domain.startswith('rg:'):
    return len(grader.level_configs(domain.removeprefix('rg:')))
  if domain not in DOMAINS:
    raise ValueError(f'unknown domain {domain!r}; known are {sorted(DOMAINS)} and rg:<reasoning-gym family>')
  return len(functions.LEVELS if domain == 'functions' else DOMAINS[domain].levels)


def make(domain: str, *, split: str, count: int, seed: int, level: int = 0) -> list[types.Task]:
  """`count` tasks of a domain with distinct questions, all of one split.

  Args:
    domain: a row of DOMAINS, or 'rg:<family>' for any reasoning-gym family.
    split: 'train' or 'heldout'.
    count: how many.
    seed: another seed draws other tasks of the same split.
    level: difficulty, 0 is easiest.

  Raises:
    ValueError: unknown domain, split or level, a level that takes too long, or fewer distinct tasks than asked for.
  """
  if split not in SPLITS:
    raise ValueError(f'split {split!r} is not one of {SPLITS}')
  if count < 1:
    raise ValueError(f'count = {count}: ask for at least 1 task')
  if not 0 <= level < levels(domain):
    raise ValueError(f'domain {domain!r} has no level {level}: it has {levels(domain)}, 0 to {levels(domain) - 1}')
  tries = _TRIES_PER_TASK * count + 2000
  found = {}
  for task in _draw(domain, level, seed, tries):
    question = task.messages[-1]['content']
    if is_heldout(question) == (split == 'heldout'):
      found.setdefault(question, task)
    if len(found) == count:
      return list(found.values())
  raise ValueError(
      f'domain {domain!r} at level {level} gave {len(found)} distinct {split} tasks, fewer than the {count} asked '
      f'for, in {tries} draws; ask for fewer or take another of its {levels(domain)} levels')


def majority_accuracy(tasks: Iterable[types.Task]) -> dict[str, float]:
  """By domain, the accuracy of always giving the most frequent right answer. What a model must beat.

  A code task has no answer to repeat, so its right function counts as one; a task without either shares it with none.
  """
  rights = collections.defaultdict(collections.Counter)
  for task in tasks:
    answer = task.reference['answer'] if isinstance(task.reference, dict) else task.reference
    rights[task.domain][(task.demonstration or task.id) if answer is None else str(answer)] += 1
  return {domain: max(c.values()) / c.total() for domain, c in rights.items()}


def _draw(domain: str, level: int, seed: int, tries: int) -> Iterator[types.Task]:
  # Generators of neighbouring seeds share items, so seeds are spread first.
  spread = int.from_bytes(hashlib.sha256(f'{domain}/{level}/{seed}'.encode()).digest()[:4], 'big') >> 2
  if domain == 'functions':
    drawn = list(functions.all_functions(level))
    random.Random(spread).shuffle(drawn)
    return (_function_task(f, level) for f in drawn)
  if domain.startswith('rg:'):
    return _family_tasks(domain, level, spread, tries)
  return _domain_tasks(domain, level, spread, tries)


def _domain_tasks(name: str, level: int, seed: int, tries: int) -> Iterator[types.Task]:
  domain = DOMAINS[name]
  config = domain.levels[level]
  if callable(domain.source):
    entries = (domain.source(random.Random(seed + i), **config) for i in range(tries))
  else:
    dataset = grader.make_dataset(domain.source, level=0, config=config, seed=seed, size=tries)
    entries = (dataset[i] for i in range(tries))
  for entry in entries:
    metadata = entry['metadata']
    if not domain.keep(metadata):
      continue
    shown = {key: domain.between.join(map(str, value)) if isinstance(value, list) else value
             for key, value in metadata.items()}
    reference = {'answer': entry['answer'], 'kind': domain.kind}
    yield _task(name, ANSWER_SYSTEM, domain.ask.format(**shown), level, verifier='procedural',
                reference=reference, demonstration=f'Answer: {entry["answer"]}')


def _family_tasks(name: str, level: int, seed: int, tries: int) -> Iterator[types.Task]:
  family, skipped = name.removeprefix('rg:'), 0
  for i in range(tries):
    entry = grader.make_entry(family, level=level, seed=seed, size=tries, index=i)
    skipped = skipped + 1 if 'skipped' in entry else 0
    if skipped > _MAX_SKIPPED:
      raise ValueError(f'domain {name!r} has no tasks at level {level}, one of its {levels(name)} levels: '
                       f'{entry["skipped"]}')
    if skipped:
      continue
    answer = entry['answer']
    reference = {'answer': answer, 'kind': grader.kind_of(answer)}
    if family in puzzles.PUZZLES:
      reference |= {'kind': 'text', 'family': family, 'metadata': entry['metadata']}
    yield _task(name, ANSWER_SYSTEM, entry['question'], level, verifier='procedural', reference=reference,
                demonstration=None if answer is None else f'Answer: {answer}')


def _function_task(function: functions.Function, level: int) -> types.Task:
  return _task('functions', CODE_SYSTEM, function.description, level, verifier='code',
               tests={'style': 'call', 'text': function.tests}, limits=_FUNCTION_LIMITS,
               demonstration=function.source)


def _task(domain: str, system: str, question: str, level: int, **fields) -> types.Task:
  digest = hashlib.sha256(f'{domain}\n{question}'.encode()).hexdigest()[:12]
  messages = ({'role': 'system', 'content': system}, {'role': 'user', 'content': question})
  return types.Task(id=f'{domain}/{digest}', domain=domain, messages=messages, level=level, **fields)
