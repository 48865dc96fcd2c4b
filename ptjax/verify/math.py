r"""Judges mathematical answers: which one a completion states, and whether it is the right one, exactly.

The last statement counts: a \boxed{}, a `####` line or `answer: x`. Plain numbers are compared here, as fractions;
everything else by math-verify in a worker that can be killed, under `math_policy`. Nearly right is wrong: 0.333333
is not 1/3. An answer too large to compare is a timeout, and an unclosed box is no answer.
"""

import re

from ptjax import types
from ptjax.verify import answers
from ptjax.verify import procedural
from ptjax.verify import worker

_MAX_CHARS = 1000
_CPU_S = 3.0
_STATEMENT = re.compile(r'\banswer\s*(?::|\bis\b:?)[*_\s]*', re.IGNORECASE)
_GSM8K = re.compile(r'^####[ \t]*', re.MULTILINE)
_INLINE = re.compile(r'\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]', re.DOTALL)
_PROSE = re.compile(r'(?<!\\)(?<![A-Za-z\\])[A-Za-z]{3,}')
_TEXT = re.compile(r'\\(?:text|textbf|textit|mathrm|mbox|textrm|operatorname)\s*\{([^{}]*)\}')
_SPACE = re.compile(r'\\[,;:!> ]|\\quad|\\qquad|~')
_UNICODE = str.maketrans({'−': '-', '–': '-', '×': '\\times ', '·': '\\cdot ', '÷': '\\div ', '≤': '\\le ',
                          '≥': '\\ge ', '∞': '\\infty ', 'π': '\\pi ', '°': '^\\circ ', '±': '\\pm '})
_WORKERS = worker.WorkerPool('ptjax.verify.math_policy', size=2)


def verify(task: types.Task, text: str) -> types.Verdict:
  """Passes when the answer that `text` states last equals `task.reference`, LaTeX or a number.

  Raises:
    RuntimeError: the reference cannot be read, or the comparison broke.
  """
  answer, format_ok = extract(text)
  gold = clean(str(task.reference))
  evidence = {'answer': answer, 'reference': str(task.reference)}
  if answer is None or len(answer) > _MAX_CHARS:
    return types.Verdict('fail', 0.0, dict(evidence, answer=None), format_ok=format_ok)
  try:
    right, how = equal(gold, clean(answer))
  except worker.Killed as e:
    return types.Verdict('timeout', 0.0, dict(evidence, why=str(e)), format_ok=format_ok)
  return types.Verdict('pass' if right else 'fail', float(right), dict(evidence, compared=how), format_ok=format_ok)


def extract(text: str) -> tuple[str | None, bool]:
  r"""The answer stated last, and whether it was stated as \boxed{x}, `#### x` or `Answer: x`.

  Without any statement it is the last formula between dollars, else the last number. A last box that is never closed
  is a truncated answer, hence None.
  """
  box = text.rfind('\\boxed{')
  statement = max((m.end() for pattern in (_STATEMENT, _GSM8K) for m in pattern.finditer(text)), default=-1)
  if box >= 0 and box >= statement:
    return answers.last_box(text), answers.last_box(text) is not None
  if statement >= 0:
    line = (text[statement:].lstrip().splitlines() or [''])[0].strip()
    return _from_line(line), bool(re.search(r'####[ \t]*$|:[*_\s]*$', text[:statement]))
  formulas = list(_INLINE.finditer(text))
  if formulas:
    return next(g for g in formulas[-1].groups() if g), False
  return answers.extract(text, 'number')[0], False


def _from_line(line: str) -> str | None:
  """The formula in a stated line; its number where the line is prose."""
  formula = _INLINE.search(line)
  if formula:
    return next(g for g in formula.groups() if g)
  line = line.strip(' .*`')
  if _PROSE.search(_TEXT.sub('', line)) and re.search(r'\d', line):
    return answers.extract(f'Answer: {line}', 'number')[0]
  return line or None


def clean(text: str) -> str:
  """The formula without what does not change its value: typography, closing punctuation, digit grouping."""
  text = text.translate(_UNICODE).strip().strip('$').strip()
  text = re.sub(r'\\(?:left|right|displaystyle|bigl?|bigr?|Bigl?|Bigr?)(?![A-Za-z])\s*', '', text)
  text = text.replace('\\dfrac', '\\frac').replace('\\tfrac', '\\frac').replace('\\$', '')
  text = re.sub(r'(?<=\d)(?:\\,|\\ |\\!|\{,\}|\{ \}|~)+(?=\d{3}(?!\d))', '', text)
  text = text.rstrip().rstrip('.,;').rstrip()
  if re.fullmatch(r'[+-]?\d{1,3}(?:,\\?!?\d{3})+(?:\.\d+)?(?:\D.*)?', text):
    text = re.sub(r'(?<=\d),\\?!?(?=\d{3}(?!\d))', '', text)
  return re.sub(r'^\+(?=\d)', '', text)


def equal(gold: str, answer: str) -> tuple[bool, str]:
  """Whether two cleaned formulas have the same value, and what decided it."""
  if answer == gold:
    return True, 'same text'
  if _is_text(gold):
    return _words(gold) == _words(answer), 'words'
  ours, theirs = procedural.number(gold), procedural.number(answer)
  if ours is not None and theirs is not None:
    return ours == theirs, 'numbers'
  ours, theirs = _unit(gold) if _TEXT.search(gold) else '', _unit(answer)
  if ours and theirs and ours != theirs:
    return False, 'units'
  if {gold[:1], answer[:1]} == {'(', '\\'} and '\\{' in (gold[:2], answer[:2]):
    return False, 'a set and a tuple'
  reply = _WORKERS.call({'gold': gold, 'answer': answer}, cpu_s=_CPU_S, wall_s=8 * _CPU_S)
  return reply['equal'], reply.get('why', 'formulas')


def _unit(formula: str) -> str:
  r"""The unit after a number, as in 5\text{ cm} or 5 cm; '' without one."""
  plain = _TEXT.sub(r' \1', _SPACE.sub(' ', formula))
  match = re.fullmatch(r'[\d.,/\\{}a-z]*?\d[\s}]*([A-Za-z]+(?:\^\{?\d\}?)?)', plain)
  return match[1].replace('{', '').replace('}', '').rstrip('s') if match else ''


def _is_text(gold: str) -> bool:
  r"""Words only: \text{...} and nothing else, or bare words of two letters or more."""
  bare = _TEXT.sub('', gold)
  if bare != gold:
    return not re.search(r'[A-Za-z0-9\\^_=<>]', bare) and bool(re.search(r'[A-Za-z]', gold))
  return bool(re.fullmatch(r'\(?[A-Za-z]+(?:[ -][A-Za-z]+)+\)?|[A-Z][a-z]{2,}', gold))


def _words(text: str) -> list[str]:
  return re.findall(r'\w+', _TEXT.sub(r'\1', _SPACE.sub(' ', text)).casefold())
