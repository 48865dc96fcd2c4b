"""Writes a trained adapter in the layout of the `peft` library, so that it loads beside an exported base."""

import json
import pathlib

from flax import nnx
import numpy as np
import safetensors.numpy

from ptjax.models.families import ModelConfig
from ptjax.weights import layout


def export_adapter(directory: str | pathlib.Path, config: ModelConfig, adapter: nnx.State, *, rank: int, alpha: float,
                   base: str) -> None:
  """Writes adapter_model.safetensors and adapter_config.json.

  Args:
    adapter: the trainable state of adapters.split with a rank above 0.
    alpha: the adapter adds alpha / rank * x @ a @ b.
    base: the model that it goes with, as a path or hub name.

  Raises:
    ValueError: the state holds other parameters than adapters.
  """
  tensors, targets = {}, set()
  for path, variable in nnx.to_flat_state(adapter):
    if path[-1] not in ('lora_a', 'lora_b'):
      raise ValueError(f'{"/".join(map(str, path))} is not part of an adapter; fix: export a stage with lora_rank > 0, '
                       'or --config.export.merge_lora=True')
    name = layout.row(config, (*path[:-1], 'w')).name.removesuffix('.weight')
    targets.add(name.rpartition('.')[2])
    for layer, value in enumerate(np.asarray(variable[...], np.float32)):
      matrix = value.reshape(-1, rank).T if path[-1] == 'lora_a' else value.reshape(rank, -1).T
      key = f'base_model.model.{name.format(layer)}.lora_{path[-1][-1].upper()}.weight'
      tensors[key] = np.ascontiguousarray(matrix)
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  safetensors.numpy.save_file(tensors, directory / 'adapter_model.safetensors', metadata={'format': 'pt'})
  fields = dict(peft_type='LORA', task_type='CAUSAL_LM', base_model_name_or_path=base, r=rank, lora_alpha=alpha,
                target_modules=sorted(targets), lora_dropout=0.0, bias='none', fan_in_fan_out=False,
                inference_mode=True)
  (directory / 'adapter_config.json').write_text(json.dumps(fields, indent=2) + '\n', encoding='utf-8')
