"""Rotary positions and masked attention in plain jnp: the reference that every faster path must equal."""

import math

import jax
import jax.numpy as jnp
import numpy as np


def rotary_frequencies(head_dim: int, theta: float, scaling: tuple) -> np.ndarray:
  """Angular frequency of each of the H/2 rotary pairs, float64 on the host.

  Scaling 'linear' divides every frequency by `factor`; 'llama3' leaves the short wavelengths alone, divides the long
  ones by `factor` and blends between (Llama 3.1, arXiv 2407.21783).
  """
  freq_H2 = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
  rules = dict(scaling)
  kind = rules.get('rope_type')
  if kind == 'linear':
    return freq_H2 / rules['factor']
  if kind == 'llama3':
    context = rules['original_max_position_embeddings']
    low, high = rules['low_freq_factor'], rules['high_freq_factor']
    turns_H2 = context * freq_H2 / (2 * math.pi)
    blend_H2 = np.clip((turns_H2 - low) / (high - low), 0.0, 1.0)
    return freq_H2 * (blend_H2 + (1 - blend_H2) / rules['factor'])
  return freq_H2


def rotate(x_BTNH: jax.Array, position_BT: jax.Array, freq_H2: np.ndarray) -> jax.Array:
  """x with each pair (i, i + H/2) turned by position * frequency; computed in f32 (RoFormer, arXiv 2104.09864)."""
  angle_BTH2 = position_BT[:, :, None].astype(jnp.float32) * jnp.asarray(freq_H2, jnp.float32)[None, None, :]
  cos_BT1H2, sin_BT1H2 = jnp.cos(angle_BTH2)[:, :, None, :], jnp.sin(angle_BTH2)[:, :, None, :]
  a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([a * cos_BT1H2 - b * sin_BT1H2, b * cos_BT1H2 + a * sin_BT1H2], axis=-1)
  return turned.astype(x_BTNH.dtype)


def tree_mask(segment_BT: jax.Array, branch_BT: jax.Array) -> jax.Array:
  """True where token t may look at token s: same segment, not later, and on the trunk or on t's own branch.

  A padding token sees only itself, so that its softmax is defined; nothing real sees it.
  """
  length = segment_BT.shape[1]
  same_BTS = segment_BT[:, :, None] == segment_BT[:, None, :]
  on_path_BTS = (branch_BT[:, None, :] == 0) | (branch_BT[:, :, None] == branch_BT[:, None, :])
  causal_TS = np.tri(length, dtype=bool)
  real_B1S = (segment_BT > 0)[:, None, :]
  return (same_BTS & on_path_BTS & causal_TS[None] & real_B1S) | np.eye(length, dtype=bool)[None]


def masked_attention(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask_BTS: jax.Array) -> jax.Array:
  """Grouped-query attention under a boolean mask; scores and softmax in f32."""
  B, T, N, H = q_BTNH.shape
  K = k_BSKH.shape[2]
  q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
  score_BKGTS = jnp.einsum('BTKGH,BSKH->BKGTS', q_BTKGH, k_BSKH, preferred_element_type=jnp.float32) / math.sqrt(H)
  score_BKGTS = jnp.where(mask_BTS[:, None, None], score_BKGTS, -jnp.inf)
  weight_BKGTS = jax.nn.softmax(score_BKGTS, axis=-1).astype(v_BSKH.dtype)
  out_BTKGH = jnp.einsum('BKGTS,BSKH->BTKGH', weight_BKGTS, v_BSKH)
  return out_BTKGH.reshape(B, T, N, H)
