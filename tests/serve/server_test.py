"""The sampler over HTTP, asked by OpenAI's own client: what each feature answers, streamed and not."""

import asyncio
import concurrent.futures
import math

from absl.testing import absltest, parameterized
import numpy as np
import openai

from ptjax.data import chat
from ptjax.sample.requests import Request
from tests.serve import live

MESSAGES = [{'role': 'user', 'content': 'Say something.'}]


def setUpModule():
  global LIVE, CLIENT
  LIVE = live.Live(live.engine())
  CLIENT = LIVE.client()


def tearDownModule():
  LIVE.stop()


def complete(prompt='Once upon', **settings):
  return CLIENT.completions.create(**(dict(model=live.MODEL, prompt=prompt, max_tokens=20, seed=3) | settings))


def ask(messages=MESSAGES, **settings):
  return CLIENT.chat.completions.create(**(dict(model=live.MODEL, messages=messages, max_tokens=20, seed=3) | settings))


def stop_of(text: str) -> str:
  """Two characters of a text which do not stand earlier in it."""
  return next(text[i:i + 2] for i in range(4, len(text) - 1)
              if text.find(text[i:i + 2]) == i and '\ufffd' not in text[i:i + 2])


class CompletionsTest(parameterized.TestCase):

  def test_says_what_the_engine_draws(self):
    answer = complete(temperature=0, logprobs=3)
    request = Request(id='x', prompt_ids=live.TOKENIZER.encode('Once upon'), max_tokens=20, temperature=0.0,
                      stop_ids=live.TOKENIZER.eos_ids, top_logp=3)
    LIVE.stop()  # the engine is this thread's now
    (rollout,), = live.engine().generate([request])
    setUpModule()
    (choice,) = answer.choices
    self.assertEqual(choice.text, live.TOKENIZER.decode(rollout.token_ids, skip_special=True))
    self.assertEqual(choice.finish_reason, rollout.finish_reason)
    np.testing.assert_allclose(choice.logprobs.token_logprobs, rollout.model_logp, atol=1e-5)
    for logp, top in zip(choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True):
      self.assertEqual(logp, max(top.values()))  # greedy: the token is the likeliest one, to the bit
      self.assertBetween(len(top), 1, 3)
    self.assertEqual((answer.object, answer.model), ('text_completion', live.MODEL))
    usage = answer.usage
    self.assertEqual((usage.prompt_tokens, usage.completion_tokens, usage.total_tokens),
                     (9, len(rollout.token_ids), 9 + len(rollout.token_ids)))

  def test_prompts_of_every_form(self):
    ids = [live.TOKENIZER.encode(text) for text in ('ab', 'cd')]
    alone = [complete(text, temperature=0).choices[0].text for text in ('ab', 'cd')]
    for prompt in (['ab', 'cd'], ids):
      self.assertEqual([c.text for c in complete(prompt, temperature=0).choices], alone)
    self.assertEqual(complete(ids[0], temperature=0).choices[0].text, alone[0])
    several = complete(['ab', 'cd'], n=2)
    self.assertEqual([c.index for c in several.choices], [0, 1, 2, 3])
    self.assertEqual(several.usage.prompt_tokens, 4)

  def test_seeds(self):
    texts = [[c.text for c in complete(n=3, **settings).choices] for settings in ({}, {}, {'seed': 4}, {'seed': -4})]
    self.assertEqual(texts[0], texts[1])
    self.assertEqual(len({tuple(t) for t in texts}), 3)
    self.assertLen(set(texts[0]), 3)
    self.assertNotEqual(*(complete(seed=None, max_tokens=30).choices[0].text for _ in range(2)))

  @parameterized.parameters({}, dict(n=3), dict(logprobs=2), dict(logprobs=0, n=2), dict(echo=True),
                            dict(echo=True, logprobs=2), dict(echo=True, logprobs=1, max_tokens=0),
                            dict(temperature=0, logit_bias={'70': 100}), dict(prompt=['ab', 'cd'], n=2))
  def test_streamed_is_what_is_not_streamed(self, **settings):
    whole = complete(**settings)
    chunks = list(complete(stream=True, stream_options={'include_usage': True}, **settings))
    self.assertEqual(chunks[-1].usage, whole.usage)
    self.assertTrue(all(c.usage is None for c in chunks[:-1]))
    for choice in whole.choices:
      mine = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == choice.index]
      self.assertEqual(''.join(c.text for c in mine), choice.text)
      self.assertEqual([c.finish_reason for c in mine if c.finish_reason], [choice.finish_reason])
      for field in ('tokens', 'token_logprobs', 'top_logprobs', 'text_offset') if choice.logprobs else ():
        joined = [x for c in mine if c.logprobs for x in getattr(c.logprobs, field)]
        self.assertEqual(joined, getattr(choice.logprobs, field), field)

  def test_guesses_are_told_in_the_usage(self):
    started = live.Live(live.Scripted('hello', guesses=(7, 3)))
    try:
      answer = started.client().completions.create(model=live.MODEL, prompt='a', max_tokens=4, n=2)
    finally:
      started.stop()
    details = answer.usage.completion_tokens_details
    self.assertEqual((details.accepted_prediction_tokens, details.rejected_prediction_tokens), (6, 8))

  def test_stop_strings(self):
    whole = complete(max_tokens=60).choices[0].text
    stop = stop_of(whole)
    answer = complete(max_tokens=60, stop=['never said', stop], logprobs=0)
    self.assertEqual(answer.choices[0].text, whole[:whole.find(stop)])
    self.assertEqual(answer.choices[0].finish_reason, 'stop')
    self.assertTrue(all(offset < len(answer.choices[0].text) for offset in answer.choices[0].logprobs.text_offset))
    streamed = list(complete(max_tokens=60, stop=stop, stream=True))
    self.assertEqual(''.join(c.choices[0].text for c in streamed), answer.choices[0].text)

  def test_echoed_prompt_log_probs_are_those_of_the_same_tokens_drawn(self):
    drawn = complete(temperature=0, logprobs=1, max_tokens=8, extra_body={'ignore_eos': True})
    ids = live.TOKENIZER.encode('Once upon')
    tokens = drawn.choices[0].logprobs
    request = Request(id='x', prompt_ids=ids, max_tokens=8, temperature=0.0)
    LIVE.stop()
    (rollout,), = live.engine().generate([request])
    setUpModule()
    scored = complete([*ids, *rollout.token_ids.tolist()], echo=True, logprobs=1, max_tokens=1).choices[0].logprobs
    self.assertIsNone(scored.token_logprobs[0])
    self.assertIsNone(scored.top_logprobs[0])
    np.testing.assert_allclose(scored.token_logprobs[len(ids):-1], tokens.token_logprobs, atol=1e-4)
    self.assertEqual(scored.tokens[len(ids):-1], tokens.tokens)
    for logp, top in zip(scored.token_logprobs[len(ids):-1], scored.top_logprobs[len(ids):-1], strict=True):
      self.assertEqual(logp, max(top.values()))

  def test_offsets_point_at_tokens(self):
    answer = complete('a € b', echo=True, logprobs=0, max_tokens=4).choices[0]
    self.assertTrue(answer.text.startswith('a € b'))
    offsets = answer.logprobs.text_offset
    self.assertEqual(offsets[:8], [0, 1, 2, 2, 2, 3, 4, 5])  # the sign's three bytes share its place
    self.assertEqual(answer.logprobs.tokens[2], 'bytes:\\xe2')

  def test_bias_and_lengths(self):
    a = live.TOKENIZER.encode('A')[0]
    answer = complete(logit_bias={str(a): 100}, max_tokens=7)
    self.assertEqual((answer.choices[0].text, answer.choices[0].finish_reason), ('A' * 7, 'length'))
    end = live.TOKENIZER.eos_id
    ended = complete(logit_bias={str(end): 100}, logprobs=0)
    self.assertEqual((ended.choices[0].text, ended.choices[0].finish_reason), ('', 'stop'))
    self.assertEqual(ended.choices[0].logprobs.tokens, ['<|im_end|>'])
    longer = complete(logit_bias={str(end): 100}, extra_body={'min_tokens': 5})
    self.assertEqual(longer.usage.completion_tokens, 6)
    ignored = complete(logit_bias={str(end): 100}, extra_body={'ignore_eos': True})
    self.assertEqual((ignored.usage.completion_tokens, ignored.choices[0].text), (20, ''))
    nothing = complete(max_tokens=0)
    self.assertEqual((nothing.choices[0].text, nothing.usage.completion_tokens), ('', 0))

  def test_truncation_fields(self):
    greedy = complete(temperature=0).choices[0].text
    for settings in (dict(extra_body={'top_k': 1}), dict(top_p=1e-6), dict(extra_body={'min_p': 0.99999})):
      with self.subTest(str(settings)):
        self.assertEqual(complete(temperature=1.5, **settings).choices[0].text, greedy)


class ChatTest(parameterized.TestCase):

  def test_messages_go_through_the_template(self):
    ids = chat.encode_prompt(live.TOKENIZER, [{'role': 'system', 'content': 'Be brief.'}, *MESSAGES])
    said = ask([{'role': 'system', 'content': [{'type': 'text', 'text': 'Be '}, {'type': 'text', 'text': 'brief.'}]},
                *MESSAGES], temperature=0)
    self.assertEqual(said.choices[0].message.content, complete(ids.tolist(), temperature=0).choices[0].text)
    self.assertEqual(said.usage.prompt_tokens, len(ids))
    self.assertEqual(said.choices[0].message.role, 'assistant')

  @parameterized.parameters({}, dict(n=3), dict(logprobs=True), dict(logprobs=True, top_logprobs=2, n=2),
                            dict(max_completion_tokens=5, max_tokens=None), dict(max_tokens=None))
  def test_streamed_is_what_is_not_streamed(self, **settings):
    whole = ask(**settings)
    chunks = list(ask(stream=True, stream_options={'include_usage': True}, **settings))
    self.assertEqual(chunks[-1].usage, whole.usage)
    for choice in whole.choices:
      mine = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == choice.index]
      self.assertEqual(mine[0].delta.role, 'assistant')
      self.assertEqual(''.join(c.delta.content or '' for c in mine), choice.message.content)
      self.assertEqual([c.finish_reason for c in mine if c.finish_reason], [choice.finish_reason])
      if choice.logprobs:
        self.assertEqual([x for c in mine if c.logprobs for x in c.logprobs.content], choice.logprobs.content)
        self.assertTrue(all(len(x.top_logprobs) == settings.get('top_logprobs', 0) and not math.isnan(x.logprob)
                            for x in choice.logprobs.content))

  def test_the_context_bounds_what_has_no_max_tokens(self):
    answer = ask(max_tokens=None, extra_body={'ignore_eos': True})
    self.assertEqual(answer.usage.total_tokens, live.engine().limits.max_context)
    self.assertEqual(answer.choices[0].finish_reason, 'length')

  def test_the_clients_own_stream_helper(self):
    stop = stop_of(ask(max_tokens=60).choices[0].message.content)
    whole = ask(max_tokens=60, stop=stop).choices[0].message.content
    with CLIENT.chat.completions.stream(model=live.MODEL, messages=MESSAGES, max_tokens=60, seed=3,
                                        stop=stop) as stream:
      for _ in stream:
        continue
      self.assertEqual(stream.get_final_completion().choices[0].message.content, whole)


class ManyTest(absltest.TestCase):

  def test_clients_at_one_time_get_what_each_gets_alone(self):
    prompts = [f'{i} and' for i in range(6)]
    alone = [complete(p, seed=i).choices[0].text for i, p in enumerate(prompts)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
      together = list(pool.map(lambda p: complete(p[1], seed=p[0]).choices[0].text, enumerate(prompts)))
    self.assertEqual(together, alone)

    async def gather():
      async with LIVE.async_client() as client:
        async def one(i):
          stream = await client.completions.create(model=live.MODEL, prompt=prompts[i], max_tokens=20, seed=i,
                                                   stream=True)
          return ''.join([chunk.choices[0].text async for chunk in stream])
        return await asyncio.gather(*map(one, range(6)))
    self.assertEqual(asyncio.run(gather()), alone)

  def test_more_prompts_than_slots(self):
    self.assertLen(complete(['a'] * 16, max_tokens=4).choices, 16)
    with self.assertRaisesRegex(openai.BadRequestError, 'over the 16'):
      complete(['a'] * 17, max_tokens=4)


class AboutTest(absltest.TestCase):

  def test_models(self):
    self.assertEqual([m.id for m in CLIENT.models.list()], [live.MODEL])
    self.assertEqual(CLIENT.models.retrieve(live.MODEL).owned_by, 'ptjax')
    with self.assertRaises(openai.NotFoundError):
      CLIENT.models.retrieve('other/model')

  def test_metrics(self):
    before = {name: LIVE.metric(name) for name in ('ptjax_prompt_tokens_total', 'ptjax_generation_tokens_total',
                                                   'ptjax_time_to_first_token_seconds_count')}
    complete(max_tokens=7, n=2, extra_body={'ignore_eos': True})
    grown = {name: LIVE.metric(name) - value for name, value in before.items()}
    self.assertEqual(list(grown.values()), [9, 14, 1])
    self.assertGreater(LIVE.metric('ptjax_engine_tokens_drawn'), 0)
    self.assertEqual(LIVE.metric('ptjax_samples_running'), 0)
    self.assertGreater(LIVE.metric('ptjax_requests_total'), 0)


if __name__ == '__main__':
  absltest.main()
