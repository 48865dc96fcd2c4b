"""Generated tasks: disjoint splits, stable ids, right demonstrations, short prompts."""

import dataclasses
import json
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
from reasoning_gym import factory

from ptjax.tasks import functions
from ptjax.tasks import procedural
from ptjax.verify import base
from ptjax.verify import procedural as grader
from ptjax.verify import puzzles

_LEVELS = [(name, level) for name, d in procedural.DOMAINS.items()
           for level in (functions.LEVELS if d is None else range(len(d.levels)))]

_SHARED = ('propositional_logic',)  # a conclusion often follows in another task too
_NOT_MADE = ('composite',)  # a mixture of other families, which has no settings of its own


def question(task):
  return task.messages[-1]['content']


class MakeTest(parameterized.TestCase):

  @parameterized.parameters(*_LEVELS)
  def test_domain(self, name, level):
    train = procedural.make(name, split='train', count=100, seed=0, level=level)
    heldout = procedural.make(name, split='heldout', count=40, seed=0, level=level)
    other = procedural.make(name, split='train', count=100, seed=1, level=level)
    self.assertEqual([t.id for t in train], [t.id for t in procedural.make(
        name, split='train', count=100, seed=0, level=level)])
    self.assertNotEqual([t.id for t in train], [t.id for t in other])
    self.assertLen({t.id for t in train}, 100)
    self.assertLen({question(t) for t in heldout}, 40)
    self.assertEmpty({t.id for t in heldout} & ({t.id for t in train} | {t.id for t in other}))
    for task in heldout + train:
      self.assertEqual(procedural.is_heldout(question(task)), task in heldout)
      if name != 'functions':
        verdict = grader.verify(task, task.demonstration)
        self.assertEqual((verdict.status, verdict.format_ok), ('pass', True), task)
        self.assertEqual(grader.verify(task, 'Answer: 987654').status, 'fail')
        if task.reference['kind'] == 'list':  # nor does a copy of the question pay
          self.assertEqual(grader.verify(task, question(task)).status, 'fail')

  def test_id_is_that_of_the_question_alone(self):
    [a] = [t for s in range(3) for t in procedural.make('products', split='train', count=250, seed=s)
           if question(t) == 'What is 3 * 4?'][:1]
    self.assertEqual(a.id, 'products/' + __import__('hashlib').sha256(b'products\nWhat is 3 * 4?').hexdigest()[:12])
    self.assertEqual(a.reference['answer'], '12')

  def test_errors(self):
    for kwargs, message in (
        (dict(domain='product', split='train', count=1), 'unknown domain'),
        (dict(domain='rg:nope', split='train', count=1), 'no family'),
        (dict(domain='gcd', split='test', count=1), 'split'),
        (dict(domain='gcd', split='train', count=0), 'count'),
        (dict(domain='gcd', split='train', count=1, level=9), 'no level 9'),
        (dict(domain='functions', split='train', count=1, level=9), 'no level 9: it has 2, 0 to 1'),
        (dict(domain='gcd', split='train', count=1, level=-1), 'no level -1'),
        (dict(domain='rg:puzzle24', split='train', count=1, level=6), 'no level 6: it has 6, 0 to 5'),
        (dict(domain='rg:acre', split='train', count=1, level=1), 'no level 1: it has 1, 0 to 0'),
        (dict(domain='rg:composite', split='train', count=1), 'no level that can be made'),
        (dict(domain='count_bits', split='heldout', count=500), 'fewer than the 500')):
      with self.assertRaisesRegex(ValueError, message):
        procedural.make(seed=0, **kwargs)

  def test_any_family(self):
    made = procedural.make('rg:lcm', split='train', count=5, seed=0, level=1)
    for task in made:
      self.assertEqual(grader.verify(task, task.demonstration).status, 'pass')
      self.assertEqual(json.loads(json.dumps(task.reference)), task.reference)

  def test_levels(self):
    for domain, count in (('products', 3), ('gcd', 2), ('functions', 2), ('rg:acre', 1), ('rg:gcd', 4),
                          ('rg:rubiks_cube', 4), ('rg:caesar_cipher', 3), ('rg:bf', 3)):
      self.assertEqual(procedural.levels(domain), count, domain)
    for domain in ('product', 'rg:nope', 'rg:composite'):
      with self.assertRaises(ValueError):
        procedural.levels(domain)

  def test_a_level_that_takes_too_long_or_has_no_tasks_says_so(self):
    with mock.patch.object(grader, '_MAKE_S', {'cpu_s': 0.01, 'wall_s': 60.0}):
      with self.assertRaisesRegex(ValueError, "'bf' at level 2 takes too long"):
        procedural.make('rg:bf', split='train', count=1, seed=0, level=2)
    with mock.patch.object(grader, 'make_entry', return_value={'skipped': 'ValueError: x'}):
      with self.assertRaisesRegex(ValueError, 'no tasks at level 1, one of its 4 levels: ValueError: x'):
        procedural.make('rg:gcd', split='train', count=1, seed=0, level=1)

  def test_levels_that_reasoning_gym_alone_cannot_make(self):
    for family, level in (('caesar_cipher', 2), ('survo', 3), ('modulo_grid', 1), ('tsumego', 1), ('jugs', 3),
                          ('sokoban', 0), ('game_of_life_halting', 3), ('n_queens', 0), ('propositional_logic', 0),
                          ('tower_of_hanoi', 0), ('rubiks_cube', 3)):
      [made] = procedural.make(f'rg:{family}', split='train', count=1, seed=0, level=level)
      self.assertNotIn('...', question(made))

  def test_majority_accuracy(self):
    tasks = procedural.make('gcd', split='train', count=100, seed=0)
    counts = [sum(t.reference['answer'] == a for t in tasks) for a in {t.reference['answer'] for t in tasks}]
    self.assertEqual(procedural.majority_accuracy(tasks), {'gcd': max(counts) / 100})
    code = procedural.make('functions', split='train', count=50, seed=0)
    self.assertEqual(procedural.majority_accuracy(code), {'functions': 1 / 50})
    bare = [dataclasses.replace(task, demonstration=None) for task in code]
    self.assertEqual(procedural.majority_accuracy(bare), {'functions': 1 / 50})


class FamiliesTest(parameterized.TestCase):

  @parameterized.parameters(*(f for f in sorted(factory.DATASETS) if f not in _NOT_MADE))
  def test_family(self, family):
    made = procedural.make(f'rg:{family}', split='train', count=2, seed=0)
    for task, other in zip(made, made[::-1]):
      base.check(task)
      self.assertEqual(json.loads(json.dumps(task.reference)), task.reference)
      self.assertEqual(task.demonstration is None, family in puzzles.UNANSWERED)
      if task.demonstration:
        verdict = grader.verify(task, task.demonstration)
        self.assertEqual((verdict.status, verdict.format_ok), ('pass', True), task)
      others = {other.demonstration} - {task.demonstration, None} if family not in _SHARED else ()
      for wrong in ('', 'Answer:', 'Answer: no idea at all', 'Answer: 987654.5', *others):
        self.assertEqual(grader.verify(task, wrong).status, 'fail', f'{task} {wrong}')

  def test_those_left_out(self):
    for family in _NOT_MADE:
      with self.assertRaises(ValueError):
        procedural.make(f'rg:{family}', split='train', count=1, seed=0)


class FunctionsTest(parameterized.TestCase):

  @parameterized.parameters(*functions.LEVELS)
  def test_tests_tell_functions_apart(self, level):
    some = list(functions.all_functions(level))
    self.assertLen({f.description for f in some}, len(some))
    self.assertGreaterEqual(len(some), 300)
    for function in some:
      cases = json.loads(function.tests)['cases']
      self.assertGreaterEqual(len(cases), 4)
      values = [json.dumps(c['expected']) for c in cases]
      self.assertGreater(len(set(values)), 1, function)  # no constant passes
    # A function of the same template with another parameter fails some test.
    signature = lambda f: f.source.split('\n', maxsplit=1)[0]
    for a, b in zip(some, some[1:]):
      if signature(a) == signature(b):
        namespace = {}
        exec(b.source, namespace)  # pylint: disable=exec-used
        got = [namespace['f'](*c['args']) for c in json.loads(a.tests)['cases']]
        self.assertNotEqual(got, [c['expected'] for c in json.loads(a.tests)['cases']], (a, b))


if __name__ == '__main__':
  absltest.main()
