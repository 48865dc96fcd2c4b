"""Hugging Face tensor names <-> parameter paths, and the two moves between their layouts.

A Hugging Face linear weight is [out, in] with heads flattened, one tensor per layer; a parameter here is
[in..., out...] with heads apart and all layers stacked. Readers of other formats translate to the Hugging Face names
and layout first, so this is the only table. Nothing here renames by pattern: a tensor without a row is reported as
extra.
"""

from collections.abc import Callable, Iterator
import math
from typing import NamedTuple

import numpy as np

from ptjax.models.families import FAMILIES, ModelConfig


class Tensor(NamedTuple):
  """One tensor of a checkpoint, not read yet."""

  shape: tuple[int, ...]  # as `read` returns it, in the Hugging Face layout
  read: Callable[[], np.ndarray]


class Row(NamedTuple):
  """Where a parameter comes from: a name with the layer number left open, and how many of its axes are inputs."""

  name: str
  in_rank: int  # 0: taken as it is; otherwise a linear weight, stored transposed


_LAYER = 'model.layers.{}.'
LAYOUTS = {
    'llama': {
        ('embed', 'w'): Row('model.embed_tokens.weight', 0),
        ('layers', 'attn_norm', 'scale'): Row(_LAYER + 'input_layernorm.weight', 0),
        ('layers', 'attn', 'q', 'w'): Row(_LAYER + 'self_attn.q_proj.weight', 1),
        ('layers', 'attn', 'k', 'w'): Row(_LAYER + 'self_attn.k_proj.weight', 1),
        ('layers', 'attn', 'v', 'w'): Row(_LAYER + 'self_attn.v_proj.weight', 1),
        ('layers', 'attn', 'o', 'w'): Row(_LAYER + 'self_attn.o_proj.weight', 2),
        ('layers', 'mlp_norm', 'scale'): Row(_LAYER + 'post_attention_layernorm.weight', 0),
        ('layers', 'mlp', 'gate', 'w'): Row(_LAYER + 'mlp.gate_proj.weight', 1),
        ('layers', 'mlp', 'up', 'w'): Row(_LAYER + 'mlp.up_proj.weight', 1),
        ('layers', 'mlp', 'down', 'w'): Row(_LAYER + 'mlp.down_proj.weight', 1),
        ('final_norm', 'scale'): Row('model.norm.weight', 0),
        ('head', 'w'): Row('lm_head.weight', 1),
    },
}


def row(config: ModelConfig, path: tuple) -> Row:
  """The row of a parameter.

  Raises:
    ValueError: the family's layout has none for this path, as for adapters that were not merged.
  """
  layout = LAYOUTS[FAMILIES[config.family]['weights']]
  if path not in layout:
    raise ValueError(f'parameter {"/".join(map(str, path))} has no tensor in the {config.family!r} layout; '
                     'merge adapters before an export')
  return layout[path]


def tensors_of(config: ModelConfig, path: tuple, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple, tuple]]:
  """(name, index into the parameter, Hugging Face shape) of each tensor that makes up one parameter."""
  name, in_rank = row(config, path)
  stacked = path[0] == 'layers'
  inner = shape[1:] if stacked else shape
  stored = (math.prod(inner[in_rank:]), math.prod(inner[:in_rank])) if in_rank else inner
  for i in range(shape[0] if stacked else 1):
    yield name.format(i), ((i,) if stacked else ()), stored


def to_parameter(tensor: np.ndarray, shape: tuple[int, ...], in_rank: int) -> np.ndarray:
  """A view of a stored tensor with the axes of one layer of the parameter."""
  return tensor.T.reshape(shape) if in_rank else tensor


def to_stored(parameter: np.ndarray, in_rank: int) -> np.ndarray:
  """The inverse of `to_parameter`, contiguous."""
  if not in_rank:
    return np.ascontiguousarray(parameter)
  inputs = math.prod(parameter.shape[:in_rank])
  return np.ascontiguousarray(parameter.reshape(inputs, -1).T)
