"""One token per row from its logits: bias, temperature, top-k, top-p, min-p, and the log-prob under that law.

A draw inverts the cumulative sum in two levels (which block of the vocabulary, then which token of the block), so it
needs two uniform numbers per row and neither a sort nor a random number per token. Truncations find their threshold by
bisection over the bits of a float, exact with ties kept. Everything is f32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

_DRAW, _KEEP, _GUESS = range(3)  # streams of random numbers
_BLOCK = 128  # tokens of the vocabulary that are summed before the first level of a draw


class Law(NamedTuple):
  """Sampling settings of B rows."""

  temperature_B: jax.Array  # f32; 0 takes the largest logit, its log-prob under temperature 1
  top_k_B: jax.Array  # int32, 0 keeps all
  top_p_B: jax.Array  # f32, 1 keeps all
  min_p_B: jax.Array  # f32, 0 keeps all
  seed_B2: jax.Array  # uint32, high and low word of the request's seed
  sample_B: jax.Array  # int32, which sample of the request
  bias_B: jax.Array  # int32, row of the bias table; row 0 is all zeros
  stop_BX: jax.Array  # int32, X token ids that end the row, -1 for none
  stop_from_B: jax.Array  # int32, first position at which a stop id may lie
  top_B: jax.Array  # bool, alternatives are wanted


class Drawn(NamedTuple):
  """One token per row. Log-probs are f32, in nats."""

  token_B: jax.Array  # int32
  behavior_logp_B: jax.Array  # under the law it was drawn from
  model_logp_B: jax.Array  # under softmax(logits): temperature 1, no bias, nothing truncated
  top_id_BA: jax.Array  # the A most likely tokens of softmax(logits), zeros in rows that do not want them
  top_logp_BA: jax.Array


class Proposal(NamedTuple):
  """A guess per row and the law that it was drawn from."""

  token_B: jax.Array  # int32, -1 for none
  prob_BV: jax.Array  # all 0 for none


def draw(logits_BV: jax.Array, law: Law, position_B: jax.Array, bias_YV: jax.Array, *, alternatives: int,
         proposal: Proposal | None = None) -> Drawn:
  """A token per row from softmax((logits + bias) / temperature), truncated and renormalised: p.

  Order of truncation: top-k, then the smallest set with mass >= top-p of what is left, then p >= min_p * max(p). Beside
  the logits and the proposal, a draw depends on the row's seed, sample and position alone.

  A token x proposed from a law q is kept with probability min(1, p(x) / q(x)); otherwise the draw is from
  max(p - q, 0), renormalised. What comes out has law p whatever q is (speculative sampling, arXiv 2211.17192), and is
  never x if x was not kept. At temperature 0 the most likely token comes out, whatever is proposed.

  Args:
    logits_BV: f32.
    position_B: of the token before the drawn one.
    bias_YV: f32 rows that `law.bias_B` chooses from; -inf forbids a token.
    alternatives: A.
  """
  sampled_B = law.temperature_B > 0
  given_BV, scaled_BV, kept_BV, as_model_B = _weights(logits_BV, law, position_B, bias_YV)
  uniform_B2 = _uniform_pairs(law, position_B, _DRAW)
  if proposal is None:
    chosen_B, total_B = _invert(kept_BV, uniform_B2)
  else:
    total_B = jnp.sum(kept_BV, axis=-1)
    chosen_B = _keep_or_replace(kept_BV / total_B[:, None], proposal, _uniform_pairs(law, position_B, _KEEP)[:, 0],
                                uniform_B2)
  token_B = jnp.where(sampled_B, chosen_B, jnp.argmax(given_BV, axis=-1)).astype(jnp.int32)
  behavior_logp_B = at(scaled_BV, token_B) - jnp.log(total_B)
  model_logp_B = jax.lax.cond(jnp.all(as_model_B), lambda _: behavior_logp_B,
                              lambda x_BV: jnp.where(as_model_B, behavior_logp_B, log_prob(x_BV, token_B)), logits_BV)
  top_id_BA, top_logp_BA = top(logits_BV, law.top_B, alternatives)
  return Drawn(token_B, behavior_logp_B, model_logp_B, top_id_BA, top_logp_BA)


def propose(logits_BV: jax.Array, law: Law, position_B: jax.Array, bias_YV: jax.Array) -> Proposal:
  """A guess per row from a draft model's logits under the row's own law, by random numbers of its own."""
  given_BV, _, kept_BV, _ = _weights(logits_BV, law, position_B, bias_YV)
  chosen_B, total_B = _invert(kept_BV, _uniform_pairs(law, position_B, _GUESS))
  token_B = jnp.where(law.temperature_B > 0, chosen_B, jnp.argmax(given_BV, axis=-1)).astype(jnp.int32)
  return Proposal(token_B, kept_BV / total_B[:, None])


def each_of(law: Law, count: int) -> Law:
  """The law of `count` positions per row, row by row."""
  return Law(*(jnp.repeat(x, count, axis=0) for x in law))


def at(x_BV: jax.Array, token_B: jax.Array) -> jax.Array:
  return jnp.take_along_axis(x_BV, token_B[:, None], axis=-1)[:, 0]


def log_prob(logits_BV: jax.Array, token_B: jax.Array) -> jax.Array:
  """log softmax(logits)[token], f32."""
  return at(logits_BV, token_B) - jax.nn.logsumexp(logits_BV, axis=-1)


def top(logits_BV: jax.Array, wanted_B: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """The `count` most likely tokens of each row and their log-probs; computed only if some row wants them."""
  shape = (logits_BV.shape[0], count)
  nothing = (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
  if not count:
    return nothing

  def find(x_BV):
    value_BA, id_BA = jax.lax.top_k(x_BV, count)
    return id_BA, value_BA - jax.nn.logsumexp(x_BV, axis=-1)[:, None]

  return jax.lax.cond(jnp.any(wanted_B), find, lambda _: nothing, logits_BV)


def _weights(logits_BV: jax.Array, law: Law, position_B: jax.Array, bias_YV: jax.Array):
  """Logits as altered, those over temperature with maximum 0, weights after truncation, rows that are as the model."""
  sampled_B = law.temperature_B > 0
  banned_B = position_B + 1 < law.stop_from_B
  altered_B = banned_B | (law.bias_B > 0)
  given_BV = jax.lax.cond(jnp.any(altered_B), lambda x_BV: _altered(x_BV, law, banned_B, bias_YV), lambda x_BV: x_BV,
                          logits_BV)
  scaled_BV = given_BV / jnp.where(sampled_B, law.temperature_B, 1.0)[:, None]
  scaled_BV -= jnp.max(scaled_BV, axis=-1, keepdims=True)
  weight_BV = jnp.exp(scaled_BV)
  truncated_B = sampled_B & ((law.top_k_B > 0) | (law.top_p_B < 1) | (law.min_p_B > 0))
  kept_BV = jax.lax.cond(
      jnp.any(truncated_B), lambda w_BV: jnp.where(truncated_B[:, None], _truncate(w_BV, law), w_BV),
      lambda w_BV: w_BV, weight_BV)
  as_model_B = ~truncated_B & ~altered_B & ((law.temperature_B == 1) | ~sampled_B)
  return given_BV, scaled_BV, kept_BV, as_model_B


def _keep_or_replace(prob_BV: jax.Array, proposal: Proposal, keep_B: jax.Array, uniform_B2: jax.Array) -> jax.Array:
  """The proposed token where keep * q(x) < p(x), else one from max(p - q, 0)."""
  guess_B = jnp.maximum(proposal.token_B, 0)
  kept_B = (proposal.token_B >= 0) & (keep_B * at(proposal.prob_BV, guess_B) < at(prob_BV, guess_B))
  rest_BV = jnp.maximum(prob_BV - proposal.prob_BV, 0.0)
  some_B1 = jnp.any(rest_BV > 0, axis=-1, keepdims=True)  # p = q but for rounding leaves nothing
  chosen_B, _ = _invert(jnp.where(some_B1, rest_BV, prob_BV), uniform_B2)
  return jnp.where(kept_B, guess_B, chosen_B)


def _altered(logits_BV: jax.Array, law: Law, banned_B: jax.Array, bias_YV: jax.Array) -> jax.Array:
  """Logits with each row's bias, and no stop id where none may be drawn yet."""
  B, V = logits_BV.shape
  stop_BX = jnp.where(banned_B[:, None] & (law.stop_BX >= 0), law.stop_BX, V)  # V is out of range: dropped
  logits_BV += bias_YV[law.bias_B]
  return logits_BV.at[jnp.arange(B)[:, None], stop_BX].set(-jnp.inf, mode='drop')


def _uniform_pairs(law: Law, position_B: jax.Array, stream: int) -> jax.Array:
  """Two numbers in [0, 1) per row; streams are independent of each other."""

  def pair(seed_2, sample, position):
    key = jax.random.fold_in(jax.random.wrap_key_data(seed_2, impl='threefry2x32'), sample)
    key = jax.random.fold_in(key, position)
    return jax.random.uniform(jax.random.fold_in(key, stream) if stream else key, (2,), jnp.float32)

  return jax.vmap(pair)(law.seed_B2, law.sample_B, position_B)


def _invert(weight_BV: jax.Array, uniform_B2: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The token at which each row's cumulative weight passes its uniform number, and the row's total weight."""
  B, V = weight_BV.shape
  width = min(V, _BLOCK)
  padded_BV = jnp.pad(weight_BV, ((0, 0), (0, -V % width)))
  weight_BXY = padded_BV.reshape(B, -1, width)
  up_to_BX = jnp.cumsum(jnp.sum(weight_BXY, axis=-1), axis=-1)
  block_B = _first_above(up_to_BX, uniform_B2[:, 0])
  inside_BY = jnp.cumsum(jnp.take_along_axis(weight_BXY, block_B[:, None, None], axis=1)[:, 0], axis=-1)
  return block_B * width + _first_above(inside_BY, uniform_B2[:, 1]), up_to_BX[:, -1]


def _first_above(up_to_BX: jax.Array, uniform_B: jax.Array) -> jax.Array:
  """First index whose cumulative weight exceeds uniform * total: an index of weight > 0, as uniform < 1."""
  return jnp.sum(up_to_BX <= (uniform_B * up_to_BX[:, -1])[:, None], axis=-1)


def _truncate(weight_BV: jax.Array, law: Law) -> jax.Array:
  V = weight_BV.shape[1]
  count_B = jnp.where(law.top_k_B > 0, jnp.minimum(law.top_k_B, V), V).astype(jnp.float32)
  weight_BV = _keep_top(weight_BV, jnp.ones_like(weight_BV), count_B)
  goal_B = jnp.where(law.top_p_B < 1, law.top_p_B * jnp.sum(weight_BV, axis=-1), jnp.inf)
  weight_BV = _keep_top(weight_BV, weight_BV, goal_B)
  return jnp.where(weight_BV >= law.min_p_B[:, None] * jnp.max(weight_BV, axis=-1, keepdims=True), weight_BV, 0.0)


def _keep_top(weight_BV: jax.Array, measure_BV: jax.Array, goal_B: jax.Array) -> jax.Array:
  """The largest weights whose measure sums to at least `goal`, ties with the smallest one kept; the others 0.

  Non-negative floats order as their bits do, so 31 halvings of an integer interval find the threshold exactly.
  """
  def halve(_, bounds):
    low_B, high_B = bounds  # the measure above `low` reaches the goal (or low = 0), above `high` it does not
    middle_B = low_B + (high_B - low_B) // 2
    bar_B = jax.lax.bitcast_convert_type(middle_B, jnp.float32)
    reached_B = jnp.sum(jnp.where(weight_BV >= bar_B[:, None], measure_BV, 0.0), axis=-1) >= goal_B
    return jnp.where(reached_B, middle_B, low_B), jnp.where(reached_B, high_B, middle_B)

  low_B = jnp.zeros(weight_BV.shape[0], jnp.int32)
  high_B = jnp.full_like(low_B, 0x7F800000)  # infinity
  low_B, _ = jax.lax.fori_loop(0, 31, halve, (low_B, high_B))
  return jnp.where(weight_BV >= jax.lax.bitcast_convert_type(low_B, jnp.float32)[:, None], weight_BV, 0.0)
