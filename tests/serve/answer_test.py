"""Pieces of an answer: characters, stop strings and log-probs are told when they are certain, and add up."""

import functools
import itertools
import json
import random

from absl.testing import absltest, parameterized
import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from ptjax.data.tokenizer import Tokenizer
from ptjax.sample.requests import Request
from ptjax.sample.stop_strings import Detokenizer
from ptjax.serve import answer, protocol, shapes
from ptjax.serve.errors import ApiError
from tests.serve import live

OFFER = protocol.Offer('tiny', live.TOKENIZER, vocab_size=320, max_context=256, top_logp=5, biases=2, samples=16)


def sentencepiece() -> Tokenizer:
  """A vocabulary of whole words with a space in front, and bytes."""
  words = ['<unk>', '</s>', '\u2581Hello', '\u2581', 'w', '\u2581\u2581', '\u2581wide']
  words += [f'<0x{b:02X}>' for b in range(256)]
  backend = Backend(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True))
  backend.decoder = decoders.Sequence([
      decoders.Replace('\u2581', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)])
  backend.add_special_tokens(['</s>'])
  return Tokenizer(backend, None, 1, 1, (1,), None)


def pieces(text: str, *, stops=(), window=1, logprobs=None):
  """The deltas of a completion whose engine says `text`, `window` tokens a step."""
  engine = live.Scripted(text, window=window)
  request = Request(id='x', prompt_ids=[5], max_tokens=200, stop_strings=stops,
                    stop_ids=live.TOKENIZER.eos_ids, top_logp=1)
  plan = protocol.Plan((request,), is_chat=False, logprobs=logprobs)
  engine.submit(request)
  choice = answer.Choice(plan, live.TOKENIZER, 0)
  deltas = []
  while not engine.idle:
    deltas += [choice.feed(event) for event in engine.step()]
  return deltas


class DetokenizerTest(parameterized.TestCase):

  @parameterized.parameters(True, False)
  def test_pieces_join_to_the_whole(self, skip_special):
    rng = random.Random(0)
    words = [live.TOKENIZER.encode(c) for c in 'a€ü👍🏽 '] + [[i] for i in range(len(live.TOKENIZER))]
    pieces = [[1], [2], [3], [4], [5], [6], [7 + 97], [7 + b for b in '€'.encode()]]
    for tokenizer, parts in ((live.TOKENIZER, words), (sentencepiece(), pieces)):
      for _ in range(500):
        ids = list(itertools.chain(*rng.choices(parts, k=rng.randint(0, 7))))
        detokenizer = Detokenizer(functools.partial(tokenizer.decode, skip_special=skip_special))
        told = [detokenizer.add(i) for i in ids] + [detokenizer.rest()]
        self.assertEqual(''.join(told), tokenizer.decode(ids, skip_special), str(ids))

  def test_half_a_character_is_held(self):
    detokenizer = Detokenizer(live.TOKENIZER.decode)
    self.assertEqual([detokenizer.add(i) for i in live.TOKENIZER.encode('a€b')], ['a', '', '', '€', 'b'])

  def test_bytes_of_tokens(self):
    for tokenizer, text in ((live.TOKENIZER, 'a€\x00 \n'), (sentencepiece(), None)):
      if text:
        self.assertEqual(b''.join(map(tokenizer.token_bytes, tokenizer.encode(text))), text.encode())
      else:
        self.assertEqual([tokenizer.token_bytes(i) for i in (2, 6, 7 + 0xe2)], [b' Hello', b' wide', b'\xe2'])
    self.assertEqual(shapes.spell(live.TOKENIZER, 300), 'token_id:300')


class StopTest(parameterized.TestCase):

  @parameterized.parameters(1, 2, 3, 7, 100)
  def test_cut_before_the_string_however_steps_fall(self, window):
    for text, stops, said in (
        ('hello END more', ('END',), 'hello '), ('a EN b END', ('END',), 'a EN b '), ('xaab', ('ab', 'aab'), 'x'),
        ('no such', ('END',), 'no such'), ('ends in EN', ('END',), 'ends in EN'), ('END', ('END',), ''),
        ('10 € each', ('€',), '10 '), ('10 €', (' \u20ac',), '10'),
        ('aaa', ('aa',), ''), ('a👍b', ('👍b',), 'a')):
      deltas = pieces(text, stops=stops, window=window)
      self.assertEqual(''.join(d.text for d in deltas), said, str((text, stops)))
      self.assertEqual(deltas[-1].finish_reason, 'stop')
      told = ''
      for delta in deltas:  # nothing that a stop string takes back is ever told
        told += delta.text
        self.assertTrue(said.startswith(told))

  def test_nothing_else_is_held(self):
    self.assertEqual([d.text for d in pieces('aEbENc', stops=('END',))], ['a', '', 'Eb', '', '', 'ENc', ''])

  @parameterized.parameters(1, 3, 100)
  def test_log_probs_go_with_their_text(self, window):
    deltas = pieces('a€bENcEND', stops=('END',), window=window, logprobs=1)
    whole = answer.join(deltas)
    self.assertEqual([t.offset for t in whole.tokens], [0, 1, 1, 1, 2, 3, 4, 5])
    self.assertEqual(whole.text, 'a€bENc')
    told = 0
    for delta in deltas:
      self.assertTrue(all(t.offset < told + len(delta.text) for t in delta.tokens))
      told += len(delta.text)


class ParsingTest(parameterized.TestCase):

  def test_any_body_is_a_plan_or_an_api_error(self):
    rng = random.Random(0)
    values = [None, True, False, 0, 1, -1, 2 ** 70, 0.5, -3.5, '', 'a', 'text', [], {}, [1], ['a'], [[1]], [None],
              {'a': 1}, {'type': 'text'}, {'1': 2},
              [{'role': 'user', 'content': 'hi'}], [{'role': 'tool'}], [{}], 'auto', '\x00',
              [{'type': 'function', 'function': {'name': 'f'}}], [{'role': 'assistant', 'tool_calls': [[]]}],
              [{'role': 'assistant', 'tool_calls': [{'function': {'arguments': 5}}], 'content': [None]}],
              [{'role': 'user', 'content': [{'type': []}]}], [{'role': ['user'], 'content': 'a'}]]
    good = {protocol.completion: dict(model='tiny', prompt='hi'),
            protocol.conversation: dict(model='tiny', messages=[{'role': 'user', 'content': 'hi'}])}
    names = {protocol.completion: protocol._COMPLETION, protocol.conversation: protocol._CHAT}
    plans = 0
    for _ in range(4000):
      parse = rng.choice(list(good))
      body = good[parse] | {rng.choice(names[parse]): rng.choice(values) for _ in range(rng.randint(0, 3))}
      try:
        plan = parse(protocol.decode(json.dumps(body).encode()), OFFER, 'x')
      except ApiError as error:
        self.assertBetween(error.status, 400, 404)
        continue
      plans += 1
      self.assertTrue(all(len(r.prompt_ids) + r.max_tokens <= OFFER.max_context for r in plan.requests))
    self.assertGreater(plans, 300)

  def test_any_bytes_are_an_object_or_an_api_error(self):
    rng = random.Random(0)
    good = json.dumps(dict(model='tiny', prompt='h\u00e9 \ud83d\udc4d', logit_bias={'1': 1e3})).encode()
    for _ in range(3000):
      body = bytearray(good)
      for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(body))
        body[at:at + rng.randint(0, 2)] = bytes(rng.choices(range(256), k=rng.randint(0, 2)))
      try:
        self.assertIsInstance(protocol.decode(bytes(body)), dict)
      except ApiError as error:
        self.assertEqual(error.status, 400)

  def test_biases(self):
    plan = protocol.completion(dict(model='tiny', prompt='a', logit_bias={'3': -100, '319': 2.5}), OFFER, 'x')
    bias_V = plan.requests[0].logit_bias
    self.assertEqual((bias_V[3], bias_V[319], np.count_nonzero(bias_V)), (-100, 2.5, 2))


if __name__ == '__main__':
  absltest.main()
