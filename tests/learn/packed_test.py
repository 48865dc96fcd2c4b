"""Packing, splitting and padding change nothing: the same log-probs, losses, gradients and steps on a real decoder."""

import functools

from absl.testing import absltest
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from ptjax import types
from ptjax.data import batching
from ptjax.learn import objectives
from ptjax.learn import update
from ptjax.models import adapters
from ptjax.models import scoring
from ptjax.models.families import ModelConfig
from ptjax.models.transformer import Transformer

CONFIG = ModelConfig(vocab_size=23, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn=24)
MODEL = Transformer(CONFIG, nnx.Rngs(0))
POLICY = dict(clip_low=0.2, clip_high=0.3, branches=6, max_tokens=5, kl_coef=0.1, kl='k3_ratio', correction='none',
              correction_cap=2.0, correction_floor=0.5)
BRANCHES = 6


def trees():
  """Two prompts with an even number of completions each, one of them with a tool token, and numbers of RL."""
  rng = np.random.default_rng(1)
  made = []
  for prompt, lengths in ((4, (3, 5)), (2, (1, 4, 2, 3))):
    completions = []
    for n in lengths:
      mask = np.ones(n, bool)
      mask[1:2] = n < 5
      completions.append({
          'token_ids': rng.integers(0, 23, n).astype(np.int32), 'mask': mask,
          'advantage': np.full(n, rng.normal(), np.float32),
          'behavior_logp': rng.normal(-3, 0.3, n).astype(np.float32),
          'ref_logp': rng.normal(-3, 0.3, n).astype(np.float32)})
    made.append(types.TokenizedSequence(rng.integers(0, 23, prompt).astype(np.int32), completions))
  return made


def layouts(unit):
  """The same completions alone in padded rows, in full rows, and in one wide row."""
  alone = [types.TokenizedSequence(t.prompt_ids, t.completions[i:i + unit])
           for t in trees() for i in range(0, len(t.completions), unit)]
  common = dict(max_branches=BRANCHES, unit=unit)
  return {
      'alone': sum((batching.pack([t], rows=1, seq_len=17, **common).batches for t in alone), []),
      'rows': batching.pack(trees(), rows=2, seq_len=13, **common).batches,
      'wide': batching.pack(trees(), rows=1, seq_len=26, **common).batches,
  }


@jax.jit
def logp(batch):
  return scoring.token_logp(MODEL, batch, temperature=0.7, loss_tokens=26)[0]


def by_completion(batches):
  """Log-probs of each completion's tokens, keyed by its ids."""
  found = {}
  for batch in batches:
    logp_BT = np.asarray(logp(batch))
    for b in range(len(logp_BT)):
      for branch in range(1, batch.branch_BT[b].max() + 1):
        at = batch.branch_BT[b] == branch
        found[tuple(batch.token_BT[b, at])] = logp_BT[b, at]
  return found


def everything(logp_BT, entropy_BT, batch):
  """All kinds of objectives at once, so that one compiled step covers them: the summed totals over the tokens."""
  parts = {'sft': objectives.supervised(), 'dpo': objectives.preference(dict(loss='dpo', beta=0.5, branches=BRANCHES))}
  for loss, how in (('ppo_clip', 'token_mean'), ('gspo', 'seq_mean_token_mean')):
    parts[loss] = objectives.policy(dict(POLICY, policy_loss=loss, aggregation=how))
  results = {name: objective(logp_BT, entropy_BT, batch) for name, objective in parts.items()}
  metrics = {f'{name}_{key}': pair for name, (_, _, more) in results.items() for key, pair in more.items()}
  metrics |= {name: (total, weight) for name, (total, weight, _) in results.items()}
  return sum(total for total, _, _ in results.values()), results['sft'][1], metrics


@functools.cache
def compiled():
  """(step, trainable and frozen parameters, optimizer) of plain gradient descent."""
  graphdef, params, frozen = adapters.split(CONFIG, nnx.state(MODEL), rank=0)
  optimizer = optax.sgd(0.5)
  return update.make_update(graphdef, everything, optimizer, temperature=1.0, loss_tokens=26), params, frozen, optimizer


def one_step(batches):
  """The parameters after one step, and the metrics."""
  step, params, frozen, optimizer = compiled()
  state, metrics = step(update.init(jax.tree.map(jnp.copy, params), optimizer), frozen, batches)
  return jax.tree.leaves(state.params), metrics


class PackedTest(absltest.TestCase):

  def test_log_probs_do_not_depend_on_the_layout(self):
    got = {name: by_completion(batches) for name, batches in layouts(1).items()}
    self.assertLen(got['alone'], 6)
    for name in ('rows', 'wide'):
      for ids, logp_T in got['alone'].items():
        np.testing.assert_allclose(got[name][ids], logp_T, atol=1e-5)

  def test_a_step_does_not_depend_on_the_layout(self):
    made = layouts(2)
    (want, want_metrics), (got, metrics) = one_step(made['alone']), one_step(made['wide'])
    start = jax.tree.leaves(nnx.state(MODEL))
    self.assertGreater(max(float(jnp.abs(a - b).max()) for a, b in zip(want, start)), 1e-3)
    for a, b in zip(want, got):
      np.testing.assert_allclose(a, b, atol=5e-6)
    self.assertContainsSubset({'sft', 'dpo', 'ppo_clip', 'gspo', 'gspo_kl', 'dpo_accuracy'}, metrics)
    for key in want_metrics:
      np.testing.assert_allclose(want_metrics[key], metrics[key], rtol=1e-4, atol=1e-6, err_msg=key)

  def test_one_document_never_sees_another(self):
    (batch,) = layouts(1)['wide']
    other = batch._replace(token_BT=np.where(batch.segment_BT == 1, 22 - batch.token_BT, batch.token_BT))
    before, after = np.asarray(logp(batch)), np.asarray(logp(other))
    second = batch.segment_BT == 2
    np.testing.assert_array_equal(before[second], after[second])
    self.assertFalse(np.array_equal(before[~second], after[~second]))

  def test_a_branch_never_sees_its_neighbour(self):
    (batch,) = layouts(1)['wide']
    other = batch._replace(token_BT=np.where(batch.branch_BT == 1, 22 - batch.token_BT, batch.token_BT))
    rest = batch.branch_BT != 1
    np.testing.assert_array_equal(np.asarray(logp(batch))[rest], np.asarray(logp(other))[rest])

  def test_nothing_to_train_on_changes_nothing(self):
    (batch,) = layouts(2)['wide']
    nan_BT = np.full(batch.mask_BT.shape, np.nan, np.float32)
    empty = batch._replace(mask_BT=np.zeros_like(batch.mask_BT), advantage_BT=nan_BT, behavior_logp_BT=nan_BT,
                           old_logp_BT=nan_BT, ref_logp_BT=nan_BT)
    params, metrics = one_step([empty])
    self.assertEqual((float(metrics['loss']), float(metrics['grad_norm'])), (0.0, 0.0))
    for a, b in zip(params, jax.tree.leaves(nnx.state(MODEL))):
      np.testing.assert_array_equal(a, b)


if __name__ == '__main__':
  absltest.main()
