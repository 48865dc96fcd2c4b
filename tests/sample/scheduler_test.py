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
from ptjax.sample.engine import Engine, Request, SamplerLimits
from ptjax.sample.page_pool import SINK

CONFIG = ModelConfig(vocab_size=17, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=16)
LIMITS = SamplerLimits(slots=4, page_size=2, pages=18, max_context=24, window=3, prefill_chunk=8)


@functools.cache
def weights(version):
  return nnx.state(Transformer(CONFIG, nnx.Rngs(version % 2)))


@functools.cache
def engine():
  return Engine(CONFIG, LIMITS)


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
  return tuple(jnp.where(free_Z[:, None, None, None], jnp.nan, pool_ZKCH) for pool_ZKCH in pools)


def check_greedy(rollout):
  tokens, start = np.concatenate([rollout.prompt_ids, rollout.token_ids]), len(rollout.prompt_ids)
  padded = np.pad(tokens, (0, LIMITS.max_context - len(tokens)))
  for version in set(rollout.version.tolist()):
    logits_TV = np.asarray(forward()(weights(version), padded))[start - 1:len(tokens) - 1]
    at = rollout.version == version
    np.testing.assert_array_equal(rollout.token_ids[at], logits_TV.argmax(-1)[at])
  np.testing.assert_array_less(rollout.version[:-1], rollout.version[1:] + 1)  # never back to older weights


class EngineLife(RuleBasedStateMachine):

  @initialize()
  def start(self):
    self.engine, self.version, self.open = engine(), 0, {}
    self.engine.load_params(weights(0), 0)

  @rule(prompt=st.lists(st.sampled_from([1, 2]), min_size=1, max_size=12), samples=st.integers(1, 3),
        max_tokens=st.integers(1, 14), stop=st.booleans())
  def submit(self, prompt, samples, max_tokens, stop):
    request = Request(id='r', prompt_ids=prompt, max_tokens=max_tokens, samples=samples, temperature=0.0,
                      stop_ids=(5, 9) if stop else ())
    self.open[self.engine.submit(request)] = samples

  @rule(times=st.integers(1, 3))
  def step(self, times):
    for _ in range(times):
      for ticket, _, rollout in self.engine.step():
        check_greedy(rollout)
        self.open[ticket] -= 1

  @rule(data=st.data())
  def cancel(self, data):
    if self.open:
      ticket = data.draw(st.sampled_from(sorted(self.open)))
      assert len(self.engine.cancel(ticket)) == self.open.pop(ticket)

  @rule()
  def new_weights(self):
    self.version += 1
    self.engine.load_params(weights(self.version), self.version)

  @invariant()
  def every_page_is_accounted_for(self):
    if not hasattr(self, 'engine'):
      return
    scheduler = self.engine._scheduler
    pool = scheduler.pool
    holders = np.bincount(
        sum([s.pages for s in scheduler.running + scheduler.filling], []) + scheduler.cache.pages + [SINK],
        minlength=LIMITS.pages)
    np.testing.assert_array_equal(pool.refs_Z, holders)
    free = sorted(pool._free)
    assert free == np.flatnonzero(holders == 0).tolist()
    assert not any(s.pages for s in scheduler.waiting)
    self.engine._pools = poison(self.engine._pools, holders == 0)

  def teardown(self):
    if not hasattr(self, 'engine'):
      return
    while not self.engine._scheduler.idle:
      self.step(1)
    assert not any(self.open.values())
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
      finished += [ticket for ticket, _, _ in made.step()]
    self.assertEqual(finished[0], tickets[0])
    self.assertGreater(made.stats()['preemptions'], before)


if __name__ == '__main__':
  absltest.main()
