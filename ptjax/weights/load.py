"""Loads a model: source -> configuration, sharded parameters, tokenizer.

Tensors are read one at a time into the stacked array of their parameter, which is put on the devices and freed before
the next one starts; the largest parameters go first, so host memory stays near one copy of the model. The load is
strict: every missing, extra and mis-shaped tensor is named in one error, before anything is put on a device.
"""

from collections.abc import Callable, Mapping
import pathlib
from typing import Any, NamedTuple

from absl import logging
from flax import nnx
import jax
import numpy as np

from ptjax.data import tokenizer as tokenizer_lib
from ptjax.models import families, transformer
from ptjax.weights import gguf, layout, safetensors, source as source_lib

Place = Callable[[Any, str], jax.Array]  # (host array, axis letters) -> array on the devices


class Loaded(NamedTuple):
  """What `nnx.merge(graphdef, params)` needs, and the text side."""

  config: families.ModelConfig
  graphdef: nnx.GraphDef
  params: nnx.State
  tokenizer: tokenizer_lib.Tokenizer


def load(source: str, *, place: Place | None = None, cache_dir: str | pathlib.Path = source_lib.CACHE_DIR,
         seed: int = 0, **overrides) -> Loaded:
  """Loads `source` (see source.resolve).

  Args:
    place: puts a host array with the given axis letters on the devices; the default device when None.
    cache_dir: where fetched models are kept.
    seed: of the initialisation, for `random:` sources only.
    **overrides: ModelConfig fields, such as param_dtype, compute_dtype and remat.

  Raises:
    ValueError: the source cannot be had, is not supported, or does not hold exactly the model's tensors.
  """
  place = place or (lambda array, axes: jax.device_put(array, may_alias=False))
  model = source_lib.resolve(source, cache_dir)
  if model.kind == 'random':
    config = families.ModelConfig(**(families.RANDOM_SIZES[model.path] | overrides))
    graphdef, params = _initialise(config, seed, place)
    return Loaded(config, graphdef, params, tokenizer_lib.byte_level(config.vocab_size))
  checkpoint = gguf.File(model.path) if model.kind == 'gguf' else safetensors.Directory(model.path)
  config = checkpoint.config(**overrides)
  tokenizer = checkpoint.tokenizer()
  if len(tokenizer) > config.vocab_size:
    raise ValueError(f'{model.path}: the tokenizer has {len(tokenizer)} ids, the model only {config.vocab_size}')
  graphdef, abstract = abstract_model(config)
  params = fill(config, abstract, checkpoint.tensors(), place)
  logging.info('loaded %s: %.1fM parameters, %s', source, config.parameter_count / 1e6, config.param_dtype)
  return Loaded(config, graphdef, params, tokenizer)


def abstract_model(config: families.ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
  """Graph definition and state of shapes; allocates nothing."""
  return nnx.split(nnx.eval_shape(lambda: transformer.Transformer(config, nnx.Rngs(0))))


def fill(config: families.ModelConfig, abstract: nnx.State, tensors: Mapping[str, layout.Tensor],
         place: Place) -> nnx.State:
  """The state `abstract` with every parameter read from `tensors` and placed.

  Raises:
    ValueError: names every missing, extra and mis-shaped tensor.
  """
  flat = dict(nnx.to_flat_state(abstract))
  _check_tensors(config, flat, tensors)
  placed = {}
  for path in sorted(flat, key=lambda p: -np.prod(flat[p].shape)):
    array = _read(config, path, flat[path], tensors)
    placed[path] = flat[path].replace(_placed(array, flat[path], place))
  return nnx.from_flat_state([(path, placed[path]) for path in flat])


def _read(config, path, variable, tensors) -> np.ndarray:
  """One whole parameter on the host."""
  host = np.empty(variable.shape, variable.dtype)
  in_rank = layout.row(config, path).in_rank
  for name, index, _ in layout.tensors_of(config, path, variable.shape):
    host[index] = layout.to_parameter(tensors[name].read(), host[index].shape, in_rank)
  return host


def _check_tensors(config, flat, tensors) -> None:
  wanted = {name: shape for path, variable in flat.items()
            for name, _, shape in layout.tensors_of(config, path, variable.shape)}
  problems = [f'missing: {name} {list(wanted[name])}' for name in wanted if name not in tensors]
  problems += [f'extra: {name} {list(tensors[name].shape)}' for name in sorted(set(tensors) - set(wanted))]
  problems += [f'shape: {name} is {list(tensors[name].shape)}, the configuration asks for {list(wanted[name])}'
               for name in wanted if name in tensors and tuple(tensors[name].shape) != tuple(wanted[name])]
  if problems:
    raise ValueError(f'the tensors do not match the configuration ({len(problems)} problems):\n  '
                     + '\n  '.join(problems))


def _placed(array, variable: nnx.Variable, place: Place) -> jax.Array:
  """The array on the devices; waits, so that the host's copy can be freed."""
  return jax.block_until_ready(place(array, variable.get_metadata()['axes']))


def _initialise(config, seed: int, place: Place) -> tuple[nnx.GraphDef, nnx.State]:
  graphdef, params = nnx.split(transformer.Transformer(config, nnx.Rngs(seed)))
  left = list(nnx.to_flat_state(params))[::-1]
  del params  # each array is let go as soon as it is placed
  placed = []
  while left:
    path, variable = left.pop()
    placed.append((path, variable.replace(_placed(variable[...], variable, place))))
  return graphdef, nnx.from_flat_state(placed)
