"""Supervised fine-tuning and preference optimisation: one loop over packed examples, two ways to get them."""

from collections.abc import Callable, Mapping, Sequence
import itertools
import json
import os
import time

from absl import logging
import numpy as np

from ptjax import types
from ptjax.data import batching, chat
from ptjax.data.mixture import Mixture
from ptjax.learn import objectives
from ptjax.learn.trainer import Trainer
from ptjax.rl import rollout
from ptjax.runtime import devices
from ptjax.tasks import jsonl

PAIRS_FILE = 'pairs.jsonl'
BLOCK_PER_SOURCE = 8  # examples per source over which the mixture's shares are exact


def sft(config, parts, plain, stage):
  """Trains on demonstrations for config.sft.steps steps; returns the plain state that `plain` becomes."""
  trainer = Trainer(config.sft, parts.model_config, plain, objectives.supervised(), mesh=parts.mesh, seed=config.seed)
  return _train(config.sft, trainer, *demonstrations(config.sft, parts), stage, seed=config.seed)


def dpo(config, parts, plain, stage):
  """Prefers chosen over rejected completions (arXiv 2305.18290) for config.dpo.steps steps.

  Without a data file the pairs are the parent's own samples: right against wrong, as the verifiers say.
  """
  trainer = Trainer(config.dpo, parts.model_config, plain, objectives.preference(config.dpo), mesh=parts.mesh,
                    seed=config.seed)
  pairs = preferences(config, parts, plain, stage)
  return _train(config.dpo, trainer, {'pairs': pairs}, {'pairs': 1.0}, stage, seed=config.seed, unit=2,
                before=trainer.with_reference)


def _train(settings, trainer, sources: Mapping[str, Sequence[types.TokenizedSequence]], weights, stage, *, seed: int,
           unit: int = 1, before: Callable = lambda batches: batches):
  """Takes settings.steps optimizer steps on settings.examples examples each, drawn from the sources by weight."""
  check_sizes(settings, sources, stage.name)
  mixture = Mixture(sources, weights, block=BLOCK_PER_SOURCE * len(sources), seed=seed)
  for step in stage.steps(settings.steps, trainer, mixture=mixture):
    began = time.monotonic()
    examples = batching.share_prefix(mixture.draw(settings.examples))
    batches = before(batching.pack(
        examples, rows=trainer.rows, seq_len=settings.seq_len, max_branches=settings.branches,
        loss_tokens=settings.loss_tokens, unit=unit).batches)
    metrics = trainer.update(batches)
    tokens = int(sum((b.segment_BT > 0).sum() for b in batches))
    optim = {name: metrics.pop(name) for name in ('grad_norm', 'lr')}
    stage.log(step, progress=dict(loss=metrics['loss']), tokens_per_s=tokens / (time.monotonic() - began),
              optim=optim, **{stage.name: metrics})
  return trainer.merged()


def check_sizes(settings, sources: Mapping[str, Sequence[types.TokenizedSequence]], stage: str) -> None:
  """Raises ValueError, before the first step, for an example that no row can hold; names it and the flags to raise."""
  for source, examples in sources.items():
    for number, example_of in enumerate(examples, 1):
      tokens, _, trained = batching.size(example_of)
      if tokens > settings.seq_len or trained > settings.loss_tokens:
        raise ValueError(
            f'{stage}: example {number} of {source} has {tokens} tokens, {trained} of them trained; a row takes '
            f'{stage}.seq_len = {settings.seq_len} and {stage}.loss_tokens = {settings.loss_tokens}; '
            f'fix: a shorter example, or --config.{stage}.seq_len={max(tokens, settings.seq_len)} '
            f'--config.{stage}.loss_tokens={max(trained, settings.loss_tokens)}')


def demonstrations(settings, parts) -> tuple[dict[str, list[types.TokenizedSequence]], dict[str, float]]:
  """(examples by source, weights): the records of the data file, or the training tasks' demonstrations by domain.

  Raises:
    ValueError: there is no example at all.
  """
  encode = lambda messages: batching.supervised(*example(parts.tokenizer, messages))
  if settings.data:
    return {'data': [encode(messages) for messages in jsonl.conversations(settings.data)]}, {'data': 1.0}
  found = {domain: [encode([*task.messages, answered(task.demonstration)]) for task in tasks if task.demonstration]
           for domain, tasks in by_domain(parts.train_tasks).items()}
  found = {domain: examples for domain, examples in found.items() if examples}
  if not found:
    raise ValueError('sft: no training task has a demonstration; fix: --config.sft.data=FILE.jsonl')
  return found, {domain: parts.weights[domain] for domain in found}


def answered(text: str) -> dict:
  return dict(role='assistant', content=text)


def example(tokenizer, messages, *, given: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """(prompt ids, completion ids, completion mask): the prompt ends where the first assistant turn opens.

  Args:
    given: messages at the start that belong to the prompt, assistant turns among them too.
  """
  ids, mask = chat.encode_conversation(tokenizer, messages)
  before = messages[:given]
  start = len(chat.encode_conversation(tokenizer, before)[0]) if any(m['role'] == 'assistant' for m in before) else 0
  first = start + int(np.argmax(mask[start:]))
  return ids[:first], ids[first:], mask[first:]


def preferences(config, parts, plain, stage) -> list[types.TokenizedSequence]:
  """Chosen/rejected pairs from the data file, or from samples of `plain`, kept in the stage's directory."""
  if config.dpo.data:
    both = [[example(parts.tokenizer, [*r['prompt'], *r[side]], given=len(r['prompt']))
             for side in ('chosen', 'rejected')] for r in jsonl.preferences(config.dpo.data)]
    return [batching.preference(chosen[0], [(chosen[1], rejected[1])], masks=[(chosen[2], rejected[2])])
            for chosen, rejected in both]
  records = kept_pairs(stage.directory / PAIRS_FILE) or sample_pairs(config, parts, plain, stage.directory / PAIRS_FILE)
  return [batching.preference(np.asarray(r['prompt_ids']), [r['pair']]) for r in records]


def kept_pairs(path) -> list[dict]:
  """The pairs that process 0 finds in its file, given to all processes; none when there is no file."""
  text = path.read_text(encoding='utf-8') if devices.is_main() and path.exists() else ''
  return [json.loads(line) for line in devices.gather_bytes(text)[0].splitlines()]


def sample_pairs(config, parts, plain, path) -> list[dict]:
  """Samples training tasks from `plain` and pairs right with wrong samples; process 0 keeps them in the file.

  Raises:
    ValueError: no task had both.
  """
  settings = config.dpo
  rng = np.random.default_rng([config.seed, 1])
  pool = [task for tasks in by_domain(parts.train_tasks).values() for task in tasks]
  tasks = [pool[i] for i in rng.permutation(len(pool))[:settings.sample_tasks]]
  parts.load_policy(plain, version=0)
  groups = rollout.generate(parts.engine, parts.tokenizer, tasks, samples=settings.samples_per_task, seed=config.seed,
                            max_tokens=config.rl.max_tokens, temperature=settings.temperature)
  verdicts = iter(rollout.grade(parts.verifiers, [t for t, group in zip(tasks, groups) for _ in group],
                                [r.text for group in groups for r in group]))
  records = []
  for task, group in zip(tasks, groups):
    judged = [(r, next(verdicts)) for r in group]
    distinct = {r.token_ids.tobytes(): (r, v) for r, v in judged if r.finish_reason == 'stop'}.values()
    right = [r for r, v in distinct if v.status == 'pass']
    wrong = [r for r, v in distinct if v.status in ('fail', 'timeout')]
    records += [dict(task_id=task.id, chosen=chosen.text, rejected=rejected.text, prompt_ids=chosen.prompt_ids.tolist(),
                     pair=[chosen.token_ids.tolist(), rejected.token_ids.tolist()])
                for chosen, rejected in list(itertools.product(right, wrong))[:settings.pairs_per_task]]
  logging.info('dpo: %d pairs from %d tasks of %d samples', len(records), len(tasks), settings.samples_per_task)
  if not records:
    raise ValueError('dpo: no task had both a right and a wrong sample, so there is no pair; fix: other domains or '
                     'levels, or a higher --config.dpo.samples_per_task')
  if devices.is_main():
    partial = path.with_suffix('.partial')
    partial.write_text(''.join(json.dumps(record) + '\n' for record in records), encoding='utf-8')
    os.replace(partial, path)
  return records


def by_domain(pools: Mapping[str, Mapping[int, Sequence[types.Task]]]) -> dict[str, list[types.Task]]:
  """The tasks of each domain, all levels together, in a fixed order."""
  return {domain: [task for level in sorted(levels) for task in levels[level]] for domain, levels in pools.items()}
