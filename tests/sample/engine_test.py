"""The engine against the uncached forward of the same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from absl.testing import absltest, parameterized
from flax import nnx

from ptjax.runtime import devices
from ptjax.sample.engine import Engine
from ptjax.sample.requests import Request, SamplerLimits
from tests.sample.tiny_engine import (
    CONFIG, LENGTH, all_greedy, drawn, engine, expected, log_softmax, prompts, truncated, weights)


class GreedyTest(parameterized.TestCase):

  @parameterized.parameters(
      dict(),
      dict(page_size=16, window=1, slots=3, prefill_chunk=64),
      dict(page_size=3, window=16, slots=16, prefill_chunk=7),
      dict(page_size=4, window=5, slots=8, pages=22))  # pages for less than two sequences at their longest
  def test_equals_the_uncached_forward(self, **limits):
    made = engine(**limits)
    before = made.stats()['preemptions']
    requests = all_greedy(prompts(0, 9), samples=2)
    for request, group in zip(requests, made.generate(requests), strict=True):
      self.assertLen(group, 2)
      for rollout in group:
        self.assertEqual(rollout.task_id, request.id)
        logits_TV = expected(rollout)
        np.testing.assert_array_equal(rollout.token_ids, logits_TV.argmax(-1))
        gap_T = np.abs(rollout.behavior_logp - np.max(log_softmax(logits_TV), axis=-1))
        self.assertLess(gap_T.mean(), 1e-5)
        self.assertLess(gap_T.max(), 1e-4)
    if limits.get('pages'):
      self.assertGreater(made.stats()['preemptions'], before)


class SamplingTest(parameterized.TestCase):

  def requests(self):
    settings = (dict(), dict(temperature=0.7), dict(top_k=4), dict(top_p=0.6), dict(temperature=0.0), dict(min_p=0.1))
    return [Request(id=str(i), prompt_ids=p, max_tokens=5 + 3 * i, seed=i, samples=1 + i % 3, group_id=f'g{i}', **s)
            for i, (p, s) in enumerate(zip(prompts(1, 6), settings, strict=True))]

  def test_log_probs_are_those_of_the_law(self):
    requests = [Request(id='t', prompt_ids=p, max_tokens=25, temperature=0.8, seed=3, samples=4) for p in prompts(2, 4)]
    gaps = []
    for rollout in sum(engine().generate(requests), []):
      logp_TV = log_softmax(expected(rollout) / 0.8)
      gaps.append(np.abs(rollout.behavior_logp - logp_TV[np.arange(25), rollout.token_ids]))
    self.assertLess(np.mean(gaps), 1e-5)
    self.assertLess(np.max(gaps), 1e-4)

  def test_tokens_depend_on_nothing_but_the_request(self):
    wanted = drawn(engine().generate(self.requests()))
    self.assertEqual(drawn(engine().generate(self.requests()[::-1])), wanted[::-1])
    self.assertEqual([drawn(engine().generate([r]))[0] for r in self.requests()], wanted)
    self.assertEqual(drawn(engine(page_size=16, window=1, slots=3, prefill_chunk=64).generate(self.requests())), wanted)
    self.assertEqual(drawn(engine(page_size=4, window=5, slots=8, pages=22).generate(self.requests())), wanted)

  def test_samples_and_seeds_differ(self):
    request = dict(id='x', prompt_ids=[1, 2, 3], max_tokens=12)
    (a,), (b,) = engine().generate([Request(**request, samples=1, seed=1), Request(**request, samples=1, seed=2)])
    (group,) = engine().generate([Request(**request, samples=3, seed=1)])
    self.assertNotEqual(a.token_ids.tolist(), b.token_ids.tolist())
    self.assertEqual(a.token_ids.tolist(), group[0].token_ids.tolist())
    self.assertLen({tuple(r.token_ids) for r in group}, 3)

  @parameterized.parameters((0, 1.0), (20, 1.0), (0, 0.5))
  def test_first_tokens_follow_the_softmax(self, top_k, top_p):
    (group,) = engine().generate([Request(id='x', prompt_ids=[5, 6, 7], max_tokens=1, samples=600, seed=9, top_k=top_k,
                                          top_p=top_p, temperature=0.4)])
    p_V = truncated(expected(group[0])[0], temperature=0.4, top_k=top_k, top_p=top_p)
    counts_V = np.bincount([r.token_ids[0] for r in group], minlength=320)
    self.assertEqual(counts_V[p_V == 0].sum(), 0)
    often = p_V * 600 >= 5
    pooled = lambda x: np.append(x[often], x[~often].sum())
    observed, wanted = pooled(counts_V), pooled(p_V * 600)
    kept = wanted > 1e-9
    self.assertGreater(scipy.stats.chisquare(observed[kept], wanted[kept], sum_check=False).pvalue, 1e-3)


class RequestTest(parameterized.TestCase):

  def test_a_stop_token_is_kept_and_a_length_stop_adds_nothing(self):
    (full,), = engine().generate(all_greedy([[3, 4, 5]], max_tokens=9))
    self.assertEqual((full.finish_reason, len(full.token_ids)), ('length', 9))
    stop = int(full.token_ids[4])
    first = full.token_ids.tolist().index(stop)
    (stopped,), = engine().generate(all_greedy([[3, 4, 5]], max_tokens=9, stop_ids=(stop, 319)))
    self.assertEqual(stopped.finish_reason, 'stop')
    self.assertEqual(stopped.token_ids.tolist(), full.token_ids[:first + 1].tolist())
    self.assertTrue(stopped.mask.all())
    self.assertLen(stopped.behavior_logp, first + 1)

  def test_a_stop_token_at_the_limit_is_a_stop(self):
    (full,), = engine().generate(all_greedy([[3, 4, 5]], max_tokens=1))
    (same,), = engine().generate(all_greedy([[3, 4, 5]], max_tokens=1, stop_ids=(int(full.token_ids[0]),)))
    self.assertEqual((full.finish_reason, same.finish_reason), ('length', 'stop'))

  def test_a_completion_ends_with_the_context(self):
    (rollout,), = engine().generate(all_greedy([np.arange(60)], max_tokens=20))
    self.assertEqual((rollout.finish_reason, len(rollout.token_ids)), ('length', LENGTH - 60))

  @parameterized.parameters(
      (dict(prompt_ids=np.arange(64)), "'bad': prompt of 64 tokens leaves no room.*max_context"),
      (dict(prompt_ids=[1, 320]), r"'bad': token ids must be in \[0, 320\)"),
      (dict(stop_ids=tuple(range(9))), "'bad': 9 stop ids, at most 8"),
      (dict(prompt_ids=[]), "'bad': prompt_ids must be"),
      (dict(max_tokens=0, top_p=0.0, temperature=-1.0), "'bad': max_tokens = 0 .*temperature = -1.0 .*top_p = 0.0"),
  )
  def test_what_can_not_be_served_is_refused_by_name(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      engine().generate([*all_greedy([[1]]), Request(**(dict(id='bad', prompt_ids=[1], max_tokens=4) | fields))])
    self.assertEqual(engine().step(), [])  # nothing is left behind

  def test_more_pages_than_the_pool_is_refused(self):
    with self.assertRaisesRegex(ValueError, "'0' needs 8 pages of 8 tokens, the pool has 4"):
      Engine(CONFIG, SamplerLimits(slots=2, page_size=8, pages=5, max_context=64)).submit(
          all_greedy([[1]], max_tokens=60)[0])

  def test_limits_are_checked(self):
    with self.assertRaisesRegex(ValueError, 'slots = 0'):
      SamplerLimits(slots=0)
    with self.assertRaisesRegex(ValueError, 'max_context = 4096 exceeds'):
      Engine(CONFIG, SamplerLimits(max_context=4096))
    with self.assertRaisesRegex(RuntimeError, 'no weights'):
      Engine(CONFIG, SamplerLimits(max_context=64)).step()

  def test_submit_step_cancel(self):
    made = engine()
    tickets = [made.submit(r) for r in all_greedy([[1, 2], [3, 4]], max_tokens=30, samples=2)]
    self.assertEqual({(e.ticket, e.sample, e.start, len(e.token_ids), e.rollout) for e in made.step()},
                     {(t, s, 0, 6, None) for t in tickets for s in range(2)})
    with self.assertRaisesRegex(RuntimeError, 'idle engine'):
      made.generate([])
    cancelled = made.cancel(tickets[0])
    self.assertEqual([sample for sample, _ in cancelled], [0, 1])
    self.assertEqual({r.finish_reason for _, r in cancelled}, {'cancelled'})
    self.assertLen(cancelled[0][1].token_ids, 6)  # one window
    finished = []
    while len(finished) < 2:
      finished += [event for event in made.step() if event.rollout]
    self.assertEqual({(e.ticket, e.sample) for e in finished}, {(tickets[1], 0), (tickets[1], 1)})

  def test_on_finish_sees_every_rollout_and_its_error_leaves_the_engine_idle(self):
    seen = []
    groups = engine().generate(all_greedy(prompts(3, 4), samples=2), seen.append)
    self.assertLen(seen, 8)
    self.assertEqual({id(r) for r in seen}, {id(r) for g in groups for r in g})

    def fail(rollout):
      raise KeyError(rollout.task_id)

    with self.assertRaises(KeyError):
      engine().generate(all_greedy(prompts(3, 12), samples=2), fail)
    self.assertEqual(drawn(engine().generate(all_greedy(prompts(3, 4), samples=2))), drawn(groups))


class StepTest(absltest.TestCase):

  def test_a_long_prompt_does_not_hold_up_those_that_decode(self):
    """Of 40 tokens 16 are computed between windows; the short prompt behind it is done before the long one begins."""
    made = engine(prefill_budget=16, prefill_chunk=16)
    made.load_params(weights(), 0)  # drops what is cached
    long, short = (made.submit(r) for r in all_greedy([np.arange(60, 100), [1, 2, 3]], max_tokens=12))
    first = {}
    for step in range(12):
      for event in made.step():
        first.setdefault(event.ticket, step)
    self.assertEqual(first[short], 0)
    self.assertGreater(first[long], 0)
    self.assertTrue(made.idle)

  def test_small_requests_pass_a_large_one_that_waits_for_pages(self):
    made = engine(page_size=4, slots=8, pages=22)  # 84 tokens
    made.load_params(weights(), 0)
    running = made.submit(all_greedy([np.arange(40)], max_tokens=20)[0])
    made.step()
    large, small = (made.submit(r) for r in all_greedy([np.arange(100, 150), [1, 2, 3]], max_tokens=6))
    ended = []
    while not made.idle:
      ended += [event.ticket for event in made.step() if event.rollout]
    self.assertLess(ended.index(small), ended.index(large))
    self.assertCountEqual(ended, [running, large, small])

  def test_pause_resume_drain(self):
    made = engine()
    begun, = [made.submit(r) for r in all_greedy([[1, 2]], max_tokens=20)]
    made.step()
    made.pause()
    self.assertEqual(made.step(), [])
    with self.assertRaisesRegex(RuntimeError, 'paused'):
      made.drain()
    made.resume()
    queued, = [made.submit(r) for r in all_greedy([[3, 4]], max_tokens=4)]
    self.assertEqual([e.ticket for e in made.drain() if e.rollout], [begun])
    self.assertEqual([e.ticket for e in made.step() if e.rollout], [queued])

  def test_stats_of_a_period(self):
    made = engine()
    made.generate(all_greedy([[1, 2, 3]], samples=2))
    made.reset_stats()
    made.generate([Request(id='x', prompt_ids=np.arange(30, 50), max_tokens=12, samples=4)])
    stats = made.stats()
    self.assertEqual((stats['tokens_drawn'], stats['tokens_prefilled'], stats['tokens_cached']), (48, 19, 57))
    self.assertEqual(stats['cache_hit_frac'], 57 / 76)
    self.assertEqual(stats['occupancy'], 0.5)  # 4 rows of 8, to the end
    self.assertEqual(stats['pages_peak_frac'], (2 + 4 * 2) / (made.limits.pages - 1))  # 2 full pages shared, 31 tokens
    self.assertEqual(stats['tokens_per_s'], 48 / stats['seconds'])


class SharingTest(absltest.TestCase):

  def test_samples_prefill_their_prompt_once(self):
    made = engine()
    made.load_params(weights(), 0)  # drops what is cached
    before = made.stats()
    prompt = np.random.default_rng(8).integers(0, 320, 30)
    made.generate([Request(id='x', prompt_ids=prompt, max_tokens=2, samples=12)])
    self.assertEqual(made.stats()['tokens_prefilled'] - before['tokens_prefilled'], 29)
    self.assertEqual(made.stats()['tokens_cached'] - before['tokens_cached'], 11 * 29)

  def test_a_next_turn_reuses_the_last_one(self):
    made = engine()
    (first,), = made.generate(all_greedy([np.arange(100, 120)], max_tokens=12))
    before = made.stats()['tokens_prefilled']
    turn = np.concatenate([first.prompt_ids, first.token_ids, [7, 8, 9]])
    (second,), = made.generate(all_greedy([turn], max_tokens=5))
    self.assertLessEqual(made.stats()['tokens_prefilled'] - before, 3 + 8)  # what is new, and less than a page
    np.testing.assert_array_equal(second.token_ids, expected(second).argmax(-1))


class WeightsTest(absltest.TestCase):

  def test_a_warm_engine_equals_a_cold_one(self):
    made, rows = engine(), prompts(4, 5)
    old = made.generate(all_greedy(rows))
    compiles = made.stats()['compiles']
    try:
      made.load_params(weights(1), 5)
      groups = made.generate(all_greedy(rows))
    finally:
      made.load_params(weights(), 0)
    self.assertEqual(made.stats()['compiles'], compiles)
    self.assertNotEqual(drawn(groups), drawn(old))
    for (rollout,) in groups:
      np.testing.assert_array_equal(rollout.token_ids, expected(rollout, seed=1).argmax(-1))
      np.testing.assert_array_equal(rollout.version, 5)

  def test_weights_that_change_in_flight_are_recorded_per_token(self):
    made = engine()
    try:
      made.submit(Request(id='x', prompt_ids=[1, 2, 3], max_tokens=14, seed=4))
      made.step()
      made.load_params(weights(1), 1)
      finished = []
      while not finished:
        finished = [event for event in made.step() if event.rollout]
    finally:
      made.load_params(weights(), 0)
    rollout = finished[0].rollout
    self.assertEqual(rollout.version.tolist(), [0] * 6 + [1] * 8)
    logp_TV = np.where(rollout.version[:, None] == 0, log_softmax(expected(rollout)), log_softmax(expected(rollout, 1)))
    np.testing.assert_allclose(rollout.behavior_logp, logp_TV[np.arange(14), rollout.token_ids], atol=1e-4)

  def test_the_source_may_be_deleted_after_loading(self):
    made = engine()
    wanted = drawn(made.generate(all_greedy([[1, 2, 3]])))
    copy = jax.tree.map(jnp.copy, weights())
    made.load_params(copy, 0)
    jax.tree.map(lambda x: x.delete(), copy)
    self.assertEqual(drawn(made.generate(all_greedy([[1, 2, 3]]))), wanted)

  def test_wrong_weights_are_named(self):
    state = jax.tree.map(lambda x: x, weights())
    state['final_norm']['scale'] = nnx.Param(jnp.ones(3))
    state['layers']['attn']['q']['lora_a'] = nnx.Param(jnp.ones((2, 64, 4)))
    with self.assertRaisesRegex(ValueError, r"final_norm/scale: wanted \(\(64,\), .* got \(\(3,\), 'float32'\)"
                                            r'\n  layers/attn/q/lora_a: wanted nothing, got '):
      engine().load_params(state, 1)


class ProgramsTest(parameterized.TestCase):

  def test_nothing_compiles_after_warm_up(self):
    made = engine(slots=12, draft_tokens=3)
    made.warm_up()
    compiles, limits = made.stats()['compiles'], made.limits
    self.assertEqual(limits.slot_buckets, (1, 8, 12))
    # A window with and one without guesses per bucket, fill and score per bucket, copy, bias, layout.
    self.assertEqual(compiles, 2 * len(limits.slot_buckets) + 2 * len(limits.chunk_buckets) + 3)
    rng = np.random.default_rng(0)
    bias_VV = np.where(rng.random((4, 320)) < 0.2, -np.inf, 0.0)

    def request(i):
      return Request(
          id=str(i), prompt_ids=rng.integers(0, 320, rng.integers(1, 50)), seed=i, max_tokens=int(rng.integers(1, 9)),
          samples=int(rng.integers(1, 4)), temperature=float(rng.choice([0.0, 1.0])), top_k=int(rng.choice([0, 7])),
          stop_ids=(5, 6), stop_strings=('11', '222'), prompt_logp=bool(rng.random() < 0.1),
          top_logp=int(rng.choice([0, 2])), logit_bias=bias_VV[i % 4] if rng.random() < 0.2 else None)

    made.generate([request(i) for i in range(500)])
    made.load_params(weights(), 1)
    self.assertEqual(made.stats()['compiles'], compiles)

  @parameterized.parameters(dict(fsdp=4, tensor=2), dict(fsdp=2, tensor=4), dict(context=4, tensor=2))
  def test_eight_devices_equal_one(self, **axes):
    mesh = devices.make_mesh(**axes)
    made = Engine(CONFIG, SamplerLimits(slots=8, page_size=8, max_context=LENGTH, window=6, prefill_chunk=32),
                  mesh=mesh)
    made.load_params(weights(), 0)
    requests = all_greedy(prompts(5, 3), samples=2)
    self.assertEqual(drawn(made.generate(requests)), drawn(engine().generate(requests)))


if __name__ == '__main__':
  absltest.main()
