"""Takes the answer that a completion states last.

A model that chats must be graded as fairly as one that answers in the asked form, so the value is looked for in both
places and the form is reported beside it. This module judges nothing: it never sees the reference.
"""

import fractions
import itertools
import re

KINDS = ('number', 'word', 'list', 'text')

_STATED = re.compile(r'\banswer\s*(?:(?:\*\*)?:|\bis\b:?)\s*(?:\*\*)?\s*', re.IGNORECASE)
# A sign belongs to the number unless it joins it to the operand before it.
_NUMBER = re.compile(r'(?:(?<![\w.)])-\s?|(?<=[-+*/]\s)-)?'
                     r'(?:(?:\d{1,3}(?:,\d{3}){1,40}+(?!,*+\d)|\d+)(?:\.\d+)?|(?<!\w)\.\d+)(?:/\d+(?![\d.]))?')
# What makes another value, or none, of the number that it stands before or after. A mark of bold text does not.
_BEFORE = re.compile(
    r'(?:[^\W\d_]|[-^_+/×÷√<≤≥≠]\s*|(?<![-=])>\s*|\*\s+|\d\s*\*|[\d.][.,:]|\w\(|\]\{|'
    r'\\(?!boxed|text|math|approx|quad|implies|\w*arrow|therefore)[A-Za-z]+\s*[({[]?\s*|'
    r'\b(?:not|at least|at most|(?:less|more|fewer|greater|larger|smaller|other) than|under|over|above|below|up to|'
    r'between)\s+(?:equal to |exactly )?[$*(]*)$', re.IGNORECASE)
_AFTER = re.compile(
    r'[^\W\d_](?![^\W\d_])|\.\d|[:(/]\s*\w|,\d|[ \xa0\u202f](?:\d{3}(?!\d)|\d+/\d)|'
    r'\s*(?:[×÷+<>≤≥≠%!]|\^(?!\{?\\circ)|-\s*[\d(]|\*\*?\s*[\d(]|\*[a-z])|'
    r'\s*\\(?!text|math|quad|approx|implies|\w*arrow|therefore)[A-Za-z%]|\s+[a-z]+(?:,?\s+and\s+|,\s*)\d|'
    r'\s+(?:percent|half|squared|cubed|factorial|choose|times|plus|minus|divided|mod|or (?:less|more|fewer|so))\b',
    re.IGNORECASE)
_FRACTION = re.compile(r'\\[dt]?frac\s*(?:\{(-?\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))')
_GROUPED = re.compile(r'(?<=\d)(?:\{,\}|\\[,!])(?=\d{3}(?!\d))')
_NEGATIVE = re.compile(r'(?<![\d)\w])(?<![\d)]\s)(?:minus|negative)\s+(?=[\d.])', re.IGNORECASE)
SCALES = {'dozen': 12, 'hundred': 100, 'thousand': 10**3, 'million': 10**6, 'billion': 10**9, 'trillion': 10**12}
_SCALED = re.compile(rf'(?<![\d.,/])(\d{{1,20}}(?:\.\d{{1,20}})?)[ \xa0-]({"|".join(SCALES)})\b', re.IGNORECASE)
_WORD = re.compile(r"\w+(?:['’-]\w+)*")
# Items and their separators never give back what they took, so that no text takes long to look through.
_ITEM = r"(?<!\w)(?<!\w['’.-])[+-]?\w++(?:['’.-]\w++)*+"
_COMMA = r'\s*+,\s*+(?:and[ \t]+)?'
_LIST = re.compile(rf'{_ITEM}(?:{_COMMA}{_ITEM})+(?:[ \t]++and[ \t]++{_ITEM})?')
_BETWEEN = r'[ \t]*+(?:;|<|>|->|→|\n)\s*+'  # other ways to write a list, looked for where there are no commas
_OTHER_LIST = re.compile(rf'{_ITEM}(?:{_BETWEEN}{_ITEM})+|(?<!\w)[+-]?\d++(?:[ \t]++[+-]?\d++)+')
_BULLET = re.compile(r'^[ \t]*+(?:\d+[.)]|[-*•])[ \t]+', re.MULTILINE)
_BULLETS = re.compile(rf'(?:{_BULLET.pattern}.*\n++)+{_BULLET.pattern}.*', re.MULTILINE)
_QUOTES = re.compile(r"(?<!\w)'|'(?!\w)|\\text\{|\}")
_RESULT = re.compile(r'=|->|→|\bis\b|\bequals\b|\bare\b')
_ENDS = re.compile(r'[.!?(\n]')
_HEDGE = re.compile(r'\b(?:or|either|not)\b', re.IGNORECASE)
_CHOICE = re.compile(r"\w+\s*(?:[/|&]|,?\s+(?:and|nor)\b)", re.IGNORECASE)
_NEGATION = re.compile(r',?\s\(?not\b', re.IGNORECASE)
_SPELLED = dict(zip(
    'zero one two three four five six seven eight nine ten once twice thrice'.split(),
    (*range(11), 1, 2, 3)))
_MINUS = str.maketrans('−–', '--')
_MAX_CHARS = 20_000  # at the end of a completion, in which a value is looked for
_UNQUOTED = str.maketrans('−–', '--', '"“”*`[]')


def without_thoughts(text: str) -> str:
  """What a model says when it has thought: the text after the last </think>."""
  return text.rpartition('</think>')[2]


def last_box(text: str) -> str | None:
  r"""The content of the last \boxed{...}, or None when there is none or the last one is never closed."""
  start = text.rfind('\\boxed{')
  if start < 0:
    return None
  depth = 0
  for i in range(start + len('\\boxed'), len(text)):
    if text[i] == '\\':
      continue
    if text[i] in '{}' and text[i - 1] != '\\':
      depth += 1 if text[i] == '{' else -1
      if depth == 0:
        return text[start + len('\\boxed{'):i]
  return None


def extract(text: str, kind: str) -> tuple[str | None, bool]:
  r"""The last stated answer and whether it was stated in the asked form.

  The order is: the last `Answer: x` (`answer is x` counts as a statement, though not as the asked form), else the
  last \boxed{x}, else by kind the last number, the last word, the last list, or the whole text. A list comes
  back with ', ' between its items. A number that is part of something else, as in 3^2, is no answer.

  Args:
    text: the completion.
    kind: 'number', 'word', 'list' or 'text'; what sort of value the task asks for.

  Returns:
    (answer, format_ok): answer is None when the text holds no value of this kind.

  Raises:
    ValueError: for an unknown kind.
  """
  if kind not in KINDS:
    raise ValueError(f'answer kind {kind!r} is not one of {KINDS}')
  text = without_thoughts(text)
  if kind == 'text':
    return _extract_text(text)
  text, states_nothing, end = text[-_MAX_CHARS:], False, None
  for match in reversed(list(_STATED.finditer(text))):
    value_in, end = text[match.end():end], match.start()  # each part of the text is looked through once
    line = value_in.split('\n')[0]
    value_in = value_in if kind == 'list' else line
    if _values(value_in, kind):
      answer = _in_statement(value_in, kind)
      plain = line.strip(' .*`"\'$')
      return answer, (plain if kind == 'list' else plain.replace(',', '')) == answer and _asked_form(match)
    states_nothing |= bool(line.strip())
  if states_nothing:
    return None, False
  box = last_box(text)
  if box is not None:
    answer = _last(box, kind) if kind == 'word' else _in_statement(box, kind)  # its first word may be a command
    return answer, answer is not None
  return _last(text, kind), False


def _extract_text(text: str) -> tuple[str | None, bool]:
  stated = list(_STATED.finditer(text))
  if stated:
    return text[stated[-1].end():].strip() or None, _asked_form(stated[-1])
  box = last_box(text)
  return (text if box is None else box).strip() or None, box is not None


def _asked_form(match: re.Match) -> bool:
  return ':' in match.group()


def _in_statement(line: str, kind: str) -> str | None:
  """The value a statement gives: its first one, or what its equation or sentence ends in; a choice gives none."""
  if kind == 'list':
    return _stated_list(_tidied(line))
  head = _NEGATION.split(line, maxsplit=1)[0]
  line = head if _values(head, kind) else line
  values = _values(line, kind)
  if not values or len(values) > 1 and _HEDGE.search(line) or kind == 'word' and _CHOICE.match(line.strip(' .*`"\'$')):
    return None
  return (values[-1] if _RESULT.search(line) else values[0]) or None


def _stated_list(text: str) -> str | None:
  """The list a statement gives: the first, or the one its equation or sentence ends in; a choice gives none."""
  found = _lists(text)
  if not found:
    return None
  head = _RESULT.split(text[:found[0].start()])[-1]
  tail = _ENDS.split(text[found[-1].end():])[0]
  if _HEDGE.search(head) or re.search(r'\d', found[0].group()) and re.search(r'\d', head + tail):
    return None
  answer = found[0]
  for before, after in itertools.pairwise(found):
    between = text[before.end():after.start()]
    if _HEDGE.search(between):
      return None
    end, result = _ENDS.search(between), _RESULT.search(between)
    if end and not (result and result.start() < end.start()):
      break
    if result:
      answer = after
    elif _joined(after) != _joined(answer):
      return None
  return _joined(answer)


def _last(text: str, kind: str) -> str | None:
  if kind == 'list':
    return _last_list(_tidied(text))
  values = _values(text, kind)
  return values[-1] or None if values else None


def _last_list(text: str) -> str | None:
  found = _lists(text)
  if not found or len(found) > 1 and _HEDGE.search(text[found[-2].end():found[-1].start()]):
    return None
  return _joined(found[-1])


def _values(text: str, kind: str) -> list[str]:
  """All values of this kind in the text, in order."""
  if kind == 'word':
    return _WORD.findall(text)
  if kind == 'list':
    return [_joined(found) for found in _lists(_tidied(text))]
  return _numbers(text)


def _tidied(text: str) -> str:
  """Text without quotes and brackets, with bullets as a list with commas."""
  joined = _BULLETS.sub(lambda m: ', '.join(_BULLET.sub('', m.group()).split('\n')).replace(', , ', ', '), text)
  return _QUOTES.sub('', joined.translate(_UNQUOTED))


def _lists(text: str) -> list[re.Match]:
  return list(_LIST.finditer(text)) or list(_OTHER_LIST.finditer(text))


def _joined(found: re.Match) -> str:
  parts = re.split(rf'{_COMMA}|[ \t]+and[ \t]+|{_BETWEEN}|[ \t]+', found.group())
  return ', '.join(part.removeprefix('+') for part in parts)


def _numbers(text: str) -> list[str]:
  """The numbers of the text in order, without separators; spelled ones only where no digits stand.

  The first and the last, of which one is the answer, are '' where they are not a whole value.
  """
  text = _FRACTION.sub(lambda m: ' {}/{}'.format(*(x for x in m.groups() if x)), text.translate(_MINUS))
  text = _SCALED.sub(_product, _NEGATIVE.sub('-', _GROUPED.sub(',', text)))
  found = list(_NUMBER.finditer(text))
  if found:
    return [_whole(text, found[0]), *(m.group() for m in found[1:-1]), *(_whole(text, m) for m in found[1:][-1:])]
  words = (w.lower() for w in _WORD.findall(text))
  return [str(_SPELLED[w]) for w in words if w in _SPELLED]


def _product(scaled: re.Match) -> str:
  return str(fractions.Fraction(scaled[1]) * SCALES[scaled[2].lower()])


def denied(before: str) -> bool:
  """Whether a text makes another value, or none, of what comes after it, as in 'not' or 'less than'."""
  return bool(_BEFORE.search(before[-40:]))


def _whole(text: str, number: re.Match) -> str:
  """The number, or '' where what stands beside it makes it another value."""
  if denied(text[max(0, number.start() - 40):number.start()]) or _AFTER.match(text, number.end(), number.end() + 40):
    return ''
  return re.sub(r'^(-?)\.', r'\g<1>0.', number.group().replace(',', '').replace(' ', ''))
