"""From tasks to rollouts: renders prompts, samples completions with the engine, decodes them.

With several processes each samples the tasks it owns on its own devices and all get the whole list back, in task
order. A request's draws depend on (seed, step, task, sample) alone, so the result does not depend on how tasks were
shared out.
"""

from collections.abc import Sequence
import dataclasses
import zlib

import jax

from ptjax import types
from ptjax.data import chat
from ptjax.data.tokenizer import Tokenizer
from ptjax.runtime import devices
from ptjax.sample.engine import Engine
from ptjax.sample.requests import Request


def generate(engine: Engine, tokenizer: Tokenizer, tasks: Sequence[types.Task], *, samples: int, seed: int,
             step: int = 0, on_finish=None, **sampling) -> list[list[types.Rollout]]:
  """`samples` rollouts of each task, in task order, with their text.

  Args:
    seed, step: with the task's place and id they determine every draw.
    on_finish: called with each rollout as it ends.
    **sampling: max_tokens, temperature and the other sampling fields of Request.

  Raises:
    ValueError: a prompt that does not fit the engine's context; names the task.
  """
  mine = range(jax.process_index(), len(tasks), jax.process_count())
  requests = [
      Request(id=tasks[i].id, group_id=f'{step}/{i}', prompt_ids=chat.encode_prompt(tokenizer, tasks[i].messages),
              samples=samples, seed=zlib.crc32(f'{seed}/{step}/{i}/{tasks[i].id}'.encode()),
              stop_ids=tokenizer.eos_ids, **sampling)
      for i in mine
  ]
  groups = engine.generate(requests, on_finish)
  for group in groups:
    for rollout in group:
      rollout.text = tokenizer.decode(rollout.token_ids, skip_special=True)
  return share(groups, len(tasks), unpack=lambda fields: types.Rollout(**fields))


def share(mine: list, total: int, *, unpack) -> list:
  """Puts together what each process computed for items p, p + P, p + 2P, ...; each item is a list of dataclasses."""
  if jax.process_count() == 1:
    return mine
  packed = [[dataclasses.asdict(x) for x in item] for item in mine]
  everything = [None] * total
  for process, part in enumerate(devices.gather_bytes(packed)):
    for k, item in enumerate(part):
      everything[process + k * jax.process_count()] = [unpack(fields) for fields in item]
  return everything


def grade(pool, tasks: Sequence[types.Task], texts: Sequence[str]) -> list[types.Verdict]:
  """One verdict per (task, text); each process grades its part in its own sandboxes and gets all of them back."""
  mine = range(jax.process_index(), len(tasks), jax.process_count())
  verdicts = pool.run([tasks[i] for i in mine], [texts[i] for i in mine])
  return [v for v, in share([[v] for v in verdicts], len(tasks), unpack=lambda fields: types.Verdict(**fields))]


def records(step: int, tasks, rollouts, verdicts) -> list[dict]:
  """Readable lines for rollouts.jsonl: the first rollout of each task with its verdict."""
  per_task = len(rollouts) // len(tasks)
  return [
      dict(step=step, task_id=task.id, domain=task.domain, prompt=task.messages[-1]['content'],
           completion=rollout.text, status=verdict.status, score=verdict.score, format_ok=verdict.format_ok,
           finish_reason=rollout.finish_reason, reference=_shown(task), evidence=verdict.evidence)
      for task, rollout, verdict in zip(tasks, rollouts[::per_task], verdicts[::per_task])
  ]


def _shown(task: types.Task):
  """The right answer as a reader wants it; a task graded by tests has only an example of one."""
  reference = task.reference['answer'] if isinstance(task.reference, dict) else task.reference
  return task.demonstration if reference is None else reference
