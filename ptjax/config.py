"""Checks a whole configuration before any device is touched, and says everything that is wrong with it at once.

Every problem names the field, its value, the rule, and the flag that fixes it. Nothing is changed here: values that
follow from others are computed where they are used. No jax is imported, so a job without a model can check its config.
"""

from collections.abc import Iterator, Mapping, Sequence
import ipaddress
import os

from ml_collections import config_dict

DTYPES = ('float32', 'bfloat16')
SCALED_DTYPES = ('int8', 'float8_e4m3fn')  # with a scale beside them
ISOLATION = ('userns', 'root', 'uid', 'landlock', 'none')
SCHEDULES = ('constant', 'linear', 'cosine')
STAGES = ('sft', 'dpo', 'rl')
# Rows of the tables in ptjax/learn, which import jax and so are not read here; a test compares them.
ALGORITHMS = {
    'dpo.loss': ('dpo', 'hinge', 'ipo_mean', 'ipo_sum', 'kto', 'orpo', 'robust_dpo', 'simpo'),
    'rl.advantage': ('dr_grpo', 'grpo', 'grpo_population_std', 'reinforce_pp', 'reinforce_pp_baseline', 'rloo'),
    'rl.policy_loss': ('cispo', 'gspo', 'ppo_clip', 'reinforce'),
    'rl.aggregation': ('seq_mean_token_mean', 'seq_mean_token_sum', 'seq_mean_token_sum_norm', 'token_mean'),
    'rl.kl': ('k2', 'k3', 'k3_ratio'),
    'rl.correction': ('geometric_mis', 'icepop', 'none', 'sequence_mis', 'sequence_tis', 'token_mis', 'token_tis'),
}

# field -> (rule in words, test, a value that passes)
_RULES = {
    'seed': ('an integer >= 0', lambda v: v >= 0, 0),
    'model.param_dtype': (f'one of {DTYPES}', lambda v: v in DTYPES, 'float32'),
    'model.compute_dtype': (f'one of {DTYPES}', lambda v: v in DTYPES, 'float32'),
    'model.remat': ("'none' or 'block'", lambda v: v in ('none', 'block'), 'none'),
    'tasks.train_per_domain': ('>= 1', lambda v: v >= 1, 100),
    'pipeline.stages': (f'a tuple out of {STAGES}, each at most once',
                        lambda v: set(v) <= set(STAGES) and len(set(v)) == len(v), "\"('sft','dpo','rl')\""),
    'dpo.beta': ('> 0', lambda v: v > 0, 0.1),
    'dpo.odds_weight': ('>= 0', lambda v: v >= 0, 0.1),
    'dpo.label_smoothing': ('in [0, 0.5)', lambda v: 0 <= v < 0.5, 0.0),
    'dpo.samples_per_task': ('>= 2: a pair needs a right and a wrong sample', lambda v: v >= 2, 4),
    'dpo.sample_tasks': ('>= 1', lambda v: v >= 1, 64),
    'dpo.pairs_per_task': ('>= 1', lambda v: v >= 1, 1),
    'dpo.temperature': ('> 0: greedy samples of one task are all the same', lambda v: v > 0, 1.0),
    'dpo.branches': ('an even number >= 2: chosen and rejected are neighbours', lambda v: v >= 2 and v % 2 == 0, 32),
    'rl.tasks_per_step': ('>= 1', lambda v: v >= 1, 8),
    'rl.rollouts_per_task': ('>= 2: an advantage compares the rollouts of one task', lambda v: v >= 2, 8),
    'rl.temperature': ('> 0: greedy rollouts of one task are all the same', lambda v: v > 0, 1.0),
    'rl.overlong_tokens': ('>= 0', lambda v: v >= 0, 0),
    'curriculum.window': ('>= 1', lambda v: v >= 1, 64),
    'rl.max_tokens': ('>= 1 token', lambda v: v >= 1, 32),
    'rl.clip_low': ('in (0, 1)', lambda v: 0 < v < 1, 0.2),
    'rl.clip_high': ('> 0', lambda v: v > 0, 0.28),
    'rl.kl_coef': ('>= 0', lambda v: v >= 0, 0.01),
    'rl.correction_cap': ('> 0', lambda v: v > 0, 2.0),
    'rl.correction_floor': ('>= 0', lambda v: v >= 0, 0.5),
    'rl.updates_per_step': ('>= 1', lambda v: v >= 1, 1),
    'curriculum.rehearsal_frac': ('in [0, 1)', lambda v: 0 <= v < 1, 0.1),
    'curriculum.raise_at': ('in (0, 1]', lambda v: 0 < v <= 1, 0.9),
    'sampler.slots': ('>= 1', lambda v: v >= 1, 32),
    'sampler.page_size': ('a power of two', lambda v: v >= 1 and v & (v - 1) == 0, 16),
    'sampler.window': ('>= 1', lambda v: v >= 1, 8),
    'sampler.pages': ('0, or >= 2: one of them is never used', lambda v: v == 0 or v >= 2, 0),
    'sampler.max_context': ('>= 2 tokens', lambda v: v >= 2, 1024),
    'sampler.prefill_chunk': ('>= 1', lambda v: v >= 1, 128),
    'sampler.prefill_budget': ('>= 0', lambda v: v >= 0, 0),
    'sampler.stop_ids': ('>= 1', lambda v: v >= 1, 8),
    'sampler.top_logp': ('>= 0', lambda v: v >= 0, 0),
    'sampler.biases': ('>= 0', lambda v: v >= 0, 0),
    'sampler.draft_tokens': ('>= 0', lambda v: v >= 0, 0),
    'sampler.ngram': ('>= 1', lambda v: v >= 1, 3),
    'sampler.kv_dtype': (f"'' or one of {DTYPES + SCALED_DTYPES}", lambda v: v in ('', *DTYPES, *SCALED_DTYPES),
                         'bfloat16'),
    'sampler.weight_dtype': (f"'' or one of {SCALED_DTYPES}", lambda v: v in ('', *SCALED_DTYPES), 'int8'),
    'generate.temperature': ('>= 0', lambda v: v >= 0, 0.0),
    'generate.top_p': ('in (0, 1]', lambda v: 0 < v <= 1, 1.0),
    'generate.min_p': ('in [0, 1)', lambda v: 0 <= v < 1, 0.0),
    'generate.top_k': ('>= 0', lambda v: v >= 0, 0),
    'generate.max_tokens': ('>= 1', lambda v: v >= 1, 64),
    'generate.samples': ('>= 1', lambda v: v >= 1, 1),
    'serve.port': ('in [0, 65535] (0 takes a free one)', lambda v: 0 <= v <= 65535, 8000),
    'serve.max_waiting': ('>= 0', lambda v: v >= 0, 256),
    'serve.max_body_bytes': ('>= 1024', lambda v: v >= 1024, 4194304),
    'serve.drain_s': ('in [0, 3600] seconds', lambda v: 0 <= v <= 3600, 30.0),
    'eval.tasks_per_domain': ('>= 1', lambda v: v >= 1, 40),
    'eval.samples': ('>= 1', lambda v: v >= 1, 1),
    'eval.temperature': ('>= 0', lambda v: v >= 0, 0.0),
    'eval.max_tokens': ('>= 1', lambda v: v >= 1, 64),
    'gate.confidence': ('in (0, 1)', lambda v: 0 < v < 1, 0.95),
    'gate.max_drop': ('a fraction in [0, 1]', lambda v: 0 <= v <= 1, 0.0),
    'sandbox.min_isolation': (f'one of {ISOLATION}', lambda v: v in ISOLATION, 'uid'),
    'sandbox.workers': ('>= 0 (0: one more than cores)', lambda v: v >= 0, 0),
    'verify.max_error_frac': ('a fraction in [0, 1]', lambda v: 0 <= v <= 1, 0.1),
    'checkpoint.every': ('>= 1 step', lambda v: v >= 1, 5),
    'checkpoint.keep': ('>= 2, so that one save survives whatever happens to the other', lambda v: v >= 2, 2),
}
_STAGE_RULES = {
    'steps': ('>= 1', lambda v: v >= 1, 20),
    'lr': ('> 0', lambda v: v > 0, 1e-4),
    'schedule': (f'one of {SCHEDULES}', lambda v: v in SCHEDULES, 'constant'),
    'warmup_steps': ('>= 0', lambda v: v >= 0, 0),
    'weight_decay': ('>= 0', lambda v: v >= 0, 0.0),
    'clip_norm': ('> 0', lambda v: v > 0, 1.0),
    'b1': ('in [0, 1)', lambda v: 0 <= v < 1, 0.9),
    'b2': ('in [0, 1)', lambda v: 0 <= v < 1, 0.95),
    'lora_rank': ('>= 0 (0 trains every parameter)', lambda v: v >= 0, 16),
    'lora_alpha': ('>= 0 (0: equal to lora_rank)', lambda v: v >= 0, 0.0),
    'rows': ('>= 1', lambda v: v >= 1, 4),
    'seq_len': ('>= 2 tokens', lambda v: v >= 2, 256),
    'loss_tokens': ('>= 1', lambda v: v >= 1, 128),
    'branches': ('>= 1', lambda v: v >= 1, 32),
}


def validate(config: config_dict.ConfigDict, base: config_dict.ConfigDict, *, where: str = 'the configuration') -> None:
  """Raises one ValueError that lists every problem of `config`.

  Args:
    base: what configs/base.py gives: `config` must have exactly its fields.
    where: the config's file, for the message.
  """
  problems = list(_fields(config, base))
  if not problems:
    problems = [*_ruled(config), *_crossed(config)]
  if problems:
    text = '\n'.join(f'  {problem}\n      fix: {fix}' for problem, fix in problems)
    raise ValueError(f'{len(problems)} problem{"s" * (len(problems) > 1)} in {where}\n{text}')


def is_loopback(host: str) -> bool:
  """True for a name or address that only this machine itself can reach."""
  try:
    return host == 'localhost' or ipaddress.ip_address(host).is_loopback
  except ValueError:
    return False


def leaves(config: Mapping, prefix: str = '') -> Iterator[tuple[str, object]]:
  """(full name, value) of every field."""
  for name, value in config.items():
    if isinstance(value, Mapping | config_dict.ConfigDict):
      yield from leaves(value, f'{prefix}{name}.')
    else:
      yield f'{prefix}{name}', value


def _fields(config, base) -> Iterator[tuple[str, str]]:
  have, want = dict(leaves(config)), dict(leaves(base))
  for name in sorted(want.keys() - have.keys()):
    yield f'{name}: missing (was its section replaced whole?)', f'--config.{name}={want[name]!r}'
  for name in sorted(have.keys() - want.keys()):
    yield f'{name} = {have[name]!r}: no such field', 'take it out, or add it to configs/base.py'
  for name in sorted(want.keys() & have.keys()):
    if type(have[name]) is not type(want[name]) and not (isinstance(want[name], float) and
                                                         isinstance(have[name], int)):
      yield (f'{name} = {have[name]!r}: is {type(have[name]).__name__}, must be {type(want[name]).__name__}',
             f'--config.{name}={want[name]!r}')


def _ruled(config) -> Iterator[tuple[str, str]]:
  rules = dict(_RULES)
  for stage in STAGES:
    for name, rule in _STAGE_RULES.items():
      rules.setdefault(f'{stage}.{name}', rule)
  rules |= {name: (f'one of {rows}', lambda v, rows=rows: v in rows, rows[0]) for name, rows in ALGORITHMS.items()}
  rules |= {f'{stage}.examples': ('>= 1', lambda v: v >= 1, 16) for stage in ('sft', 'dpo')}
  values = dict(leaves(config))
  for name, (rule, test, example) in rules.items():
    if not test(values[name]):
      yield f'{name} = {values[name]!r}: must be {rule}', f'--config.{name}={example}'


def _crossed(config) -> Iterator[tuple[str, str]]:
  """Rules that look at several fields."""
  for stage in config.pipeline.stages:
    if config[stage].loss_tokens > config[stage].seq_len:
      yield (f'{stage}.loss_tokens = {config[stage].loss_tokens}: a row has {stage}.seq_len = {config[stage].seq_len} '
             'tokens', f'--config.{stage}.loss_tokens={config[stage].seq_len}')
  if 'rl' in config.pipeline.stages and config.rl.max_tokens > config.rl.loss_tokens:
    yield (f'rl.max_tokens = {config.rl.max_tokens}: a rollout must fit the trained tokens of a row, rl.loss_tokens = '
           f'{config.rl.loss_tokens}', f'--config.rl.loss_tokens={config.rl.max_tokens}')
  if 'dpo' in config.pipeline.stages and not config.dpo.data and 2 * config.rl.max_tokens > config.dpo.loss_tokens:
    yield (f'dpo.loss_tokens = {config.dpo.loss_tokens}: a pair of samples takes up to 2 x rl.max_tokens = '
           f'{2 * config.rl.max_tokens}', f'--config.dpo.loss_tokens={2 * config.rl.max_tokens}')
  if config.model.draft_source and not config.sampler.draft_tokens:
    yield (f'model.draft_source = {config.model.draft_source!r}: guesses nothing with sampler.draft_tokens = 0',
           '--config.sampler.draft_tokens=4')
  for section in ('rl', 'eval', 'generate'):
    if config[section].max_tokens >= config.sampler.max_context:
      yield (f'{section}.max_tokens = {config[section].max_tokens}: leaves no room for a prompt in '
             f'sampler.max_context = {config.sampler.max_context}',
             f'--config.sampler.max_context={2 * config[section].max_tokens}')
  if config.curriculum.lower_at >= config.curriculum.raise_at:
    yield (f'curriculum.lower_at = {config.curriculum.lower_at}: must be below curriculum.raise_at = '
           f'{config.curriculum.raise_at}', '--config.curriculum.lower_at=0.1')
  yield from _tasks(config)
  for name in ('tasks.path', 'tasks.heldout_path', 'sft.data', 'dpo.data', 'serve.api_key_file'):
    path = dict(leaves(config))[name]
    if path and not os.path.exists(path):
      yield f'{name} = {path!r}: no such file', f'--config.{name}=FILE{"" if name.startswith("serve") else ".jsonl"}'
  if not config.serve.api_key_file and not is_loopback(config.serve.host):
    yield (f'serve.host = {config.serve.host!r}: is reached from other machines, so clients must show a key of '
           'serve.api_key_file', '--config.serve.api_key_file=FILE, or --config.serve.host=127.0.0.1')


def _tasks(config) -> Iterator[tuple[str, str]]:
  tasks, curriculum = config.tasks, config.curriculum
  if bool(tasks.path) != bool(tasks.heldout_path):
    yield ('tasks.path and tasks.heldout_path: give both or neither, since what is trained on cannot be held out',
           '--config.tasks.heldout_path=FILE.jsonl')
  own = [stage for stage in config.pipeline.stages if stage == 'rl' or not config[stage].data]
  if len(set(tasks.domains)) < len(tasks.domains):
    yield f'tasks.domains = {tasks.domains!r}: must be distinct', "--config.tasks.domains=\"('gcd',)\""
  if own and not tasks.path and not tasks.domains:
    yield (f'tasks.domains = (): stages {own} take their data from tasks, and there are none',
           "--config.tasks.domains=\"('gcd',)\", or --config.tasks.path and --config.tasks.heldout_path")
  if tasks.weights and (len(tasks.weights) != len(tasks.domains) or min(tasks.weights) <= 0):
    yield (f'tasks.weights = {tasks.weights!r}: must be empty, or one number > 0 for each of {tasks.domains!r}',
           '--config.tasks.weights="()"')
  if not _distinct(tasks.levels) or min(tasks.levels, default=0) < 0:
    yield f'tasks.levels = {tasks.levels!r}: must be distinct, >= 0 and at least one', '--config.tasks.levels="(0,)"'
  if not 0 <= curriculum.min_share <= 1 / max(len(tasks.domains), 1):
    yield (f'curriculum.min_share = {curriculum.min_share}: must be in [0, 1 / domains] = '
           f'[0, {1 / max(len(tasks.domains), 1):.3f}]', '--config.curriculum.min_share=0.0')


def _distinct(values: Sequence) -> bool:
  return 0 < len(values) == len(set(values))
