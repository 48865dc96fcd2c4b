"""Hugging Face directories: the logits of transformers, strict reading, export that reads back to the same model."""

import json
import pathlib
import shutil

from absl.testing import absltest, parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy as safetensors_numpy

from ptjax.models import attention
from ptjax.weights import load, safetensors

DATA = pathlib.Path(__file__).resolve().parent.parent / 'data' / 'weights'
MODELS = ('tiny_linear', 'tiny_llama3')


def logits_of(model: load.Loaded, ids: np.ndarray) -> np.ndarray:
  ones_BT = np.ones((1, len(ids)), np.int32)
  net = nnx.merge(model.graphdef, model.params)
  hidden_BTD = net.hidden(jnp.asarray(ids)[None], jnp.arange(len(ids))[None], attention.tree_mask(ones_BT, 0 * ones_BT))
  return np.asarray(net.logits(hidden_BTD)[0])


class SafetensorsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path) / 'model'

  def _copy(self, name):
    return pathlib.Path(shutil.copytree(DATA / name, self.directory))

  @parameterized.parameters(*MODELS)
  def test_logits_of_transformers(self, name):
    stored = np.load(DATA / name / 'logits.npz')
    np.testing.assert_allclose(logits_of(load.load(str(DATA / name)), stored['ids']), stored['logits'], atol=1e-5)

  @parameterized.product(name=MODELS, dtype=('float32', 'bfloat16'), shard_bytes=(safetensors.SHARD_BYTES, 9_000))
  def test_export_reads_back_to_the_same_model(self, name, dtype, shard_bytes):
    model = load.load(str(DATA / name), param_dtype=dtype)
    safetensors.export_hf(self.directory, model.config, model.params, model.tokenizer, shard_bytes)
    again = load.load(str(self.directory), param_dtype=dtype)
    self.assertEqual(again.config, model.config)
    self.assertEqual(again.graphdef, model.graphdef)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(again.params), nnx.to_pure_dict(model.params))
    text = 'hello the <|eot|> 123'
    self.assertEqual(again.tokenizer.encode(text, add_special=True), model.tokenizer.encode(text, add_special=True))
    for field in ('bos_id', 'eos_id', 'pad_id', 'eos_ids', 'chat_template'):
      self.assertEqual(getattr(again.tokenizer, field), getattr(model.tokenizer, field))
    files = sorted(f.name for f in self.directory.glob('*.safetensors'))
    self.assertEqual(files == ['model.safetensors'], shard_bytes > 9_000)
    self.assertEqual((self.directory / safetensors.INDEX).exists(), shard_bytes == 9_000)

  @parameterized.parameters(*MODELS)
  def test_export_writes_the_very_tensors_of_transformers(self, name):
    """Not only a round trip of our own: names, shapes and values are those that transformers wrote."""
    model = load.load(str(DATA / name), param_dtype=dict(tiny_linear='float32', tiny_llama3='bfloat16')[name])
    safetensors.export_hf(self.directory, model.config, model.params, model.tokenizer)
    theirs, ours = safetensors.Directory(DATA / name).tensors(), safetensors.Directory(self.directory).tensors()
    self.assertEqual(theirs.keys(), ours.keys())
    for tensor in theirs:
      np.testing.assert_array_equal(theirs[tensor].read(), ours[tensor].read(), err_msg=tensor)

  def test_export_replaces_an_older_one_whole(self):
    model = load.load(str(DATA / 'tiny_linear'))
    safetensors.export_hf(self.directory, model.config, model.params, model.tokenizer, 5_000)
    (self.directory / 'theirs.safetensors').write_bytes(b'not ours')
    safetensors.export_hf(self.directory, model.config, model.params, model.tokenizer)
    self.assertCountEqual([f.name for f in self.directory.iterdir()], [
        'config.json', 'generation_config.json', 'model.safetensors', 'theirs.safetensors', 'tokenizer.json',
        'tokenizer_config.json'])
    again = load.load(str(self.directory))
    jax.tree.map(np.testing.assert_array_equal, model.params, again.params)

  def test_export_refuses_unmerged_adapters_and_leaves_nothing(self):
    model = load.load(str(DATA / 'tiny_linear'))
    flat = dict(nnx.to_flat_state(model.params))
    flat['layers', 'attn', 'q', 'lora_a'] = nnx.Param(jnp.zeros((2, 16, 4)), axes='DA')
    with self.assertRaisesRegex(ValueError, 'layers/attn/q/lora_a has no tensor.*merge adapters'):
      safetensors.export_hf(self.directory, model.config, nnx.from_flat_state(list(flat.items())), model.tokenizer)
    self.assertEmpty(list(self.directory.iterdir()))

  def test_every_kind_of_mismatch_is_named_in_one_error(self):
    directory = self._copy('tiny_linear')
    tensors = safetensors_numpy.load_file(directory / 'model.safetensors')
    del tensors['model.layers.0.self_attn.q_proj.weight']
    tensors['model.layers.1.mlp.down_proj.weight'] = np.zeros((16, 23), np.float32)
    tensors['model.layers.2.input_layernorm.weight'] = np.zeros(16, np.float32)
    safetensors_numpy.save_file(tensors, directory / 'model.safetensors')
    with self.assertRaises(ValueError) as caught:
      load.load(str(directory))
    for line in ('3 problems', 'missing: model.layers.0.self_attn.q_proj.weight [32, 16]',
                 'extra: model.layers.2.input_layernorm.weight [16]',
                 'shape: model.layers.1.mlp.down_proj.weight is [16, 23], the configuration asks for [16, 24]'):
      self.assertIn(line, str(caught.exception))

  def test_damaged_and_missing_files(self):
    directory = self._copy('tiny_llama3')
    shards = sorted(directory.glob('*.safetensors'))
    whole = shards[1].read_bytes()
    shards[1].write_bytes(whole[:-7])
    with self.assertRaisesRegex(ValueError, f'{shards[1].name}.*is not a whole safetensors file'):
      load.load(str(directory))
    shards[1].unlink()
    with self.assertRaisesRegex(ValueError, f'shards that .*index.json lists are missing: {shards[1].name}'):
      load.load(str(directory))
    (directory / safetensors.INDEX).unlink()
    shards[1].write_bytes(shards[0].read_bytes())
    with self.assertRaisesRegex(ValueError, 'is in an earlier shard too'):
      load.load(str(directory))
    for shard in shards:
      shard.unlink()
    with self.assertRaisesRegex(ValueError, 'no .safetensors file'):
      load.load(str(directory))

  def test_unsupported_configuration_names_the_field(self):
    directory = self._copy('tiny_linear')
    fields = json.loads((directory / 'config.json').read_text())
    (directory / 'config.json').write_text(json.dumps(fields | dict(sliding_window=128, hidden_act='gelu')))
    with self.assertRaisesRegex(ValueError, r"(?s)hidden_act = 'gelu'.*sliding_window = 128"):
      load.load(str(directory))
    (directory / 'config.json').write_text('{')
    with self.assertRaisesRegex(ValueError, 'config.json is not valid JSON'):
      load.load(str(directory))


if __name__ == '__main__':
  absltest.main()
