"""Exactness: no credit for containing, nearing or decorating the right answer, and no model text is ever run."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

from absl.testing import absltest
from absl.testing import parameterized

from ptjax import types
from ptjax.tasks import procedural as makers
from ptjax.verify import procedural
from ptjax.verify import puzzles

_ROOT = pathlib.Path(__file__).parents[2]


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
                      {'answer': 'two words', 'kind': 'word'},
                      {'answer': '24', 'family': 'puzzle24', 'metadata': {}},
                      {'answer': '24', 'family': 'puzzle24', 'metadata': {'numbers': [4, 6]}},
                      {'answer': '4*6', 'family': 'puzzle24', 'kind': 'number', 'metadata': {'numbers': [4, 6]}}):
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

  def test_family_without_an_oracle_answer(self):
    [made] = makers.make('rg:graph_color', split='train', count=1, seed=0)
    self.assertIsNone(made.reference['answer'])
    self.assertIsNone(made.demonstration)
    for wrong in ('', 'None', '{}', 'null'):
      self.assertEqual(procedural.verify(made, f'Answer: {wrong}').status, 'fail', wrong)
    puzzle = made.reference['metadata']['puzzle']
    colors = {v: None for v in puzzle['vertices']}
    self.assertTrue(_color(colors, puzzle['edges'], puzzle['color_options']))
    verdict = procedural.verify(made, 'Answer: ' + json.dumps({str(k): v for k, v in colors.items()}))
    self.assertEqual(verdict.status, 'pass', verdict)

  def test_no_answer_is_run_as_code(self):
    with tempfile.TemporaryDirectory() as folder:
      mark = pathlib.Path(folder) / 'mark'
      code = f"__import__('pathlib').Path('{mark}').touch()"
      for family, (metadata, _, _) in _PUZZLES.items():
        reference = {'family': family, 'answer': None, 'metadata': metadata}
        self.assertEqual(procedural.verify(task(reference), f'Answer: {code}').status, 'fail', family)
      self.assertFalse(mark.exists())

  @parameterized.parameters(
      '9**9**9', '9**(9**9)', '(1).__class__', 'exec(x)', 'x' * 1000, 'lambda: 0', 'a.b', '1' * 300)
  def test_guards_refuse(self, text):
    for family in ('puzzle24', 'countdown', 'simple_integration', 'polynomial_multiplication'):
      self.assertIsNone(puzzles.PUZZLES[family].text.fullmatch(text))

  def test_long_answers_are_read_where_the_right_one_is_long(self):
    board = '1 ' * 15_000
    self.assertEqual(procedural.verify(task({'answer': board, 'kind': 'text'}), f'Answer: {board}').status, 'pass')

  def test_an_entry_is_the_same_in_processes_with_other_hashes(self):
    families = ('word_ladder', 'isomorphic_strings', 'ransom_note', 'polynomial_multiplication', 'knight_swap')
    code = ('import json\nfrom ptjax.verify import procedural\n'
            f'print(json.dumps([procedural.make_entry(f, level=1, seed=3, size=9, index=4) for f in {families}]))')
    made = {subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True, cwd=_ROOT,
                           env={**os.environ, 'PYTHONHASHSEED': seed}).stdout for seed in '12'}
    self.assertLen(made, 1)
    self.assertLen(json.loads(made.pop()), len(families))

  def test_what_cannot_be_scored_is_found_before_an_answer_is(self):
    remade = {'answer': 'FIE,FIG', 'family': 'word_ladder', 'seed': 5, 'size': 9, 'index': 2}
    with self.assertRaisesRegex(ValueError, 'does not solve its own task'):
      procedural.check(task(remade))
    self.assertEqual(procedural.verify(task(remade), 'Answer: no').status, 'fail')

  def test_sequences_that_explode_are_cut_short(self):
    for index in range(60):
      self.assertIn('question', procedural.make_entry('number_sequence', level=3, seed=0, size=60, index=index))


class PuzzleTest(parameterized.TestCase):

  def test_each_family_has_its_cases(self):
    self.assertEqual(sorted(_PUZZLES), sorted(puzzles.PUZZLES))

  @parameterized.parameters(*sorted(puzzles.PUZZLES))
  def test_right_and_wrong(self, family):
    metadata, right, wrong = _PUZZLES[family]
    for answer in right:
      self.assertTrue(puzzles.right(family, metadata, answer), answer)
    for answer in [*wrong, '', 'x', '[]', '{}', 'null', 'None', '[' * 9000, '(' * 190, *(f'{a} x' for a in right),
                   *(f'{a} {a}' for a in right)]:
      self.assertFalse(puzzles.right(family, metadata, answer), answer)

  def test_values_are_exact(self):
    metadata = {'numbers': [9999, 1, 11], 'target': 9999}
    self.assertFalse(puzzles.right('countdown', metadata, '9999 + 1/11'))
    self.assertTrue(puzzles.right('countdown', metadata | {'numbers': [9999, 11, 11, 1]}, '9999*11/11/1'))

  @parameterized.parameters('premises', 'variables')
  def test_metadata_that_lacks_a_field_raises_whatever_the_answer(self, field):
    metadata = {k: v for k, v in _PUZZLES['propositional_logic'][0].items() if k != field}
    for answer in ('P', 'x', ''):
      with self.assertRaises(KeyError):
        puzzles.right('propositional_logic', metadata, answer)


_BOXES = {'0.5_0.5': ['box_red', 'target_blue'], '0.5_1.5': ['box_blue', 'target_red']}
_SWAP = ('[{"Agent[0.5, 0.5]": "move(box_red, square[0.5, 1.5])", "Agent[0.5, 1.5]": "move(box_blue, square[0.5, 0.5])"'
         '}, {"Agent[0.5, 0.5]": "move(box_blue, target_blue)", "Agent[0.5, 1.5]": "move(box_red, target_red)"}]')
_BUTTONS = [{'name': 'A', 'type': 'add', 'value': 2, 'active_state': 'any'},
            {'name': 'B', 'type': 'multiply', 'value': 2, 'active_state': 'red'},
            {'name': 'C', 'type': 'subtract', 'value': 1, 'active_state': 'green'}]
_SOKOBAN = '+ + + + + +  \n+ * @ - X +  \n+ - - - - +  \n+ + + + + +  \n'
# family -> (metadata, right answers, wrong answers)
_PUZZLES = {
    'boxnet': ({'initial_state': _BOXES}, [_SWAP, f'```json\n{_SWAP}\n```'], [
        '[{"Agent[0.5, 0.5]": "move(target_blue, square[0.5, 1.5])"}]',  # targets stay
        '[{"Agent[0.5, 0.5]": "move(box_red, target_red)", "Agent[0.5, 1.5]": "move(box_blue, target_blue)"}]',
        _SWAP.replace('box_red', 'box_green'), _SWAP[:-1] + ', {"Agent[7.5, 0.5]": "move(box_red, target_red)"}]',
        _SWAP.replace('}, {', ', ')]),  # a key twice, and all at once
    'countdown': ({'numbers': [2, 5, 4], 'target': 14},
                  ['2*5 + 4', '4 + 5 × 2', '4 - (-2)*5', '-(-4) + (2)*5', '2*5\n+4'],
                  ['2.5*4 + 4', '2*5 + 4 + 0', '2 + 5 + 4', '14', '2*5 --4', '2*5 + +4', '4+2*-(-5)', '+2*5 + 4',
                   '2*5*4/4 + 4', '2*5 + 4 = 14', '2*5 + 4/1']),
    'graph_color': ({'puzzle': {'vertices': [0, 1, 2], 'edges': [[0, 1], [1, 2]], 'color_options': [1, 2]}},
                    ['{"0": 1, "1": 2, "2": 1}'],
                    ['{"0": 1, "1": 2}', '{"0": 1, "1": 1, "2": 2}', '{"0": 1, "1": 3, "2": 1}', '{"0": true, "1": 2, '
                     '"2": 1}', '{"0": 1, "1": 2, "2": 1, "3": 1}', '{"0": 1, "1": 1, "1": 2, "2": 1}']),
    'group_anagrams': ({'solution': [['eat', 'tea'], ['nat', 'tan']]}, ['[["tan", "nat"], ["eat", "tea"]]'],
                       ['[["tan", "nat"], {"eat": 1, "tea": 2}]', '[["tan", "nat", "eat", "tea"]]',
                        '[["tan", "nat"], ["eat", "tea"], []]', '[["tan", "nat"], ["eat", "tea", "tea"]]']),
    'intermediate_integration': ({'integrand': 'x*exp(x)', 'variable': 'x'},
                                 ['(x - 1)*exp(x) + C', 'x*exp(x) - exp(x)'],
                                 ['x*exp(x)', '(x - 1)*exp(y)', '1/0', 'x*exp(x) + O(x)']),
    'jugs': ({'puzzle': {'jug_capacities': [3, 5, 9], 'target': 2}}, ['["fill B", "pour B->A"]'],
             ['["fill B", "pour B->A now"]', '["fill B"]', '["fill B", "fill A->B", "pour B->A"]', '["pour B"]',
              '["fill B", "pour B->D"]', '"fill B"', '["No solution"]']),
    'knight_swap': ({'board': {'A1': ['B3', 'C2'], 'B3': ['A1', 'C1'], 'C1': ['B3', 'C2'], 'C2': ['A1', 'C1']},
                     'pieces': {'A1': 'w', 'B3': None, 'C1': 'B', 'C2': None}, 'start_turn': 'w'},
                    ['["w,A1,B3", "B,C1,C2", "w,B3,C1", "B,C2,A1"]'],
                    ['["w,A1,C1", "B,C1,A1"]', '["B,C1,C2", "w,A1,B3", "B,C2,A1", "w,B3,C1"]', '["w,A1,B3"]', 'No',
                     '["w,A1,B3", "w,B3,C1"]', '["w,A1,B3", "B,C1,B3"]']),
    'n_queens': ({'puzzle': [list(row) for row in ('_Q__', '____', '____', '____')]},
                 ['_ Q _ _\n_ _ _ Q\nQ _ _ _\n_ _ Q _', '_Q__\n___Q\nQ___\n__Q_'],
                 ['_ _ Q _\nQ _ _ _\n_ _ _ Q\n_ Q _ _', '_Q__\n___Q\nQ___\n____', '_Q__\n___Q\nQ___\n___Q',
                  '_Q__\n___Q\nQ___\n_Q__', '_Q__Q\n___Q\nQ___\n__Q_']),
    'palindrome_generation': ({'letters': ['b', 'a', 'a', 'b']}, ['abba', 'BAAB'], ['abab', 'aba', 'abbba']),
    'palindrome_partitioning': ({'solution': [['a', 'a'], ['aa']]}, ['[["aa"], ["a", "a"]]'],
                                ['[["aa"]]', '[["aa"], "aa"]', '[["aa"], ["a", "a"], ["a", "a"]]']),
    'polynomial_multiplication': ({'polynomial_expr': '(x + 1)*(2*x - 3)'}, ['2*x**2 - x - 3', '-3 - x + 2*x**2'],
                                  ['(x + 1)*(2*x - 3)', '2*x**2 - x', '2*(x**2 - 1) - x - 1',
                                   '2.00000001*x**2 - x - 3']),
    'prime_factorization': ({'factors': [2, 2, 3]}, ['2 × 2 × 3', '3 x 2*2'], ['4 × 3', '2 × 3', '12', '2 2 3', '×']),
    'propositional_logic': (
        {'premises': ['(P → Q)', '(Q → ¬R)', 'P'], 'variables': ['P', 'Q', 'R']}, ['Q', '¬R', '(P ∧ Q)', 'P ↔ Q'],
        ['P', '(P → Q)', 'Q → ¬R', 'P ∨ Q', '¬P ∨ Q', 'R', 'P ∨ ¬P', '(P → Q) ∧ (Q → ¬R)', 'Q ∧ ¬R ∧ P', 'Q)', '(Q',
         'Q ¬', 'S', '∧', 'P Q']),
    'puzzle24': ({'numbers': [7, 5, 2, 1]}, ['(5 + 7)*2*1', '-1*2*(-7 - 5)', '(7 + 5) × 2 ÷ 1'],
                 ['8*(2 - 4 + 5)', '5*5 - 2/7', '5*5 - 7/7', '24', '(5 + 7)*2', '(5 + 7)*2*1*1', '(7 + 5)*2 - -1']),
    'quantum_lock': ({'buttons': _BUTTONS, 'initial_value': 0, 'initial_state': 'red', 'target_value': 4,
                      'solution_path': ['A', 'A']}, ['A → A', 'A A', 'A, A', 'A->A'],
                     ['A → A → A', 'A → A!', 'a → a', 'A → B → A', 'A → C', 'A A A C C', 'A → → A', 'AAx']),
    'rubiks_cube': ({'cube_size': 3, 'scramble_moves': "R U'"}, ["U R'", "U U U' R'", 'U R R R'],
                    ["R' U", "U R' 9x", "U  R'x", 'U1000000 R']),
    'rush_hour': ({'board_config': 'oooooo' 'ooooCo' 'AAooCo' 'ooooCo' 'oooooo' 'oooooo'}, ['B+2 A+4', 'B+1, B+1, A+4'],
                  ['A+4', 'B+2 A+5', 'B+3 A+4', 'B+2', 'B+2 A+4 C+1', 'B+2 A+4!', 'B+2A+4', 'C+2 A+4', 'B+9 A+4']),
    'shortest_path': ({'matrix': [['*', 'O'], ['O', 'X'], ['O', '#']], 'solution': ['down', 'down', 'right']},
                      ['down down right', 'Down  down right'],
                      ['right down down', 'down down', 'infeasible', 'down down right left right', 'down,down,right']),
    'simple_integration': ({'integrand': 'x**2', 'variable': 'x'}, ['x**3/3', 'x**3/3 + C', '1/3*x**3 - 7'],
                           ['0.333333333333*x**3', '0.3333333333333333333*x**3', 'x**3', 'X**3/3', '3**3/3']),
    'sokoban': ({'gamestr': _SOKOBAN}, ['RR', 'DURR'], ['R', 'LRR', 'RRR', 'rr', 'R R', 'RR!', 'UDLR' * 90]),
    'tower_of_hanoi': ({'num_disks': 2, 'num_pegs': 3, 'start_peg': 1, 'target_peg': 3}, [
        'Move disk 1 from Peg 1 to Peg 2\nMove disk 2 from Peg 1 to Peg 3\nMove disk 1 from Peg 2 to Peg 3'], [
        'Move disk 2 from Peg 1 to Peg 3', 'Move disk 1 from Peg 1 to Peg 3\nMove disk 2 from Peg 1 to Peg 3',
        'Move disk 1 from Peg 1 to Peg 3', 'Move disk 1 from Peg 1 to Peg 4']),
    'word_ladder': ({'start_word': 'COLD', 'end_word': 'WARD'}, ['COLD,CORD,CARD,WARD', 'cold, cord, word, ward'],
                    ['COLD,WARD', 'COLD,CORD,CARD', 'COLD,COLD,CORD,CARD,WARD', 'COLD,CXLD,CORD,CARD,WARD',
                     'CORD,CARD,WARD', 'COLD']),
}


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
    code = ('import sys, ptjax.verify.base, ptjax.verify.stream, ptjax.tasks.procedural, ptjax.tasks.jsonl\n'
            'print([m for m in ("jax", "reasoning_gym", "math_verify", "sympy") if m in sys.modules])')
    out = subprocess.run([sys.executable, '-c', code], cwd=_ROOT, capture_output=True, text=True, check=True).stdout
    self.assertEqual(out.strip(), '[]')


if __name__ == '__main__':
  absltest.main()
