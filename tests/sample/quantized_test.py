"""Weights in few bits: what is stored, what it does to log-probs, and that the engine says so."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from ptjax.models.families import ModelConfig
from ptjax.sample import decode
from ptjax.sample.engine import Engine
from ptjax.sample.requests import Request, SamplerLimits
from tests.sample import tiny_engine


class QuantizeTest(parameterized.TestCase):

  def test_by_hand(self):
    """Outputs in columns; largest magnitudes 2.54 and 127 give scales 0.02 and 1."""
    w = jnp.asarray([[2.54, 127.0], [-1.0, 0.4], [0.029, -63.6]])
    stored, scale_O = decode.quantize(w, [0], 'int8')
    np.testing.assert_allclose(scale_O, [0.02, 1.0], rtol=1e-6)
    np.testing.assert_array_equal(stored, [[127, 127], [-50, 0], [1, -64]])

  @parameterized.parameters(('int8', 0.5 / 127), ('float8_e4m3fn', 1 / 16))
  def test_error_is_within_half_a_step_of_the_largest(self, dtype, part):
    w = np.random.default_rng(0).normal(size=(5, 6, 7)).astype(np.float32) * np.geomspace(1e-3, 1e3, 7)
    stored, scale_O = decode.quantize(jnp.asarray(w), [0, 1], dtype)
    self.assertEqual(stored.dtype, dtype)
    error = np.abs(np.asarray(stored, np.float32) * np.asarray(scale_O) - w)
    self.assertLessEqual((error / np.abs(w).max((0, 1))).max(), part * 1.01)

  def test_nothing_is_divided_by_an_output_of_zeros(self):
    stored, _ = decode.quantize(jnp.zeros((3, 2)), [0], 'int8')
    np.testing.assert_array_equal(stored, 0)


class EngineTest(parameterized.TestCase):

  @parameterized.product(dtype=('int8', 'float8_e4m3fn'), out_first=(True, False))
  def test_both_layouts_give_the_logits_of_the_rounded_weights(self, dtype, out_first):
    decoder = decode.Decoder(tiny_engine.CONFIG, out_first=out_first, weight_dtype=dtype)
    state, token_T = tiny_engine.weights(), np.arange(16, dtype=np.int32)

    def rounded(path, x):
      name = jax.tree_util.keystr(path)
      if 'layers' not in name or "'w'" not in name:
        return x
      ins = [1, 2] if "'o'" in name else [1]
      stored, scale = jax.vmap(lambda w: decode.quantize(w, [i - 1 for i in ins], dtype))(x)
      return stored.astype(jnp.float32) * jnp.expand_dims(scale, ins)

    same = jax.tree_util.tree_map_with_path(rounded, state)
    params = jax.jit(decoder.layout)(state)
    shift = jax.jit(decoder.logp_shift)
    np.testing.assert_allclose(shift(params, same, token_T, 16), 0, atol=2e-5)
    self.assertGreater(np.abs(shift(params, state, token_T, 16)).max(), 1e-3)
    np.testing.assert_array_equal(shift(params, state, token_T, 9)[8:], 0)

  def test_the_engine_measures_the_shift_on_its_latest_rollout(self):
    limits = SamplerLimits(slots=2, page_size=8, max_context=64, window=6, prefill_chunk=32, biases=0,
                           weight_dtype='int8')
    made = Engine(tiny_engine.CONFIG, limits)
    made.load_params(tiny_engine.weights(), 0)
    self.assertGreater(made.stats()['logp_shift_mean'], 0)
    rollout = made.generate([Request(id='a', prompt_ids=[5, 6, 7], max_tokens=20)])[0][0]
    made.load_params(tiny_engine.weights(), 1)
    exact = tiny_engine.log_softmax(tiny_engine.expected(rollout))[np.arange(20), rollout.token_ids]
    stats, gap = made.stats(), np.abs(rollout.model_logp - exact)  # of the completion; stats also count the prompt
    self.assertBetween(stats['logp_shift_max'], gap.max() - 1e-4, 0.5)
    self.assertBetween(stats['logp_shift_mean'] * 22, gap.sum() - 1e-3, gap.sum() + 0.5)

  def test_unknown_dtype(self):
    with self.assertRaisesRegex(ValueError, "weight_dtype = 'int4'"):
      SamplerLimits(weight_dtype='int4')


if __name__ == '__main__':
  absltest.main()
