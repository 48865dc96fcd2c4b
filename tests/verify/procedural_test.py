"""Exactness: no credit for containing, nearing or decorating the right answer, and no model text is ever run."""

import json
import pathlib
import sys
import tempfile

from absl.testing import absltest
from absl.testing import parameterized

from ptjax import types
from ptjax.tasks import procedural as makers
from ptjax.verify import procedural


def task(reference, verifier='procedural'):
  return types.Task('t', 'd', (), verifier, reference)


class ExactTest(parameterized.TestCase):

  @parameterized.parameters(
      ('42', 'It is 42.', 'pass'),
      ('42', 'Answer: 42.0', 'pass'),
      (42, 'Answer: 042', 'pass'),
      ('42', 'Answer: 142', 'fail'),
      ('42', 'Answer: 42 43', 'pass'),  # the first value of a statement counts
      ('42', 'Answer: 42 or 43', 'fail'),
      ('True', 'Answer: True or False', 'fail'),
      ('0.5', '1/2', 'pass'),
      (1e-7, 'Answer: 0.0000001', 'pass'),
      (1e22, 'Answer: 10000000000000000000000', 'pass'),
      ('0.333333', '1/3', 'fail'),
      ('-42', '42', 'fail'),
      ('9007199254740993', '9007199254740992', 'fail'),  # equal as floats
      ('True', 'Answer: true', 'pass'),
      ('up right', 'Answer: up  right', 'pass'),
      ('up right', 'Answer: right up', 'fail'),
      ('42', '', 'fail'),
      ('42', '1/0', 'fail'),
  )
  def test_value(self, reference, text, status):
    verdict = procedural.verify_exact(task(reference, 'exact'), text)
    self.assertEqual((verdict.status, verdict.score), (status, float(status == 'pass')))

  def test_reference_is_checked(self):
    for reference in (None, True, ['1'], {'answer': 1}, {'answer': None, 'family': 'gcd'},
                      {'answer': '1', 'seeds': 1}, {'answer': '1', 'kind': 'digit'}, '', float('inf'),
                      {'answer': None, 'family': ['x']}, {'answer': '1', 'level': 'x'},
                      {'answer': '3,17', 'kind': 'list'}, {'answer': '7', 'kind': 'list'},
                      {'answer': 'cat', 'kind': 'number'},
                      {'answer': 'two words', 'kind': 'word'}):
      with self.assertRaisesRegex(ValueError, 'field "reference'):
        procedural.check(task(reference))


  def test_an_answer_of_digits_without_end_is_looked_through_at_once(self):
    reference = {'answer': 'x**2', 'kind': 'text', 'family': 'polynomial_multiplication'}
    self.assertEqual(procedural.verify(task(reference), 'Answer: ' + '1111111111111111111 ' * 9 + '!').status, 'fail')


class FamilyTest(parameterized.TestCase):

  def test_partial_credit_of_the_default_scorer_is_no_pass(self):
    # reasoning-gym pays len(oracle) / len(answer) for an answer that contains the oracle.
    reference = {'family': 'caesar_cipher', 'answer': 'HELLO WORLD'}
    self.assertEqual(procedural.verify(task(reference), 'Answer: HELLO WORLD OR NOT').status, 'fail')
    self.assertEqual(procedural.verify(task(reference), 'Answer: HELLO WORLD').status, 'pass')

  def test_tolerance_of_a_scorer_is_no_pass(self):
    # reasoning-gym's number_sorting takes numbers up to 1 away.
    reference = {'family': 'number_sorting', 'answer': "['1.0', '2.0']"}
    self.assertEqual(procedural.verify(task(reference), "Answer: ['1.5', '2.5']").status, 'fail')

  def test_scorer_decides_where_many_answers_are_right(self):
    [made] = makers.make('rg:puzzle24', split='train', count=1, seed=3)
    right = made.reference['answer']
    self.assertEqual(procedural.verify(made, f'Answer: {right}').status, 'pass')
    self.assertEqual(procedural.verify(made, f'Answer: ({right})').status, 'pass')
    for wrong in ('24', '1 + 1', '', 'no idea', f'{right} + 1'):
      self.assertEqual(procedural.verify(made, f'Answer: {wrong}').status, 'fail', wrong)

  def test_family_without_an_oracle_answer(self):
    [made] = makers.make('rg:graph_color', split='train', count=1, seed=0)
    self.assertIsNone(made.reference['answer'])
    self.assertIsNone(made.demonstration)
    for wrong in ('', 'None', '{}', 'null'):
      self.assertEqual(procedural.verify(made, f'Answer: {wrong}').status, 'fail', wrong)
    metadata = procedural.make_dataset('graph_color', level=0, config=None, seed=made.reference['seed'],
                                       size=made.reference['size'])[made.reference['index']]['metadata']
    puzzle = metadata['puzzle']
    colors = {v: None for v in puzzle['vertices']}
    self.assertTrue(_color(colors, puzzle['edges'], puzzle['color_options']))
    verdict = procedural.verify(made, 'Answer: ' + json.dumps({str(k): v for k, v in colors.items()}))
    self.assertEqual(verdict.status, 'pass', verdict)

  def test_no_answer_is_run_as_code(self):
    with tempfile.TemporaryDirectory() as folder:
      mark = pathlib.Path(folder) / 'mark'
      code = f"__import__('pathlib').Path('{mark}').touch()"
      for family in sorted(procedural.MANY_ANSWERS) + ['string_insertion', 'spiral_matrix', 'binary_matrix']:
        reference = {'family': family, 'answer': 'x', 'metadata': {}}
        try:
          procedural.verify(task(reference), f'Answer: {code}')
        except RuntimeError:
          continue  # a scorer that broke on the made-up metadata
      self.assertFalse(mark.exists())

  @parameterized.parameters(
      '9**9**9', '9**(9**9)', '(1).__class__', 'exec(x)', 'x' * 1000, 'lambda: 0', 'a.b', '1' * 300)
  def test_guards_refuse(self, text):
    for family in ('puzzle24', 'countdown', 'simple_integration', 'polynomial_multiplication'):
      self.assertIsNone(procedural.MANY_ANSWERS[family].fullmatch(text))

  def test_guards_admit_right_answers(self):
    for family, answer in (('simple_integration', '10*x**7 + 4*x**3/5 + C'), ('countdown', '15 - 4 + 95 + 36'),
                           ('polynomial_multiplication', '1140*z**5 + 9880*z**4 - 7410*z**3'),
                           ('intermediate_integration', '2*exp(4*x**2 + 2*x + 10) + C')):
      self.assertIsNotNone(procedural.MANY_ANSWERS[family].fullmatch(answer), answer)


def _color(colors, edges, options):
  free = next((v for v, c in colors.items() if c is None), None)
  if free is None:
    return True
  for option in options:
    if all(colors[a if b == free else b] != option for a, b in edges if free in (a, b)):
      colors[free] = option
      if _color(colors, edges, options):
        return True
  colors[free] = None
  return False


class ImportTest(absltest.TestCase):

  def test_reasoning_gym_is_lazy_and_jax_absent(self):
    import subprocess  # pylint: disable=g-import-not-at-top
    code = ('import sys, ptjax.verify.base, ptjax.verify.stream, ptjax.tasks.procedural, ptjax.tasks.jsonl\n'
            'print([m for m in ("jax", "reasoning_gym", "math_verify", "sympy") if m in sys.modules])')
    root = pathlib.Path(__file__).parents[2]
    out = subprocess.run([sys.executable, '-c', code], cwd=root, capture_output=True, text=True, check=True).stdout
    self.assertEqual(out.strip(), '[]')


if __name__ == '__main__':
  absltest.main()
