"""Functions offered to a model: how they are stated, and how the calls in its text are told from the rest."""

import dataclasses
import json
import random

from absl.testing import absltest, parameterized

from ptjax.data import chat
from ptjax.serve import tools
from tests.serve import live

WEATHER = {'type': 'function', 'function': {
    'name': 'weather', 'description': 'Tells the weather.',
    'parameters': {'type': 'object', 'properties': {'city': {'type': 'string'}}, 'required': ['city']}}}
NOW = {'type': 'function', 'function': {'name': 'now'}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def parse(text, cuts=()):
  """(text, calls) of what a model wrote, fed in pieces."""
  parser = tools.Parser(frozenset({'weather', 'now'}))
  fed = [parser.feed(text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(text)])] + [parser.finish()]
  return ''.join(said for said, _ in fed), [(c.name, json.loads(c.arguments)) for _, calls in fed for c in calls]


class ParserTest(parameterized.TestCase):

  @parameterized.parameters(
      ('hello', 'hello', []), ('', '', []), (' a\n', ' a\n', []), ('a < b', 'a < b', []),
      (CALL, '', ['weather']), (f'Let me see.\n{CALL}', 'Let me see.', ['weather']),
      (f'{CALL}\n<tool_call>{{"name": "now"}}</tool_call>', '', ['weather', 'now']),
      (f'one {CALL} two', 'one two', ['weather']), (f'one {CALL} {CALL}\n', 'one', ['weather', 'weather']),
      (CALL.removesuffix('</tool_call>'), '', ['weather']),
      ('<tool_call>\n{"name": "weather", "argum', None, []), ('<tool_call>{"name": "other"}</tool_call>', None, []),
      ('<tool_call>weather(1)</tool_call> a', None, []), ('<tool_call>{"name": ["now"]}</tool_call>', None, []),
      ('<tool_call>{"name": "now", "arguments": "a"}</tool_call>', None, []),
      ('<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>', None, []),
      ('<tool_call>[1]</tool_call>', None, []), ('<tool_call>' + '[' * 100_000 + '</tool_call>', None, []),
      (f'<tool_call> no: {CALL}', '<tool_call> no:', ['weather']))
  def test_text_and_calls(self, text, said, names):
    got, calls = parse(text)
    self.assertEqual(got, text if said is None else said)  # what is no call stays text as it is
    self.assertEqual([name for name, _ in calls], names)

  def test_arguments(self):
    self.assertEqual(parse(CALL)[1], [('weather', {'city': 'Köln'})])

  def test_how_the_text_is_cut_changes_nothing(self):
    rng = random.Random(0)
    pieces = ['<tool_call>', '</tool_call>', CALL, '{"name": "now"}', '\n', ' ', 'hi', '<tool_', '{"name": "no"}', 'x']
    for _ in range(3000):
      text = ''.join(rng.choices(pieces, k=rng.randint(0, 8)))
      cuts = sorted(rng.randint(0, len(text)) for _ in range(rng.randint(0, 9)))
      self.assertEqual(parse(text, cuts), parse(text), str((text, cuts)))

  def test_text_is_not_held_back_without_need(self):
    parser = tools.Parser(frozenset({'now'}))
    self.assertEqual(parser.feed('a < b <tool'), ('a < b', []))
    self.assertEqual(parser.feed('s>'), (' <tools>', []))


class PromptTest(absltest.TestCase):

  def test_stated_in_the_system_message_where_the_template_knows_none(self):
    messages = [
        {'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Köln and Rome?'},
        {'role': 'assistant', 'content': None, 'tool_calls': [
            {'id': '1', 'type': 'function', 'function': {'name': 'weather', 'arguments': '{"city": "Köln"}'}},
            {'id': '2', 'type': 'function', 'function': {'name': 'weather', 'arguments': '{"city": "Rome"}'}}]},
        {'role': 'tool', 'tool_call_id': '1', 'content': 'rain'},
        {'role': 'tool', 'tool_call_id': '2', 'content': 'sun'}]
    system, user, assistant, results = tools.plain(messages, [WEATHER, NOW])
    self.assertTrue(system['content'].startswith('Be brief.\n\n'))
    self.assertIn(json.dumps(WEATHER), system['content'])
    self.assertEqual(user, messages[1])
    self.assertEqual(assistant, {'role': 'assistant', 'content': f'{CALL}\n{CALL.replace("Köln", "Rome")}'})
    self.assertEqual(results, {'role': 'user', 'content': '<tool_response>\nrain\n</tool_response>\n'
                                                          '<tool_response>\nsun\n</tool_response>'})
    self.assertEqual(parse(assistant['content'])[1], [('weather', {'city': 'Köln'}), ('weather', {'city': 'Rome'})])
    ids = tools.encode(live.TOKENIZER, messages, [WEATHER])
    self.assertIn(json.dumps(WEATHER), live.TOKENIZER.decode(ids))

  def test_given_to_a_template_that_takes_them(self):
    template = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    knows = dataclasses.replace(live.TOKENIZER, chat_template=template)
    self.assertTrue(chat.takes_tools(knows))
    self.assertFalse(chat.takes_tools(live.TOKENIZER))
    text = live.TOKENIZER.decode(tools.encode(knows, [{'role': 'user', 'content': 'hi'}], [NOW]))
    self.assertEqual(text, json.dumps([NOW]) + 'hi')


class ServedTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.engine = live.Scripted(window=5, context=2048)
    served = live.Live(self.engine)
    self.addCleanup(served.stop)
    self.client = served.client()

  def ask(self, **settings):
    return self.client.chat.completions.create(**(dict(
        model=live.MODEL, messages=[{'role': 'user', 'content': 'hi'}], tools=[NOW], max_tokens=300) | settings))

  def test_streamed_and_not(self):
    now = '<tool_call>{"name": "now", "arguments": {"zone": "€"}}</tool_call>'
    for text, said, calls, reason in (
        (f'Well. {now}\n{now}', 'Well.', 2, 'tool_calls'), (now, None, 1, 'tool_calls'), ('Well.', 'Well.', 0, 'stop'),
        ('<tool_call>{"name": }</tool_call>', '<tool_call>{"name": }</tool_call>', 0, 'stop'),
        (now + ' and' * 100, None, 1, 'length')):
      with self.subTest(text):
        self.engine.text = text
        choice = self.ask().choices[0]
        if said is not None or reason != 'length':
          self.assertEqual(choice.message.content, said)
        made = choice.message.tool_calls or []
        self.assertLen(made, calls)
        self.assertEqual([(c.type, c.function.name, c.function.arguments) for c in made],
                         [('function', 'now', '{"zone": "€"}')] * calls)
        self.assertEqual(choice.finish_reason, reason)
        chunks = [c.choices[0] for c in self.ask(stream=True)]
        self.assertEqual(''.join(c.delta.content or '' for c in chunks), choice.message.content or '')
        streamed = [t for c in chunks for t in c.delta.tool_calls or []]
        self.assertEqual([t.index for t in streamed], list(range(calls)))
        self.assertEqual([t.function for t in streamed], [t.function.model_copy() for t in made] and [
            type(t.function)(name=m.function.name, arguments=m.function.arguments) for t, m in zip(streamed, made)])
        self.assertEqual(chunks[-1].finish_reason, reason)

  def test_none_and_one_at_a_time(self):
    now = '<tool_call>{"name": "now"}</tool_call>'
    self.engine.text = f'{now}\n{now}'
    self.assertEqual(self.ask(tool_choice='none').choices[0].message.content, f'{now}\n{now}')
    self.assertNotIn('<tools>', live.TOKENIZER.decode(self.engine.requests[-1].prompt_ids))
    choice = self.ask(parallel_tool_calls=False).choices[0]
    self.assertLen(choice.message.tool_calls, 1)
    self.assertEqual((choice.message.content, choice.finish_reason), (None, 'tool_calls'))


if __name__ == '__main__':
  absltest.main()
