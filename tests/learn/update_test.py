"""The update: the same step under any split, packing and mesh; nothing moves when nothing is trained on."""

import math

from absl.testing import absltest
from flax import nnx
import jax
import ml_collections
import numpy as np

from ptjax.data import batching
from ptjax.learn import objectives
from ptjax.learn import trainer as trainers
from ptjax.models import adapters
from ptjax.models import families
from ptjax.models import scoring
from ptjax.models import transformer
from ptjax.runtime import devices

CONFIG = families.ModelConfig(**families.RANDOM_SIZES['tiny'])
STATE = nnx.split(transformer.Transformer(CONFIG, nnx.Rngs(0)))[1]
SETTINGS = ml_collections.ConfigDict(dict(
    steps=5, lr=1e-2, schedule='constant', warmup_steps=0, weight_decay=0.1, clip_norm=1.0, b1=0.9, b2=0.95,
    lora_rank=4, lora_alpha=0.0, loss_tokens=16, branches=8))


def examples(count=16):
  rng = np.random.default_rng(0)
  system = rng.integers(3, 300, 10)
  prompts = [np.concatenate([system, rng.integers(3, 300, 3 + i % 4)]) for i in range(count)]
  return [batching.supervised(prompt, rng.integers(3, 300, 2 + i % 3)) for i, prompt in enumerate(prompts)]


def trained(rows, *, share=False, sizes=None, rank=4, width=32):
  """Metrics and merged parameters after two steps on the same examples, laid out in batches of `rows` rows."""
  sizes = sizes or dict(data=1)
  mesh = devices.make_mesh(**sizes, devices=jax.devices()[:math.prod(sizes.values())])
  settings = SETTINGS.copy_and_resolve_references()
  settings.lora_rank = rank
  place = jax.jit(lambda x: x, out_shardings=devices.shardings_of(mesh, STATE))
  t = trainers.Trainer(settings, CONFIG, place(STATE), objectives.supervised(), mesh=mesh)
  sequences = batching.share_prefix(examples()) if share else examples()
  batches = batching.pack(sequences, rows=rows, seq_len=width, max_branches=8, loss_tokens=16).batches
  metrics = [t.update(batches) for _ in range(2)]
  return metrics, jax.tree.map(np.asarray, t.merged())


class UpdateTest(absltest.TestCase):

  def test_the_schedule_ends_with_the_last_update_however_many_a_step_takes(self):
    settings = SETTINGS.copy_and_resolve_references()
    settings.schedule, settings.warmup_steps = 'linear', 1
    mesh = devices.make_mesh(data=1, devices=jax.devices()[:1])
    one, four = (trainers.Trainer(settings, CONFIG, STATE, objectives.supervised(), mesh=mesh, updates_per_step=n)
                 for n in (1, 4))
    self.assertAlmostEqual(float(four.schedule(0)), settings.lr / 4, places=6)
    for step in range(1, settings.steps + 1):
      self.assertAlmostEqual(float(four.schedule(4 * step)), float(one.schedule(step)), places=6)

  def assert_same(self, got, want):
    for a, b in zip(got[0], want[0]):
      for name in ('loss', 'weight', 'grad_norm'):
        self.assertAlmostEqual(a[name], b[name], delta=1e-5 * max(1, abs(b[name])), msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got[1], want[1])

  def test_any_split_into_micro_batches_takes_the_same_step(self):
    self.assert_same(trained(rows=1), trained(rows=16))

  def test_sharing_prefixes_takes_the_same_step(self):
    self.assert_same(trained(rows=4, share=True, width=64), trained(rows=4))

  def test_eight_devices_take_the_step_of_one(self):
    one = trained(rows=8)
    for sizes in (dict(fsdp=8), dict(data=4, tensor=2), dict(data=2, fsdp=2, tensor=2)):
      with self.subTest(**sizes):
        self.assert_same(trained(rows=8, sizes=sizes), one)

  def test_every_parameter_trains_at_rank_0(self):
    _, after = trained(rows=8, rank=0)
    moved = jax.tree.map(lambda a, b: bool((a != np.asarray(b)).any()), after, STATE)
    self.assertTrue(all(jax.tree.leaves(moved)))

  def test_nothing_moves_when_nothing_is_trained_on(self):
    mesh = devices.make_mesh(data=1, devices=jax.devices()[:1])
    t = trainers.Trainer(SETTINGS, CONFIG, STATE, objectives.supervised(), mesh=mesh)
    batch = batching.pack(examples(), rows=8, seq_len=32, max_branches=8).batches[0]
    t.update([batch])
    before = jax.tree.map(np.asarray, (t.state.params, t.state.opt_state))
    metrics = t.update([batch._replace(mask_BT=np.zeros_like(batch.mask_BT))])
    self.assertEqual((metrics['loss'], metrics['grad_norm'], metrics['weight']), (0.0, 0.0, 0.0))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, (t.state.params, t.state.opt_state)), before)

  def test_a_loss_that_is_not_finite_stops_with_the_parameter_named(self):
    mesh = devices.make_mesh(data=1, devices=jax.devices()[:1])
    broken = lambda logp_BT, entropy_BT, batch: (np.nan * logp_BT.sum(), batch.mask_BT.sum() * 1.0, {})
    t = trainers.Trainer(SETTINGS, CONFIG, STATE, broken, mesh=mesh)
    batch = batching.pack(examples(), rows=8, seq_len=32, max_branches=8).batches[0]
    with self.assertRaisesRegex(FloatingPointError, 'step 1: loss nan.*first bad parameter: .*lora'):
      t.update([batch])

  def test_reference_is_where_the_stage_started(self):
    mesh = devices.make_mesh(data=1, devices=jax.devices()[:1])
    t = trainers.Trainer(SETTINGS, CONFIG, STATE, objectives.supervised(), mesh=mesh)
    batches = batching.pack(examples(), rows=8, seq_len=32, max_branches=8).batches
    start = t.score(batches)[0]
    t.update(batches)
    np.testing.assert_array_equal(t.with_reference(batches)[0].ref_logp_BT, start)
    self.assertGreater(np.abs(t.score(batches)[0] - start).max(), 1e-3)


class TokenLogpTest(absltest.TestCase):

  def test_equals_the_full_log_softmax_at_any_temperature(self):
    batch = batching.pack(examples(), rows=4, seq_len=64, max_branches=8).batches[0]
    model = nnx.merge(adapters.graphdef_of(CONFIG), STATE)
    mask_BTS = scoring.attention.tree_mask(batch.segment_BT, batch.branch_BT)
    logits_BTV = model.logits(model.hidden(batch.token_BT, batch.position_BT, mask_BTS))
    for temperature in (1.0, 0.5):
      want_BTV = jax.nn.log_softmax(logits_BTV / temperature, axis=-1)
      b, t = np.nonzero(batch.mask_BT)
      want = np.asarray(want_BTV)[b, batch.parent_BT[b, t], batch.token_BT[b, t]]
      logp_BT, entropy_BT = scoring.token_logp(model, batch, temperature=temperature, loss_tokens=64)
      np.testing.assert_allclose(np.asarray(logp_BT)[b, t], want, atol=1e-5)
      np.testing.assert_array_equal(np.asarray(logp_BT)[~batch.mask_BT], 0.0)
      law = np.asarray(want_BTV)[b, batch.parent_BT[b, t]]
      np.testing.assert_allclose(np.asarray(entropy_BT)[b, t], -(np.exp(law) * law).sum(-1), rtol=1e-4)


if __name__ == '__main__':
  absltest.main()
