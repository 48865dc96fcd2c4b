"""GGUF: block decoding against bytes worked by hand, the Q/K row order, configuration, strictness on damaged files."""

import pathlib
import struct

from absl.testing import absltest, parameterized
from flax import nnx
import gguf as gguf_package
import jax.numpy as jnp
import numpy as np
from tokenizers import pre_tokenizers

from ptjax.models import attention
from ptjax.weights import gguf, load, safetensors

DATA = pathlib.Path(__file__).resolve().parent.parent / 'data' / 'weights'
Q = gguf_package.GGMLQuantizationType
TO_GGUF = {hf: name for name, hf in gguf._NAMES.items()}
TO_GGUF_LAYER = {hf: name for name, hf in gguf._LAYER_NAMES.items()}


def half(x: float) -> bytes:
  return np.float16(x).tobytes()


# One block each: the type, its bytes, and its values worked from the format's definition.
BLOCKS = {
    # value = code * d + m; byte i holds code i (low) and code i + 16 (high)
    'Q4_1': (Q.Q4_1, half(0.5) + half(-2) + bytes(i | (15 - i) << 4 for i in range(16)),
             [i * 0.5 - 2 for i in range(16)] + [(15 - i) * 0.5 - 2 for i in range(16)]),
    # value = (code - 8) * d
    'Q4_0': (Q.Q4_0, half(0.25) + bytes(i | (15 - i) << 4 for i in range(16)),
             [(i - 8) * 0.25 for i in range(16)] + [(7 - i) * 0.25 for i in range(16)]),
    # value = code * d, signed bytes
    'Q8_0': (Q.Q8_0, half(0.125) + struct.pack('32b', *range(-16, 16)), [i * 0.125 for i in range(-16, 16)]),
    'F16': (Q.F16, np.arange(32, dtype=np.float16).tobytes(), list(range(32))),
    'BF16': (Q.BF16, b''.join(struct.pack('<f', i)[2:] for i in range(32)), list(range(32))),
    'F32': (Q.F32, np.arange(32, dtype=np.float32).tobytes(), list(range(32))),
    # 8 groups of 32: value = code * d * scale - dmin * min; scales 1, mins 2 in 6-bit fields; codes all 3
    'Q4_K': (Q.Q4_K, half(0.5) + half(0.25) + bytes([1] * 4 + [2] * 4 + [1 | 2 << 4] * 4) + bytes([0x33] * 128),
             [3 * 0.5 * 1 - 0.25 * 2] * 256),
    # 16 groups of 16: value = (code - 32) * d * scale; low nibble 5, high two bits 2, so code 37; scale i - 8
    'Q6_K': (Q.Q6_K, bytes([0x55] * 128) + bytes([0xAA] * 64) + struct.pack('16b', *range(-8, 8)) + half(0.5),
             [(37 - 32) * 0.5 * (i // 16 - 8) for i in range(256)]),
}


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
  """Half-split rows in the file's order: row i + j * H/2 of a head goes to row 2i + j."""
  split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, rows.shape[1])
  return np.stack([split[:, 0], split[:, 1]], axis=2).reshape(rows.shape)


def write_tiny(path, tensors=None, fields=(), architecture='llama', kind=Q.F32, drop=(), pre='smollm', without=()):
  """tests/data/weights/tiny_linear as a GGUF file."""
  source = safetensors.Directory(DATA / 'tiny_linear')
  config = source.config()
  writer = gguf_package.GGUFWriter(path, architecture)
  writer.add_context_length(config.max_position)
  writer.add_embedding_length(config.width)
  writer.add_block_count(config.layers)
  writer.add_feed_forward_length(config.ffn)
  writer.add_head_count(config.heads)
  writer.add_head_count_kv(config.kv_heads)
  writer.add_layer_norm_rms_eps(config.norm_eps)
  writer.add_rope_freq_base(config.rope_theta)
  writer.add_rope_dimension_count(config.head_dim)
  writer.add_key_length(config.head_dim)
  writer.add_rope_scaling_type(gguf_package.RopeScalingType.LINEAR)
  writer.add_rope_scaling_factor(4.0)
  for name, value in fields:
    writer.add_uint32(f'{architecture}.{name}', value)
  tokens = ['<s>', '</s>', *sorted(pre_tokenizers.ByteLevel.alphabet()), 'he', 'll']
  tokens += [f'<unused{i}>' for i in range(config.vocab_size - len(tokens))]
  writer.add_tokenizer_model('gpt2')
  writer.add_tokenizer_pre(pre)
  writer.add_token_list(tokens)
  writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
  writer.add_token_merges(['h e', 'l l'])
  writer.add_bos_token_id(0)
  writer.add_eos_token_id(1)
  writer.add_add_bos_token(True)
  for name, tensor in (tensors or source.tensors()).items():
    array = tensor.read()
    heads = dict(q_proj=config.heads, k_proj=config.kv_heads).get(name.split('.')[-2])
    array = interleaved(array, heads) if heads else array
    parts = name.split('.', 3)
    target = TO_GGUF.get(name) or f'blk.{parts[2]}.{TO_GGUF_LAYER[parts[3]]}'
    if target not in drop:
      chosen = Q.F32 if array.ndim == 1 else kind
      writer.add_tensor(target, gguf_package.quantize(array, chosen), raw_dtype=chosen)
  for name in without:
    del writer.kv_data[0][name]
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


class GgufTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.path = pathlib.Path(self.create_tempdir().full_path) / 'tiny.gguf'

  @parameterized.named_parameters((name, *case) for name, case in BLOCKS.items())
  def test_block_decoding(self, kind, raw, values):
    writer = gguf_package.GGUFWriter(self.path, 'llama')
    block = np.frombuffer(raw + raw, np.uint8).reshape(2, -1)
    writer.add_tensor('output.weight', block, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = gguf.File(self.path).tensors()['lm_head.weight']
    self.assertEqual(tensor.shape, (2, len(values)))
    np.testing.assert_array_equal(tensor.read(), [values, values])

  def test_half_split_order(self):
    # one head of H = 4 with pairs (a0, a1), (b0, b1) side by side -> a0, b0, a1, b1
    rows = np.asarray([[0.0], [1.0], [2.0], [3.0]])
    np.testing.assert_array_equal(gguf.half_split(rows, 1)[:, 0], [0, 2, 1, 3])
    np.testing.assert_array_equal(gguf.half_split(interleaved(rows, 1), 1), rows)

  @parameterized.named_parameters(('f32', Q.F32, 1e-5), ('f16', Q.F16, 2e-2), ('bf16', Q.BF16, 2e-1))
  def test_same_logits_as_the_hugging_face_directory(self, kind, tolerance):
    write_tiny(self.path, kind=kind)
    model = load.load(str(self.path))
    stored = np.load(DATA / 'tiny_linear' / 'logits.npz')
    ids_BT = stored['ids'][None]
    ones_BT = np.ones_like(ids_BT)
    hidden_BTD = nnx.merge(model.graphdef, model.params).hidden(
        jnp.asarray(ids_BT), jnp.arange(ids_BT.shape[1])[None], attention.tree_mask(ones_BT, 0 * ones_BT))
    logits_BTV = nnx.merge(model.graphdef, model.params).logits(hidden_BTD)
    np.testing.assert_allclose(logits_BTV[0], stored['logits'], atol=tolerance)

  def test_configuration_equals_that_of_the_directory(self):
    write_tiny(self.path)
    self.assertEqual(gguf.File(self.path).config(), safetensors.Directory(DATA / 'tiny_linear').config())

  def test_vocabulary(self):
    write_tiny(self.path)
    tokenizer = gguf.File(self.path).tokenizer()
    self.assertEqual((tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.eos_ids), (0, 1, 1, (1,)))
    self.assertEqual([tokenizer.token(i) for i in tokenizer.encode('hello</s>')], ['he', 'll', 'o', '</s>'])
    self.assertEqual(tokenizer.encode('a', add_special=True), [0, *tokenizer.encode('a')])

  def test_refuses_by_name(self):
    write_tiny(self.path, architecture='mamba')
    with self.assertRaisesRegex(ValueError, r"general.architecture = 'mamba' is not supported; known: \['llama'\]"):
      gguf.File(self.path).config()
    write_tiny(self.path, fields=[('expert_count', 8), ('attention.sliding_window', 64)])
    with self.assertRaisesRegex(ValueError, r'(?s)sliding_window = 64: unknown field.*expert_count = 8: only 0'):
      gguf.File(self.path).config()
    write_tiny(self.path, pre='martian')
    with self.assertRaisesRegex(ValueError, "tokenizer.ggml.pre = 'martian' is not supported; known: .*'smollm'"):
      gguf.File(self.path).tokenizer()

  def test_what_a_field_that_is_left_out_stands_for(self):
    write_tiny(self.path, without=['llama.rope.scaling.type'])
    self.assertEqual(gguf.File(self.path).config(), safetensors.Directory(DATA / 'tiny_linear').config())
    for pre, add_bos in (('llama-bpe', True), ('smollm', False)):
      write_tiny(self.path, pre=pre, without=['tokenizer.ggml.add_bos_token'])
      self.assertEqual(gguf.File(self.path).tokenizer().encode('a', add_special=True)[0] == 0, add_bos)
    for name in ('tokens', 'token_type', 'merges'):
      write_tiny(self.path, without=[f'tokenizer.ggml.{name}'], fields=[('vocab_size', 300)])
      with self.assertRaisesRegex(ValueError, f"the vocabulary needs .*'{name}': 0"):
        gguf.File(self.path).tokenizer()

  def test_missing_and_mis_shaped_tensors_are_all_named(self):
    write_tiny(self.path, drop=('blk.1.ffn_up.weight', 'output_norm.weight'), fields=[('vocab_size', 300)])
    with self.assertRaises(ValueError) as caught:
      load.load(str(self.path))
    message = str(caught.exception)
    self.assertIn('3 problems', message)
    self.assertIn('missing: model.layers.1.mlp.up_proj.weight [24, 16]', message)
    self.assertIn('missing: model.norm.weight [16]', message)
    self.assertIn('shape: model.embed_tokens.weight is [272, 16], the configuration asks for [300, 16]', message)

  def test_a_file_cut_anywhere_is_refused(self):
    write_tiny(self.path)
    whole = self.path.read_bytes()
    for length in (0, 3, 10, 30, 200, 2000, len(whole) // 2):
      self.path.write_bytes(whole[:length])
      with self.assertRaisesRegex(ValueError, r'tiny.gguf \(\d+ bytes\)'):
        gguf.File(self.path)
    self.path.write_bytes(whole[:-100])
    with self.assertRaisesRegex(ValueError, 'was cut short, fetch it again; not whole in it: output_norm.weight|blk'):
      gguf.File(self.path)


if __name__ == '__main__':
  absltest.main()
