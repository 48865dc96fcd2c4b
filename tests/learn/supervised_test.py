"""Preference files: the other side's turns inside a completion are context, never trained on."""

import json
import types

from absl.testing import absltest

from ptjax.data import tokenizer as tokenizer_lib
from ptjax.learn import supervised


class PreferencesTest(absltest.TestCase):

  def test_user_turns_inside_a_completion_are_not_trained_on(self):
    turns = lambda *texts: [dict(role=('user', 'assistant')[i % 2], content=text) for i, text in enumerate(texts)]
    path = self.create_tempfile(content=json.dumps(dict(
        chosen=turns('Hi', 'Yo', 'Bye', 'So long'), rejected=turns('Hi', 'Go', 'Why', 'Because')))).full_path
    tokenizer = tokenizer_lib.byte_level()
    config = types.SimpleNamespace(dpo=types.SimpleNamespace(data=path))
    (pair,) = supervised.preferences(config, types.SimpleNamespace(tokenizer=tokenizer), plain=None, stage=None)
    trained = [tokenizer.decode(c['token_ids'][c['mask']]) for c in pair.completions]
    self.assertEqual(trained, ['Yo<|im_end|>So long<|im_end|>', 'Go<|im_end|>Because<|im_end|>'])
    self.assertEqual(tokenizer.decode(pair.prompt_ids), '<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n')


if __name__ == '__main__':
  absltest.main()
