"""--job=verify: order and ids kept, each line of standard input answered before the next is sent, errors by line."""

import json
import pathlib
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized

from ptjax.verify import stream

_ROOT = pathlib.Path(__file__).parents[2]


def line(**fields):
  return json.dumps({'id': 1, 'verifier': 'exact', 'answer': '1', 'reference': '1', **fields})


class StreamTest(parameterized.TestCase):

  def run_on(self, text):
    folder = pathlib.Path(self.create_tempdir().full_path)
    (folder / 'in.jsonl').write_text(text)
    try:
      stream.run(str(folder / 'in.jsonl'), str(folder / 'out.jsonl'))
    finally:
      self.answers = [json.loads(x) for x in (folder / 'out.jsonl').read_text().splitlines()]

  def test_file(self):
    tests = {'style': 'call', 'text': '{"entry": "f", "cases": [{"args": [], "expected": 1}]}'}
    requests = [
        line(id='a'), line(id=2, answer='2'), '',
        line(id='m', verifier='math', answer='\\boxed{0.5}', reference='\\frac12'),
        json.dumps({'id': 'c', 'verifier': 'code', 'answer': 'def f(): return 1', 'tests': tests,
                    'limits': {'wall_s': 5}}),
        line(id='p', verifier='procedural', reference={'answer': 'ab', 'kind': 'word'}, answer='Answer: AB')]
    self.run_on('\n'.join(requests))
    self.assertEqual([(a['id'], a['status'], a['score']) for a in self.answers],
                     [('a', 'pass', 1.0), (2, 'fail', 0.0), ('m', 'pass', 1.0), ('c', 'pass', 1.0), ('p', 'pass', 1.0)])
    self.assertEqual({frozenset(a) for a in self.answers}, {frozenset(('id', 'status', 'score', 'evidence'))})

  @parameterized.parameters(
      ('{', r':2: is not JSON'),
      ('[1]', r':2: must be a JSON object'),
      ('{"id": 1, "verifier": "exact"}', r':2: field "answer" is missing'),
      (line(extra=1), r':2: unknown field "extra"; known are'),
      (line(answer=3), r':2: field "answer" must be text, not 3'),
      (line(id=True), r':2: field "id" must be'),
      (line(verifier='maths'), r":2: unknown verifier 'maths'"),
      (line(reference=None), r':2: field "reference" must be'),
      (line(verifier='code'), r':2: field "tests" must be'),
  )
  def test_bad_line_ends_the_job_after_the_good_ones(self, bad, message):
    with self.assertRaisesRegex(ValueError, message):
      self.run_on(line(id='good') + '\n' + bad + '\n' + line(id='after'))
    self.assertEqual([a['id'] for a in self.answers], ['good'])

  @parameterized.parameters((b'{"id": "\xff"}', 'is not JSON in UTF-8'), (b'{"id": NaN}', 'NaN is no JSON number'))
  def test_bytes_that_are_no_text(self, bad, message):
    path = pathlib.Path(self.create_tempdir().full_path, 'in.jsonl')
    path.write_bytes(line().encode() + b'\n' + bad + b'\n')
    with self.assertRaisesRegex(ValueError, f'in.jsonl:2: {message}|in.jsonl:2: .*{message}'):
      stream.run(str(path), f'{path}.out')

  def test_neither_the_input_nor_an_old_output_is_lost(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    (folder / 'in.jsonl').write_text(line())
    (folder / 'old.jsonl').write_text('kept')
    with self.assertRaisesRegex(ValueError, 'is the input too'):
      stream.run(str(folder / 'in.jsonl'), str(folder / 'in.jsonl'))
    with self.assertRaisesRegex(ValueError, 'no such file'):
      stream.run(str(folder / 'mistyped.jsonl'), str(folder / 'old.jsonl'))
    self.assertEqual(((folder / 'in.jsonl').read_text(), (folder / 'old.jsonl').read_text()), (line(), 'kept'))

  def test_no_such_file(self):
    with self.assertRaisesRegex(ValueError, 'no such file'):
      stream.run('/no/such/file.jsonl', '-')

  def test_standard_input_is_answered_line_by_line(self):
    code = "from ptjax.verify import stream; stream.run('-', '-')"
    with subprocess.Popen([sys.executable, '-c', code], cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as process:
      for i in range(3):
        process.stdin.write(line(id=i) + '\n')
        process.stdin.flush()
        self.assertEqual(json.loads(process.stdout.readline())['id'], i)
      process.stdin.close()
      self.assertEqual(process.wait(), 0)


if __name__ == '__main__':
  absltest.main()
