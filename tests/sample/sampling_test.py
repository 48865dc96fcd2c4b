"""Draws against the softmax they promise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from absl.testing import absltest, parameterized

from ptjax.sample import sampling

ROWS = 4096


def settings(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=7, bias=0, stop=-1, stop_from=0,
             top=False):
  return sampling.Law(
      temperature_B=np.full(rows, temperature, np.float32), top_k_B=np.full(rows, top_k, np.int32),
      top_p_B=np.full(rows, top_p, np.float32), min_p_B=np.full(rows, min_p, np.float32),
      seed_B2=np.tile(np.asarray([0, seed], np.uint32), (rows, 1)), sample_B=np.arange(rows, dtype=np.int32),
      bias_B=np.full(rows, bias, np.int32), stop_BX=np.full((rows, 2), [stop, -1], np.int32),
      stop_from_B=np.full(rows, stop_from, np.int32), top_B=np.full(rows, top, bool))


def draw_all(logits_V, rows=ROWS, position=3, bias_V=None, **law):
  logits_BV = jnp.broadcast_to(jnp.asarray(logits_V, jnp.float32), (rows, len(logits_V)))
  bias_YV = np.zeros((2, len(logits_V)), np.float32)
  bias_YV[1] = 0 if bias_V is None else bias_V
  return jax.device_get(jax.jit(functools.partial(sampling.draw, alternatives=3))(
      logits_BV, settings(rows, **law), np.full(rows, position, np.int32), bias_YV))


def draw(logits_V, rows=ROWS, position=3, **law):
  drawn = draw_all(logits_V, rows, position, **law)
  return drawn.token_B, drawn.behavior_logp_B


def law_by_sorting(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
  """The truncated distribution, in float64 by sorting."""
  p = np.exp(np.asarray(logits, np.float64) / temperature)
  order = np.argsort(-p, kind='stable')
  if top_k:
    p[order[top_k:]] = 0
  p /= p.sum()
  before = np.cumsum(p[order]) - p[order]  # mass strictly above each token
  p[order[before >= top_p]] = 0
  p[p < min_p * p.max()] = 0
  return p / p.sum()


class DrawTest(parameterized.TestCase):

  @parameterized.parameters(
      dict(), dict(temperature=0.5), dict(temperature=2.0), dict(top_k=5), dict(top_k=1), dict(top_p=0.7),
      dict(min_p=0.2), dict(temperature=1.3, top_k=12, top_p=0.8, min_p=0.05))
  def test_frequencies_and_log_probs_are_those_of_the_law(self, **law):
    logits_V = np.random.default_rng(0).normal(size=37) * 1.5
    wanted_V = law_by_sorting(logits_V, **law)
    token_B, logp_B = draw(logits_V, **law)
    np.testing.assert_allclose(logp_B, np.log(wanted_V[token_B]), atol=2e-6)
    counts_V = np.bincount(token_B, minlength=37)
    kept_V = wanted_V > 0
    self.assertEqual(counts_V[~kept_V].sum(), 0)
    if kept_V.sum() > 1:
      self.assertGreater(scipy.stats.chisquare(counts_V[kept_V], wanted_V[kept_V] * ROWS).pvalue, 1e-3)

  def test_greedy_takes_the_largest_with_the_log_prob_of_temperature_1(self):
    token_B, logp_B = draw([0.0, 2.0, 1.0], rows=3, temperature=0.0, top_k=1, top_p=0.1)
    np.testing.assert_array_equal(token_B, 1)
    np.testing.assert_allclose(logp_B, 2.0 - np.log(1 + np.e ** 2 + np.e), rtol=1e-6)

  def test_ties_at_the_threshold_are_all_kept(self):
    token_B, logp_B = draw([1.0, 3.0, 1.0, 1.0, -5.0], top_k=2)
    self.assertSetEqual(set(token_B.tolist()), {0, 1, 2, 3})
    self.assertAlmostEqual(float(logp_B[token_B == 1][0]), -np.log(1 + 3 * np.exp(-2.0)), places=6)

  def test_tokens_of_weight_zero_are_never_drawn(self):
    logits_V = np.full(64, -np.inf)
    logits_V[[9, 63]] = 0.0
    self.assertSetEqual(set(draw(logits_V)[0].tolist()), {9, 63})

  def test_a_row_does_not_depend_on_its_neighbours(self):
    logits_BV = jnp.asarray(np.random.default_rng(1).normal(size=(2, 50)), jnp.float32)
    mixed = settings(2)._replace(top_p_B=np.asarray([0.5, 1.0], np.float32))
    plain = settings(2)
    position_B = np.asarray([4, 9], np.int32)
    token_B, logp_B = sampling.draw(logits_BV, mixed, position_B, np.zeros((1, 50), np.float32), alternatives=0)[:2]
    same_B, logq_B = sampling.draw(logits_BV, plain, position_B, np.zeros((1, 50), np.float32), alternatives=0)[:2]
    self.assertEqual((token_B[1], logp_B[1]), (same_B[1], logq_B[1]))

  def test_seed_sample_and_position_each_change_the_draw(self):
    flat = np.zeros(10_000)
    base = draw(flat, rows=64)[0]
    self.assertLess((base[1:] == base[:-1]).mean(), 0.1)
    self.assertLess((base == draw(flat, rows=64, position=4)[0]).mean(), 0.1)
    self.assertLess((base == draw(flat, rows=64, seed=8)[0]).mean(), 0.1)
    np.testing.assert_array_equal(base, draw(flat, rows=64)[0])


if __name__ == '__main__':
  absltest.main()
