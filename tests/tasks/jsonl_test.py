"""Users' JSONL: every format is read, and every mistake is told by file, line and field."""

import io
import json
import pathlib
import sys
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from ptjax.tasks import jsonl

_USER = {'role': 'user', 'content': 'hi'}
_ASSISTANT = {'role': 'assistant', 'content': 'ho'}
_TASK = {'prompt': '1+1?', 'domain': 'sums', 'verifier': 'exact', 'reference': '2'}


class JsonlTest(parameterized.TestCase):

  def file(self, *records):
    path = pathlib.Path(self.create_tempdir().full_path) / 'data.jsonl'
    path.write_text('\n'.join(r if isinstance(r, str) else json.dumps(r) for r in records))
    return str(path)

  def test_tasks(self):
    path = self.file(_TASK, '', _TASK | {'id': 'x', 'level': 2, 'prompt': [_USER], 'demonstration': 'Answer: 2'},
                     {'messages': [_USER, _ASSISTANT, _USER], 'domain': 'code', 'verifier': 'code',
                      'tests': {'style': 'asserts', 'text': 'assert f() == 1'}, 'limits': {'wall_s': 2},
                      'files': {'a.txt': 'b'}})
    made = jsonl.tasks(path)
    self.assertEqual(made[0].messages, ({'role': 'user', 'content': '1+1?'},))
    self.assertEqual((made[0].reference, made[0].level), ('2', 0))
    self.assertEqual((made[1].id, made[1].level, made[1].demonstration), ('x', 2, 'Answer: 2'))
    self.assertEqual((made[2].limits, made[2].files), ({'wall_s': 2}, {'a.txt': 'b'}))
    self.assertEqual(made[0].id, jsonl.tasks(self.file(_TASK))[0].id)
    self.assertEqual(jsonl.by_domain(made), {'sums': {0: [made[0]], 2: [made[1]]}, 'code': {0: [made[2]]}})

  @parameterized.parameters(
      ('{"prompt"', r'data.jsonl:2: is not JSON'),
      ('{"prompt": NaN}', r':2: is not JSON'),
      ('3', r':2: must be a JSON object'),
      ({**_TASK, 'answer': '2'}, r':2: unknown field "answer"; known are'),
      ({k: v for k, v in _TASK.items() if k != 'domain'}, r':2: field "domain" is missing'),
      ({k: v for k, v in _TASK.items() if k != 'prompt'}, r':2: needs exactly "prompt" or "messages"'),
      ({**_TASK, 'messages': [_USER]}, r':2: needs exactly "prompt" or "messages"; it has'),
      ({**_TASK, 'prompt': 3}, r':2: field "prompt" must be text or messages'),
      ({**_TASK, 'prompt': [{'role': 'robot', 'content': ''}]}, r':2: field "prompt" .*"role" out of'),
      ({**_TASK, 'prompt': [{'role': 'user'}]}, r':2: field "prompt" .*needs "content"'),
      ({**_TASK, 'level': '1'}, r':2: field "level" must be a whole number'),
      ({**_TASK, 'level': True}, r':2: field "level" must be a whole number'),
      ({**_TASK, 'verifier': 'maths'}, r":2: unknown verifier 'maths'"),
      ({**_TASK, 'verifier': 'code'}, r':2: field "tests" must be'),
      ({**_TASK, 'reference': [1]}, r':2: field "reference" must be'),
      (_TASK, r":2: id 'sums/[0-9a-f]{12}' was on .*:1 already"),
  )
  def test_task_errors(self, record, message):
    with self.assertRaisesRegex(ValueError, message):
      jsonl.tasks(self.file(_TASK, record))

  def test_conversations(self):
    path = self.file({'messages': [_USER, _ASSISTANT]}, {'prompt': 'hi', 'completion': 'ho'},
                     {'prompt': [_USER], 'completion': [_ASSISTANT]},
                     {'conversations': [{'from': 'human', 'value': 'hi'}, {'from': 'gpt', 'value': 'ho'}]})
    self.assertEqual(jsonl.conversations(path), [[_USER, _ASSISTANT]] * 4)
    with self.assertRaisesRegex(ValueError, r':1: field "conversations" each turn needs "from"'):
      jsonl.conversations(self.file({'conversations': [{'from': 'robot', 'value': 'hi'}]}))
    with self.assertRaisesRegex(ValueError, r':1: needs exactly .* with "completion"; it has'):
      jsonl.conversations(self.file({'prompt': 'hi'}))

  def test_preferences(self):
    wanted = {'prompt': [_USER], 'chosen': [_ASSISTANT], 'rejected': [{'role': 'assistant', 'content': 'no'}]}
    path = self.file({'prompt': 'hi', 'chosen': 'ho', 'rejected': 'no'}, wanted,
                     {'chosen': [_USER, _ASSISTANT], 'rejected': [_USER, *wanted['rejected']]})
    self.assertEqual(jsonl.preferences(path), [wanted] * 3)
    [implicit] = jsonl.preferences(self.file({'chosen': 'say hi then ho', 'rejected': 'say hi then he'}))
    self.assertEqual([implicit[k][0]['content'] for k in ('prompt', 'chosen', 'rejected')],
                     ['say hi then ', 'ho', 'he'])
    for record, message in (({'chosen': 'a', 'rejected': 'b'}, 'share no beginning'),
                            ({'prompt': 'x', 'chosen': 'a', 'rejected': 'a'}, 'must differ'),
                            ({'prompt': 'x', 'chosen': 'a', 'rejected': [_ASSISTANT]}, 'field "rejected"')):
      with self.assertRaisesRegex(ValueError, message):
        jsonl.preferences(self.file(record))

  def test_labelled_and_texts(self):
    [made] = jsonl.labelled(self.file({'prompt': 'hi', 'completion': 'ho', 'label': False}))
    self.assertEqual(made, {'prompt': [_USER], 'completion': [_ASSISTANT], 'label': False})
    with self.assertRaisesRegex(ValueError, 'field "label" must be true or false'):
      jsonl.labelled(self.file({'prompt': 'hi', 'completion': 'ho', 'label': 1}))
    self.assertEqual(jsonl.texts(self.file({'text': 'a'}, {'text': 'b'})), ['a', 'b'])

  def test_small_jobs(self):
    self.assertEqual(list(jsonl.prompts(self.file({'id': 1, 'prompt': 'a'}, {'id': 'b', 'messages': [_USER]}))),
                     [{'id': 1, 'prompt': 'a'}, {'id': 'b', 'messages': [_USER]}])
    self.assertEqual(list(jsonl.scorables(self.file({'id': 1, 'token_ids': [1, 2]}))), [{'id': 1, 'token_ids': [1, 2]}])
    for record, message in (({'prompt': 'a'}, 'field "id" is missing'),
                            ({'id': 1, 'prompt': [_USER]}, 'field "prompt" must be text'),
                            ({'id': 1, 'prompt': 'a', 'token_ids': [1, 2]}, 'needs exactly')):
      with self.assertRaisesRegex(ValueError, message):
        list(jsonl.prompts(self.file(record)) if 'token_ids' not in record else jsonl.scorables(self.file(record)))
    with self.assertRaisesRegex(ValueError, 'field "token_ids" must be a list of at least 2'):
      list(jsonl.scorables(self.file({'id': 1, 'token_ids': [1, -2]})))

  def test_standard_input(self):
    with mock.patch.object(sys, 'stdin', io.StringIO('{"text": "a"}\n{"txt": 1}\n')):
      with self.assertRaisesRegex(ValueError, 'standard input:2: unknown field "txt"'):
        jsonl.texts('-')

  def test_empty_and_missing(self):
    with self.assertRaisesRegex(ValueError, 'holds no line'):
      jsonl.tasks(self.file(''))
    with self.assertRaisesRegex(ValueError, 'no such file'):
      jsonl.tasks('/no/such.jsonl')


if __name__ == '__main__':
  absltest.main()
