"""Random lives of an engine: no page is lost, freed twice or shared while written, and what comes out is right.

After every step all free pages are set to nan, so a read of a page that is not its own would show in the tokens.
"""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from flax import nnx
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ptjax.models.families import ModelConfig
from ptjax.models.transformer import Transformer
from ptjax.sample.engine import Engine
from ptjax.sample.page_pool import SINK
from ptjax.sample.requests import Request, SamplerLimits

CONFIG = ModelConfig(vocab_size=17, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=16)
LIMITS = SamplerLimits(slots=4, page_size=2, pages=18, max_context=24, window=3, prefill_chunk=8, prefill_budget=8,
                       biases=1, draft_tokens=2, ngram=2)


@functools.cache
def weights(version):
  return nnx.state(Transformer(CONFIG, nnx.Rngs(version % 2)))


@functools.cache
def engine():
  return Engine(CONFIG, LIMITS, decode_text=text_of)


@functools.cache
def forward():
  graph = nnx.graphdef(nnx.eval_shape(lambda: Transformer(CONFIG, nnx.Rngs(0))))
  length = LIMITS.max_context

  def run(state, token_T):
    model = nnx.merge(graph, state)
    return model.logits(model.hidden(token_T[None], np.arange(length)[None], np.tri(length, dtype=bool)[None]))[0]

  return jax.jit(run)


@jax.jit
def poison(pools, free_Z):
  return jax.tree.map(lambda x: jnp.where(free_Z[:, None, None, None], jnp.nan, x), pools)


def text_of(ids):
  return ''.join(chr(97 + i) for i in ids)


def logits_under(version, tokens):
  padded = np.pad(tokens, (0, LIMITS.max_context - len(tokens)))
  return np.asarray(forward()(weights(version), padded))[:len(tokens)]


def check_greedy(rollout, request):
  """Every token is the most likely one of the model that drew it, within what the request allows."""
  tokens, start = np.concatenate([rollout.prompt_ids, rollout.token_ids]), len(rollout.prompt_ids)
  for version in set(rollout.version.tolist()):
    logits_TV = logits_under(version, tokens)[start - 1:len(tokens) - 1].copy()
    model_logp_TV = np.asarray(jax.nn.log_softmax(logits_TV))
    if request.logit_bias is not None:
      logits_TV += request.logit_bias
    logits_TV[:request.min_tokens, list(request.stop_ids)] = -np.inf
    at = rollout.version == version
    np.testing.assert_array_equal(rollout.token_ids[at], logits_TV.argmax(-1)[at])
    logp_T = model_logp_TV[np.arange(len(at)), rollout.token_ids]
    np.testing.assert_allclose(rollout.model_logp[at], logp_T[at], atol=1e-5)
  np.testing.assert_array_less(rollout.version[:-1], rollout.version[1:] + 1)  # never back to older weights
  text = text_of(rollout.token_ids)
  if rollout.stop_string:
    assert rollout.stop_string == request.stop_strings[0]
    assert text.startswith(rollout.stop_string, rollout.stop_start)
    assert len(text) == rollout.stop_start + len(rollout.stop_string)  # one character a token here
  if rollout.finish_reason == 'length':
    assert len(rollout.token_ids) == min(request.max_tokens, LIMITS.max_context - start)
  if rollout.finish_reason == 'stop':
    assert rollout.stop_string or rollout.token_ids[-1] in request.stop_ids


class EngineLife(RuleBasedStateMachine):

  @initialize()
  def start(self):
    self.engine, self.version, self.open, self.told = engine(), 0, {}, {}
    self.engine.load_params(weights(0), 0)

  @rule(prompt=st.lists(st.sampled_from([1, 2]), min_size=1, max_size=12), samples=st.integers(1, 3),
        max_tokens=st.integers(1, 14), stop=st.sampled_from(['', 'id', 'string']), banned=st.sampled_from([None, 3, 4]),
        min_tokens=st.integers(0, 3), score=st.booleans())
  def submit(self, prompt, samples, max_tokens, stop, banned, min_tokens, score):
    bias_V = None
    if banned is not None:
      bias_V = np.zeros(CONFIG.vocab_size, np.float32)
      bias_V[banned] = -np.inf
    request = Request(id='r', prompt_ids=prompt, max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens),
                      samples=samples, temperature=0.0, stop_ids=(5, 9) if stop == 'id' else (),
                      stop_strings=('fg', 'k')[len(prompt) % 2:][:1] if stop == 'string' else (),
                      logit_bias=bias_V, prompt_logp=score)
    self.open[self.engine.submit(request)] = [request, samples]

  def take(self, events):
    for event in events:
      key = event.ticket, event.sample
      self.told[key] = self.told.get(key, [])[:event.start] + event.token_ids.tolist()
      if event.rollout is not None:
        request = self.open[event.ticket][0]
        check_greedy(event.rollout, request)
        assert self.told[key] == event.rollout.token_ids.tolist()
        if request.prompt_logp:
          assert np.isnan(event.rollout.prompt_logp[0]) and np.isfinite(event.rollout.prompt_logp[1:]).all()
        self.open[event.ticket][1] -= 1

  @rule(times=st.integers(1, 3))
  def step(self, times):
    for _ in range(times):
      self.take(self.engine.step())

  @rule(data=st.data())
  def cancel(self, data):
    if self.open:
      ticket = data.draw(st.sampled_from(sorted(self.open)))
      assert len(self.engine.cancel(ticket)) == self.open.pop(ticket)[1]

  @rule(in_flight=st.sampled_from(['continue', 'restart', 'finish']))
  def new_weights(self, in_flight):
    self.engine.resume()
    self.version += 1
    self.engine.load_params(weights(self.version), self.version, in_flight=in_flight)

  @rule(data=st.data())
  def preempt(self, data):
    scheduler = self.engine._scheduler
    if live := scheduler.running + scheduler.filling:
      scheduler.preempt(live[data.draw(st.integers(0, len(live) - 1))])

  @rule(count=st.integers(1, 4))
  def evict(self, count):
    self.engine._scheduler.cache.evict(count)

  @rule()
  def pause(self):
    self.engine.pause()
    assert not self.engine.step()

  @rule()
  def drain(self):
    self.engine.resume()
    self.take(self.engine.drain())
    assert not self.engine._scheduler.live

  @invariant()
  def every_page_is_accounted_for(self):
    if not hasattr(self, 'engine'):
      return
    scheduler = self.engine._scheduler
    pool, live = scheduler.pool, scheduler.running + scheduler.filling
    holders = np.bincount(sum([s.pages for s in live], []) + scheduler.cache.pages + [SINK], minlength=LIMITS.pages)
    np.testing.assert_array_equal(pool.refs_Z, holders)
    free = sorted(sum(pool._free, []))
    assert free == np.flatnonzero(holders == 0).tolist()
    assert not any(s.pages for s in scheduler.waiting)
    assert sum(scheduler.biases._users.values()) == sum(s.bias_row > 0 for s in live)
    runner = self.engine._runner
    runner._pools = poison(runner._pools, holders == 0)

  def teardown(self):
    if not hasattr(self, 'engine'):
      return
    self.engine.resume()
    while not self.engine.idle:
      self.step(1)
    assert not any(left for _, left in self.open.values())
    assert self.engine._scheduler.pool.free + len(self.engine._scheduler.cache) == LIMITS.pages - 1
    self.engine._scheduler.cache.clear()
    assert self.engine._scheduler.pool.free == LIMITS.pages - 1


class LifeTest(absltest.TestCase):

  def test_random_lives(self):
    hypothesis.stateful.run_state_machine_as_test(EngineLife, settings=hypothesis.settings(
        max_examples=25, stateful_step_count=25, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(hypothesis.HealthCheck)))

  def test_the_oldest_finishes_first_when_pages_are_short(self):
    made = engine()
    made.load_params(weights(0), 0)
    before = made.stats()['preemptions']
    tickets = [made.submit(Request(id='r', prompt_ids=[1, 2, n], max_tokens=20, temperature=0.0)) for n in range(4)]
    finished = []
    while len(finished) < 4:
      finished += [event.ticket for event in made.step() if event.rollout is not None]
    self.assertEqual(finished[0], tickets[0])
    self.assertGreater(made.stats()['preemptions'], before)


if __name__ == '__main__':
  absltest.main()
