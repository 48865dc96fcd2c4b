"""config.json is read whole or refused by field."""

from absl.testing import absltest
from absl.testing import parameterized

from ptjax.models import families

FIELDS = dict(model_type='llama', vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, intermediate_size=128, rms_norm_eps=1e-5, rope_theta=5e5,
              tie_word_embeddings=True, max_position_embeddings=2048, hidden_act='silu')


class FamiliesTest(parameterized.TestCase):

  def test_reads_every_field(self):
    config = families.from_hf(FIELDS, param_dtype='bfloat16')
    self.assertEqual(config, families.ModelConfig(
        vocab_size=100, width=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=128, rope_theta=5e5, norm_eps=1e-5,
        tied_head=True, max_position=2048, param_dtype='bfloat16'))

  def test_round_trip(self):
    scaling = dict(rope_type='llama3', factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=8192)
    config = families.from_hf(FIELDS | dict(rope_scaling=scaling))
    self.assertEqual(families.from_hf(families.to_hf(config)), config)

  @parameterized.parameters(
      (dict(model_type='mamba'), "model_type = 'mamba' is not supported; known: .'llama'"),
      (dict(hidden_act='gelu'), "hidden_act = 'gelu': only 'silu'"),
      (dict(attention_bias=True), 'attention_bias = True: only False'),
      (dict(sliding_window=4096), 'sliding_window = 4096: unknown field'),
      (dict(rope_scaling=dict(rope_type='yarn', factor=4.0)), "rope_scaling type 'yarn'"),
      (dict(rope_scaling=dict(type='linear')), "needs exactly .'factor'., has"),
      (dict(num_key_value_heads=3), 'heads = 4 is not a multiple of kv_heads = 3'),
  )
  def test_refuses_by_name(self, changed, message):
    with self.assertRaisesRegex(ValueError, message):
      families.from_hf(FIELDS | changed)

  def test_names_all_problems_at_once(self):
    with self.assertRaisesRegex(ValueError, '(?s)hidden_act.*qk_layernorm.*vocab_size: missing'):
      kept = {k: v for k, v in FIELDS.items() if k != 'vocab_size'}
      families.from_hf(kept | dict(hidden_act='relu', qk_layernorm=True))


if __name__ == '__main__':
  absltest.main()
