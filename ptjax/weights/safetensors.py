"""Hugging Face directories: reads config.json with one or many safetensors shards, and writes the same.

What is exported loads in `transformers` (AutoModelForCausalLM, AutoTokenizer) to the same logits and ids. Refused by
name: a shard that the index lists and the directory lacks, a damaged shard, a tensor held twice, pickled weights.
"""

import functools
import json
import math
import os
import pathlib
import shutil
import tempfile

from flax import nnx
import jax
from jax.experimental import multihost_utils
import numpy as np
import safetensors
import safetensors.numpy

from ptjax.data import tokenizer as tokenizer_lib
from ptjax.models import families
from ptjax.weights import layout

SINGLE, INDEX = 'model.safetensors', 'model.safetensors.index.json'
SHARD_BYTES = 5_000_000_000


class Directory:
  """A Hugging Face model directory; tensors are read one at a time, when asked for."""

  def __init__(self, path: str | pathlib.Path):
    self.path = pathlib.Path(path)

  def config(self, **overrides) -> families.ModelConfig:
    """ModelConfig from config.json; `overrides` are ModelConfig fields."""
    return families.from_hf(_read_json(self.path / 'config.json'), **overrides)

  def tokenizer(self) -> tokenizer_lib.Tokenizer:
    return tokenizer_lib.from_directory(self.path)

  def tensors(self) -> dict[str, layout.Tensor]:
    """Every tensor of every shard by name.

    Raises:
      ValueError: there are no safetensors files, or one is missing, damaged, or repeats a tensor.
    """
    found = {}
    for file in self._shards():
      try:
        with safetensors.safe_open(file, framework='numpy') as shard:
          shapes = {name: tuple(shard.get_slice(name).get_shape()) for name in shard.keys()}
      except safetensors.SafetensorError as error:
        raise ValueError(f'{file} ({file.stat().st_size} bytes) is not a whole safetensors file: {error}. '
                         'It was cut short or damaged; fetch it again.') from error
      for name, shape in shapes.items():
        if name in found:
          raise ValueError(f'{file}: tensor {name} is in an earlier shard too')
        found[name] = layout.Tensor(shape, functools.partial(_read_tensor, file, name))
    return found

  def _shards(self) -> list[pathlib.Path]:
    if (self.path / INDEX).is_file():
      names = sorted(set(_read_json(self.path / INDEX)['weight_map'].values()))
    elif (self.path / SINGLE).is_file():  # others beside it are not the model's, as transformers takes it
      names = [SINGLE]
    else:
      names = sorted(file.name for file in self.path.glob('*.safetensors'))
    if not names:
      raise ValueError(f'{self.path} has no .safetensors file; other weight formats are not read')
    lost = [name for name in names if not (self.path / name).is_file()]
    if lost:
      raise ValueError(f'{self.path}: shards that {INDEX} lists are missing: {", ".join(lost)}')
    return [self.path / name for name in names]


def export_hf(directory: str | pathlib.Path, config: families.ModelConfig, params: nnx.State,
              tokenizer: tokenizer_lib.Tokenizer, shard_bytes: int = SHARD_BYTES) -> None:
  """Writes the model as a Hugging Face directory, in the dtype of `params`; an older export there is replaced.

  Files are written inside the target and take their names when all of them are whole; weights of other names stay.
  With several processes every one must call it (sharded parameters are gathered); the first one writes.

  Raises:
    ValueError: a parameter has no place in the layout, such as an adapter that was not merged.
  """
  directory = pathlib.Path(directory)
  writes = jax.process_index() == 0
  if writes:
    directory.mkdir(parents=True, exist_ok=True)
  scratch = pathlib.Path(tempfile.mkdtemp(dir=directory, prefix='.partial-')) if writes else None
  try:
    _write_shards(scratch, config, params, shard_bytes)
    if writes:
      _write_json(scratch / 'config.json', families.to_hf(config, **_token_ids(tokenizer)))
      _write_json(scratch / 'generation_config.json', _token_ids(tokenizer))
      tokenizer.to_directory(scratch)
      _move_in(scratch, directory)
  finally:
    if writes:
      shutil.rmtree(scratch)


def _write_shards(scratch, config, params, shard_bytes: int) -> None:
  flat = nnx.to_flat_state(params)
  total = sum(math.prod(v.shape) * v.dtype.itemsize for _, v in flat)
  shards, size = [{}], 0
  for path, variable in flat:
    in_rank = layout.row(config, path).in_rank
    for name, index, shape in layout.tensors_of(config, path, variable.shape):
      tensor_bytes = math.prod(shape) * variable.dtype.itemsize
      if size and size + tensor_bytes > shard_bytes:
        shards, size = shards + [{}], 0
      shards[-1][name] = (variable, index, in_rank)
      size += tensor_bytes
  names = [SINGLE] if len(shards) == 1 else [
      f'model-{i + 1:05d}-of-{len(shards):05d}.safetensors' for i in range(len(shards))]
  for file, entries in zip(names, shards, strict=True):
    tensors = {name: layout.to_stored(_fetch(v, index), rank) for name, (v, index, rank) in entries.items()}
    if scratch is not None:
      safetensors.numpy.save_file(tensors, str(scratch / file), metadata={'format': 'pt'})
  if scratch is not None and len(shards) > 1:
    weight_map = {name: file for file, entries in zip(names, shards, strict=True) for name in entries}
    _write_json(scratch / INDEX, dict(metadata=dict(total_size=total), weight_map=weight_map))


def _fetch(variable: nnx.Variable, index: tuple) -> np.ndarray:
  """One layer of a parameter on the host; gathered when other processes hold parts of it."""
  value = variable[...][index]
  if not value.is_fully_addressable:
    value = multihost_utils.process_allgather(value, tiled=True)
  return np.asarray(value)


def _move_in(scratch: pathlib.Path, directory: pathlib.Path) -> None:
  """Replaces an older export; config.json, by which a directory is recognised, comes last."""
  (directory / 'config.json').unlink(missing_ok=True)
  for stale in (*directory.glob(SINGLE), *directory.glob('model-?????-of-?????.safetensors'),
                directory / INDEX, directory / 'chat_template.jinja'):
    stale.unlink(missing_ok=True)
  for file in sorted(scratch.iterdir(), key=lambda f: f.name == 'config.json'):
    os.replace(file, directory / file.name)


def _token_ids(tokenizer: tokenizer_lib.Tokenizer) -> dict:
  ids = dict(bos_token_id=tokenizer.bos_id, pad_token_id=tokenizer.pad_id)
  ids['eos_token_id'] = tokenizer.eos_id if len(tokenizer.eos_ids) <= 1 else list(tokenizer.eos_ids)
  return ids


def _read_tensor(file: pathlib.Path, name: str) -> np.ndarray:
  """Opens the file anew, so that the pages it touches are not kept mapped over the whole load."""
  with safetensors.safe_open(file, framework='numpy') as shard:
    return shard.get_tensor(name)


def _read_json(path: pathlib.Path) -> dict:
  try:
    return json.loads(path.read_text(encoding='utf-8'))
  except json.JSONDecodeError as error:
    raise ValueError(f'{path} is not valid JSON: {error}') from error


def _write_json(path: pathlib.Path, fields: dict) -> None:
  path.write_text(json.dumps(fields, indent=2) + '\n', encoding='utf-8')
