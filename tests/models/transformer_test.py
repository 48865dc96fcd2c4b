"""The decoder: packing, trunk sharing, padding and depth change nothing that they should not change."""

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from ptjax.models import adapters
from ptjax.models import attention
from ptjax.models import families
from ptjax.models import transformer

CONFIG = families.ModelConfig(**families.RANDOM_SIZES['tiny'])
GRAPHDEF, STATE = nnx.split(transformer.Transformer(CONFIG, nnx.Rngs(0)))


@jax.jit
def logits(state, token_BT, segment_BT, branch_BT, position_BT):
  model = nnx.merge(GRAPHDEF, state)
  return model.logits(model.hidden(token_BT, position_BT, attention.tree_mask(segment_BT, branch_BT)))


def row(token, segment, branch, position):
  return [np.array([x], np.int32) for x in (token, segment, branch, position)]


class TransformerTest(parameterized.TestCase):

  def test_a_prompt_shared_by_two_branches_equals_two_plain_rows(self):
    shared = logits(STATE, *row([5, 6, 7, 8, 9, 10], [1] * 6, [0, 0, 1, 1, 2, 2], [0, 1, 2, 3, 2, 3]))
    first = logits(STATE, *row([5, 6, 7, 8], [1] * 4, [0, 0, 1, 1], [0, 1, 2, 3]))
    second = logits(STATE, *row([5, 6, 9, 10], [1] * 4, [0, 0, 1, 1], [0, 1, 2, 3]))
    np.testing.assert_allclose(shared[0, :4], first[0], atol=1e-5)
    np.testing.assert_allclose(shared[0, 4:], second[0, 2:], atol=1e-5)

  def test_another_document_in_the_row_changes_no_bit(self):
    build = lambda a: logits(STATE, *row([a, a + 1, 7, 8], [1, 1, 2, 2], [0] * 4, [0, 1, 0, 1]))
    np.testing.assert_array_equal(build(5)[0, 2:], build(90)[0, 2:])

  def test_padding_changes_no_bit_and_is_finite(self):
    padded = lambda pad: logits(STATE, *row([7, 8, pad, pad], [1, 1, 0, 0], [0] * 4, [0, 1, 0, 0]))
    np.testing.assert_array_equal(padded(0)[0, :2], padded(9)[0, :2])
    self.assertTrue(np.isfinite(padded(0)).all())

  @parameterized.parameters(3, 40)
  def test_products_of_bfloat16_can_come_in_float32(self, rows):
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
    x, w = draw(0, 1, rows, 64), draw(1, 9, 64)
    out = transformer.out_first_product(x, w, 1, jnp.float32)
    want = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)  # bfloat16 would be off by up to 0.06 here
    self.assertEqual(transformer.out_first_product(x, w, 1).dtype, jnp.bfloat16)

  def test_masks_of_a_packed_row(self):
    # [A A A | B B | pad] with no branches: causal inside each document.
    mask = attention.tree_mask(jnp.array([[1, 1, 1, 2, 2, 0]]), jnp.zeros((1, 6), jnp.int32))[0]
    want = np.zeros((6, 6), bool)
    for t, seen in enumerate([[0], [0, 1], [0, 1, 2], [3], [3, 4], [5]]):
      want[t, seen] = True
    np.testing.assert_array_equal(mask, want)

  def test_masked_attention_by_hand(self):
    # One query over two keys with equal scores sees the mean of the values; masked, it sees the first alone.
    q, k = jnp.zeros((1, 1, 2, 2)), jnp.zeros((1, 2, 1, 2))
    v = jnp.array([[[[1.0, 2.0]], [[3.0, 6.0]]]])
    both = attention.masked_attention(q, k, v, jnp.array([[[True, True]]]))
    one = attention.masked_attention(q, k, v, jnp.array([[[True, False]]]))
    np.testing.assert_allclose(both[0, 0], [[2, 4], [2, 4]], rtol=1e-6)
    np.testing.assert_allclose(one[0, 0], [[1, 2], [1, 2]], rtol=1e-6)

  def test_rotation_by_hand(self):
    # head_dim 4, theta 100: frequencies 1 and 0.1; pairs are (0, 2) and (1, 3).
    freq = attention.rotary_frequencies(4, 100.0, ())
    np.testing.assert_allclose(freq, [1.0, 0.1])
    x = jnp.array([1.0, 1.0, 0.0, 0.0]).reshape(1, 1, 1, 4)
    got = attention.rotate(x, jnp.array([[2]]), freq)[0, 0, 0]
    np.testing.assert_allclose(got, [np.cos(2), np.cos(0.2), np.sin(2), np.sin(0.2)], rtol=1e-6)

  def test_llama3_scaling_keeps_short_and_stretches_long_waves(self):
    scaling = dict(rope_type='llama3', factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=8192)
    plain = attention.rotary_frequencies(64, 500_000.0, ())
    scaled = attention.rotary_frequencies(64, 500_000.0, tuple(sorted(scaling.items())))
    np.testing.assert_allclose(scaled[:8], plain[:8])
    np.testing.assert_allclose(scaled[-4:], plain[-4:] / 8)
    self.assertTrue((np.diff(scaled) < 0).all())

  @parameterized.parameters(
      ('rope_theta', 5e5), ('norm_eps', 1e-2), ('rope_scaling', (('factor', 4.0), ('rope_type', 'linear'))))
  def test_every_constant_reaches_the_numbers(self, field, value):
    changed = nnx.split(transformer.Transformer(
        families.ModelConfig(**(families.RANDOM_SIZES['tiny'] | {field: value})), nnx.Rngs(0)))[0]
    token, segment, branch, position = row([5, 6, 7, 8], [1] * 4, [0] * 4, [0, 1, 2, 3])
    model = nnx.merge(changed, STATE)
    got = model.logits(model.hidden(jnp.asarray(token), jnp.asarray(position), attention.tree_mask(segment, branch)))
    self.assertGreater(float(np.abs(got - logits(STATE, token, segment, branch, position)).max()), 1e-3)

  def test_recomputing_layers_changes_no_gradient(self):
    def loss(state, remat):
      config = families.ModelConfig(**(families.RANDOM_SIZES['tiny'] | dict(remat=remat)))
      model = nnx.merge(adapters.graphdef_of(config), state)
      token, segment, branch, position = row([5, 6, 7, 8], [1] * 4, [0] * 4, [0, 1, 2, 3])
      return model.logits(model.hidden(jnp.asarray(token), jnp.asarray(position),
                                       attention.tree_mask(segment, branch))).sum()
    plain, again = (jax.jit(jax.grad(loss), static_argnums=1)(STATE, remat) for remat in ('none', 'block'))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), plain, again)

  def test_every_parameter_names_its_axes(self):
    for path, variable in nnx.to_flat_state(STATE):
      self.assertLen(variable.get_metadata()['axes'], variable.ndim, path)
      self.assertEqual(variable.shape, tuple(CONFIG.sizes[a] for a in variable.get_metadata()['axes']), path)

  def test_parameter_count(self):
    self.assertEqual(CONFIG.parameter_count, sum(x.size for x in jax.tree.leaves(STATE)))


if __name__ == '__main__':
  absltest.main()
