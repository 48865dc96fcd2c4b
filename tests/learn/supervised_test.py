"""Preference files train on the answers compared and nothing else; examples that no row holds are named early."""

import json
import types

from absl.testing import absltest
import numpy as np

from ptjax.data import batching, chat
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

  def test_assistant_turns_of_the_prompt_are_not_trained_on(self):
    turns = [dict(role=('user', 'assistant')[i % 2], content=text) for i, text in enumerate(('Hi', 'Yo', 'Bye'))]
    path = self.create_tempfile(content=json.dumps(dict(prompt=turns, chosen='So long', rejected='No'))).full_path
    tokenizer = tokenizer_lib.byte_level()
    config = types.SimpleNamespace(dpo=types.SimpleNamespace(data=path))
    (pair,) = supervised.preferences(config, types.SimpleNamespace(tokenizer=tokenizer), plain=None, stage=None)
    np.testing.assert_array_equal(pair.prompt_ids, chat.encode_prompt(tokenizer, turns))
    trained = [tokenizer.decode(c['token_ids'][c['mask']]) for c in pair.completions]
    self.assertEqual(trained, ['So long<|im_end|>', 'No<|im_end|>'])


class SizesTest(absltest.TestCase):

  def test_an_example_that_no_row_holds_is_named_before_the_first_step(self):
    settings = types.SimpleNamespace(seq_len=8, loss_tokens=4)
    short, long = (batching.supervised(np.arange(1, 4), np.arange(n)) for n in (4, 6))
    supervised.check_sizes(settings, {'data': [short]}, 'sft')
    with self.assertRaisesRegex(ValueError, 'example 2 of data has 9 tokens, 6 of them trained.*--config.sft.seq_len=9 '
                                '--config.sft.loss_tokens=6'):
      supervised.check_sizes(settings, {'data': [short, long]}, 'sft')


if __name__ == '__main__':
  absltest.main()
