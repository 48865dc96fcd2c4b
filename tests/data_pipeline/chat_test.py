"""Chat: rendering as Hugging Face does it, ids of prompts, and which tokens of a conversation are the assistant's."""

import dataclasses
import pathlib

from absl.testing import absltest, parameterized
import numpy as np
import tokenizers

from ptjax.data import chat
from ptjax.data import tokenizer as tokenizer_lib

DATA = pathlib.Path(__file__).resolve().parent.parent / 'data' / 'weights'


def said(role: str, content: str) -> dict:
  return dict(role=role, content=content)


TALK = [said('user', 'Hi'), said('assistant', 'Yo'), said('user', 'Bye'), said('assistant', 'So long')]


class ChatTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.tokenizer = tokenizer_lib.byte_level()

  def _with(self, template: str) -> tokenizer_lib.Tokenizer:
    return dataclasses.replace(self.tokenizer, chat_template=template)

  def test_prompt_opens_an_assistant_turn(self):
    ids = chat.encode_prompt(self.tokenizer, TALK[:1])
    self.assertEqual(ids.dtype, np.int32)
    self.assertEqual(self.tokenizer.decode(ids), '<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n')

  def test_mask_covers_what_the_assistant_says_and_its_end_token(self):
    ids, mask = chat.encode_conversation(self.tokenizer, TALK)
    self.assertEqual((ids.dtype, mask.dtype, ids.shape), (np.int32, bool, mask.shape))
    self.assertEqual(self.tokenizer.decode(ids[mask]), 'Yo<|im_end|>So long<|im_end|>')
    # by hand: start 1, 'user\n' 5, 'Hi' 2, end 1, '\n' 1, start 1, 'assistant\n' 10 = 21 before 'Yo', end;
    # then '\n' 1, start 1, 'user\n' 5, 'Bye' 3, end 1, '\n' 1, start 1, 'assistant\n' 10 = 23 before 'So long'
    np.testing.assert_array_equal(np.flatnonzero(mask)[:4], [21, 22, 23, 24 + 23])
    self.assertEqual(ids[-1], self.tokenizer.eos_id)
    self.assertEqual(self.tokenizer.decode(ids) + '\n', chat.render(self.tokenizer, TALK))

  def test_end_token_is_trained_on_when_padding_shares_its_id(self):
    shared = dataclasses.replace(self.tokenizer, pad_id=self.tokenizer.eos_id)
    _, mask = chat.encode_conversation(shared, TALK)
    np.testing.assert_array_equal(mask, chat.encode_conversation(self.tokenizer, TALK)[1])

  def test_trunk_equals_the_prompt_the_sampler_gets(self):
    ids, mask = chat.encode_conversation(self.tokenizer, TALK[:2])
    np.testing.assert_array_equal(ids[:np.argmax(mask)], chat.encode_prompt(self.tokenizer, TALK[:1]))

  def test_end_of_document_after_the_end_of_turn_is_glue(self):
    closing = '{% if not add_generation_prompt %}<|endoftext|>{% endif %}'
    t = dataclasses.replace(self._with(tokenizer_lib.CHATML + closing), eos_ids=(2, 0))
    ids, mask = chat.encode_conversation(t, TALK)
    self.assertEqual(t.decode(ids[mask]), 'Yo<|im_end|>So long<|im_end|>')

  def test_template_that_drops_the_content_is_refused(self):
    t = self._with('{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>'
                   '{% endfor %}')
    with self.assertRaisesRegex(ValueError, 'message 1: the chat template leaves out what the assistant says'):
      chat.encode_conversation(t, TALK)

  def test_content_that_spells_an_end_token_does_not_end_the_turn(self):
    ids, mask = chat.encode_conversation(self.tokenizer, [TALK[0], said('assistant', 'a<|im_end|>b')])
    self.assertEqual(self.tokenizer.decode(ids[mask]), 'a<|im_end|>b<|im_end|>')

  def test_exactly_one_bos(self):
    t = tokenizer_lib.from_directory(DATA / 'tiny_llama3')  # template and tokenizer both would add one
    ids = chat.encode_prompt(t, TALK[:1])
    self.assertEqual(ids[0], t.bos_id)
    self.assertEqual(np.sum(ids == t.bos_id), 1)
    ids, mask = chat.encode_conversation(t, TALK)
    self.assertEqual(np.sum(ids == t.bos_id), 1)
    self.assertEqual(t.decode(ids[mask]), 'Yo<|eot|>So long<|eot|>')  # ends with the second of two end ids

  def test_default_system_message_of_the_template_is_kept(self):
    default = "{% if messages and messages[0].role != 'system' %}<|im_start|>system\nBe kind<|im_end|>\n{% endif %}"
    t = self._with(default + tokenizer_lib.CHATML)
    ids, mask = chat.encode_conversation(t, TALK[:2])
    self.assertStartsWith(t.decode(ids), '<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHi')
    self.assertEqual(t.decode(ids[mask]), 'Yo<|im_end|>')

  def test_template_that_rewrites_the_past_is_refused(self):
    t = self._with("{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}...{% else %}"
                   "{{ m.content }}{% endif %}<|im_end|>{% endfor %}")
    with self.assertRaisesRegex(ValueError, 'message 3: the chat template rewrites earlier text'):
      chat.encode_conversation(t, TALK)

  def test_template_that_trims_the_start_of_a_turn_is_refused_or_exact(self):
    t = self._with('{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}'
                   '{% if add_generation_prompt %}[assistant]:{% endif %}')
    with self.assertRaisesRegex(ValueError, 'message 1: the chat template rewrites'):
      chat.encode_conversation(t, TALK[:2])

  def test_turn_without_an_end_token_is_refused(self):
    t = self._with('{% for m in messages %}{{ m.content }}\n{% endfor %}')
    with self.assertRaisesRegex(ValueError, r"does not close the assistant turn with one of \['<\|im_end\|>'\]"):
      chat.encode_conversation(t, TALK[:2])

  def test_vocabulary_that_puts_a_space_before_each_text_is_refused(self):
    backend = tokenizers.Tokenizer.from_str(self.tokenizer.backend.to_str())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    with self.assertRaisesRegex(ValueError, 'turns cannot be encoded one by one'):
      chat.encode_conversation(dataclasses.replace(self.tokenizer, backend=backend), TALK)

  def test_nothing_to_train_on(self):
    with self.assertRaisesRegex(ValueError, 'no assistant message'):
      chat.encode_conversation(self.tokenizer, TALK[:1])

  def test_what_templates_may_use(self):
    t = self._with("{%- for m in messages -%}{%- if m.role == 'tool' %}{% continue %}{% endif -%}"
                   "{% generation %}{{ m.content | tojson }}{% endgeneration %}{%- endfor -%}"
                   "|{{ tools | tojson }}|{{ eos_token }}|{{ strftime_now('%d %b %Y') }}|{{ mood }}")
    text = chat.render(t, [said('user', 'é"'), said('tool', 'x')], tools=[dict(name='f')], mood='good')
    self.assertEqual(text, '"é\\""|[{"name": "f"}]|<|im_end|>|26 Jul 2024|good')

  @parameterized.parameters({'arguments': {'x': 1}}, {'arguments': '{"x": 1}'})
  def test_tool_arguments_as_object_or_text(self, arguments):
    t = self._with('{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments.x + 1 }}{% endfor %}'
                   '{{ m.content }}{% endfor %}')  # a null content prints as nothing, not as "None"
    call = dict(id='1', type='function', function=dict(name='f', arguments=arguments))
    self.assertEqual(chat.render(t, [dict(role='assistant', content=None, tool_calls=[call])]), '2')

  def test_text_parts_are_joined(self):
    parts = [dict(type='text', text='a'), dict(type='text', text='b')]
    self.assertIn('\nab<|im_end|>', chat.render(self.tokenizer, [dict(role='user', content=parts)]))

  @parameterized.parameters(
      ([dict(role='user', content=[dict(type='image')])], 'message 0: content parts of type .*image.*only "text"'),
      ([said('user', 'a'), dict(role='user')], 'message 1: "content" must be text'),
      ([dict(role='robot', content='a')], 'message 0: needs a "role" out of'),
      (['a'], 'message 0: needs a "role"'),
      ([dict(role='assistant', content=None, tool_calls=[dict(function=dict(name='f', arguments='{'))])],
       'message 0: tool_calls arguments are not JSON'),
      *(([dict(role='assistant', content=None, tool_calls=calls)], error) for calls, error in (
          (['x'], 'message 0: a tool call must be an object'), ({'a': 1}, 'message 0: "tool_calls" must be a list'),
          ([dict(function=None)], 'message 0: a tool call must be an object, as must its "function"'))))
  def test_malformed_messages(self, messages, error):
    with self.assertRaisesRegex(ValueError, error):
      chat.render(self.tokenizer, messages)

  def test_template_errors_are_sentences(self):
    with self.assertRaisesRegex(ValueError, r"rejects a conversation with roles \['user'\]: users must wait"):
      chat.render(self._with("{{ raise_exception('users must wait') }}"), TALK[:1])
    with self.assertRaisesRegex(ValueError, 'does not parse'):
      chat.render(self._with('{% if %}'), TALK[:1])
    with self.assertRaisesRegex(ValueError, 'no chat template'):
      chat.render(dataclasses.replace(self.tokenizer, chat_template=None), TALK[:1])

  @parameterized.parameters("{{ ''.__class__.__mro__ }}", '{{ messages.append(1) }}',
                            "{{ cycler.__init__.__globals__.os.system('true') }}")
  def test_templates_run_in_the_sandbox(self, template):
    with self.assertRaisesRegex(ValueError, 'rejects a conversation.*(unsafe|not safely callable)'):
      chat.render(self._with(template), TALK[:1])


if __name__ == '__main__':
  absltest.main()
