"""Reinforcement learning with verifiable rewards, synchronous: one step is five calls.

  curriculum.draw -> rollout.generate -> rollout.grade -> reward + advantage -> trainer.update

The engine always holds the policy that the step starts from, so rollouts are on-policy; what remains between the
sampler's log-probs and the trainer's is measured at every step (`rl/logp_diff_mean`, `rl/logp_diff_max`).
"""

from collections import Counter
import time

import numpy as np

from ptjax import types
from ptjax.data import batching
from ptjax.learn import advantages, losses, objectives, off_policy
from ptjax.learn.trainer import Trainer
from ptjax.rl import reward, rollout
from ptjax.rl.curriculum import Curriculum

SHOWN_EVERY = 5  # steps between the rollouts that are kept to be read


def run(config, parts, plain, stage):
  """Trains the plain state `plain` for config.rl.steps steps; returns the plain state it becomes.

  Killed anywhere, the same call goes on from the last checkpoint and ends with the same bits.
  """
  rl = config.rl
  trainer = Trainer(rl, parts.model_config, plain, objectives.policy(rl), mesh=parts.mesh,
                    temperature=rl.temperature, seed=config.seed, updates_per_step=rl.updates_per_step)
  curriculum = Curriculum(parts.train_tasks, seed=config.seed, weights=parts.weights, **config.curriculum)
  advantage = losses.bind(advantages.ADVANTAGES, rl.advantage, {}, what='advantage')
  for step in stage.steps(rl.steps, trainer, curriculum=curriculum):
    began = time.monotonic()
    parts.load_policy(trainer.merged(), version=step)
    tasks = curriculum.draw(rl.tasks_per_step)
    parts.engine.reset_stats()
    groups = rollout.generate(
        parts.engine, parts.tokenizer, tasks, samples=rl.rollouts_per_task, seed=config.seed, step=step,
        max_tokens=rl.max_tokens, temperature=rl.temperature)
    sampled = time.monotonic()
    rollouts = [r for group in groups for r in group]
    verdicts = rollout.grade(parts.verifiers, [t for t, group in zip(tasks, groups) for _ in group],
                             [r.text for r in rollouts])
    graded = [verdicts[i:i + rl.rollouts_per_task] for i in range(0, len(verdicts), rl.rollouts_per_task)]
    reward_UR, trainable_UR = reward.score(graded, groups)
    shaped_UR = reward.shape_overlong(reward_UR, groups, max_tokens=rl.max_tokens, cache_tokens=rl.overlong_tokens)
    advantage_UR = advantage(shaped_UR, trainable_UR)

    verified = time.monotonic()
    says_UR = trainable_UR
    if rl.advantage not in advantages.OVER_STEP:
      says_UR = says_UR & advantages.informative(reward_UR, trainable_UR)[:, None]
    batches = trainer.with_reference(pack(rl, rollouts, advantage_UR, says_UR, rows=trainer.rows))
    if rl.correction != 'none':
      batches = trainer.with_old(batches)
    for _ in range(rl.updates_per_step):
      learned = trainer.update(batches)
    curriculum.observe(tasks, reward_UR, trainable_UR)

    drawn = sum(len(r.token_ids) for r in rollouts)
    optim = {name: learned.pop(name) for name in ('grad_norm', 'lr')}
    learned['ess_frac'] = off_policy.ess_frac(learned.pop('behavior_ratio'), learned.pop('behavior_ratio_square'))
    outcomes = Counter(v.status for v in verdicts)
    errors = Counter(t.domain for t, row in zip(tasks, graded) for v in row if v.status == 'error')
    learned_at = time.monotonic()
    drawn_by = summary(tasks, rollouts, reward_UR, trainable_UR)
    stage.log(step, progress=dict(reward=drawn_by['reward_mean']), optim=optim,
              tokens_per_s=drawn / (learned_at - began),
              seconds=dict(sample=sampled - began, verify=verified - sampled, learn=learned_at - verified),
              rl=dict(learned, **drawn_by, curriculum=curriculum.shares()),
              sampler=parts.engine.stats(),
              verify=dict({status: outcomes[status] for status in types.STATUSES}, errors=dict(errors)))
    if step % SHOWN_EVERY == 0 or step + 1 == rl.steps:
      stage.add_rollouts(rollout.records(step, tasks, rollouts, verdicts))
  return trainer.merged()


def pack(rl, rollouts, advantage_UR, says_UR, *, rows: int):
  """Micro-batches of the rollouts that say something; a group whose advantages are all 0 is left out."""
  sequences = batching.groups(rollouts, advantage_UR, says_UR)
  return batching.pack(sequences, rows=rows, seq_len=rl.seq_len, max_branches=rl.branches,
                       loss_tokens=rl.loss_tokens).batches


def summary(tasks, rollouts, reward_UR, trainable_UR) -> dict:
  """What the step's rollouts were like; rewards over those with a verdict."""
  by_domain = {}
  for task, reward_R, trainable_R in zip(tasks, reward_UR, trainable_UR):
    by_domain.setdefault(task.domain, []).extend(reward_R[trainable_R])
  lengths = [len(r.token_ids) for r in rollouts]
  return dict(
      reward_mean=float(np.mean(reward_UR, where=trainable_UR)) if trainable_UR.any() else 0.0,
      length_mean=float(np.mean(lengths)),
      truncated_frac=float(np.mean([r.finish_reason == 'length' for r in rollouts])),
      reward={domain: float(np.mean(values)) for domain, values in by_domain.items() if values})
