"""Guesses of a draft model: kept or replaced so that the law stays the target's, and what is reported of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from absl.testing import absltest, parameterized

from ptjax.models.families import ModelConfig
from ptjax.sample import sampling
from ptjax.sample.engine import Engine
from ptjax.sample.requests import Request, SamplerLimits
from tests.sample import sampling_test, tiny_engine

ROWS = 100_000
TARGET, DRAFT = np.log([0.5, 0.3, 0.2]), np.log([0.2, 0.5, 0.3])
DRAFTS = 3


def speculate(target, draft, **law):
  """(proposed, drawn) token of each of ROWS rows."""
  settings = sampling_test.settings(ROWS, **law)
  position_B, bias_YV = np.full(ROWS, 3, np.int32), np.zeros((1, len(target)), np.float32)
  wide = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.float32), (ROWS, len(x)))

  @jax.jit
  def both():
    proposal = sampling.propose(wide(draft), settings, position_B, bias_YV)
    drawn = sampling.draw(wide(target), settings, position_B, bias_YV, alternatives=0, proposal=proposal)
    return proposal.token_B, drawn

  return jax.device_get(both())


class RuleTest(parameterized.TestCase):

  def test_acceptance_residual_and_law_of_the_paper(self):
    """arXiv 2211.17192, worked out by hand: min(1, p / q), max(p - q, 0) renormalised, sum of min(p, q) = 0.7."""
    proposed_B, drawn = speculate(TARGET, DRAFT)
    kept_B = proposed_B == drawn.token_B
    for token, accept in enumerate((1.0, 0.6, 2 / 3)):
      of_token_B = proposed_B == token
      self.assertAlmostEqual(kept_B[of_token_B].mean(), accept, delta=0.012)
    self.assertAlmostEqual(kept_B.mean(), 0.7, delta=0.006)
    np.testing.assert_array_equal(drawn.token_B[~kept_B], 0)
    np.testing.assert_allclose(drawn.behavior_logp_B, TARGET[drawn.token_B], rtol=1e-5)

  @parameterized.parameters(
      dict(), dict(temperature=0.6), dict(temperature=1.7), dict(top_p=0.8), dict(top_k=3),
      dict(temperature=1.3, top_k=7, top_p=0.9, min_p=0.05))
  def test_law_is_the_targets(self, **law):
    rng = np.random.default_rng(0)
    target, draft = rng.normal(size=(2, 11)) * 1.5
    _, drawn = speculate(target, draft, **law)
    p_V = sampling_test.law_by_sorting(target, **law)
    count_V = np.bincount(drawn.token_B, minlength=11)
    np.testing.assert_array_equal(count_V[p_V == 0], 0)
    self.assertGreater(scipy.stats.chisquare(count_V[p_V > 0], ROWS * p_V[p_V > 0]).pvalue, 1e-3)
    np.testing.assert_allclose(drawn.behavior_logp_B, np.log(p_V[drawn.token_B]), atol=1e-4)

  def test_a_draft_equal_to_the_target_is_always_right(self):
    proposed_B, drawn = speculate(TARGET, TARGET)
    self.assertGreater((proposed_B == drawn.token_B).mean(), 0.9999)

  def test_a_draft_that_is_never_possible_is_replaced(self):
    never = [-np.inf, 0.0, -np.inf]
    _, drawn = speculate([0.0, -np.inf, 1.0], never)
    counts = np.bincount(drawn.token_B, minlength=3)
    p_V = np.exp([0.0, -np.inf, 1.0])
    self.assertEqual(counts[1], 0)
    self.assertGreater(scipy.stats.chisquare(counts[[0, 2]], ROWS * p_V[[0, 2]] / p_V.sum()).pvalue, 1e-3)


@functools.cache
def drafting(same=False):
  """The tiny engine with a draft model: another one, or (same) the model itself."""
  config = tiny_engine.CONFIG if same else ModelConfig(**dict(vocab_size=320, width=32, layers=1, heads=2, kv_heads=1,
                                                              head_dim=16, ffn=32, max_position=64))
  limits = SamplerLimits(slots=8, page_size=8, max_context=tiny_engine.LENGTH, window=6, prefill_chunk=32, biases=0,
                         draft_tokens=DRAFTS)
  made = Engine(tiny_engine.CONFIG, limits, draft_config=config)
  made.load_params(tiny_engine.weights(), 0)
  made.load_draft(tiny_engine.weights() if same else tiny_engine.random_weights(config))
  made._drafting.choose = lambda: DRAFTS
  return made


class EngineTest(parameterized.TestCase):

  def test_greedy_tokens_are_those_without_guesses(self):
    requests = tiny_engine.all_greedy(tiny_engine.prompts(5, 10))
    expected = tiny_engine.drawn(tiny_engine.engine().generate(requests))
    for same in (False, True):
      self.assertEqual(tiny_engine.drawn(drafting(same).generate(requests)), expected)

  def test_sampled_pairs_have_the_targets_law(self):
    """The second token's law depends on the first: keeping a guess after a rejected one would show."""
    made, prompt, n = drafting(), tiny_engine.prompts(6, 2)[0], 4000
    request = Request(id='a', prompt_ids=prompt, max_tokens=3, temperature=1.5, top_k=3, samples=n)
    rollouts = made.generate([request])[0]
    logits_V = tiny_engine.expected(rollouts[0])[0]
    seen, p_first = {}, tiny_engine.truncated(logits_V, 1.5, 3)
    for rollout in rollouts:
      seen.setdefault(int(rollout.token_ids[0]), []).append(rollout)
    firsts = np.flatnonzero(p_first)
    self.assertGreater(scipy.stats.chisquare([len(seen[t]) for t in firsts], n * p_first[firsts]).pvalue, 1e-3)
    for group in seen.values():
      p_second = tiny_engine.truncated(tiny_engine.expected(group[0])[1], 1.5, 3)
      counts = np.bincount([r.token_ids[1] for r in group], minlength=320)
      seconds = np.flatnonzero(p_second)
      self.assertEqual(counts[seconds].sum(), len(group))
      self.assertGreater(scipy.stats.chisquare(counts[seconds], len(group) * p_second[seconds]).pvalue, 1e-3)
      for rollout in group[:5]:
        np.testing.assert_allclose(rollout.behavior_logp[1], np.log(p_second[rollout.token_ids[1]]), atol=1e-4)

  def test_the_model_as_its_own_draft_is_always_right_and_the_rollout_says_so(self):
    """Windows of 6 tokens are drawn in steps of 4 and 2: 20 tokens take 2 + 2 + 2 + 1 steps."""
    requests = [Request(id=str(i), prompt_ids=p, max_tokens=20, seed=i) for i, p in
                enumerate(tiny_engine.prompts(7, 6))]
    for group in drafting(same=True).generate(requests):
      self.assertEqual((group[0].steps, group[0].accepted), (7, 13))
      self.assertEqual(group[0].drafted, 7 * DRAFTS)

  def test_prefixes_are_shared_with_guesses_on_and_what_was_missed_is_caught_up(self):
    made, prompt = drafting(same=True), np.arange(30, dtype=np.int32)
    made.generate(tiny_engine.all_greedy([prompt]))
    made.reset_stats()
    plain_windows = 2
    calls = iter(range(100))
    with self.subTest('off, then on'):
      made._drafting.choose = lambda: 0 if next(calls) < plain_windows else DRAFTS
      try:
        rollout = made.generate(tiny_engine.all_greedy([prompt], max_tokens=30))[0][0]
      finally:
        made._drafting.choose = lambda: DRAFTS
    self.assertGreaterEqual(made.stats()['tokens_cached'], 24)
    self.assertEqual(rollout.accepted + rollout.steps, 30)
    self.assertEqual(rollout.steps, 2 * 6 + 3 * 2)  # 12 tokens one by one, the others in 3 windows
    expected = tiny_engine.engine().generate(tiny_engine.all_greedy([prompt], max_tokens=30))[0][0]
    np.testing.assert_array_equal(rollout.token_ids, expected.token_ids)

  def test_what_does_not_fit_is_refused(self):
    limits = SamplerLimits(max_context=64, draft_tokens=0)
    odd = ModelConfig(vocab_size=300, width=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn=32, max_position=32)
    with self.assertRaisesRegex(ValueError, '300 tokens.*max_position = 32.*draft_tokens = 0'):
      Engine(tiny_engine.CONFIG, limits, draft_config=odd)
    with self.assertRaisesRegex(ValueError, 'without draft_config'):
      tiny_engine.engine().load_draft(tiny_engine.weights())


if __name__ == '__main__':
  absltest.main()
