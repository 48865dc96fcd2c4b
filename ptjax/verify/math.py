r"""Judges mathematical answers: which one a completion states, and whether it is the right one, exactly.

The last statement counts: a \boxed{}, a `####` line or `answer: x`. Plain numbers are compared here, as fractions;
everything else by math-verify in a worker that can be killed, under `math_policy`. Nearly right is wrong: 0.333333
is not 1/3. An answer too large to compare is a timeout, and an unclosed box is no answer.
"""

import functools
import itertools
import re
import unicodedata

from ptjax import types
from ptjax.verify import answers
from ptjax.verify import procedural
from ptjax.verify import worker

_MAX_CHARS = 1000
_CPU_S = 3.0
_STATEMENT = re.compile(r'\banswer\s*(?::|\bis\b:?)[*_\s]*|^####[ \t]*', re.IGNORECASE | re.MULTILINE)
# An opening delimiter inside a formula means that the one before it was never closed.
_INLINE = re.compile(r'\$\$?([^$]+)\$\$?|\\\(((?:(?!\\[()]).)+)\\\)|\\\[((?:(?!\\[\[\]]).)+)\\\]', re.DOTALL)
_AND_OR = re.compile(r'\s*(,|;|,?\s*\b(?:and|or)\b)\s*')
_PROSE = re.compile(r'(?<!\\)(?<![A-Za-z\\])[A-Za-z]{3,}')
_TEXT = re.compile(r'\\(?:text|textbf|textit|mathrm|mbox|textrm|operatorname)\s*\{([^{}]*)\}')
_SPACE = re.compile(r'(?<!\\)\\[,;:!> ]|\\quad|\\qquad|~')
_UNICODE = str.maketrans({
    '−': '-', '–': '-', '×': '\\times ', '·': '\\cdot ', '⋅': '\\cdot ', '÷': '\\div ', '≤': '\\le ', '≥': '\\ge ',
    '≠': '\\ne ', '∞': '\\infty ', 'π': '\\pi ', '°': '^\\circ ', '±': '\\pm ', '√': '\\sqrt ', '∪': '\\cup ',
    '∩': '\\cap ', '∅': '\\emptyset ', '∈': '\\in ', 'ℝ': '\\mathbb{R}', '⟨': '(', '⟩': ')', 'θ': '\\theta '})
_RAISED = re.compile('[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+')
_SAME_COMMANDS = ((r'\\(?:left|right|displaystyle|bigl?|bigr?|Bigl?|Bigr?)(?![A-Za-z])\s*', ''),
                  (r'\\[dt]frac', r'\\frac'), (r'\\\$', ''), (r'\\varnothing', r'\\emptyset'),
                  (r'\\langle\s*', '('), (r'\s*\\rangle', ')'), (r'\s*(?:\\colon|\\text\{:\}|\{:\})\s*', ':'),
                  (r'\\(?:mathbf|hat)\s*\{(?:\\mathbf\s*\{)?\\?([ijk])(?:math)?\}?\}', r'\1'),
                  (r'\\mathbf\s*([ijk])(?![A-Za-z])', r'\1'), (r'\\mathrm\s*\{([ei])\}', r'\1'),
                  (r'\\sqrt\s+(?:(\d+)|\(([^()]*)\))', r'\\sqrt{\1\2}'),
                  (r'(\\circ\s*\}?)\s*([CF])$', r'\1\\text{\2}'), (r'(?<=\d)\s*([AaPp])\.?[Mm]\.?$', r'\\text{ \1m}'))
_NUMERALS = {word: str(i) for i, word in enumerate(
    'zero one two three four five six seven eight nine ten eleven twelve'.split())}
_CLOCK = re.compile(r'\d{1,2}:[0-5]\d(?::[0-5]\d)?')
_LETTER = r'(?:\([A-Z]\)|[A-Z])'
_CHOICES = re.compile(rf'{_LETTER}(?:(?:\s*(?:,|&|\band\b)\s*)+{_LETTER})*|[A-Z]{{2,}}')
_CHOICE = re.compile(r'\(([A-Z])\)\s|([A-Z])[).:]\s')
_LINK = re.compile(r'(?:,\s*)?(?:'
                   r'\\(?:text|mbox|textrm)\s*\{\s*,?\s*(and|or)\s*\}|(?<![A-Za-z\\{])(and|or)(?![A-Za-z}]))')
_UNIT = re.compile(r'(?:([A-Za-z]+(?:[ /-][A-Za-z]+){0,3})|\(?approximately\)?)(\^\{?\d\}?)?')
_WITH_UNIT = re.compile(r'(.*?\S)\s*(\\(?:text|textbf|textit|textrm|mbox)\s*\{.*|'
                        r'(?<=[\d}])\s*\\mathrm\s*\{[A-Za-z]+\}(?:\^\{?\d\}?)?)', re.DOTALL)
_WITH_BARE_UNIT = re.compile(r'([-+\d.,:/]*\d|.*\})(\s+(?:[A-Za-z.]{3,}.*|[mgsh](?:\^\{?\d\}?)?)|'
                             r'\s*(?:[cmk]m|[mk]g|ml|ft|in|mi|lb|oz|hr|mph)s?(?:\^\{?\d\}?)?)', re.DOTALL)
# Words that say another thing than what is counted.
_NO_UNIT = {'or', 'and', 'not', 'less', 'more', 'fewer', 'least', 'most', 'than', 'maybe', 'perhaps', 'if', 'but', 'to',
            'plus', 'minus', 'times', 'half', 'false', 'wrong', 'is', 'for', 'when', 'where', 'with', 'mod', 'sin',
            'cos', 'tan', 'log', 'ln', 'exp', 'sqrt', 'pi', 'factorial', 'inverse', 'negative', 'below', 'score', 'x',
            'y', 'z', *_NUMERALS}
_DOTS = re.compile(r'\\[lc]?dots|…|\.\.\.')
_RUN = re.compile(rf'(-?\d{{1,9}}),\s*(?:(-?\d{{1,9}}),\s*)?(?:{_DOTS.pattern})\s*,\s*(-?\d{{1,9}})(?![\d.])')
_WORKERS = worker.WorkerPool('ptjax.verify.math_policy', size=2)


def check(task: types.Task) -> None:
  """Raises ValueError unless the reference can be read, as `verify` has to."""
  procedural.check_exact(task)
  why = _unreadable(clean(str(task.reference)))
  if why:
    raise ValueError(f'field "reference" {task.reference!r:.200} cannot be read as an answer: {why}')


@functools.lru_cache(maxsize=1 << 16)
def _unreadable(gold: str) -> str:
  """Why a reference cannot be read; '' where it can. Takes the worker some milliseconds, unless it is plain."""
  if _as_text(gold) or procedural.number(gold) is not None:
    return ''
  try:
    _WORKERS.call({'gold': _quantity(gold)[0]}, cpu_s=_CPU_S, wall_s=8 * _CPU_S)
  except (worker.Killed, RuntimeError) as e:
    if isinstance(e, worker.Died):
      raise
    return str(e)
  return ''


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
  text = answers.without_thoughts(text)
  box = text.rfind('\\boxed{')
  for statement in reversed(list(_STATEMENT.finditer(text))):
    if box >= statement.end():
      break
    line = text[statement.end():statement.end() + 2 * _MAX_CHARS].strip().split('\n')[0].strip()
    if line:
      return _from_line(line), ':' in statement.group() or '#' in statement.group()
  if box >= 0:
    return answers.last_box(text), answers.last_box(text) is not None
  formulas = list(_INLINE.finditer(text[-20 * _MAX_CHARS:]))
  if formulas:
    return _inside(formulas[-1]), False
  return answers.extract(text, 'number')[0], False


def _inside(formula: re.Match) -> str:
  return next(g for g in formula.groups() if g)


def _from_line(line: str) -> str | None:
  """The formulas in a stated line; its number where the line is prose. What is only bounded or denied is none."""
  formulas = list(_INLINE.finditer(line))
  if formulas:
    answer = _inside(formulas[0])
    for before, after in itertools.pairwise(formulas):
      link = _AND_OR.fullmatch(line, before.end(), after.start())
      if not link:
        break
      answer += f' \\text{{{link[1]}}} {_inside(after)}' if link[1].isalpha() else f', {_inside(after)}'
    return None if answers.denied(line[:formulas[0].start()]) else answer
  line = line.strip(' .*`')
  if '\\' in line and _quantity(clean(line))[1]:
    return line
  if _PROSE.search(_TEXT.sub('', line)) and re.search(r'\d', line) and not _CHOICE.match(line):
    return answers.extract(f'Answer: {line}', 'number')[0]
  return line or None


def clean(text: str) -> str:
  """The formula without what does not change its value: typography, closing punctuation, digit grouping."""
  text = _RAISED.sub(lambda m: f'^{{{unicodedata.normalize("NFKC", m[0])}}}', text.translate(_UNICODE))
  text = re.sub(r'[^\x00-\x7f]', _ascii, text).strip().strip('$').strip()
  for pattern, plain in _SAME_COMMANDS:
    text = re.sub(pattern, plain, text)
  text = re.sub(r'(?<=\d)(?:\\,|\\ |\\!|\{,\}|\{ \}|~)+(?=\d{3}(?!\d))', '', text)
  text = _RUN.sub(_items, text.rstrip().rstrip('.,;').rstrip())
  if re.fullmatch(r'[+-]?\d{1,3}(?:,\\?!?\d{3})+(?:\.\d+)?(?:\D.*)?', text):
    text = re.sub(r'(?<=\d),\\?!?(?=\d{3}(?!\d))', '', text)
  text = re.sub(r'^(?:\\text\s*\{\s*(?:minus|negative)\s*\}\s*|(?:minus|negative)\s+)(?=[\d.\\])', '-', text)
  return _NUMERALS.get(_said(text).lower()) or re.sub(r'^\+(?=\d)', '', text)


def _items(run: re.Match) -> str:
  first, second, last = (int(x) if x else None for x in run.groups())
  step = 1 if second is None else second - first
  items = range(first, last + step, step) if step else ()
  return ', '.join(map(str, items)) if len(items) <= _MAX_CHARS and items[-1:] == range(last, last + 1) else run[0]


def _ascii(char: re.Match) -> str:
  kind, *_ = unicodedata.decomposition(char[0]).split() or ['']
  plain = unicodedata.normalize('NFKC', char[0])
  if kind == '<fraction>':
    return '\\frac{{{}}}{{{}}}'.format(*plain.split('\N{FRACTION SLASH}'))
  return f'_{{{plain}}}' if kind == '<sub>' else plain


def equal(gold: str, answer: str) -> tuple[bool, str]:
  """Whether two cleaned formulas have the same value, and what decided it."""
  if answer == gold:
    return True, 'same text'
  how = _as_text(gold)
  if how:
    return _text_equal(gold, answer, how), how
  if _as_text(answer) == 'name' or _DOTS.search(answer):
    return False, 'a name, or what is left out'
  ours, theirs = procedural.number(gold), procedural.number(answer)
  if ours is not None and theirs is not None:
    return ours == theirs, 'numbers'
  gold, ours = _quantity(gold)
  answer, theirs = _quantity(answer, not re.search(r'(?<![A-Za-z\\])[A-Za-z]', gold))
  if answer is None or ours and theirs and ours != theirs:
    return False, 'units'
  if _CLOCK.fullmatch(gold) and (theirs in ('am', 'pm') or ours in ('am', 'pm') or ':0' in gold + answer):
    return gold.lstrip('0') == answer.lstrip('0'), 'time'
  if ({gold[:1], answer[:1]} == {'(', '\\'} and '\\{' in (gold[:2], answer[:2]) and
      not re.search(r':|\||\\mid', gold + answer)):
    return False, 'a set and a tuple'
  reply = _WORKERS.call({'gold': gold, 'answer': answer}, cpu_s=_CPU_S, wall_s=8 * _CPU_S)
  return reply['equal'], reply.get('why', 'formulas')


def _quantity(formula: str, bare: bool = True) -> tuple[str | None, str]:
  r"""A formula without the unit after it, as in 5\text{ cm} or 5 cm, and the unit.

  Words for powers of ten multiply. Where other words or a second number follow, there is no formula.

  Args:
    formula: with and, or between values as words.
    bare: whether letters apart from a number are a unit, not factors.
  """
  formula = _LINK.sub(lambda m: ',' if 'and' in m.groups() else ' \\lor ', formula)
  spaced = _SPACE.sub(' ', formula)
  match = _WITH_UNIT.fullmatch(spaced) or bare and _WITH_BARE_UNIT.fullmatch(spaced)
  if not match:
    return formula, ''
  value, words = match[1], _TEXT.sub(r' \1 ', match[2]).replace('.', '')
  unit = _UNIT.fullmatch(re.sub(r'\s+', ' ', words).strip().replace(' ^', '^'))
  words = (unit and unit[1] or '').split()
  if not unit or _NO_UNIT & {w.lower() for w in words} or words[:1] in (['squared'], ['cubed']) or (
      'percent' in words[:-1]):
    return None, ''
  while words and words[0].lower() in answers.SCALES:
    value = f'({value})\\cdot {answers.SCALES[words.pop(0).lower()]}'
  name = ' '.join(words).rstrip('s') + re.sub('[{}]', '', unit[2] or '')
  if name in ('degree', 'percent'):
    return value + {'degree': '^\\circ', 'percent': '\\%'}[name], ''
  return value, name.lower() if name.lower() in ('am', 'pm') else name


def _said(text: str) -> str:
  r"""The words of a text: what stands in \text{}, without its spacing."""
  return ' '.join(_TEXT.sub(r' \1 ', _SPACE.sub(' ', text)).split())


def _as_text(gold: str) -> str:
  """How to compare a gold that is no formula: as 'choices', 'name', 'words' or 'same text'; '' for a formula."""
  said = _said(gold)
  if _CHOICES.fullmatch(said):
    return 'name' if said.isalpha() and len(said) > 1 else 'choices'
  bare = _TEXT.sub('', gold)
  if bare != gold and not re.search(r'[A-Za-z0-9\\^_=<>]', bare) and re.search(r'[A-Za-z]', gold):
    return 'words'
  if re.fullmatch(r'\(?[A-Za-z]+(?:[ -][A-Za-z]+)+\)?|[A-Z][a-z]{2,}', gold):
    return 'words'
  return 'same text' if '\\begin{cases}' in gold or _DOTS.search(gold) or _quantity(gold)[0] is None else ''


def _text_equal(gold: str, answer: str, how: str) -> bool:
  """Whether a text says what the gold says; letters of choices in any order, a name of letters in its own."""
  if how == 'same text':
    return re.sub(r'\s', '', _TEXT.sub(r'\1', gold)) == re.sub(r'\s', '', _TEXT.sub(r'\1', answer))
  gold, answer = _said(gold), _said(answer)
  if how == 'words':
    return re.findall(r'\w+', gold.casefold()) == re.findall(r'\w+', answer.casefold())
  head = _CHOICE.match(answer)
  if how == 'choices' and head and not re.search(r'(?<!\w)[A-Z](?!\w)', answer[head.end():]):
    answer = head[1] or head[2]
  if how == 'name' and re.fullmatch(r'[A-Za-z]+', answer):
    return gold.casefold() == answer.casefold()
  letters = [set(re.sub(r'\band\b|\W', '', said.upper() if said.isalpha() else said)) for said in (gold, answer)]
  return letters[0] == letters[1] and (len(answer) == 1 or bool(_CHOICES.fullmatch(answer)))
