"""What a request forbids, asks for and guesses, and pools of fewer bits, against the uncached forward."""

import numpy as np
from absl.testing import absltest, parameterized

from ptjax.sample import engine as engine_module
from ptjax.sample.engine import Engine
from ptjax.sample.requests import Request, SamplerLimits
from tests.sample.tiny_engine import (
    CONFIG, LENGTH, all_greedy, drawn, engine, expected, forward, log_softmax, prompts, spell, truncated, weights)


class AllowedTest(parameterized.TestCase):
  """What a request forbids or asks for besides the plain law."""

  def bias(self, **values):
    bias_V = np.zeros(320, np.float32)
    for token, value in values.items():
      bias_V[int(token[1:])] = value
    return bias_V

  def test_a_bias_changes_the_law_and_not_the_model_log_prob(self):
    (plain,), = engine().generate(all_greedy([[3, 4, 5]], max_tokens=6))
    first = int(plain.token_ids[0])
    (rollout,), = engine().generate(all_greedy([[3, 4, 5]], max_tokens=6, logit_bias=self.bias(
        **{f't{first}': -np.inf, 't7': 1.5})))
    logits_TV = expected(rollout)
    biased_TV = logits_TV + self.bias(**{f't{first}': -np.inf, 't7': 1.5})
    np.testing.assert_array_equal(rollout.token_ids, biased_TV.argmax(-1))
    self.assertNotEqual(rollout.token_ids[0], first)
    at = (np.arange(6), rollout.token_ids)
    np.testing.assert_allclose(rollout.behavior_logp, log_softmax(biased_TV)[at], atol=1e-4)
    np.testing.assert_allclose(rollout.model_logp, log_softmax(logits_TV)[at], atol=1e-4)

  def test_more_biases_than_rows_wait_for_a_row(self):
    requests = [Request(id=str(i), prompt_ids=[3, 4, 5], max_tokens=8, temperature=0.0,
                        logit_bias=self.bias(**{f't{i}': 9.0})) for i in range(7)]
    for i, (rollout,) in enumerate(engine().generate(requests)):
      self.assertEqual(rollout.token_ids.tolist(), [i] * 8)

  @parameterized.parameters(dict(temperature=0.7), dict(top_k=5), dict(temperature=1.4, top_p=0.8), dict(min_p=0.2))
  def test_both_log_probs(self, **law):
    (rollout,), = engine().generate([Request(id='x', prompt_ids=[9, 8], max_tokens=20, seed=5, **law)])
    logits_TV, at = expected(rollout), (np.arange(20), rollout.token_ids)
    np.testing.assert_allclose(rollout.model_logp, log_softmax(logits_TV)[at], atol=1e-4)
    kept_TV = np.stack([truncated(logits_V, **law) for logits_V in logits_TV])
    np.testing.assert_allclose(rollout.behavior_logp, np.log(kept_TV[at]), atol=1e-4)

  def test_no_stop_before_min_tokens(self):
    (full,), = engine().generate(all_greedy([[3, 4, 5]], max_tokens=12))
    stops = tuple(sorted(set(full.token_ids[:3].tolist())))
    (rollout,), = engine().generate(all_greedy([[3, 4, 5]], max_tokens=12, stop_ids=stops, min_tokens=5))
    logits_TV = expected(rollout).copy()
    logits_TV[:5, list(stops)] = -np.inf
    np.testing.assert_array_equal(rollout.token_ids, logits_TV.argmax(-1))
    self.assertGreaterEqual(len(rollout.token_ids), 6 if rollout.finish_reason == 'stop' else 12)

  def test_a_stop_string_that_spans_tokens(self):
    (full,), = engine().generate(all_greedy([[3, 4, 5]], max_tokens=20))
    text = spell(full.token_ids)
    string = spell(full.token_ids[7:9])[1:4]  # parts of two tokens
    (rollout,), = engine().generate(all_greedy([[3, 4, 5]], max_tokens=20, stop_strings=('never', string)))
    self.assertEqual((rollout.finish_reason, rollout.stop_string), ('stop', string))
    self.assertEqual(rollout.stop_start, text.index(string))
    self.assertEqual(rollout.token_ids.tolist(), full.token_ids[:-(-(rollout.stop_start + 3) // 3)].tolist())

  def test_prompt_scores_and_alternatives(self):
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 320, n) for n in (1, 2, 40, 33)]
    made = engine()
    made.generate(all_greedy(prompts[2:]))  # in the cache already, and yet to be scored
    requests = [Request(id='p', prompt_ids=p, max_tokens=n, temperature=0.0, prompt_logp=True, top_logp=2, samples=2)
                for p, n in zip(prompts, (3, 0, 4, 1))]
    for request, group in zip(requests, made.generate(requests), strict=True):
      for rollout in group:
        P, n = len(request.prompt_ids), request.max_tokens
        self.assertEqual((len(rollout.token_ids), rollout.finish_reason), (n, 'length'))
        tokens = np.concatenate([rollout.prompt_ids, rollout.token_ids])
        logp_TV = log_softmax(forward()(weights(), np.pad(tokens, (0, LENGTH - len(tokens)))))[:P + n - 1]
        top_TA = np.argsort(-logp_TV, axis=-1)[:, :2]
        self.assertTrue(np.isnan(rollout.prompt_logp[0]))
        np.testing.assert_allclose(rollout.prompt_logp[1:], logp_TV[np.arange(P - 1), tokens[1:P]], atol=1e-4)
        np.testing.assert_array_equal(np.concatenate([rollout.prompt_top_ids[1:], rollout.top_ids]), top_TA)
        np.testing.assert_allclose(np.concatenate([rollout.prompt_top_logp[1:], rollout.top_logp]),
                                   np.take_along_axis(logp_TV, top_TA, axis=-1), atol=1e-4)

  @parameterized.parameters(
      (dict(logit_bias=np.zeros(3)), 'logit_bias must be 320 numbers'),
      (dict(logit_bias=np.full(320, -np.inf)), 'leave no token'),
      (dict(logit_bias=np.where(np.arange(320) == 5, 0, -np.inf), min_tokens=2, stop_ids=(5,)), 'leave no token'),
      (dict(top_logp=4), 'top_logp = 4, at most sampler top_logp = 3'),
      (dict(stop_strings=('',)), 'a stop string is empty'),
      (dict(min_tokens=9), r'min_tokens = 9 must be in \[0, max_tokens\]'),
      (dict(max_tokens=0), 'max_tokens = 0 must be at least 1'),
      (dict(stop_ids=(320,)), r'token ids must be in \[0, 320\)'),
  )
  def test_what_can_not_be_allowed_is_refused(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      engine().submit(Request(**(dict(id='x', prompt_ids=[1], max_tokens=4) | fields)))
    self.assertTrue(engine().idle)

  def test_stop_strings_need_decode_text(self):
    with self.assertRaisesRegex(ValueError, 'decode_text'):
      Engine(CONFIG, SamplerLimits(max_context=64)).submit(
          Request(id='x', prompt_ids=[1], max_tokens=1, stop_strings=('a',)))


class SpeculationTest(parameterized.TestCase):

  def requests(self, temperature):
    """Prompts that repeat themselves, so that guesses are often right."""
    rng = np.random.default_rng(0)
    rows = [np.tile(rng.integers(0, 320, n), 30 // n) for n in (3, 5, 7, 11)] + [rng.integers(0, 320, 20)]
    return [Request(id=str(i), prompt_ids=row, max_tokens=24, temperature=temperature, seed=i, samples=2,
                    stop_ids=(7,)) for i, row in enumerate(rows)]

  @parameterized.parameters(0.0, 0.2, 1.0)
  def test_guesses_change_no_token(self, temperature):
    drafting = engine(draft_tokens=3)
    drafting.reset_stats()
    drafting._drafting.choose = lambda: 3
    groups = drafting.generate(self.requests(temperature))
    plain = engine().generate(self.requests(temperature))
    self.assertEqual(drawn(groups), drawn(plain))
    for ours, theirs in zip(sum(groups, []), sum(plain, [])):
      np.testing.assert_allclose(ours.behavior_logp, theirs.behavior_logp, atol=1e-4)
      self.assertEqual(ours.finish_reason, theirs.finish_reason)
    if temperature < 1:
      self.assertGreater(drafting.stats()['accept_frac'], 0.2)
      self.assertLess(drafting.stats()['windows'], 24 * 2)

  def test_it_is_off_while_it_is_slower_and_tried_again(self):
    drafting = engine_module._Drafting(3)
    chosen = []
    for _ in range(200):
      drafts = drafting.choose()
      chosen.append(drafts)
      drafting.learn(8, drafts, tokens=30 if drafts else 20, seconds=2.0 if drafts else 1.0)
    self.assertEqual(chosen[:3], [3, 0, 0])
    self.assertBetween(sum(map(bool, chosen)), 5, 9)
    for _ in range(200):  # now the text repeats itself
      drafts = drafting.choose()
      chosen.append(drafts)
      drafting.learn(8, drafts, tokens=70 if drafts else 20, seconds=2.0 if drafts else 1.0)
    self.assertGreater(sum(map(bool, chosen[-100:])), 90)


class QuantisedTest(parameterized.TestCase):

  @parameterized.parameters(('int8', 0.02), ('float8_e4m3fn', 0.1), ('bfloat16', 0.03))
  def test_stored_keys_and_values_of_fewer_bits(self, kv_dtype, mean_gap):
    made = engine(kv_dtype=kv_dtype)
    requests = [Request(id='t', prompt_ids=p, max_tokens=25, seed=3, samples=2) for p in prompts(2, 4)]
    gaps = []
    for rollout in sum(made.generate(requests), []):
      logp_TV = log_softmax(expected(rollout))
      gaps.append(np.abs(rollout.behavior_logp - logp_TV[np.arange(25), rollout.token_ids]))
    self.assertBetween(np.mean(gaps), 1e-5, mean_gap)

  def test_an_unknown_kind_is_refused(self):
    with self.assertRaisesRegex(ValueError, "kv_dtype = 'int3' is not one of"):
      SamplerLimits(kv_dtype='int3')


if __name__ == '__main__':
  absltest.main()
