"""LoRA starts as the identity, merges to what it computes, and trains nothing else."""

import dataclasses
import functools

from absl.testing import absltest
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from ptjax.models import adapters
from ptjax.models import attention
from ptjax.models import families
from ptjax.models import transformer

CONFIG = families.ModelConfig(**families.RANDOM_SIZES['tiny'])
STATE = nnx.split(transformer.Transformer(CONFIG, nnx.Rngs(0)))[1]
TOKEN = np.array([[5, 6, 7, 8]], np.int32)
POSITION = np.array([[0, 1, 2, 3]], np.int32)
MASK = attention.tree_mask(np.ones((1, 4), np.int32), np.zeros((1, 4), np.int32))


def logits(graphdef, *states):
  model = nnx.merge(graphdef, *states)
  return np.asarray(model.logits(model.hidden(TOKEN, POSITION, MASK)))


class AdaptersTest(absltest.TestCase):

  def test_starts_equal_to_the_base(self):
    graphdef, trainable, frozen = adapters.split(CONFIG, STATE, rank=4)
    plain = adapters.graphdef_of(CONFIG)
    np.testing.assert_array_equal(logits(graphdef, trainable, frozen), logits(plain, STATE))
    jax.tree.map(np.testing.assert_array_equal, adapters.merge(graphdef, trainable, frozen), STATE)

  def test_merge_equals_what_the_adapter_computes(self):
    graphdef, trainable, frozen = adapters.split(CONFIG, STATE, rank=4, alpha=8.0)
    trainable = jax.tree.map(lambda x: x + 0.05 * jax.random.normal(jax.random.key(1), x.shape), trainable)
    merged = adapters.merge(graphdef, trainable, frozen)
    got = logits(adapters.graphdef_of(CONFIG), merged)
    np.testing.assert_allclose(got, logits(graphdef, trainable, frozen), atol=2e-5)
    self.assertGreater(np.abs(got - logits(adapters.graphdef_of(CONFIG), STATE)).max(), 0.01)

  def test_merge_by_hand(self):
    # scale = alpha / rank = 2; w + 2 * a @ b on the first layer of one projection.
    graphdef, trainable, frozen = adapters.split(CONFIG, STATE, rank=1, alpha=2.0, targets=('up',))
    paths = [path for path, _ in nnx.to_flat_state(trainable)]
    self.assertEqual(paths, [('layers', 'mlp', 'up', 'lora_a'), ('layers', 'mlp', 'up', 'lora_b')])
    trainable = jax.tree.map(lambda x: 0 * x + 0.5, trainable)
    merged = dict(nnx.to_flat_state(adapters.merge(graphdef, trainable, frozen)))
    path = ('layers', 'mlp', 'up', 'w')
    np.testing.assert_allclose(merged[path][...], dict(nnx.to_flat_state(STATE))[path][...] + 2 * 0.25, rtol=1e-6)

  def test_low_rank_gradients_equal_those_of_autodiff(self):
    for i, o in (('D', 'F'), ('D', 'NH'), ('NH', 'D')):
      sizes = dict(B=2, T=3, A=2, D=4, F=5, N=2, H=3)
      draw = lambda letters, seed: jax.random.normal(jax.random.key(seed), [sizes[x] for x in letters])
      x, a, b, dy = draw(f'BT{i}', 0), draw(f'{i}A', 1), draw(f'A{o}', 2), draw(f'BT{o}', 3)
      plain = lambda x, a, b: jnp.einsum(f'BT{i},{i}A,A{o}->BT{o}', x, a, b)
      want, want_vjp = jax.vjp(plain, x, a, b)
      got, got_vjp = jax.vjp(functools.partial(transformer.low_rank_product, i, o), x, a, b)
      np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
      for g, w in zip(got_vjp(dy), want_vjp(dy)):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)

  def test_rank_0_trains_everything(self):
    graphdef, trainable, frozen = adapters.split(CONFIG, STATE, rank=0)
    self.assertEmpty(jax.tree.leaves(frozen))
    jax.tree.map(np.testing.assert_array_equal, adapters.merge(graphdef, trainable, frozen), STATE)

  def test_what_trains_is_float32_beside_bfloat16_weights(self):
    config = dataclasses.replace(CONFIG, param_dtype='bfloat16')
    state = nnx.split(transformer.Transformer(config, nnx.Rngs(0)))[1]
    for rank in (0, 4):
      graphdef, trainable, frozen = adapters.split(config, state, rank=rank)
      self.assertEqual({x.dtype for x in jax.tree.leaves(trainable)}, {jnp.dtype('float32')})
      jax.tree.map(np.testing.assert_array_equal, state, adapters.merge(graphdef, trainable, frozen))
    nudged = jax.tree.map(lambda x: x + 1e-6, adapters.split(config, state, rank=0)[1])
    self.assertFalse(any(bool((a == b).all()) for a, b in zip(
        jax.tree.leaves(nudged), jax.tree.leaves(state), strict=True)))

  def test_unknown_target(self):
    with self.assertRaisesRegex(ValueError, r"\['head'\] are unknown; known: \('q', 'k'"):
      adapters.split(CONFIG, STATE, rank=4, targets=('q', 'head'))


if __name__ == '__main__':
  absltest.main()
