"""Log-probs of given tokens without ever holding [B, T, V]: the head runs on trained positions alone, in chunks."""

import jax
import jax.numpy as jnp

from ptjax import types
from ptjax.models import attention
from ptjax.models.transformer import Transformer

CHUNK_TOKENS = 128  # positions of a row whose logits exist at one time


def token_logp(model: Transformer, batch: types.Batch, *, temperature: float,
               loss_tokens: int) -> tuple[jax.Array, jax.Array]:
  """Log-prob of each trained token given its parent, and the entropy of the law it was scored under.

  logp_BT[t] = log_softmax(logits(hidden[parent[t]]) / temperature)[token[t]] where mask_BT, 0 elsewhere; f32 nats.

  Args:
    temperature: the one the tokens were drawn at; 1 for text nobody sampled.
    loss_tokens: static upper bound on trained tokens per row (batching promises it).
  """
  mask_BTS = attention.tree_mask(batch.segment_BT, batch.branch_BT)
  hidden_BTD = model.hidden(batch.token_BT, batch.position_BT, mask_BTS)
  B, T, _ = hidden_BTD.shape
  X = min(loss_tokens, T)  # trained positions of a row, gathered to the front
  index_BX = jnp.argsort(~batch.mask_BT, axis=1, stable=True)[:, :X]
  parent_BX = jnp.take_along_axis(batch.parent_BT, index_BX, axis=1)
  target_BX = jnp.take_along_axis(batch.token_BT, index_BX, axis=1)
  hidden_BXD = jnp.take_along_axis(hidden_BTD, parent_BX[:, :, None], axis=1)

  @jax.checkpoint
  def score(hidden_BCD, target_BC):
    logp_BCV = jax.nn.log_softmax(model.logits(hidden_BCD) / temperature, axis=-1)
    picked_BC = jnp.take_along_axis(logp_BCV, target_BC[:, :, None], axis=-1)[:, :, 0]
    return picked_BC, -jnp.sum(jnp.exp(logp_BCV) * logp_BCV, axis=-1)

  pieces = [score(hidden_BXD[:, i:i + CHUNK_TOKENS], target_BX[:, i:i + CHUNK_TOKENS])
            for i in range(0, X, CHUNK_TOKENS)]
  logp_BX, entropy_BX = (jnp.concatenate(p, axis=1) for p in zip(*pieces))
  row_B1 = jnp.arange(B)[:, None]

  def spread(value_BX):
    value_BT = jnp.zeros((B, T), jnp.float32).at[row_B1, index_BX].set(value_BX)
    return jnp.where(batch.mask_BT, value_BT, 0.0)

  return spread(logp_BX), spread(jax.lax.stop_gradient(entropy_BX))
