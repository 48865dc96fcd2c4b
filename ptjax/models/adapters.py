"""Low-rank adapters (LoRA, arXiv 2106.09685): put beside the frozen weights, trained alone, merged exactly."""

import math

from flax import nnx
import jax
import jax.numpy as jnp

from ptjax.models.families import ModelConfig
from ptjax.models.transformer import Linear, Transformer

TARGETS = ('q', 'k', 'v', 'o', 'gate', 'up', 'down')


def graphdef_of(config: ModelConfig) -> nnx.GraphDef:
  """The plain (adapter-free) graph of a config; no array is made."""
  return nnx.split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))))[0]


def split(config: ModelConfig, state: nnx.State, *, rank: int, alpha: float = 0.0, seed: int = 0,
          targets: tuple[str, ...] = TARGETS):
  """Splits a plain state into (graphdef, trainable, frozen).

  With rank 0 every parameter is trainable and nothing is frozen. Otherwise each target projection gets lora_a
  (normal, 1 / sqrt(fan in)) and lora_b (zeros), so that the model starts equal to `state`, and only those train. The
  adapter adds alpha / rank * x @ lora_a @ lora_b; alpha 0 stands for alpha = rank. What trains is f32 whatever the
  dtype of `state`: small steps would be lost in bfloat16.

  Raises:
    ValueError: a target that the decoder does not have.
  """
  unknown = sorted(set(targets) - set(TARGETS))
  if unknown:
    raise ValueError(f'lora targets {unknown} are unknown; known: {TARGETS}')
  model = nnx.merge(graphdef_of(config), state)
  if rank == 0:
    return _in_float32(*nnx.split(model, nnx.Param, ...))
  key = jax.random.key(seed)
  for path, module in nnx.iter_modules(model.layers):
    if isinstance(module, Linear) and path[-1] in targets:
      key, init_key = jax.random.split(key)
      ins, outs = (tuple(config.sizes[a] for a in letters) for letters in (module.in_axes, module.out_axes))
      a = jax.random.normal(init_key, (config.layers, *ins, rank)) * math.prod(ins) ** -0.5
      module.lora_a = nnx.LoRAParam(a, axes='L' + module.in_axes + 'A')
      module.lora_b = nnx.LoRAParam(jnp.zeros((config.layers, rank, *outs)), axes='LA' + module.out_axes)
      module.lora_scale = (alpha or rank) / rank
  return _in_float32(*nnx.split(model, nnx.LoRAParam, ...))


def _in_float32(graphdef: nnx.GraphDef, trainable: nnx.State, frozen: nnx.State):
  return graphdef, jax.tree.map(lambda x: x.astype(jnp.float32), trainable), frozen


def merge(graphdef: nnx.GraphDef, trainable: nnx.State, frozen: nnx.State) -> nnx.State:
  """The plain state that computes what (trainable, frozen) compute: w + scale * lora_a @ lora_b, in param_dtype."""
  model = nnx.merge(graphdef, trainable, frozen)
  for _, module in nnx.iter_modules(model.layers):
    if isinstance(module, Linear) and module.lora_scale:
      a, b, w = module.lora_a[...], module.lora_b[...], module.w[...]
      L, A = a.shape[0], a.shape[-1]
      delta = jnp.einsum('LIA,LAO->LIO', a.reshape(L, -1, A), b.reshape(L, A, -1)).reshape(w.shape)
      module.w = module.w.replace((w.astype(jnp.float32) + module.lora_scale * delta).astype(w.dtype))
      del module.lora_a, module.lora_b
      module.lora_scale = 0.0
  return jax.tree.map(lambda x: x.astype(model.config.param_dtype), nnx.state(model))
