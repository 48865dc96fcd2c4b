"""Writes report.html: what a run gained, stage by stage, in one file that opens offline.

It reads only what the run left in its workdir (manifests, metrics.jsonl, eval.json, rollouts.jsonl) and needs no jax. A
piece that is missing or broken is said so on the page and never stops the rest. All text from models and tasks is
hostile: the template escapes everything, the page runs no script and may load nothing. No verdict is passed here; gates
do that.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
import dataclasses
import datetime
import importlib.resources
import json
import math
import os
import pathlib
import re
from typing import Any

import jinja2
import markupsafe

from ptjax.evals import charts, gates, suites
from ptjax.runtime import lineage, metrics
from ptjax.types import STATUSES

FILE_NAME = 'report.html'
SHOWN_ROLLOUTS = 20
_SHOWN_CHARS = 4000  # of one prompt or completion
_AVERAGE = 'average'

# (title, axis label, metrics, drawn as); in a name, * stands for a domain. A chart without any metric is left out.
_CURVES = (
    ('SFT loss', 'nats per token', ('sft/loss',), 'lines'),
    ('DPO loss', 'nats per pair', ('dpo/loss',), 'lines'),
    ('DPO: chosen above rejected', 'fraction', ('dpo/accuracy',), 'lines'),
    ('RL reward', 'mean of rollouts', ('rl/reward_mean',), 'lines'),
    ('RL reward by domain', 'mean of rollouts', ('rl/reward/*',), 'lines'),
    ('KL to the reference', 'nats per token', ('rl/kl',), 'lines'),
    ('Entropy of the policy', 'nats per token', ('rl/entropy',), 'lines'),
    ('Curriculum: share of tasks', 'fraction', ('rl/curriculum/*/share_frac',), 'stacked'),
    ('Curriculum: difficulty', 'level', ('rl/curriculum/*/level',), 'exact'),
    ('Rollout length', 'tokens', ('rl/length_mean',), 'lines'),
    ('Sampler minus trainer log-prob', 'nats', ('rl/logp_diff_mean', 'rl/logp_diff_max'), 'log'),
    ('Sampler', 'fraction', ('sampler/occupancy', 'sampler/cache_hit_frac', 'sampler/pages_peak_frac'), 'lines'),
    ('Verifier outcomes', 'rollouts', tuple(f'verify/{status}' for status in STATUSES), 'stacked'),
)
# Written by every stage: one chart each, one line per stage.
_SHARED_CURVES = (
    ('Gradient norm', '', 'optim/grad_norm'), ('Learning rate', '', 'optim/lr'),
    ('Speed', 'tokens/s', 'perf/tokens_per_s'))


@dataclasses.dataclass
class Run:
  """What a workdir holds; `problems` are sentences about what could not be read."""

  manifests: list[lineage.Manifest]
  evals: dict[str, suites.SuiteResult]  # by stage, in the stages' order
  records: list[dict[str, Any]]
  rollouts: list[dict[str, Any]]  # the ones to show
  problems: list[str]


def write(workdir: str | os.PathLike) -> pathlib.Path:
  """Writes <workdir>/report.html from whatever stages have run so far, and returns its path."""
  run = collect(workdir)
  source = importlib.resources.files('ptjax.evals').joinpath('report.html.j2').read_text(encoding='utf-8')
  environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
                                   lstrip_blocks=True)
  environment.filters.update(percent=_percent, points=_points, tone=_tone, clean=_clean, verdict=_verdict)
  html = environment.from_string(source).render(
      title=pathlib.Path(workdir).resolve().name, headline=headline(run), chart=_accuracy_chart(run),
      table=accuracy_table(run), changes=stage_changes(run), curves=_curves(run), rollouts=run.rollouts,
      stages=_lineage(run), problems=run.problems, made=lineage.now())
  path = pathlib.Path(workdir) / FILE_NAME
  partial = path.with_name(f'{FILE_NAME}.partial')
  partial.write_text(html, encoding='utf-8', errors='replace')
  os.replace(partial, path)
  return path


def collect(workdir: str | os.PathLike) -> Run:
  """Returns everything in the workdir that can be read."""
  workdir, problems = pathlib.Path(workdir), []
  manifests = _attempt(lambda: lineage.chain(workdir), [], problems)
  order, evals = _stages(workdir, manifests), {}
  for stage in order:
    path = workdir / stage / 'eval.json'
    if path.exists() and (result := _attempt(lambda: suites.load(path), None, problems)):
      evals[stage] = result
  records = _attempt(lambda: metrics.read(workdir), [], problems)
  paths = [path for stage in reversed(order) if (path := workdir / stage / 'rollouts.jsonl').exists()]
  rollouts = []
  for path in paths:
    rollouts += _attempt(lambda: pick_rollouts(path, SHOWN_ROLLOUTS - len(rollouts), problems), [], problems)
    if len(rollouts) >= SHOWN_ROLLOUTS:
      break
  return Run(manifests, evals, records, rollouts, problems)


def _stages(workdir: pathlib.Path, manifests: Sequence[lineage.Manifest]) -> list[str]:
  """Returns the stages, parents first; one without a manifest goes first if it is a parent, else last, by age."""
  known = [manifest.stage for manifest in manifests]
  parents = {parent for manifest in manifests for parent in manifest.parents}
  paths = sorted(workdir.glob('*/eval.json'), key=lambda path: path.stat().st_mtime_ns)
  loose = [path.parent.name for path in paths
           if path.parent.name not in known and '.replaced-' not in path.parent.name]
  return [s for s in loose if s in parents] + known + [s for s in loose if s not in parents]


def pick_rollouts(path: pathlib.Path, count: int, problems: list[str]) -> list[dict[str, Any]]:
  """Returns up to `count` of the latest rollouts, taking turns between domains and verdicts, so that all are seen."""
  latest = defaultdict(lambda: deque(maxlen=count))
  broken = 0
  with open(path, encoding='utf-8', errors='replace') as f:
    for line in f:
      try:
        row = json.loads(line)
        latest[str(row['domain']), str(row['status'])].append(row)
      except (json.JSONDecodeError, KeyError, TypeError):
        broken += 1
  if broken:
    problems.append(f'{path}: {broken} lines are not rollouts and were left out.')
  order = [*STATUSES, *sorted({status for _, status in latest} - set(STATUSES))]
  kinds = [latest[key] for key in sorted(latest, key=lambda key: (order.index(key[1]), key[0]))]
  picked = []
  while len(picked) < count and any(kinds):
    picked += [kind.pop() for kind in kinds if kind]
  return [_readable(row, path.parent.name) for row in picked[:count]]


def headline(run: Run) -> dict[str, Any] | None:
  """Returns the first stage against the last one that no gate blocked, and the last stage against its parent."""
  if not run.evals:
    return None
  stages = list(run.evals)
  blocked = {m.stage for m in run.manifests if m.gate is not None and _verdict(m.gate) == 'blocked'}
  first = stages[0]
  final = [stage for stage in stages if stage not in blocked or stage == first][-1]
  base, best = run.evals[first], run.evals[final]
  out = {'first': first, 'final': final, 'base': base.macro, 'best': best.macro, 'tasks': base.macro.tasks,
         'confidence': base.confidence, 'blocked': sorted(blocked),
         'gain': None, 'gain_text': '', 'last': None}
  if first != final and (diff := _compare(base, best, run.problems)):
    out.update(gain=diff, gain_text=gates.describe_gain(diff))
  last = stages[-1]
  parent = _parent(run, last)
  if parent and (diff := _compare(run.evals[parent], run.evals[last], run.problems)):
    out['last'] = {'stage': last, 'parent': parent, 'diff': diff}
  return out


def accuracy_table(run: Run) -> dict[str, Any] | None:
  """Returns the stages and one row per domain, the average last; a cell is None where a stage lacks the domain."""
  if not run.evals:
    return None
  rows = []
  for domain in [*_domains(run), _AVERAGE]:
    cells = {stage: _summary_of(result, domain) for stage, result in run.evals.items()}
    known = next(cell for cell in cells.values() if cell)
    rows.append({'domain': domain, 'tasks': known.tasks, 'majority': known.majority_frac, 'cells': cells})
  ks = sorted({k for result in run.evals.values() for k in result.macro.pass_at if k > 1})
  return {'stages': list(run.evals), 'rows': rows, 'ks': ks}


def stage_changes(run: Run) -> list[dict[str, Any]]:
  """Returns each evaluated stage against its parent: the paired change of the average, and the gate's words."""
  by_stage = {manifest.stage: manifest for manifest in run.manifests}
  out = []
  for stage, result in run.evals.items():
    parent = _parent(run, stage)
    if parent is None or (diff := _compare(run.evals[parent], result, run.problems)) is None:
      continue
    gate = by_stage[stage].gate if stage in by_stage else None
    out.append({'stage': stage, 'parent': parent, 'diff': diff, 'text': gates.describe_gain(diff), 'gate': gate})
  return out


def _attempt(action, otherwise, problems: list[str]):
  """Returns what `action` returns; when a file is broken, its error joins `problems` and `otherwise` comes back."""
  try:
    return action()
  except (ValueError, RuntimeError, OSError) as e:
    problems.append(str(e))
    return otherwise


def _compare(parent: suites.SuiteResult, child: suites.SuiteResult, problems: list[str]) -> gates.Difference | None:
  def action():
    return gates.compare(parent, child, confidence=child.confidence, max_drop=0.0).macro
  return _attempt(action, None, problems)


def _parent(run: Run, stage: str) -> str | None:
  """Returns the evaluated stage that this one started from: by its manifest, else the one before it."""
  for manifest in run.manifests:
    if manifest.stage == stage:
      named = [parent for parent in manifest.parents if parent in run.evals]
      return named[-1] if named else None
  stages = list(run.evals)
  index = stages.index(stage)
  return stages[index - 1] if index else None


def _domains(run: Run) -> list[str]:
  return sorted({domain for result in run.evals.values() for domain in result.domains})


def _summary_of(result: suites.SuiteResult, domain: str) -> suites.Summary | None:
  return result.macro if domain == _AVERAGE else result.domains.get(domain)


def _accuracy_chart(run: Run) -> markupsafe.Markup | None:
  if not run.evals:
    return None
  domains, rates, constant = [*_domains(run), _AVERAGE], {}, {}
  for stage, result in run.evals.items():
    for domain in domains:
      if summary := _summary_of(result, domain):
        rates[stage, domain] = (summary.accuracy, summary.low, summary.high)
        constant[domain] = summary.majority_frac
  return markupsafe.Markup(charts.accuracy(list(run.evals), domains, rates, constant))


def _curves(run: Run) -> list[markupsafe.Markup]:
  figures = []
  for title, ylabel, names, kind in _CURVES:
    series = _series(run.records, lambda record, name: _label(name, names))
    if series and kind == 'stacked':
      figures.append(charts.stacked(series, title=title, ylabel=ylabel, colors=charts.STATUS_COLORS))
    elif series:
      figures.append(charts.lines(series, title=title, ylabel=ylabel, log=kind == 'log',
                                  smooth=kind != 'exact'))
  for title, ylabel, wanted in _SHARED_CURVES:
    series = _series(run.records, lambda record, name: record['stage'] if name == wanted else None)
    if series:
      figures.append(charts.lines(series, title=title, ylabel=ylabel, smooth=wanted != 'optim/lr'))
  return [markupsafe.Markup(figure) for figure in figures]


def _series(records: Sequence[Mapping[str, Any]], label_of) -> charts.Series:
  """Returns label -> (steps, values) of the numbers for which `label_of(record, name)` is not None."""
  series = defaultdict(lambda: ([], []))
  for record in records:
    for name, value in record.items():
      if isinstance(value, (int, float)) and (label := label_of(record, name)) is not None:
        series[_clean(label)][0].append(record['step'])
        series[_clean(label)][1].append(value)
  return series


def _label(name: str, wanted: Sequence[str]) -> str | None:
  """Returns the curve's name in the legend when the metric is wanted: what `*` stands for, or the name's last part."""
  for pattern in wanted:
    head, star, tail = pattern.partition('*')
    if name == pattern:
      return name.rsplit('/', 1)[-1]
    if star and name.startswith(head) and name.endswith(tail) and len(name) > len(pattern) - 1:
      return name[len(head):len(name) - len(tail)]
  return None


def _lineage(run: Run) -> list[dict[str, Any]]:
  by_stage = {manifest.stage: manifest for manifest in run.manifests}
  out = []
  for manifest in run.manifests:
    parent = next((by_stage[p] for p in manifest.parents if p in by_stage), None)
    code = manifest.code
    revision = code.get('commit', '')[:12] + (' with local changes' if code.get('dirty') else '')
    changed = lineage.diff_fields(parent.config, manifest.config) if parent else {}
    out.append({
        'manifest': manifest, 'revision': revision or f'version {code.get("version", "unknown")}',
        'took': _took(manifest.started, manifest.finished), 'changed': changed,
        'data': json.dumps(manifest.data, indent=1, default=str) if manifest.data else '',
        'versions': ', '.join(f'{k} {v}' for k, v in manifest.versions.items()),
        'machine': ', '.join(f'{k} {v}' for k, v in manifest.machine.items())})
  return out


def _readable(row: Mapping[str, Any], stage: str) -> dict[str, Any]:
  prompt = row.get('prompt', '')
  if not isinstance(prompt, str):
    prompt = '\n'.join(str(m.get('content', '')) if isinstance(m, Mapping) else str(m) for m in prompt or ())
  reference = row.get('reference')
  reference = reference if isinstance(reference, str) else json.dumps(reference, default=str)
  status = str(row['status'])
  return {'stage': stage, 'step': row.get('step'), 'task_id': str(row.get('task_id', '')), 'domain': str(row['domain']),
          'status': status if status in STATUSES else 'error', 'score': row.get('score'),
          'format_ok': bool(row.get('format_ok')), 'prompt': _shorten(prompt), 'reference': _shorten(reference),
          'completion': _shorten(str(row.get('completion', '')))}


def _shorten(text: str) -> str:
  extra = len(text) - _SHOWN_CHARS
  return text if extra <= 0 else f'{text[:_SHOWN_CHARS]}\n... {extra:,} more characters'


def _clean(text: Any) -> str:
  """Returns the text with control characters made visible, so that it cannot disturb the page."""
  return re.sub(r'[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]',
                lambda m: f'\\u{ord(m.group()):04x}', str(text))


def _percent(frac: float | None, digits: int = 0) -> str:
  return '–' if frac is None or math.isnan(frac) else f'{100 * frac:.{digits}f}%'


def _points(frac: float) -> str:
  return f'{100 * frac:+.1f}'.replace('-', '−')


def _verdict(gate: Mapping[str, Any]) -> str:
  """What a gate came to; with config.gate.enabled=False a stage that falls behind is promoted all the same."""
  return 'passed' if gate.get('passed') else 'blocked' if gate.get('enabled', True) else 'failed, gate off'


def _tone(diff: gates.Difference) -> str:
  """Returns the colour of a change: good, bad, or '' where it cannot be told from noise."""
  return 'pass' if diff.low > 0 else 'fail' if diff.high < 0 else ''


def _took(started: str | None, finished: str | None) -> str:
  if not started or not finished:
    return 'not finished'
  begin, end = (datetime.datetime.fromisoformat(t) for t in (started, finished))
  return str(end - begin)
