"""Model families as data: one entry says how a Hugging Face config.json maps onto the shared decoder.

A field that would change the numbers and that the decoder does not implement is refused by name, never ignored.
"""

import dataclasses

ROPE_SCALINGS = ('linear', 'llama3')
REMAT_POLICIES = ('none', 'block')


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Shape and constants of one decoder; hashable, so it can be a static argument of a jitted function."""

  vocab_size: int  # V
  width: int  # D
  layers: int  # L
  heads: int  # N
  kv_heads: int  # K, divides N
  head_dim: int  # H
  ffn: int  # F
  rope_theta: float = 10_000.0
  rope_scaling: tuple = ()  # sorted (field, value) pairs; empty for plain RoPE
  norm_eps: float = 1e-5
  tied_head: bool = True
  max_position: int = 2048  # tokens
  family: str = 'llama'
  param_dtype: str = 'float32'
  compute_dtype: str = 'float32'
  remat: str = 'none'  # 'block' recomputes each layer in the backward pass

  def __post_init__(self):
    if self.heads % self.kv_heads:
      raise ValueError(f'heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}')
    if self.head_dim % 2:
      raise ValueError(f'head_dim = {self.head_dim} is odd: rotary positions need pairs')
    if self.remat not in REMAT_POLICIES:
      raise ValueError(f'remat = {self.remat!r} is not one of {REMAT_POLICIES}')

  @property
  def sizes(self) -> dict[str, int]:
    """Axis letter -> size."""
    return dict(V=self.vocab_size, D=self.width, L=self.layers, N=self.heads, K=self.kv_heads,
                H=self.head_dim, F=self.ffn)

  @property
  def parameter_count(self) -> int:
    s = self.sizes
    attention = 2 * s['D'] * s['H'] * (s['N'] + s['K'])
    layer = attention + 3 * s['D'] * s['F'] + 2 * s['D']
    return s['L'] * layer + s['V'] * s['D'] * (1 if self.tied_head else 2) + s['D']


# What each family fixes beyond the shared fields: `must` are config.json fields that have to hold these values when
# they are present, `ignored` are fields that do not change a forward pass.
FAMILIES = {
    'llama': dict(
        must=dict(hidden_act='silu', attention_bias=False, mlp_bias=False),
        weights='llama',
    ),
}

_SHARED_FIELDS = {
    'vocab_size', 'hidden_size', 'num_hidden_layers', 'num_attention_heads', 'num_key_value_heads', 'head_dim',
    'intermediate_size', 'rope_theta', 'rope_scaling', 'rope_parameters', 'rms_norm_eps', 'tie_word_embeddings',
    'max_position_embeddings', 'model_type',
}
_NO_EFFECT_FIELDS = {
    'architectures', 'attention_dropout', 'bos_token_id', 'eos_token_id', 'pad_token_id', 'initializer_range',
    'torch_dtype', 'dtype', 'transformers_version', 'use_cache', 'pretraining_tp', '_name_or_path', 'id2label',
    'label2id', 'transformers.js_config', 'is_llama_config', 'rope_interleaved', 'use_return_dict', 'return_dict',
    'output_attentions', 'output_hidden_states', 'problem_type', 'chunk_size_feed_forward', 'is_encoder_decoder',
}


def from_hf(fields: dict, **overrides) -> ModelConfig:
  """ModelConfig from the contents of a config.json.

  Raises:
    ValueError: names every field that is missing or that the decoder does not support.
  """
  family = fields.get('model_type')
  if family not in FAMILIES:
    raise ValueError(f'config.json: model_type = {family!r} is not supported; known: {sorted(FAMILIES)}')
  problems = []
  for name, value in FAMILIES[family]['must'].items():
    if fields.get(name, value) != value:
      problems.append(f'{name} = {fields[name]!r}: only {value!r} is supported')
  if fields.get('rope_interleaved'):
    problems.append('rope_interleaved = True: only the half-split rotary layout is supported')
  known = _SHARED_FIELDS | _NO_EFFECT_FIELDS | set(FAMILIES[family]['must'])
  for name in sorted(set(fields) - known):
    if fields[name] not in (None, False):
      problems.append(f'{name} = {fields[name]!r}: unknown field, it might change the numbers')
  required = ('vocab_size', 'hidden_size', 'num_hidden_layers', 'num_attention_heads', 'intermediate_size')
  problems += [f'{name}: missing' for name in required if name not in fields]
  scaling = _rope_scaling(fields, problems)
  if problems:
    raise ValueError('config.json is not supported as it is:\n  ' + '\n  '.join(problems))
  heads = fields['num_attention_heads']
  rope = fields.get('rope_parameters') or {}
  settings = dict(
      vocab_size=fields['vocab_size'], width=fields['hidden_size'], layers=fields['num_hidden_layers'], heads=heads,
      kv_heads=fields.get('num_key_value_heads') or heads,
      head_dim=fields.get('head_dim') or fields['hidden_size'] // heads, ffn=fields['intermediate_size'],
      rope_theta=float(fields.get('rope_theta') or rope.get('rope_theta') or 10_000.0), rope_scaling=scaling,
      norm_eps=fields.get('rms_norm_eps', 1e-6), tied_head=fields.get('tie_word_embeddings', False),
      max_position=fields.get('max_position_embeddings', 2048), family=family)
  return ModelConfig(**(settings | overrides))


def to_hf(config: ModelConfig, **tokens) -> dict:
  """The config.json of `config`; `tokens` adds fields such as eos_token_id."""
  scaling = dict(config.rope_scaling) or None
  return dict(
      architectures=['LlamaForCausalLM'], model_type=config.family, vocab_size=config.vocab_size,
      hidden_size=config.width, num_hidden_layers=config.layers, num_attention_heads=config.heads,
      num_key_value_heads=config.kv_heads, head_dim=config.head_dim, intermediate_size=config.ffn,
      rope_theta=config.rope_theta, rope_scaling=scaling, rms_norm_eps=config.norm_eps,
      tie_word_embeddings=config.tied_head, max_position_embeddings=config.max_position, hidden_act='silu',
      attention_bias=False, mlp_bias=False, torch_dtype=config.param_dtype, **tokens)


def _rope_scaling(fields, problems) -> tuple:
  """Sorted (field, value) pairs of the RoPE scaling, or () for none; appends what is unsupported to `problems`."""
  raw = dict(fields.get('rope_scaling') or fields.get('rope_parameters') or {})
  raw.pop('rope_theta', None)
  kind = raw.pop('rope_type', raw.pop('type', 'default'))
  raw.pop('type', None)
  if kind == 'default':
    return ()
  wanted = dict(linear={'factor'}, llama3={'factor', 'low_freq_factor', 'high_freq_factor',
                                           'original_max_position_embeddings'})
  if kind not in ROPE_SCALINGS:
    problems.append(f'rope_scaling type {kind!r}: only {ROPE_SCALINGS} are supported')
    return ()
  if set(raw) != wanted[kind]:
    problems.append(f'rope_scaling of type {kind!r} needs exactly {sorted(wanted[kind])}, has {sorted(raw)}')
  return tuple(sorted({'rope_type': kind, **raw}.items()))


# `random:<size>`: shapes to start from without any weights.
RANDOM_SIZES = {
    'tiny': dict(vocab_size=320, width=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=128, max_position=1024),
    'smollm2-135m': dict(vocab_size=49_152, width=576, layers=30, heads=9, kv_heads=3, head_dim=64, ffn=1536,
                         rope_theta=100_000.0, max_position=8192),
}
