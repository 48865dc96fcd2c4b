"""Evaluates a policy on held-out tasks and says how sure the numbers are.

It knows no model: `generate` and `verify` are given by the caller. A verdict of `error` means that the verifier or the
host broke, so it is left out of every rate and counted beside it; a `timeout` is a wrong answer. "Answer right" and
"format right" are two columns and are never mixed. Nothing here decides whether a stage is good enough: see gates.py.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import hashlib
import json
import math
import os
import statistics

from ptjax.types import Rollout, Task, Verdict

Generate = Callable[[Sequence[Task], int], list[list[Rollout]]]
Verify = Callable[[Sequence[Task], Sequence[str]], list[Verdict]]


@dataclasses.dataclass(frozen=True)
class TaskResult:
  """What one task's samples came to; the four tuples have one entry per sample."""

  id: str
  domain: str
  digest: str  # of the prompt and everything that grades it
  scores: tuple[float, ...]
  statuses: tuple[str, ...]
  format_ok: tuple[bool, ...]
  truncated: tuple[bool, ...]  # the sample ended at the token limit
  text: str  # the first sample, to be read

  def graded(self) -> list[int]:
    """Returns the samples that have a verdict, that is those whose status is not `error`."""
    return [i for i, status in enumerate(self.statuses) if status != 'error']

  def right_frac(self) -> float:
    """Returns the share of graded samples with the right answer, in any form; nan if none was graded."""
    return _mean([self.statuses[i] == 'pass' for i in self.graded()])

  def strict_frac(self) -> float:
    """Returns the share of graded samples with the right answer in the asked form; nan if none was graded."""
    return _mean([self.statuses[i] == 'pass' and self.format_ok[i] for i in self.graded()])


@dataclasses.dataclass(frozen=True)
class Summary:
  """The numbers of one domain, or of all domains averaged with equal weight."""

  tasks: int
  accuracy: float  # answer right; nan when no sample of a domain was graded
  low: float  # interval of the accuracy
  high: float
  strict_frac: float  # answer right and in the asked form
  format_frac: float  # in the asked form, right or wrong
  majority_frac: float  # accuracy of the best constant answer
  truncated_frac: float
  errors: int  # samples without a verdict, in no rate above
  pass_at: dict[int, float]


@dataclasses.dataclass(frozen=True)
class SuiteResult:
  """One evaluation: the tasks' results and what follows from them."""

  name: str
  samples: int
  confidence: float
  tasks: tuple[TaskResult, ...]
  domains: dict[str, Summary]
  macro: Summary


def pass_at_k(n: int, c: int, k: int) -> float:
  """Returns the chance that k of n samples, drawn without replacement, hold one of the c right ones.

  1 - C(n-c, k) / C(n, k), the unbiased estimator of arXiv 2107.03374.

  Raises:
    ValueError: unless 0 <= c <= n and 1 <= k <= n.
  """
  if not (0 <= c <= n and 1 <= k <= n):
    raise ValueError(f'pass_at_k needs 0 <= c <= n and 1 <= k <= n, not n={n}, c={c}, k={k}')
  return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def wilson_interval(right: float, n: int, confidence: float = 0.95) -> tuple[float, float]:
  """Returns the Wilson score interval of a rate; (0, 1) when n is 0.

  `right` may be fractional: the sum over n tasks of each one's share of right samples. The variance of such a share is
  at most that of a single draw, so the interval is then on the safe side.
  """
  if n == 0:
    return 0.0, 1.0
  z = normal_quantile(confidence)
  rate = right / n
  centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
  half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
  return max(0.0, centre - half), min(1.0, centre + half)


def normal_quantile(confidence: float) -> float:
  """Returns z with P(|Z| <= z) = confidence: 1.96 for 0.95."""
  if not 0.0 < confidence < 1.0:
    raise ValueError(f'confidence = {confidence} must lie between 0 and 1, for example 0.95')
  return statistics.NormalDist().inv_cdf(0.5 + confidence / 2)


def evaluate(tasks: Sequence[Task], generate: Generate, verify: Verify, *, samples: int,
             majority: Mapping[str, float], name: str = 'heldout', ks: Sequence[int] = (1,),
             confidence: float = 0.95) -> SuiteResult:
  """Samples every task, grades the samples and returns the suite's result.

  Args:
    generate: gives `samples` rollouts for each task, in the tasks' order.
    verify: gives one verdict per (task, text); called once with all samples of all tasks.
    majority: by domain, the accuracy of always giving the most common answer; 0 for a domain that is not named.
    ks: the k of pass@k, each at most `samples`.

  Raises:
    ValueError: no tasks, an id twice, or a k larger than `samples`.
    RuntimeError: `generate` or `verify` gave back another number of items than asked for.
  """
  _check_request(tasks, samples, ks)
  groups = generate(tasks, samples)
  if len(groups) != len(tasks) or any(len(group) != samples for group in groups):
    raise RuntimeError(f'generate gave {sum(map(len, groups))} rollouts in {len(groups)} groups; '
                       f'{samples} for each of {len(tasks)} tasks were asked for')
  flat = [(task, rollout) for task, group in zip(tasks, groups) for rollout in group]
  verdicts = verify([task for task, _ in flat], [rollout.text for _, rollout in flat])
  if len(verdicts) != len(flat):
    raise RuntimeError(f'verify gave {len(verdicts)} verdicts for {len(flat)} samples')
  results = []
  for i, (task, group) in enumerate(zip(tasks, groups)):
    mine = verdicts[i * samples:(i + 1) * samples]
    results.append(TaskResult(
        id=task.id, domain=task.domain, digest=_digest(task), scores=tuple(float(v.score) for v in mine),
        statuses=tuple(v.status for v in mine), format_ok=tuple(bool(v.format_ok) for v in mine),
        truncated=tuple(r.finish_reason == 'length' for r in group), text=group[0].text))
  return summarise(results, name=name, samples=samples, ks=ks, majority=majority, confidence=confidence)


def summarise(results: Sequence[TaskResult], *, name: str, samples: int, ks: Sequence[int],
              majority: Mapping[str, float], confidence: float) -> SuiteResult:
  """Returns the SuiteResult of graded tasks: a summary per domain and their average with equal weights."""
  by_domain = {}
  for result in results:
    by_domain.setdefault(result.domain, []).append(result)
  domains = {domain: _summary(group, ks, float(majority.get(domain, 0.0)), confidence)
             for domain, group in sorted(by_domain.items())}
  return SuiteResult(name=name, samples=samples, confidence=confidence, tasks=tuple(results), domains=domains,
                     macro=_macro(list(domains.values())))


def save(result: SuiteResult, path: str | os.PathLike) -> None:
  """Writes the result as JSON, whole or not at all; a rate that does not exist (nan) becomes null."""
  record = dataclasses.asdict(result)
  for summary in (record['macro'], *record['domains'].values()):
    summary.update({k: None for k, v in summary.items() if isinstance(v, float) and math.isnan(v)})
    summary['pass_at'] = {str(k): None if math.isnan(v) else v for k, v in summary['pass_at'].items()}
  partial = f'{os.fspath(path)}.partial'
  with open(partial, 'w', encoding='utf-8') as f:
    json.dump(record, f, indent=1, allow_nan=False)
    f.flush()
    os.fsync(f.fileno())
  os.replace(partial, path)


def load(path: str | os.PathLike) -> SuiteResult:
  """Returns a saved result; the summaries are worked out again from its tasks.

  Raises:
    ValueError: the file is not an evaluation that `save` wrote.
  """
  try:
    with open(path, encoding='utf-8') as f:
      record = json.load(f)
    tasks = [TaskResult(**{k: tuple(v) if isinstance(v, list) else v for k, v in task.items()})
             for task in record['tasks']]
    return summarise(tasks, name=record['name'], samples=record['samples'], confidence=record['confidence'],
                     ks=[int(k) for k in record['macro']['pass_at']],
                     majority={d: s['majority_frac'] for d, s in record['domains'].items()})
  except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as e:
    raise ValueError(f'{os.fspath(path)} is not an evaluation result ({e!r}); '
                     'delete it and evaluate the stage again') from e


def _check_request(tasks: Sequence[Task], samples: int, ks: Sequence[int]) -> None:
  if not tasks:
    raise ValueError('there is no task to evaluate: the suite is empty')
  twice = [id_ for id_, count in Counter(task.id for task in tasks).items() if count > 1]
  if twice:
    raise ValueError(f'{len(twice)} task ids occur more than once in the suite, for example {twice[:3]}')
  if samples < 1 or any(not 1 <= k <= samples for k in ks):
    raise ValueError(f'pass@k for k in {tuple(ks)} needs samples >= 1 and 1 <= k <= samples, not samples={samples}')


def _summary(group: Sequence[TaskResult], ks: Sequence[int], majority: float, confidence: float) -> Summary:
  graded = [result for result in group if result.graded()]
  right = [result.right_frac() for result in graded]
  low, high = wilson_interval(sum(right), len(right), confidence)
  samples = [(result, i) for result in graded for i in result.graded()]
  pass_at = {}
  for k in ks:
    counts = [[result.statuses[i] == 'pass' for i in result.graded()] for result in graded]
    pass_at[k] = _mean([pass_at_k(len(c), sum(c), k) for c in counts if len(c) >= k])
  return Summary(
      tasks=len(group), accuracy=_mean(right), low=low, high=high, pass_at=pass_at, majority_frac=majority,
      strict_frac=_mean([result.strict_frac() for result in graded]),
      format_frac=_mean([result.format_ok[i] for result, i in samples]),
      truncated_frac=_mean([flag for result in group for flag in result.truncated]),
      errors=sum(status == 'error' for result in group for status in result.statuses))


def _macro(domains: Sequence[Summary]) -> Summary:
  """Averages over domains with equal weights; nan as soon as one domain has no graded sample.

  The interval recovers each domain's variance from its own Wilson limits (MOVER, Zou and Donner 2008), so a domain at
  0 or 1 still adds to the width, which a plain stratified normal interval would miss.
  """
  average = lambda field: _mean([getattr(s, field) for s in domains])
  accuracy = average('accuracy')
  if math.isnan(accuracy):
    low, high = 0.0, 1.0
  else:
    low = accuracy - math.sqrt(sum((s.accuracy - s.low) ** 2 for s in domains)) / len(domains)
    high = accuracy + math.sqrt(sum((s.high - s.accuracy) ** 2 for s in domains)) / len(domains)
  return Summary(
      tasks=sum(s.tasks for s in domains), accuracy=accuracy, low=max(0.0, low), high=min(1.0, high),
      strict_frac=average('strict_frac'), format_frac=average('format_frac'),
      majority_frac=average('majority_frac'), truncated_frac=average('truncated_frac'),
      errors=sum(s.errors for s in domains),
      pass_at={k: _mean([s.pass_at[k] for s in domains]) for k in domains[0].pass_at})


def _mean(values: Sequence[float]) -> float:
  return sum(values) / len(values) if values else math.nan


def _digest(task: Task) -> str:
  graded_by = [task.messages, task.verifier, task.reference, task.tests, task.files, task.limits]
  return hashlib.sha256(json.dumps(graded_by, sort_keys=True, default=str).encode()).hexdigest()[:16]
