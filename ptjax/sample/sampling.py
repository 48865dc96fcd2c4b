"""One token per row from its logits: temperature, top-k, top-p, min-p, and the log-prob under that law.

A draw inverts the cumulative sum in two levels (which block of the vocabulary, then which token of the block), so it
needs two uniform numbers per row and neither a sort nor a random number per token. Truncations find their threshold by
bisection over the bits of a float, exact with ties kept. Everything is f32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

_BLOCK = 128  # tokens of the vocabulary that are summed before the first level of a draw


class Law(NamedTuple):
  """Sampling settings of B rows."""

  temperature_B: jax.Array  # f32; 0 takes the largest logit, its log-prob under temperature 1
  top_k_B: jax.Array  # int32, 0 keeps all
  top_p_B: jax.Array  # f32, 1 keeps all
  min_p_B: jax.Array  # f32, 0 keeps all
  seed_B2: jax.Array  # uint32, high and low word of the request's seed
  sample_B: jax.Array  # int32, which sample of the request


def draw(logits_BV: jax.Array, law: Law, position_B: jax.Array) -> tuple[jax.Array, jax.Array]:
  """token_B (int32) and logp_B (f32, nats) drawn from softmax(logits / temperature), truncated and renormalised.

  Order of truncation: top-k, then the smallest set with mass >= top-p of what is left, then p >= min_p * max(p). Beside
  the logits, a draw depends on the row's seed, sample and position alone.
  """
  sampled_B = law.temperature_B > 0
  scaled_BV = logits_BV / jnp.where(sampled_B, law.temperature_B, 1.0)[:, None]
  scaled_BV -= jnp.max(scaled_BV, axis=-1, keepdims=True)
  weight_BV = jnp.exp(scaled_BV)
  truncated_B = sampled_B & ((law.top_k_B > 0) | (law.top_p_B < 1) | (law.min_p_B > 0))
  weight_BV = jax.lax.cond(
      jnp.any(truncated_B), lambda w_BV: jnp.where(truncated_B[:, None], _truncate(w_BV, law), w_BV),
      lambda w_BV: w_BV, weight_BV)
  uniform_B2 = jax.vmap(_uniform_pair)(law.seed_B2, law.sample_B, position_B)
  chosen_B, total_B = _invert(weight_BV, uniform_B2)
  token_B = jnp.where(sampled_B, chosen_B, jnp.argmax(logits_BV, axis=-1)).astype(jnp.int32)
  logp_B = jnp.take_along_axis(scaled_BV, token_B[:, None], axis=-1)[:, 0] - jnp.log(total_B)
  return token_B, logp_B


def _uniform_pair(seed_2: jax.Array, sample: jax.Array, position: jax.Array) -> jax.Array:
  key = jax.random.fold_in(jax.random.wrap_key_data(seed_2, impl='threefry2x32'), sample)
  return jax.random.uniform(jax.random.fold_in(key, position), (2,), jnp.float32)


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
