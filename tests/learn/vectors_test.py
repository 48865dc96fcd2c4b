"""Every reference vector of tests/data/rl_vectors.json against the function of ptjax that it pins."""

import functools
import json
import pathlib

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from ptjax import types
from ptjax.data import batching, mixture
from ptjax.evals import suites
from ptjax.learn import advantages, losses, off_policy, policy_losses
from ptjax.sample import sampling

FILE = pathlib.Path(__file__).parent.parent / 'data' / 'rl_vectors.json'
VECTORS = {v['id']: (v['input'], v['expect']) for v in json.loads(FILE.read_text(encoding='utf-8'))['vectors']}

# Vectors of things this package does not have, with the reason.
ELSEWHERE = {
    'staleness_admission': 'no asynchronous loop: rollouts are always drawn by the policy about to be updated',
}


def f32(x):
  return jnp.asarray(np.asarray(x, np.float64), jnp.float32)


def close(got, want):
  np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=2e-6, atol=1e-6)


def row(x):
  return f32(x)[None]


def ones(like):
  return jnp.ones(np.shape(like), bool), jnp.ones(np.shape(like), jnp.int32)


def pair(pw, pl, rw=0.0, rl=0.0, nw=1, nl=1, kl=0.0):
  return losses.Pairs(*(jnp.full((1, 1), x, jnp.float32) for x in (pw, pl, rw, rl, nw, nl)), kl=kl)



def loss_of(name, pairs_, **settings):
  total, weight = losses.bind(losses.PREFERENCE_LOSSES, name, settings, what='loss')(pairs_)
  return total / weight


def mean(sum_weight):
  return sum_weight[0] / sum_weight[1]


def by_group(name):
  def check(given, expect):
    reward_UR = np.array(given['rewards'])
    close(advantages.ADVANTAGES[name](reward_UR, np.ones(reward_UR.shape, bool)), expect['adv'])
  return check


def reinforce_pp(given, expect):
  mask_BT = np.array(given['mask'], bool)
  logp_BT, ref_BT, score_B = (np.array(given[k]) for k in ('logp', 'ref_logp', 'score'))
  reward_BT = advantages.kl_rewards(logp_BT, ref_BT, mask_BT, score_B, beta=given['beta'])
  close(reward_BT, expect['token_reward'])
  close(advantages.returns(reward_BT, mask_BT, gamma=given['gamma']), expect['return'])
  close(advantages.reinforce_pp_tokens(logp_BT, ref_BT, mask_BT, score_B, beta=given['beta'], gamma=given['gamma']),
        expect['adv'])


def gae(given, expect):
  reward_BT, value_BT = np.array([given['rewards']]), np.array([given['values']])
  mask_BT = np.array([given.get('loss_mask', np.ones_like(given['rewards']))], bool)
  bootstrap_B = np.array([given.get('bootstrap', 0.0)])
  got_BT, returns_BT = advantages.gae(
      reward_BT, value_BT, mask_BT, bootstrap_B, gamma=given['gamma'], lam=given['lam'])
  close(got_BT[0], expect['adv'])
  if 'returns' in expect:
    close(returns_BT[0], expect['returns'])


def value_loss(given, expect):
  v, old, target = (row(given[k]) for k in ('v', 'v_old', 'returns'))
  close(mean(losses.value_loss(v, old, target, ones(v)[0], clip=given['clip'])), expect['loss'])
  each = [losses.value_loss(v, old, target, jnp.arange(3)[None] == t, clip=given['clip'])[0] for t in range(3)]
  close(each, expect['per_token'])


def token_loss(name, given, expect, key):
  old, advantage = row(given['old_logp']), row(given['adv'])
  loss = losses.bind(policy_losses.POLICY_LOSSES, name, given, what='loss')

  def total(logp_BT):
    loss_BT, _ = loss(logp_BT, old, advantage, *ones(old))
    return loss_BT.sum(), loss_BT
  grad_BT, loss_BT = jax.grad(total, has_aux=True)(row(given['logp']))
  close(loss_BT[0], expect['per_token_loss'])
  close(grad_BT[0], expect['dloss_dlogp'])
  ratio_BT = jnp.exp(policy_losses.log_ratio(row(given['logp']), old, ones(old)[0]))
  if key == 'weight':
    ratio_BT = jnp.clip(ratio_BT, 1 - given['eps_low'], 1 + given['eps_high'])
  close(ratio_BT[0], expect[key])


def clip_boundary(given, expect):
  old = jnp.zeros((1, 1))
  for eps in ('.20', '.28'):
    def total(logp_BT):
      return policy_losses.ppo_clip(logp_BT, old, row([given['adv']]), *ones(old), eps_low=0.2,
                                    eps_high=float(eps))[0].sum()
    value, grad = jax.value_and_grad(total)(row([np.log(given['ratio'])]))
    close(value, expect[f'loss_eps{eps}'])
    close(grad[0, 0], expect[f'grad_eps{eps}'])


def gspo(given, expect):
  logp, old = f32(given['logp']), f32(given['old_logp'])
  mask_BT, branch_BT = jnp.asarray(given['mask']) > 0, jnp.ones((2, 3), jnp.int32)
  advantage_BT = jnp.broadcast_to(f32(given['adv'])[:, None], (2, 3))
  for kind, low, high in (('clipped', given['eps_low'], given['eps_high']), ('unclipped', 1.0, 1e9)):
    def loss(logp_BT):
      loss_BT, metrics = policy_losses.gspo(
          logp_BT, old, advantage_BT, mask_BT, branch_BT, eps_low=low, eps_high=high, max_branches=1)
      return mean(policy_losses.seq_mean_token_mean(loss_BT, mask_BT, branch_BT, max_branches=1)), metrics
    (value, metrics), grad = jax.value_and_grad(loss, has_aux=True)(logp)
    close(value, expect[f'loss_{kind}'])
    close(grad, expect[f'grad_{kind}'])
    close(metrics['ratio'][0], 3 * expect['s'][0] + 2 * expect['s'][1])


def onpolicy(given, expect):
  old, advantage = row(given['old_logp']), row(given['adv'])
  for name in ('ppo_clip', 'gspo'):
    loss = losses.bind(policy_losses.POLICY_LOSSES, name, dict(eps_low=0.2, eps_high=0.2, max_branches=2), what='loss')
    branch_BT = jnp.array([[1, 2]])
    total = lambda logp: loss(logp, old, advantage, ones(old)[0], branch_BT)[0].sum()
    value, grad = jax.value_and_grad(total)(row(given['logp']))
    close(value, expect['loss'])
    close(grad[0], expect['dloss_dlogp_token_sum'])


def aggregation(given, expect):
  loss_BT, mask_BT = f32(given['token_loss']), jnp.asarray(given['mask']) > 0
  for name, function in policy_losses.AGGREGATIONS.items():
    bound = losses.bind({name: function}, name, dict(max_branches=1, norm_tokens=given['H']), what='aggregation')
    key = name.replace('_', '-') + ('(H=4)' if name.endswith('norm') else '')
    close(mean(bound(loss_BT, mask_BT, jnp.ones((3, 4), jnp.int32))), expect[key])


def grad_accum(given, expect):
  del given
  rows = VECTORS['aggregation_modes'][0]
  loss_BT, mask_BT = f32(rows['token_loss']), jnp.asarray(rows['mask']) > 0
  branch_BT = jnp.ones((3, 4), jnp.int32)
  for cuts in ([], [1, 2], [2]):
    parts = [policy_losses.token_mean(*(jnp.asarray(x) for x in part)) for part in zip(
        *(np.split(np.asarray(x), cuts) for x in (loss_BT, mask_BT, branch_BT)))]
    total, weight = (sum(column) for column in zip(*parts))
    close(total / weight, expect['right'])
    close(1 / weight, expect['token_weight_right'])


def two_ranks(given, expect):
  parts = [policy_losses.token_mean(jnp.full((1, n), total / n), *ones(np.ones((1, n))))
           for total, n in zip(given['rank_sums'], given['rank_counts'])]
  total, weight = (sum(column) for column in zip(*parts))
  close(total / weight, expect['right_global'])
  close([part[0] * given['world'] / weight for part in parts], expect['right_local_scaling'])


def fully_masked(given, expect):
  loss_BT, mask_BT = f32(np.array(given['token_loss'], np.float64)), jnp.asarray(given['mask']) > 0
  branch_BT = jnp.ones((2, 2), jnp.int32)
  for name, key in (('token_mean', 'token-mean'), ('seq_mean_token_mean', 'seq-mean-token-mean')):
    function = losses.bind(policy_losses.AGGREGATIONS, name, dict(max_branches=1), what='aggregation')
    close(mean(function(loss_BT, mask_BT, branch_BT)), expect[key])
    total, weight = function(loss_BT, jnp.zeros((2, 2), bool), branch_BT)
    close([total, weight], [expect['all_masked_batch'], 0.0])
    grad = jax.grad(lambda x: function(x, mask_BT, branch_BT)[0])(loss_BT)
    assert np.isfinite(grad).all() and not grad[1].any()


def kl_setup(given):
  theta_V, ref_V = f32(given['theta']), jnp.log(f32(given['ref_probs']))
  return theta_V, ref_V, jnp.ones((1, 3), bool), jax.nn.softmax(theta_V)


def kl_value(given, expect):
  theta_V, ref_V, mask_BT, pi_V = kl_setup(given)
  logp_V = jax.nn.log_softmax(theta_V)
  close(pi_V, expect['pi'])
  k1 = policy_losses.kl_k1(logp_V[None], ref_V[None], mask_BT)[0]
  others = {k: policy_losses.KL_ESTIMATORS[k](logp_V[None], ref_V[None], logp_V[None], mask_BT)[0]
            for k in ('k2', 'k3', 'k3_ratio')}
  for name, got in dict(others, k1=k1).items():
    close(got, expect[name.removesuffix('_ratio')])
    close((pi_V * got).sum(), expect[f'E_{name.removesuffix("_ratio")}'])
  close((pi_V * k1).sum(), expect['true_reverse_KL'])


def kl_gradient(given, expect):
  theta_V, ref_V, mask_BT, pi_V = kl_setup(given)
  behavior_V = jax.nn.log_softmax(theta_V)

  def expected(name):
    def value(t):
      kl = policy_losses.KL_ESTIMATORS[name](jax.nn.log_softmax(t)[None], ref_V[None], behavior_V[None], mask_BT)
      return (pi_V * kl[0]).sum()
    return jax.grad(value)(theta_V)
  close(expected('k2'), expect['E_grad_k2'])
  close(expected('k2'), expect['grad_true_reverse_KL'])
  close(expected('k3'), expect['E_grad_k3'])
  close(expected('k3'), expect['grad_forward_KL(ref||pi)'])
  close(expected('k3_ratio'), expect['E_grad_ratio_times_k3'])
  close(jax.grad(lambda t: policy_losses.kl_k1(jax.nn.log_softmax(t)[None], ref_V[None], mask_BT).sum())(theta_V),
        expect['E_grad_k1'])
  assert 'k1' not in policy_losses.KL_ESTIMATORS


def importance(given, expect):
  logp, behavior = f32(given['trainer_logp']), f32(given['sampler_logp'])
  mask_BT, branch_BT = jnp.asarray(given['mask']) > 0, jnp.ones((2, 3), jnp.int32)

  def weight(name, **more):
    settings = dict(cap=given['C'], floor=given['low'], max_branches=1) | more
    function = losses.bind(off_policy.CORRECTIONS, name, settings, what='correction')
    return function(logp, behavior, mask_BT, branch_BT)
  close(weight('token_tis', cap=1e9), expect['rho'])
  close(weight('token_tis'), expect['token_TIS'])
  close(weight('token_mis'), expect['token_MIS'])
  close(weight('icepop'), expect['icepop'])
  close(weight('sequence_tis', cap=1e9)[:, 0], expect['seq_ratio'])
  close(weight('sequence_tis')[:, 0], expect['seq_TIS'])
  close(weight('sequence_mis')[:, 0], expect['seq_MIS'])
  close(weight('geometric_mis')[:, 0], expect['geo_ratio'])


def decoupled(given, expect):
  behavior, proximal, current = (jnp.log(row(given[k])) for k in ('behav_p', 'prox_p', 'cur_p'))
  advantage, eps = row(given['adv']), dict(eps_low=given['eps'], eps_high=given['eps'])
  loss_BT, metrics = off_policy.decoupled_ppo(
      current, proximal, behavior, advantage, *ones(current), **eps, cap=1e9)
  close(loss_BT[0], expect['loss_decoupled'])
  close(metrics['ratio'][0], sum(expect['r']))
  close(off_policy.token_tis(proximal, behavior, *ones(current), cap=1e9)[0], expect['w'])
  close(policy_losses.ppo_clip(current, behavior, advantage, *ones(current), **eps)[0][0], expect['loss_coupled'])


def packed_logp(tokens, logits_TV, temperature=1.0):
  """Log-probs by the packed layout: the parent of each token predicts it."""
  sequence = batching.supervised(tokens[:1], tokens[1:])
  (batch,), _ = batching.pack([sequence], rows=1, seq_len=len(tokens), max_branches=1)
  logp_TV = jax.nn.log_softmax(f32(logits_TV) / temperature)
  return logp_TV[batch.parent_BT[0], batch.token_BT[0]][batch.mask_BT[0]]


def temperature(given, expect):
  logits = [given['logits'], given['logits']]
  close(packed_logp([0, given['token']], logits, given['T'])[0], expect['right'])
  close(packed_logp([0, given['token']], logits)[0], expect['wrong_T1'])


def plain_law(rows, top_k=0):
  zero_B = jnp.zeros(rows, jnp.int32)
  return sampling.Law(
      temperature_B=jnp.ones(rows), top_k_B=zero_B + top_k, top_p_B=jnp.ones(rows), min_p_B=jnp.zeros(rows),
      seed_B2=jnp.zeros((rows, 2), jnp.uint32), sample_B=jnp.arange(rows), bias_B=zero_B,
      stop_BX=jnp.full((rows, 1), -1), stop_from_B=zero_B, top_B=jnp.zeros(rows, bool))


def truncated_law(given, expect):
  """The sampler records the law it drew from; RL's own settings never truncate, so its ratio stays 1."""
  logits_BV = jnp.log(f32([given['probs']]))
  law = plain_law(1, top_k=int(sum(given['kept'])))
  bias_YV = jnp.zeros((1, logits_BV.shape[1]))
  draws = (sampling.draw(logits_BV, law, jnp.array([i]), bias_YV, alternatives=1) for i in range(64))
  drawn = next(d for d in draws if d.token_B[0] == given['token'])
  trainer = packed_logp([0, given['token']], np.log([given['probs']] * 2))[0]
  close(drawn.behavior_logp_B[0], expect['sampler_processed_logp'])
  close([trainer, jnp.exp(trainer - drawn.behavior_logp_B[0])], [expect['trainer_logp'], expect['spurious_ratio']])
  close(drawn.model_logp_B[0], expect['trainer_logp'])


def speculative_accept(given, expect):
  """Over many rows: which proposals are kept, what replaces the others, and the law of what comes out."""
  n = 200_000
  wide = lambda p: jnp.broadcast_to(jnp.log(f32(p)), (n, len(p)))
  law, where = plain_law(n), (jnp.zeros(n, jnp.int32), jnp.zeros((1, len(given['target_p']))))
  proposal = sampling.propose(wide(given['draft_q']), law, *where)
  drawn = sampling.draw(wide(given['target_p']), law, *where, alternatives=0, proposal=proposal)
  kept_B = np.asarray(proposal.token_B == drawn.token_B)
  near = functools.partial(np.testing.assert_allclose, atol=0.01)
  near([kept_B[np.asarray(proposal.token_B) == t].mean() for t in range(3)], expect['accept_prob_given_x'])
  near(kept_B.mean(), expect['mean_accept'])
  law_of = lambda token_B: np.bincount(token_B, minlength=3) / len(token_B)
  near(law_of(np.asarray(drawn.token_B)[~kept_B]), expect['residual'])
  near(law_of(np.asarray(drawn.token_B)), expect['output_law'])


def shift(given, expect):
  close(packed_logp(given['tokens'], given['logits']), expect['logp_t1..t3'])


def completion_mask(given, expect):
  prompt = given['is_response'].count(0)
  ids = np.arange(len(given['tokens']))
  (batch,), _ = batching.pack([batching.supervised(ids[:prompt], ids[prompt:])], rows=1, seq_len=5, max_branches=1)
  targets = batch.token_BT[0][batch.mask_BT[0]]
  assert [given['tokens'][i] for i in targets] == expect['target_tokens']
  close(batch.parent_BT[0][batch.mask_BT[0]], targets - 1)
  close(batch.mask_BT[0, 1:], expect['target_mask'])


def positions(given, expect):
  for mask, want in zip(given['mask'], expect['position_ids']):
    tokens = np.arange(sum(mask))
    (batch,), _ = batching.pack([batching.supervised(tokens[:1], tokens[1:])], rows=1, seq_len=8, max_branches=1)
    close(batch.position_BT[0, :sum(mask)], np.array(want)[np.array(mask) > 0])


def eos_mask(given, expect):
  completion = given['completion'][:given['true_len']]
  (batch,), _ = batching.pack(
      [batching.supervised([9], completion)], rows=1, seq_len=6, max_branches=1, pad_id=given['pad'])
  close(batch.token_BT[0, 1:], given['completion'])
  close(batch.mask_BT[0, 1:], expect['mask'])


def packing(given, expect):
  trees = [batching.supervised(np.zeros(1), np.arange(n - 1)) for n in given['lengths']]
  (batch,), _ = batching.pack(trees, rows=1, seq_len=given['row'], max_branches=2)
  segment_T, branch_T, index_T = batch.segment_BT[0], batch.branch_BT[0], np.arange(given['row'])
  close(segment_T, expect['segment_ids'])
  close(batch.position_BT[0], expect['positions'])
  same = (segment_T[:, None] == segment_T) & (segment_T > 0) & (index_T[:, None] >= index_T)
  np.testing.assert_array_equal(same & ((branch_T == 0) | (branch_T[:, None] == branch_T)), expect['allowed'])
  assert batch.mask_BT.sum() == expect['n_loss_targets']


def tool_mask(given, expect):
  roles, loss = np.array(given['roles']), np.array(given['token_loss'], np.float32)
  prompt, drawn = np.flatnonzero(roles == 'P'), np.flatnonzero(roles != 'P')
  rollout = types.Rollout('t', 'g', prompt, drawn, roles[drawn] == 'M', np.zeros(len(drawn), np.float32),
                          np.zeros(len(drawn), np.int32), 'stop', 1.0)
  trees = batching.groups([rollout], np.ones((1, 1)), np.ones((1, 1), bool))
  (batch,), _ = batching.pack(trees, rows=1, seq_len=len(roles), max_branches=1)
  close(batch.mask_BT[0], expect['mask'])
  close(mean(policy_losses.token_mean(loss[None], batch.mask_BT, batch.branch_BT)), expect['token-mean'])


def dpo(given, expect):
  def loss(pw, pl):
    return loss_of('dpo', pair(pw, pl, given['rw'], given['rl']), beta=given['beta'])
  value, (d_pw, d_pl) = jax.value_and_grad(loss, argnums=(0, 1))(given['pw'], given['pl'])
  close([value, d_pw], [expect['loss'], expect['d_pw']])
  if 'h' in expect:
    pairs_ = pair(given['pw'], given['pl'], given['rw'], given['rl'])
    metrics = losses.preference_metrics(pairs_, beta=given['beta'])
    close(d_pl, expect['d_pl'])
    close(pairs_.margin_BR[0, 0], expect['h'])
    close(mean(metrics['chosen_reward']), expect['reward_w'])
    close(mean(metrics['rejected_reward']), expect['reward_l'])


def ipo(given, expect):
  pairs_ = pair(*(given[k] for k in ('pw', 'pl', 'rw', 'rl', 'nw', 'nl')))
  close(loss_of('ipo_sum', pairs_, beta=given['beta']), expect['loss_sum'])
  close(loss_of('ipo_mean', pairs_, beta=given['beta']), expect['loss_mean'])


def orpo(given, expect):
  pairs_ = pair(given['pw'], given['pl'], nw=given['nw'], nl=given['nl'])
  close(loss_of('orpo', pairs_, odds_weight=given['lam']), expect['loss'])
  close(loss_of('orpo', pairs_, odds_weight=0.0), expect['nll'])


def kto(given, expect):
  def one(r, desirable):
    return pair(*((r, 0.0) if desirable else (0.0, r)), nw=desirable, nl=1 - desirable, kl=given['kl'])
  examples = [one(r, d) for r, d in zip(given['r'], given['desirable'])]
  close([loss_of('kto', example, beta=given['beta']) for example in examples], expect['per_example'])
  parts = [losses.kto(example, beta=given['beta']) for example in examples]
  total, weight = (sum(column) for column in zip(*parts))
  close(total / weight, expect['loss'])


def bradley_terry(given, expect):
  rejected, valid = row(given['s_l']), jnp.ones((1, 2), bool)
  loss = lambda chosen: mean(losses.bradley_terry(chosen, rejected, valid))
  value, grad = jax.value_and_grad(loss)(row(given['s_w']))
  close(value, expect['loss'])
  close(grad[0], expect['d_s_w'])
  pairs_ = losses.Pairs(row(given['s_w']), rejected, *(jnp.zeros((1, 2)),) * 2, *(jnp.ones((1, 2)),) * 2)
  close(mean(losses.preference_metrics(pairs_, beta=1.0)['accuracy']), expect['acc'])


def rm_last_token(given, expect):
  length = sum(given['mask'])
  (batch,), _ = batching.pack([batching.supervised(given['ids'][:1], given['ids'][1:length])], rows=1,
                              seq_len=len(given['ids']), max_branches=1, pad_id=given['pad'])
  close(batch.token_BT[0], given['ids'])
  close(losses.last_token(jnp.asarray(batch.branch_BT), max_branches=1)[0, 0], expect['index'])


def overlong(given, expect):
  got = advantages.overlong_penalty(np.array(given['len']), max_tokens=given['Lmax'], cache_tokens=given['cache'])
  close(got, expect['penalty'])


def dynamic_sampling(given, expect):
  reward_UR = np.array(given['rewards'])
  keep_U = advantages.informative(reward_UR, np.ones(reward_UR.shape, bool))
  assert keep_U.tolist() == expect['keep'] and keep_U.sum() == expect['n_keep']


def robust(given, expect):
  close(loss_of('robust_dpo', pair(given['h'], 0.0), beta=given['beta'], label_smoothing=given['e']), expect['loss'])


def pass_at_k(given, expect):
  close([suites.pass_at_k(given['n'], given['c'], k) for k in given['k']], expect['pass'])


def mix(given, expect):
  assert mixture.largest_remainder(given['weights'], given['N']) == expect['counts']


def lost_update(given, expect):
  for dtype, name, tolerance in ((jnp.bfloat16, 'bf16', 0.0), (jnp.float32, 'fp32', 3e-5)):
    step = lambda _, w: w - jnp.asarray(given['step'], w.dtype)
    got = jax.lax.fori_loop(0, given['n'], step, jnp.asarray(given['w'], dtype))
    np.testing.assert_allclose(float(got), expect[name], atol=tolerance)


CHECKS = {
    'adv_grpo_ddof1': by_group('grpo'),
    'adv_grpo_ddof0': by_group('grpo_population_std'),
    'adv_drgrpo': by_group('dr_grpo'),
    'adv_rloo': by_group('rloo'),
    'adv_reinforce_pp': reinforce_pp,
    'gae_terminal': gae,
    'gae_truncated_bootstrap': gae,
    'gae_skips_tool_tokens': gae,
    'value_loss_clipped': value_loss,
    'ppo_clip_sym': lambda given, expect: token_loss('ppo_clip', given, expect, 'ratio'),
    'dapo_clip_higher': lambda given, expect: token_loss('ppo_clip', given, expect, 'ratio'),
    'clip_higher_boundary': clip_boundary,
    'gspo_sequence_ratio': gspo,
    'cispo': lambda given, expect: token_loss('cispo', given, expect, 'weight'),
    'onpolicy_value_vs_grad': onpolicy,
    'dapo_soft_overlong': overlong,
    'dapo_dynamic_sampling': dynamic_sampling,
    'aggregation_modes': aggregation,
    'token_mean_under_grad_accum': grad_accum,
    'token_mean_two_ranks': two_ranks,
    'fully_masked_row': fully_masked,
    'kl_estimators_value': kl_value,
    'kl_estimators_gradient': kl_gradient,
    'tis_mis_weights': importance,
    'decoupled_ppo': decoupled,
    'temperature_logprob': temperature,
    'topp_logprob_bias': truncated_law,
    'speculative_accept': speculative_accept,
    'logprob_shift': shift,
    'completion_mask_shift': completion_mask,
    'position_ids_left_pad': positions,
    'eos_mask_pad_eq_eos': eos_mask,
    'packing_equivalence': packing,
    'tool_mask': tool_mask,
    'dpo_sigmoid': dpo,
    'dpo_at_init': dpo,
    'rdpo_robust': robust,
    'ipo': ipo,
    'orpo': orpo,
    'kto': kto,
    'reward_model_bt': bradley_terry,
    'rm_last_token': rm_last_token,
    'pass_at_k': pass_at_k,
    'bf16_lost_update': lost_update,
    'mix_largest_remainder': mix,
}


class VectorsTest(parameterized.TestCase):

  @parameterized.named_parameters((name, name) for name in CHECKS)
  def test_vector(self, name):
    CHECKS[name](*VECTORS[name])

  def test_no_id_is_left_unhandled(self):
    self.assertEmpty(set(CHECKS) & set(ELSEWHERE))
    self.assertEqual(set(CHECKS) | set(ELSEWHERE), set(VECTORS))


if __name__ == '__main__':
  absltest.main()
