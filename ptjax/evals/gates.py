"""Compares a stage with its parent on the same held-out tasks, and blocks it when it got worse by more than noise.

The comparison is paired, task by task, and deterministic. A gate refuses to compare evaluations of different tasks,
and it fails closed: a domain where nothing could be compared, or where too many verdicts are errors, blocks.

How often is a harmless stage blocked? At confidence 1 - a each two-sided interval leaves a/2 on the side that matters.
The macro difference spends one a/2, and the domains together spend the other: each of D domains is judged at a/(2D)
(Bonferroni). So a stage that changed nothing is blocked with probability at most about a, however many domains there
are. The price is that a small drop in one small domain cannot be told from noise; it is then a warning, not a block.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math

from ptjax.evals.suites import SuiteResult, TaskResult, normal_quantile


@dataclasses.dataclass(frozen=True)
class Difference:
  """Child minus parent over the tasks that both have a verdict for. All but the counts are fractions of 1."""

  pairs: int
  excluded: int  # tasks left out because one side has only errors
  parent: float  # answer right, over the pairs
  child: float
  change: float
  low: float  # interval of the change, at the gate's confidence
  high: float
  bound: float  # the change is below this, at the level the gate judges by (see the module's docstring)
  gained: int  # tasks where the child is right more often
  lost: int
  p_value: float  # exact sign test over gained and lost: McNemar's exact test when there is one sample per task
  answer: float  # the part of the change in strict accuracy due to right answers; equals `change`
  format_only: float  # the part due to the form alone: answers as right as before, but in (or out of) the asked form
  format_low: float  # lower end of the interval of `format_only`

  @property
  def improved(self) -> bool:
    """Returns whether the interval of the change lies wholly above 0."""
    return self.low > 0.0


@dataclasses.dataclass(frozen=True)
class GateResult:
  """Whether the child may be promoted, and why, in sentences."""

  passed: bool
  reasons: tuple[str, ...]  # why it is blocked; one sentence of approval when it passed
  warnings: tuple[str, ...]
  confidence: float
  max_drop: float
  macro: Difference
  domains: dict[str, Difference]

  def to_json(self) -> dict:
    """Returns a JSON-able record of the result, for the manifest."""
    return dataclasses.asdict(self)


def compare(parent: SuiteResult, child: SuiteResult, *, confidence: float, max_drop: float,
            max_error_frac: float = 0.1) -> GateResult:
  """Returns whether `child` holds up against `parent`.

  Args:
    confidence: of the intervals, e.g. 0.95.
    max_drop: fraction of accuracy that may be lost; a domain or the macro average blocks when its whole interval lies
      below -max_drop.
    max_error_frac: largest share of a domain's tasks that may go without a verdict.

  Raises:
    ValueError: the two evaluations are not of the same tasks.
  """
  if not 0.0 <= max_drop <= 1.0:
    raise ValueError(f'max_drop = {max_drop} is a fraction of accuracy and must lie in [0, 1]')
  pairs = _pair(parent, child)
  domain_level = 1.0 - (1.0 - confidence) / len(pairs)
  domains = {domain: _difference({domain: rows}, confidence, domain_level) for domain, rows in pairs.items()}
  macro = _difference(pairs, confidence, confidence)
  reasons, warnings = [], []
  for name, diff in {'the average over domains': macro, **domains}.items():
    total = diff.pairs + diff.excluded
    if diff.pairs == 0 or diff.excluded > max_error_frac * total:
      reasons.append(f'{name}: {diff.excluded} of {total} tasks have no verdict (verifier or host errors), more than '
                     f'{max_error_frac:.0%}; repair the verifier and evaluate again.')
    if diff.bound < -max_drop:
      reasons.append(f'{name}: {_fall(diff)}; even the favourable end of its interval ({_points(diff.bound)}) is '
                     f'below the allowed {_points(-max_drop)}.')
    elif diff.change < -max_drop:
      warnings.append(f'{name}: {_fall(diff)}, which is within the noise of {diff.pairs} tasks.')
  passed = not reasons
  if passed:
    reasons.append(f'no domain, nor the average, fell by more than its noise; the average changed by '
                   f'{_points(macro.change)} ({_points(macro.low)} to {_points(macro.high)}).')
  return GateResult(passed, tuple(reasons), tuple(warnings), confidence, max_drop, macro, domains)


def describe_gain(diff: Difference) -> str:
  """Returns one sentence that says how much of a change is right answers and how much is form alone."""
  strict = diff.answer + diff.format_only
  head = f'right answers {_points(diff.answer)}, form alone {_points(diff.format_only)}'
  if diff.low > 0:
    return f'A gain in right answers: {head}; right and in the asked form together {_points(strict)}.'
  if diff.format_low > 0:
    return f'A gain in format only: {head}; the answers are not right more often beyond noise.'
  if diff.high < 0:
    return f'A loss of right answers: {head}.'
  return f'No change beyond noise: {head}.'


def sign_test(gained: int, lost: int) -> float:
  """Returns the exact two-sided p-value that gains and losses are equally likely (McNemar's exact test)."""
  n = gained + lost
  if n == 0:
    return 1.0
  tail = sum(math.comb(n, i) for i in range(min(gained, lost) + 1)) / 2 ** n
  return min(1.0, 2.0 * tail)


def paired_interval(changes: Mapping[str, Sequence[float]], confidence: float) -> tuple[float, float]:
  """Returns the interval of the mean over strata of the mean change per task; (-1, 1) if a stratum is empty.

  One pair of opposite pseudo-changes (+1 and -1) is added, shared evenly over the strata, and a normal interval is
  taken. With one stratum and one sample per task this is the adjusted Wald interval of Bonett and Price (2012): unlike
  the plain one it keeps its coverage for few tasks and never has width 0.
  """
  if any(len(rows) == 0 for rows in changes.values()):
    return -1.0, 1.0
  weight = 1.0 / len(changes)
  centre = variance = 0.0
  for rows in changes.values():
    n = len(rows) + 2 * weight
    mean = sum(rows) / n
    spread = (sum(x * x for x in rows) + 2 * weight) / n - mean * mean
    centre += weight * mean
    variance += weight * weight * spread / n
  half = normal_quantile(confidence) * math.sqrt(max(variance, 0.0))
  return max(-1.0, centre - half), min(1.0, centre + half)


def _pair(parent: SuiteResult, child: SuiteResult) -> dict[str, list[tuple[TaskResult, TaskResult]]]:
  olds = {task.id: task for task in parent.tasks}
  news = {task.id: task for task in child.tasks}
  problems = []
  for label, missing in (('the child lacks', [i for i in olds if i not in news]),
                         ('the parent lacks', [i for i in news if i not in olds])):
    if missing:
      problems.append(f'{label} {len(missing)} tasks: {_some(missing)}')
  shared = [i for i in olds if i in news]
  moved = [i for i in shared if (olds[i].domain, olds[i].digest) != (news[i].domain, news[i].digest)]
  if moved:
    problems.append(f'{len(moved)} tasks have the same id but another prompt, grading or domain: {_some(moved)}')
  if not olds:
    problems.append('there is no task in either')
  if problems:
    raise ValueError(f'cannot compare evaluations of different tasks: {"; ".join(problems)}. '
                     'Evaluate both stages on the same suite.')
  pairs = {}
  for id_ in sorted(shared):
    pairs.setdefault(olds[id_].domain, []).append((olds[id_], news[id_]))
  return dict(sorted(pairs.items()))


def _difference(pairs: Mapping[str, Sequence[tuple[TaskResult, TaskResult]]], confidence: float,
                gate_confidence: float) -> Difference:
  """Compares one domain, or several as strata with equal weights."""
  kept = {domain: [(old, new) for old, new in rows if old.graded() and new.graded()]
          for domain, rows in pairs.items()}
  changes = {domain: [new.right_frac() - old.right_frac() for old, new in rows] for domain, rows in kept.items()}
  form = {domain: [_form_frac(new) - _form_frac(old) for old, new in rows] for domain, rows in kept.items()}
  change = _stratified(list(changes.values()))
  low, high = paired_interval(changes, confidence)
  flat = [x for rows in changes.values() for x in rows]
  gained, lost = sum(x > 0 for x in flat), sum(x < 0 for x in flat)
  return Difference(
      pairs=len(flat), excluded=sum(map(len, pairs.values())) - len(flat),
      parent=_stratified([[old.right_frac() for old, _ in rows] for rows in kept.values()]),
      child=_stratified([[new.right_frac() for _, new in rows] for rows in kept.values()]),
      change=change, low=low, high=high, bound=paired_interval(changes, gate_confidence)[1], gained=gained,
      lost=lost, p_value=sign_test(gained, lost), answer=change,
      format_only=_stratified(list(form.values())), format_low=paired_interval(form, confidence)[0])


def _form_frac(task: TaskResult) -> float:
  """Returns minus the share of samples that are right but not in the asked form: what form alone would add."""
  return task.strict_frac() - task.right_frac()


def _stratified(strata: Sequence[Sequence[float]]) -> float:
  """Averages over strata the mean of each; a stratum without a pair counts as 0 (and blocks the gate)."""
  return sum(sum(rows) / max(len(rows), 1) for rows in strata) / len(strata)


def _fall(diff: Difference) -> str:
  return (f'accuracy fell by {-100 * diff.change:.1f} points, from {diff.parent:.1%} to {diff.child:.1%} '
          f'({diff.lost} tasks lost, {diff.gained} gained, p = {diff.p_value:.2g})')


def _points(frac: float) -> str:
  return f'{100 * frac:+.1f} points'


def _some(ids: Sequence[str]) -> str:
  return ', '.join(sorted(ids)[:5]) + (', ...' if len(ids) > 5 else '')
