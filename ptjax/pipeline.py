"""Runs stages in order from open weights: train, evaluate on held-out tasks, compare with the parent, promote or block.

What a manifest shows as done is skipped, so the same command goes on wherever it was stopped. A stage that falls behind
its parent by more than noise is blocked: its checkpoint stays, no later stage starts from it, and the run ends there.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import itertools
import json
import os
from typing import Any

from absl import logging
import jax

from ptjax import types
from ptjax.data import chat
from ptjax.evals import gates, report, suites
from ptjax.learn import supervised
from ptjax.models import adapters
from ptjax.rl import loop, rollout
from ptjax.runtime import checkpoint, devices, lineage, metrics
from ptjax.runtime.stage import Stage, Stopped
from ptjax.sample.engine import Engine
from ptjax.sample.requests import SamplerLimits
from ptjax.tasks import jsonl, procedural
from ptjax.verify.base import VerifierPool
from ptjax.weights import load as model_weights
from ptjax.weights import source as model_source

EVAL_FILE = 'eval.json'

# stage name -> (config, parts, plain state, stage on disk) -> plain state
STAGES = {'sft': supervised.sft, 'dpo': supervised.dpo, 'rl': loop.run}

# The config fields that decide what a stage comes to, beside those of the stages before it. A change elsewhere leaves a
# finished stage valid.
_FIELDS = {
    'base': ('seed', 'model.source', 'model.draft_source', 'model.param_dtype', 'model.compute_dtype', 'tasks', 'eval',
             'sampler.kv_dtype', 'sampler.weight_dtype'),
    'sft': ('sft',),
    'dpo': ('dpo', 'rl.max_tokens'),
    'rl': ('rl', 'curriculum'),
}
# And the user's own files, by what is in them.
_FILES = {'base': ('tasks.path', 'tasks.heldout_path'), 'sft': ('sft.data',), 'dpo': ('dpo.data',), 'rl': ()}

_SOURCE = 'model.source contents'  # and the model's, by its fingerprint


class GateBlocked(RuntimeError):
  """A stage fell behind its parent by more than noise and was not promoted."""


@dataclasses.dataclass
class Parts:
  """What stages share: the mesh, the model's shape and text side, the sampler, the verifiers and the tasks."""

  mesh: Any
  model_config: Any
  tokenizer: Any
  engine: Engine
  verifiers: VerifierPool
  train_tasks: dict[str, dict[int, list[types.Task]]]  # domain -> level -> tasks
  weights: dict[str, float]  # relative share by domain
  heldout_tasks: list[types.Task]

  def load_policy(self, plain, version: int) -> None:
    """Gives the sampler these parameters; a process that holds a part of them gathers the rest."""
    if jax.process_count() > 1:
      plain = jax.tree.map(devices.fetch, plain)
    self.engine.load_params(plain, version)


def run(config, workdir: str, stages: Sequence[str], *, interrupt: devices.Interrupt,
        overrides: Sequence[str] = ()) -> None:
  """Runs `base` (the source as it comes, evaluated) and then `stages`; writes the report after each.

  Raises:
    Stopped: a signal came; what is done is saved.
    GateBlocked: a stage fell behind its parent; nothing after it ran.
    ValueError: another run is writing to the workdir.
  """
  with lineage.locked(workdir) if devices.is_main() else contextlib.nullcontext():
    _run(config, workdir, stages, interrupt, overrides)


def _run(config, workdir, stages, interrupt, overrides) -> None:
  parts, source = build(config)
  check_prompts(config, parts, stages)
  done = []
  with parts.verifiers:
    for name in ('base', *stages):
      if interrupt.stop_requested():
        raise Stopped(f'stopped before stage {name}; what is finished is saved, the same command goes on from there')
      manifest = _begin(config, workdir, name, done, overrides)
      parent = done[-1] if done else None
      if manifest is None:
        logging.info('stage %s is done: skipped', name)
        _judge(config, workdir, lineage.read(workdir, name), parent)
      else:
        stage = Stage(name, workdir, **config.checkpoint, interrupt=interrupt)
        plain = restore(workdir, parts.mesh, parts.model_config, source, done)
        if name != 'base':
          plain = STAGES[name](config, parts, plain, stage)
        _finish(config, workdir, parts, plain, stage, manifest, parent=parent)
      done.append(name)
      if devices.is_main():
        show(workdir, done)
      _check_gate(config, workdir, name)


def build(config, *, tasks: bool = True) -> tuple[Parts, Any]:
  """The parts of a run and the plain state of its model source."""
  mesh = devices.make_mesh(**config.mesh)
  model = load_model(config, mesh)
  draft = load_model(config, mesh, config.model.draft_source) if config.model.draft_source else None
  if draft and draft.tokenizer.vocabulary != model.tokenizer.vocabulary:
    raise ValueError(f'model.draft_source = {config.model.draft_source!r} has another tokenizer than model.source = '
                     f'{config.model.source!r}; fix: a draft model of the same family, or --config.model.draft_source=')
  engine = Engine(model.config, SamplerLimits(**config.sampler),
                  mesh=mesh if jax.process_count() == 1 else None,  # each process samples on a device of its own
                  decode_text=functools.partial(model.tokenizer.decode, skip_special=True),
                  draft_config=draft and draft.config)
  if draft:
    engine.load_draft(draft.params)
  train, heldout = load_tasks(config) if tasks else ({}, [])
  verifiers = VerifierPool(min_isolation=config.sandbox.min_isolation, workers=config.sandbox.workers,
                           max_error_frac=config.verify.max_error_frac)
  parts = Parts(mesh, model.config, model.tokenizer, engine, verifiers, train, domain_weights(config, train), heldout)
  return parts, model.params


def load_model(config, mesh, source: str = ''):
  """The model source (or another one), laid over the mesh."""
  m = config.model
  return model_weights.load(
      source or m.source, place=functools.partial(devices.put_global, mesh, fit=True), cache_dir=m.cache_dir,
      seed=config.seed, param_dtype=m.param_dtype, compute_dtype=m.compute_dtype, remat=m.remat)


def load_tasks(config):
  """(training tasks by domain and level, held-out tasks), disjoint."""
  t = config.tasks
  if t.path:
    train, heldout = jsonl.tasks(t.path), jsonl.tasks(t.heldout_path)
    shared = {task.id for task in train} & {task.id for task in heldout}
    if shared:
      raise ValueError(f'{len(shared)} tasks stand in both {t.path} and {t.heldout_path}, e.g. {sorted(shared)[0]!r}; '
                       'fix: take them out of one')
    return jsonl.by_domain(train), heldout
  make = functools.partial(procedural.make, seed=config.seed)
  train = {domain: {level: make(domain, split='train', count=t.train_per_domain, level=level) for level in t.levels}
           for domain in t.domains}
  heldout = [task for domain in t.domains
             for task in make(domain, split='heldout', count=config.eval.tasks_per_domain, level=min(t.levels))]
  return train, heldout


def domain_weights(config, train) -> dict[str, float]:
  """Relative share by domain of the training tasks.

  Raises:
    ValueError: the weights are for other domains than the tasks', or there are too many domains for the least share.
  """
  t, min_share = config.tasks, config.curriculum.min_share
  weights = dict(zip(t.domains, t.weights)) if t.weights else dict.fromkeys(train, 1.0)
  if train and set(weights) != set(train):
    raise ValueError(f'tasks.weights are for the domains {t.domains}, but {t.path} has {tuple(train)}; '
                     f'fix: --config.tasks.domains="{tuple(train)}" with weights in that order')
  if 'rl' in config.pipeline.stages and min_share * len(train) > 1:
    raise ValueError(f'curriculum.min_share = {min_share}: {len(train)} domains cannot all have it; '
                     f'fix: --config.curriculum.min_share={1 / len(train):.4f} or less')
  return weights


def check_prompts(config, parts: Parts, stages: Sequence[str]) -> None:
  """Raises ValueError, before any work, for a task whose prompt leaves too little room for what it will be asked."""
  context = ('sampler.max_context', config.sampler.max_context)
  asked = [(parts.heldout_tasks, 'eval', config.eval.max_tokens, [context])]
  if 'rl' in stages or 'dpo' in stages and not config.dpo.data:
    train = [task for levels in parts.train_tasks.values() for tasks in levels.values() for task in tasks]
    row = [('rl.seq_len', config.rl.seq_len)] if 'rl' in stages else []
    asked.append((train, 'rl', config.rl.max_tokens, [context, *row]))
  for tasks, section, max_tokens, limits in asked:
    for task in tasks:
      need = len(chat.encode_prompt(parts.tokenizer, task.messages)) + max_tokens
      for flag, limit in limits:
        if need > limit:
          raise ValueError(f'task {task.id}: its prompt and {section}.max_tokens = {max_tokens} take {need} tokens, '
                           f'over {flag} = {limit}; fix: a shorter prompt, or --config.{flag}={need}')


def restore(workdir: str, mesh, model_config, plain, stages: Sequence[str]):
  """The plain state after the finished `stages`: `plain` with each stage's trained parameters put in or merged."""
  for name in stages:
    if name != 'base':
      graphdef, params, frozen, _ = trained(workdir, mesh, model_config, plain, name)
      plain = jax.jit(adapters.merge, static_argnums=0)(graphdef, params, frozen)
  return plain


def trained(workdir: str, mesh, model_config, parent, name: str):
  """(graphdef, trained parameters, frozen ones, settings) of a finished stage that started from the state `parent`."""
  manifest = lineage.read(workdir, name)
  settings = manifest.config[name]  # what the stage ran with, whatever today's config says
  graphdef, params, frozen = adapters.split(
      model_config, parent, rank=settings['lora_rank'], alpha=settings['lora_alpha'], seed=manifest.seed)
  params = jax.device_put(params, devices.shardings_of(mesh, params))
  loaded, _, _ = checkpoint.load(os.path.join(workdir, name, 'checkpoints'), {'params': params})
  return graphdef, loaded['params'], frozen, settings


def finished_stages(config, workdir: str) -> list[str]:
  """The stages that made the model a small job uses, in order: those that config.model.stage came from, and it.

  'last' is the one started last of those that finished, passed their gate and whose parents still are what they were.

  Raises:
    ValueError: there is none such in this workdir, or it was trained from another source.
  """
  wanted, paths = config.model.stage, {}  # stage -> the stages from the source to it
  hashes = {config.model.source: ''}
  for manifest in lineage.chain(workdir) if workdir and wanted != 'base' else ():
    if manifest.config['model.source'] != config.model.source:
      raise ValueError(f"{workdir} was trained from {manifest.config['model.source']!r}, not {config.model.source!r}; "
                       f"fix: --config.model.source={manifest.config['model.source']}")
    if manifest.config.get(_SOURCE) != model_source.fingerprint(config.model.source, config.model.cache_dir):
      raise ValueError(f'{workdir} was trained from other contents of {config.model.source!r} than it has now; fix: '
                       'put them back, or train again in another --workdir')
    passed = manifest.gate is None or manifest.gate['passed'] or not config.gate.enabled
    [(parent, parent_hash)] = manifest.parents.items()
    if manifest.finished and hashes.get(parent) == parent_hash and (passed or manifest.stage == wanted):
      hashes[manifest.stage] = manifest.config_hash
      paths[manifest.stage] = [*paths.get(parent, ()), manifest.stage]
  if wanted == 'base' or not workdir and wanted == 'last':
    return []
  if not paths or wanted not in ('last', *paths):
    raise ValueError(f'model.stage = {wanted!r}: has not finished in workdir {workdir!r}, which has {list(paths)}; '
                     'fix: --config.model.stage=base or last, or another --workdir')
  return list(paths.values())[-1] if wanted == 'last' else paths[wanted]


def evaluate(config, parts: Parts, plain, *, version: int = 0, name: str = 'heldout') -> suites.SuiteResult:
  """The held-out result of the plain state `plain`."""
  e = config.eval
  parts.load_policy(plain, version)
  with metrics.Progress(f'eval {name}', len(parts.heldout_tasks) * e.samples) as progress:
    finished = itertools.count(1)
    on_finish = lambda rollout: progress.update(next(finished))

    def generate(tasks, samples):
      return rollout.generate(parts.engine, parts.tokenizer, tasks, samples=samples, seed=config.seed,
                              on_finish=on_finish, max_tokens=e.max_tokens, temperature=e.temperature)

    return suites.evaluate(parts.heldout_tasks, generate, functools.partial(rollout.grade, parts.verifiers),
                           samples=e.samples, ks=sorted({1, e.samples}), confidence=config.gate.confidence,
                           majority=procedural.majority_accuracy(parts.heldout_tasks))


def relevant(config, stages: Sequence[str]) -> dict:
  """What decides what the last of `stages` comes to: fields at their full names, and files by their digests."""
  value_of = lambda name: functools.reduce(lambda section, key: section[key], name.split('.'), config)
  values = {name: value_of(name) for stage in stages for name in _FIELDS[stage]}
  files = {f'{name} sha256': lineage.file_digest(value_of(name))
           for stage in stages for name in _FILES[stage] if value_of(name)}
  files[_SOURCE] = model_source.fingerprint(config.model.source, config.model.cache_dir)
  return {name: value.to_dict() if hasattr(value, 'to_dict') else value for name, value in values.items()} | files


def _begin(config, workdir, name, done, overrides) -> lineage.Manifest | None:
  """The manifest of a stage that is to run, already on disk; None when the stage is done."""
  fields = relevant(config, [*done, name])
  parents = {parent: lineage.digest(relevant(config, done)) for parent in done[-1:]} or {config.model.source: ''}
  digest = lineage.digest(fields)
  if devices.is_main():  # one process moves directories, the others wait for it
    lineage.set_aside_changed(workdir, name, digest, parents=parents, rerun=config.pipeline.rerun_changed)
  devices.barrier(f'stage {name}')
  if lineage.is_done(workdir, name, digest, config=fields, parents=parents):
    return None
  manifest = lineage.begin(name, parents=parents, config=fields, seed=config.seed, overrides=overrides,
                           config_hash=digest, devices=[d.device_kind for d in jax.devices()])
  if devices.is_main():
    lineage.write(workdir, manifest)
  return manifest


def _finish(config, workdir, parts, plain, stage, manifest, *, parent) -> None:
  """Evaluates the stage, holds it against its parent and closes its manifest; without held-out tasks only closes it."""
  manifest.data = dict(
      train={domain: lineage.digest([task.id for task in tasks])
             for domain, tasks in supervised.by_domain(parts.train_tasks).items()},
      heldout=lineage.digest([task.id for task in parts.heldout_tasks]))
  manifest.metrics = dict(stage.last)
  if parent:
    manifest.checkpoint = os.path.join(stage.name, 'checkpoints')
  if parts.heldout_tasks:
    result = evaluate(config, parts, plain, name=stage.name)
    manifest.metrics |= dict(accuracy=result.macro.accuracy, strict=result.macro.strict_frac)
    if devices.is_main():
      suites.save(result, stage.directory / EVAL_FILE)
    devices.barrier('stage evaluated')
  manifest.finished = lineage.now()
  _judge(config, workdir, manifest, parent)


def _judge(config, workdir, manifest, parent) -> None:
  """Holds a stage's held-out result against its parent's under the gate as it is set now, and records the manifest."""
  paths = [os.path.join(workdir, name, EVAL_FILE) for name in (parent, manifest.stage) if name]
  if parent and all(map(os.path.exists, paths)):
    gate = gates.compare(*map(suites.load, paths), confidence=config.gate.confidence, max_drop=config.gate.max_drop)
    record = dict(gate.to_json(), enabled=bool(config.gate.enabled))
    manifest.gate = json.loads(json.dumps(record))  # as it is read back
  if devices.is_main() and lineage.read(workdir, manifest.stage) != manifest:
    lineage.write(workdir, manifest)
  devices.barrier('stage judged')


def _check_gate(config, workdir, name) -> None:
  gate = lineage.read(workdir, name).gate
  if gate is None or gate['passed']:
    return
  reasons = '\n  '.join(gate['reasons'])
  if config.gate.enabled:
    raise GateBlocked(f'stage {name} is blocked by its gate, nothing was promoted past its parent:\n  {reasons}')
  logging.warning('stage %s would be blocked, but config.gate.enabled is False:\n  %s', name, reasons)


def show(workdir, stages: Sequence[str]) -> None:
  """Prints the accuracy of every stage so far by domain, and writes the report."""
  paths = {name: os.path.join(workdir, name, EVAL_FILE) for name in stages}
  results = {name: suites.load(path) for name, path in paths.items() if os.path.exists(path)}
  if results:
    show_table(results)
  logging.info('report: %s', report.write(workdir))


def show_table(results: dict[str, suites.SuiteResult]) -> None:
  """Prints accuracy and strict accuracy by domain, a column pair per result."""
  first = next(iter(results.values()))
  rows = []
  for domain in (*first.domains, 'average'):
    pick = lambda result: result.macro if domain == 'average' else result.domains[domain]
    row = dict(domain=domain, tasks=pick(first).tasks, majority=pick(first).majority_frac)
    for name, result in results.items():
      row[name] = pick(result).accuracy
      row[f'{name} strict'] = pick(result).strict_frac
    rows.append(row)
  metrics.table(rows, 'held-out accuracy (answer right), and strict (right and in the asked form)')
