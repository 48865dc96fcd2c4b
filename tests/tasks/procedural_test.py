"""Generated tasks: disjoint splits, stable ids, right demonstrations, short prompts."""

import dataclasses
import json

from absl.testing import absltest
from absl.testing import parameterized

from ptjax.tasks import functions
from ptjax.tasks import procedural
from ptjax.verify import procedural as grader

_LEVELS = [(name, level) for name, d in procedural.DOMAINS.items()
           for level in (functions.LEVELS if d is None else range(len(d.levels)))]


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
        (dict(domain='functions', split='train', count=1, level=9), 'no level 9'),
        (dict(domain='count_bits', split='heldout', count=500), 'fewer than the 500')):
      with self.assertRaisesRegex(ValueError, message):
        procedural.make(seed=0, **kwargs)

  def test_any_family(self):
    made = procedural.make('rg:lcm', split='train', count=5, seed=0, level=1)
    for task in made:
      self.assertEqual(grader.verify(task, task.demonstration).status, 'pass')
      self.assertEqual(json.loads(json.dumps(task.reference)), task.reference)

  def test_majority_accuracy(self):
    tasks = procedural.make('gcd', split='train', count=100, seed=0)
    counts = [sum(t.reference['answer'] == a for t in tasks) for a in {t.reference['answer'] for t in tasks}]
    self.assertEqual(procedural.majority_accuracy(tasks), {'gcd': max(counts) / 100})
    code = procedural.make('functions', split='train', count=50, seed=0)
    self.assertEqual(procedural.majority_accuracy(code), {'functions': 1 / 50})
    bare = [dataclasses.replace(task, demonstration=None) for task in code]
    self.assertEqual(procedural.majority_accuracy(bare), {'functions': 1 / 50})


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
