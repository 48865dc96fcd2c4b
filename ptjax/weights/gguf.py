"""Reads GGUF files: configuration, vocabulary, and tensors in the Hugging Face names and layout.

The header is parsed here, since the `gguf` package spends seconds and 150 MB on a vocabulary; the package dequantises.
Refused by name: architectures other than those in ARCHITECTURES, metadata that would change the numbers, quantisations
that are not decoded, tensors that the file does not hold whole. Tensors are decoded one at a time, when read.
"""

import math
import mmap
import pathlib
import struct
from typing import Any, NamedTuple

import gguf
import numpy as np

from ptjax.data import tokenizer as tokenizer_lib
from ptjax.models import families
from ptjax.weights.layout import Tensor

ARCHITECTURES = {'llama': 'llama'}  # general.architecture -> a family

_Q = gguf.GGMLQuantizationType
DECODED = (_Q.F32, _Q.F16, _Q.BF16, _Q.Q4_0, _Q.Q4_1, _Q.Q5_0, _Q.Q5_1, _Q.Q8_0, _Q.Q2_K, _Q.Q3_K, _Q.Q4_K, _Q.Q5_K,
           _Q.Q6_K)

_NAMES = {
    'token_embd.weight': 'model.embed_tokens.weight',
    'output_norm.weight': 'model.norm.weight',
    'output.weight': 'lm_head.weight',
}
_LAYER_NAMES = {
    'attn_norm.weight': 'input_layernorm.weight',
    'attn_q.weight': 'self_attn.q_proj.weight',
    'attn_k.weight': 'self_attn.k_proj.weight',
    'attn_v.weight': 'self_attn.v_proj.weight',
    'attn_output.weight': 'self_attn.o_proj.weight',
    'ffn_norm.weight': 'post_attention_layernorm.weight',
    'ffn_gate.weight': 'mlp.gate_proj.weight',
    'ffn_up.weight': 'mlp.up_proj.weight',
    'ffn_down.weight': 'mlp.down_proj.weight',
}
_REQUIRED = {
    'embedding_length': 'hidden_size',
    'block_count': 'num_hidden_layers',
    'attention.head_count': 'num_attention_heads',
    'feed_forward_length': 'intermediate_size',
    'context_length': 'max_position_embeddings',
    'attention.layer_norm_rms_epsilon': 'rms_norm_eps',
}
_OPTIONAL = {'attention.head_count_kv': 'num_key_value_heads', 'rope.freq_base': 'rope_theta',
             'attention.key_length': 'head_dim'}
_CHECKED = ('vocab_size', 'rope.dimension_count', 'attention.value_length', 'rope.scaling.type', 'rope.scaling.factor',
            'rope.scaling.original_context_length', 'rope.scaling.finetuned', 'expert_count', 'expert_used_count')
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type


class _Stored(NamedTuple):
  """Where one tensor lies in the file."""

  shape: tuple[int, ...]  # slowest axis first
  kind: gguf.GGMLQuantizationType
  start: int  # bytes from the start of the file


class File:
  """One GGUF file, mapped into memory; nothing is decoded until asked for."""

  def __init__(self, path: str | pathlib.Path):
    """Raises ValueError when the file is no GGUF file, or is cut short (naming the tensors it lacks)."""
    self.path = pathlib.Path(path)
    with open(self.path, 'rb') as file:
      self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.path.stat().st_size else b''
    try:
      self.fields, self._tensors = _parse(self._bytes)
    except (ValueError, ArithmeticError, struct.error) as error:
      raise ValueError(f'{path} ({len(self._bytes)} bytes) is not a whole GGUF file: {error}. '
                       'It was cut short or damaged; fetch it again.') from error
    cut = [name for name, t in self._tensors.items() if t.start + _byte_count(t) > len(self._bytes)]
    if cut:
      raise ValueError(f'{path} ({len(self._bytes)} bytes) was cut short, fetch it again; not whole in it: '
                       + ', '.join(cut))

  def config(self, **overrides) -> families.ModelConfig:
    """ModelConfig from the metadata; `overrides` are ModelConfig fields.

    Raises:
      ValueError: names the architecture and every field that is missing or not supported.
    """
    architecture = self.fields.get('general.architecture')
    if architecture not in ARCHITECTURES:
      raise ValueError(f'{self.path}: general.architecture = {architecture!r} is not supported; '
                       f'known: {sorted(ARCHITECTURES)}')
    prefix = architecture + '.'
    found = {n.removeprefix(prefix): value for n, value in self.fields.items() if n.startswith(prefix)}
    problems = [f'{prefix}{n}: missing' for n in _REQUIRED if n not in found]
    problems += [f'{prefix}{n} = {found[n]!r}: unknown field, it might change the numbers'
                 for n in sorted(set(found) - set(_REQUIRED) - set(_OPTIONAL) - set(_CHECKED))]
    problems += [f'{prefix}{problem}' for problem in _wrong_values(found)]
    if problems:
      raise ValueError(f'{self.path} is not supported as it is:\n  ' + '\n  '.join(problems))
    fields = {hf: found[n] for n, hf in (_REQUIRED | _OPTIONAL).items() if n in found}
    if _rope_scaling(found) == 'linear':
      fields['rope_scaling'] = dict(rope_type='linear', factor=found['rope.scaling.factor'])
    vocab_size = found.get('vocab_size') or len(self.fields.get('tokenizer.ggml.tokens', ()))
    return families.from_hf(dict(fields, model_type=ARCHITECTURES[architecture], vocab_size=vocab_size,
                                 tie_word_embeddings='output.weight' not in self._tensors), **overrides)

  def tokenizer(self) -> tokenizer_lib.Tokenizer:
    """The tokenizer that the metadata describe.

    Raises:
      ValueError: the vocabulary is not byte-level BPE, or its pre-tokenizer is unknown.
    """
    kind = self.fields.get('tokenizer.ggml.model')
    if kind != 'gpt2':
      raise ValueError(f"{self.path}: tokenizer.ggml.model = {kind!r} is not supported; known: ['gpt2']. "
                       'Load the Hugging Face directory of the model instead (tokenizer.json).')
    lengths = {name: len(self.fields.get(f'tokenizer.ggml.{name}', ())) for name in ('tokens', 'token_type', 'merges')}
    if not all(lengths.values()) or lengths['token_type'] != lengths['tokens']:
      raise ValueError(f'{self.path}: the vocabulary needs tokenizer.ggml.tokens, .merges and one .token_type per '
                       f'token; their lengths are {lengths}')
    types = np.asarray(self.fields['tokenizer.ggml.token_type'])
    pre = self.fields.get('tokenizer.ggml.pre', 'default')
    ids = {name: self.fields.get(f'tokenizer.ggml.{field}_token_id') for name, field in
           dict(bos_id='bos', eos_id='eos', pad_id='padding', eot_id='eot').items()}
    return tokenizer_lib.from_vocabulary(
        self.fields['tokenizer.ggml.tokens'], self.fields['tokenizer.ggml.merges'],
        np.flatnonzero(types == _CONTROL).tolist(), pre, **ids,
        add_bos=self.fields.get('tokenizer.ggml.add_bos_token', pre == 'llama-bpe'),  # as llama.cpp takes it
        chat_template=self.fields.get('tokenizer.chat_template'),
        max_length=self.fields.get(f'{self.fields.get("general.architecture")}.context_length'),
        plain_added=np.flatnonzero(types == _USER_DEFINED).tolist())

  def tensors(self) -> dict[str, Tensor]:
    """Every tensor of the file under its Hugging Face name; one without such a name keeps its own.

    Raises:
      ValueError: names each tensor whose quantisation cannot be decoded.
    """
    bad = [f'{name}: {t.kind.name}' for name, t in self._tensors.items() if t.kind not in DECODED]
    if bad:
      raise ValueError(f'{self.path}: quantisations that cannot be decoded (known: '
                       f'{", ".join(q.name for q in DECODED)}):\n  ' + '\n  '.join(bad))
    return {_hf_name(name): self._entry(name) for name in self._tensors}

  def _entry(self, name: str) -> Tensor:
    tensor = self._tensors[name]
    prefix = self.fields.get('general.architecture')
    heads = self.fields.get(f'{prefix}.attention.head_count')
    if name.endswith('attn_k.weight'):
      heads = self.fields.get(f'{prefix}.attention.head_count_kv', heads)
    permuted = name.endswith(('attn_q.weight', 'attn_k.weight'))

    def read() -> np.ndarray:
      raw = np.frombuffer(self._bytes, np.uint8, _byte_count(tensor), tensor.start)
      rows = raw.reshape(gguf.quant_shape_to_byte_shape(tensor.shape, tensor.kind))
      array = gguf.dequantize(rows, tensor.kind)
      return half_split(array, heads) if permuted else array

    return Tensor(tensor.shape, read)


def _rope_scaling(found: dict) -> str:
  """The kind of scaling; a factor alone means linear, as it does to llama.cpp."""
  return found.get('rope.scaling.type', 'linear' if 'rope.scaling.factor' in found else 'none')


def _wrong_values(found: dict) -> list[str]:
  """Fields of the architecture that are known but hold what the decoder does not do."""
  lists = [f'{n}: one value per layer; only the same for all is supported' for n in found if isinstance(found[n], list)]
  if lists:
    return lists
  head_dim = found.get('attention.key_length') or (
      found.get('embedding_length', 0) // found.get('attention.head_count', 1))
  allowed = {'rope.dimension_count': (head_dim,), 'attention.value_length': (head_dim,), 'expert_count': (0,),
             'expert_used_count': (0,), 'rope.scaling.type': ('none', 'linear')}
  wrong = [f'{n} = {found[n]!r}: only {" or ".join(map(repr, values))} is supported'
           for n, values in allowed.items() if n in found and found[n] not in values]
  if _rope_scaling(found) == 'linear' and 'rope.scaling.factor' not in found:
    wrong.append('rope.scaling.factor: missing')
  return wrong


def half_split(rows: np.ndarray, heads: int) -> np.ndarray:
  """Q or K rows of a llama-architecture file, whose rotary pairs lie side by side, in the half-split order.

  Row 2i + j of a head goes to row i + j * H/2 (j in {0, 1}).
  """
  inputs = rows.shape[1]
  return rows.reshape(heads, -1, 2, inputs).swapaxes(1, 2).reshape(-1, inputs)


def _hf_name(name: str) -> str:
  block, _, rest = name.partition('.')
  layer, _, rest = rest.partition('.')
  if block == 'blk' and rest in _LAYER_NAMES:
    return f'model.layers.{layer}.{_LAYER_NAMES[rest]}'
  return _NAMES.get(name, name)


_SCALARS = ('<B', '<b', '<H', '<h', '<I', '<i', '<f', '<?', None, None, '<Q', '<q', '<d')  # by metadata value type
_STRING, _ARRAY, _FLOAT32 = 8, 9, 6


def _parse(data) -> tuple[dict[str, Any], dict[str, _Stored]]:
  """Metadata and tensor table of a GGUF file (version 2 or 3, little-endian)."""
  magic, version, tensor_count, field_count = struct.unpack_from('<4sIQQ', data)
  if magic != b'GGUF' or version not in (2, 3):
    raise ValueError(f'it starts with {magic!r}, version {version}; only GGUF versions 2 and 3 are read')
  cursor = _Cursor(data, 24)
  fields = {}
  for _ in range(field_count):
    name = cursor.string()
    fields[name] = cursor.value(cursor.scalar('<I'))
  rows = []
  for _ in range(tensor_count):
    name, rank = cursor.string(), cursor.scalar('<I')
    shape = tuple(cursor.scalar('<Q') for _ in range(rank))[::-1]
    rows.append((name, shape, gguf.GGMLQuantizationType(cursor.scalar('<I')), cursor.scalar('<Q')))
  alignment = fields.get('general.alignment', 32)
  base = -(-cursor.offset // alignment) * alignment
  tensors = {name: _Stored(shape, kind, base + start) for name, shape, kind, start in rows}
  if len(tensors) != len(rows):
    raise ValueError('two tensors have the same name')
  return fields, tensors


class _Cursor:
  """Reads the header's values one after the other."""

  def __init__(self, data, offset: int):
    self._data, self.offset = data, offset

  def scalar(self, form: str):
    value, = struct.unpack_from(form, self._data, self.offset)
    self.offset += struct.calcsize(form)
    return value

  def string(self) -> str:
    length = self.scalar('<Q')
    text = self._data[self.offset:self.offset + length]
    if len(text) != length:
      raise ValueError('a text ends past the end of the file')
    self.offset += length
    return str(text, 'utf-8')

  def value(self, kind: int):
    if kind == _STRING:
      return self.string()
    if kind == _ARRAY:
      inner, length = self.scalar('<I'), self.scalar('<Q')
      if length > len(self._data):
        raise ValueError('a list is longer than the file')
      return [self.value(inner) for _ in range(length)]
    if kind >= len(_SCALARS):
      raise ValueError(f'unknown metadata value type {kind}')
    value = self.scalar(_SCALARS[kind])
    return float(str(np.float32(value))) if kind == _FLOAT32 else value


def _byte_count(tensor: _Stored) -> int:
  return math.prod(gguf.quant_shape_to_byte_shape(tensor.shape, tensor.kind))
