"""The decoder, as a Flax NNX module whose layers are stacked on a leading L axis and scanned.

Trainer and sampler run the same `Block`; they differ only in the `attend` they hand to it: masked attention over the
row for training, write-then-read of a paged pool for sampling. A module is split once into a graph definition and a
state of arrays; everything that runs is a function of the two. Each parameter carries its axis letters as metadata
(`axes`), from which `runtime.devices` derives its sharding.
"""

from collections.abc import Callable
import functools
import math

from flax import nnx
import jax
import jax.numpy as jnp

from ptjax.models import attention
from ptjax.models.families import ModelConfig

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # (q_BTNH, k_BTKH, v_BTKH) -> out_BTNH


def out_first_product(x: jax.Array, w: jax.Array, in_rank: int, dtype: jnp.dtype | None = None) -> jax.Array:
  """x [B, T, in...] times w [out..., in...]: [B, T, out...], in `dtype` or that of the operands.

  For a few rows a CPU computes w @ x^T about twice as fast as x @ w^T; the barriers keep XLA from turning one into the
  other.
  """
  lead, out_shape = x.shape[:2], w.shape[:w.ndim - in_rank]
  x_MI = x.reshape(math.prod(lead), -1)
  w_OI = w.reshape(-1, x_MI.shape[1])
  if x_MI.shape[0] <= 32:
    x_IM = jax.lax.optimization_barrier(x_MI.T)
    y_OM = jax.lax.optimization_barrier(jnp.matmul(w_OI, x_IM, preferred_element_type=dtype))
    return y_OM.T.reshape(*lead, *out_shape)
  return jnp.einsum('MI,OI->MO', x_MI, w_OI, preferred_element_type=dtype).reshape(*lead, *out_shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def low_rank_product(i: str, o: str, x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
  """x [B, T, i...] times a [i..., A] times b [A, o...], for axis letters i and o.

  Its gradients are those of autodiff, in an order of operands that makes XLA transpose the small factor, not dy.
  """
  return _low_rank_forward(i, o, x, a, b)[0]


def _low_rank_forward(i, o, x, a, b):
  low_BTA = jnp.einsum(f'BT{i},{i}A->BTA', x, a)
  return jnp.einsum(f'BTA,A{o}->BT{o}', low_BTA, b), (x, low_BTA, a, b)


def _low_rank_backward(i, o, saved, dy):
  x, low_BTA, a, b = saved
  dlow_BTA = jnp.einsum(f'BT{o},A{o}->BTA', dy, b)
  da_Ai = jnp.einsum(f'BTA,BT{i}->A{i}', dlow_BTA, x)
  db = jnp.einsum(f'BTA,BT{o}->A{o}', low_BTA, dy)
  return jnp.einsum(f'BTA,{i}A->BT{i}', dlow_BTA, a), jnp.moveaxis(da_Ai, 0, -1), db


low_rank_product.defvjp(_low_rank_forward, _low_rank_backward)


class Linear(nnx.Module):
  """y = x @ w (+ scale * x @ lora_a @ lora_b when adapters.add_lora has put a low-rank pair beside w)."""

  def __init__(self, in_axes: str, out_axes: str, config: ModelConfig, rngs: nnx.Rngs):
    shape = tuple(config.sizes[a] for a in in_axes + out_axes)
    fan_in = math.prod(config.sizes[a] for a in in_axes)
    init = jax.random.normal(rngs.params(), shape, jnp.dtype(config.param_dtype)) * (fan_in ** -0.5)
    self.w = nnx.Param(init, axes=in_axes + out_axes)
    self.in_axes, self.out_axes = in_axes, out_axes
    self.compute_dtype = config.compute_dtype
    self.lora_scale = 0.0  # alpha / rank; 0 while there is no adapter
    self.out_first = False  # w is stored [out..., in...]: the sampler's layout on CPU
    self.scaled = False  # w is stored in few bits with a scale per output beside it: the sampler's again

  def __call__(self, x: jax.Array) -> jax.Array:
    i, o = self.in_axes, self.out_axes
    x = x.astype(self.compute_dtype)
    w = self.w[...].astype(self.compute_dtype)
    y = out_first_product(x, w, len(i)) if self.out_first else jnp.einsum(f'BT{i},{i}{o}->BT{o}', x, w)
    if self.scaled:
      y = (y * self.w_scale[...][None, None]).astype(self.compute_dtype)
    if self.lora_scale:
      a, b = self.lora_a[...].astype(self.compute_dtype), self.lora_b[...].astype(self.compute_dtype)
      y += self.lora_scale * low_rank_product(i, o, x, a, b)
    return y


class RMSNorm(nnx.Module):
  """x / rms(x) * scale, in f32 (arXiv 1910.07467)."""

  def __init__(self, config: ModelConfig):
    self.scale = nnx.Param(jnp.ones((config.width,), jnp.dtype(config.param_dtype)), axes='D')
    self.eps = config.norm_eps

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    x32_BTD = x_BTD.astype(jnp.float32)
    rms_BT1 = jax.lax.rsqrt(jnp.mean(jnp.square(x32_BTD), axis=-1, keepdims=True) + self.eps)
    return (x32_BTD * rms_BT1 * self.scale[...].astype(jnp.float32)[None, None, :]).astype(x_BTD.dtype)


class Attention(nnx.Module):
  """Grouped-query self-attention with rotary positions."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    self.q = Linear('D', 'NH', config, rngs)
    self.k = Linear('D', 'KH', config, rngs)
    self.v = Linear('D', 'KH', config, rngs)
    self.o = Linear('NH', 'D', config, rngs)
    self.rope = (config.head_dim, config.rope_theta, config.rope_scaling)

  def __call__(self, x_BTD: jax.Array, position_BT: jax.Array, attend: Attend) -> jax.Array:
    freq_H2 = attention.rotary_frequencies(*self.rope)
    q_BTNH = attention.rotate(self.q(x_BTD), position_BT, freq_H2)
    k_BTKH = attention.rotate(self.k(x_BTD), position_BT, freq_H2)
    return self.o(attend(q_BTNH, k_BTKH, self.v(x_BTD)))


class MLP(nnx.Module):
  """down(silu(gate(x)) * up(x)) (SwiGLU, arXiv 2002.05202)."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    self.gate = Linear('D', 'F', config, rngs)
    self.up = Linear('D', 'F', config, rngs)
    self.down = Linear('F', 'D', config, rngs)

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    return self.down(jax.nn.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nnx.Module):
  """One pre-norm decoder layer."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    self.attn_norm = RMSNorm(config)
    self.attn = Attention(config, rngs)
    self.mlp_norm = RMSNorm(config)
    self.mlp = MLP(config, rngs)

  def __call__(self, x_BTD: jax.Array, position_BT: jax.Array, attend: Attend) -> jax.Array:
    x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD), position_BT, attend)
    return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Embedding(nnx.Module):

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    init = jax.random.normal(rngs.params(), (config.vocab_size, config.width), jnp.dtype(config.param_dtype))
    self.w = nnx.Param(init * config.width ** -0.5, axes='VD')


class Transformer(nnx.Module):
  """Embedding, L scanned blocks, final norm, head (the embedding's transpose when `tied_head`)."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    self.config = config
    self.embed = Embedding(config, rngs)

    @nnx.split_rngs(splits=config.layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stacked(rngs):
      return Block(config, rngs)

    self.layers = stacked(rngs)
    for _, variable in nnx.iter_graph(self.layers):
      if isinstance(variable, nnx.Variable):
        variable.set_metadata(axes='L' + variable.get_metadata()['axes'])
    self.final_norm = RMSNorm(config)
    if not config.tied_head:
      self.head = Linear('D', 'V', config, rngs)

  def embedded(self, token_BT: jax.Array) -> jax.Array:
    return jnp.take(self.embed.w[...], token_BT, axis=0).astype(self.config.compute_dtype)

  def hidden(self, token_BT: jax.Array, position_BT: jax.Array, mask_BTS: jax.Array) -> jax.Array:
    """Final-norm hidden states [B, T, D] of rows under an attention mask (see attention.tree_mask)."""
    block_def, stacked = nnx.split(self.layers)
    attend = functools.partial(attention.masked_attention, mask_BTS=mask_BTS)

    def layer(x_BTD, state):
      return nnx.merge(block_def, state)(x_BTD, position_BT, attend), None

    if self.config.remat == 'block':
      layer = jax.checkpoint(layer)
    x_BTD, _ = jax.lax.scan(layer, self.embedded(token_BT), stacked)
    return self.final_norm(x_BTD)

  def logits(self, hidden_BTD: jax.Array) -> jax.Array:
    """f32 logits [B, T, V]; products accumulate in f32."""
    head_VD = self.embed.w[...] if self.config.tied_head else jnp.swapaxes(self.head.w[...], 0, 1)
    return jnp.einsum('BTD,VD->BTV', hidden_BTD, head_VD.astype(hidden_BTD.dtype),
                      preferred_element_type=jnp.float32)
