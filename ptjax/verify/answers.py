"""Takes the answer that a completion states last.

A model that chats must be graded as fairly as one that answers in the asked form, so the value is looked for in both
places and the form is reported beside it. This module judges nothing: it never sees the reference.
"""

import re

KINDS = ('number', 'word', 'list', 'text')

_STATED = re.compile(r'\banswer\s*(?:(?:\*\*)?:|\bis\b:?)\s*(?:\*\*)?\s*', re.IGNORECASE)
# A sign belongs to the number unless it joins it to the operand before it.
_NUMBER = re.compile(r'(?:(?<![\w.)])-\s?|(?<=[-+*/]\s)-)?(?:\d{1,3}(?:,\d{3})+(?![\d,]*\d)|\d+)(?:\.\d+)?'
                     r'(?:/\d+(?![\d.]))?')
_WORD = re.compile(r"\w+(?:['’-]\w+)*")
_ITEM = r"-?\w+(?:['’.-]\w+)*"
_COMMA = r'\s*,\s*(?:and\s+)?'
_LIST = re.compile(rf'{_ITEM}(?:{_COMMA}{_ITEM})+(?:\s+and\s+{_ITEM})?')
_BULLET = re.compile(r'^[ \t]*(?:\d+[.)]|[-*•])[ \t]+', re.MULTILINE)
_BULLETS = re.compile(rf'(?:{_BULLET.pattern}.*\n)+{_BULLET.pattern}.*', re.MULTILINE)
_RESULT = re.compile(r'=|\bis\b|\bequals\b|\bare\b')
_HEDGE = re.compile(r'\b(?:or|either|not)\b', re.IGNORECASE)
_SPELLED = dict(zip(
    'zero one two three four five six seven eight nine ten once twice thrice'.split(),
    (*range(11), 1, 2, 3)))
_MINUS = str.maketrans('−–', '--')
_UNQUOTED = str.maketrans('−–', '--', '"“”*`[]')


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
  last \boxed{x}, else by kind the last number, the last word, the last list with commas, or the whole text. A
  list comes back with ', ' between its items.

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
  stated = list(_STATED.finditer(text))
  if stated and kind == 'text':
    return text[stated[-1].end():].strip() or None, _asked_form(stated[-1])
  for match in reversed(stated):
    line = text[match.end():].split('\n\n' if kind == 'list' else '\n')[0]
    if line.strip():
      answer = _in_statement(line, kind)
      plain = line.strip(' .*`"\'$')
      plain = (plain if kind == 'list' else plain.replace(',', '')) == answer
      return answer, plain and _asked_form(match)
  box = last_box(text)
  if box is not None:
    answer = box.strip() if kind == 'text' else _last(box, kind)
    return answer, answer is not None
  return (text.strip() or None if kind == 'text' else _last(text, kind)), False


def _asked_form(match: re.Match) -> bool:
  return ':' in match.group()


def _in_statement(line: str, kind: str) -> str | None:
  """The value a statement gives: its first one, or what its equation or sentence ends in; a choice gives none."""
  values = _values(line, kind)
  if not values or len(values) > 1 and _HEDGE.search(line):
    return None
  return values[-1] if _RESULT.search(line) else values[0]


def _last(text: str, kind: str) -> str | None:
  values = _values(text, kind)
  return values[-1] if values else None


def _values(text: str, kind: str) -> list[str]:
  """All values of this kind in the text, in order."""
  if kind == 'word':
    return _WORD.findall(text)
  if kind == 'list':
    text = _BULLETS.sub(lambda m: ', '.join(_BULLET.sub('', m.group()).splitlines()), text).translate(_UNQUOTED)
    return [', '.join(re.split(rf'{_COMMA}|\s+and\s+', found)) for found in _LIST.findall(text)]
  return _numbers(text)


def _numbers(text: str) -> list[str]:
  """All numbers of the text in order, without separators; spelled ones only where no digits stand."""
  text = text.translate(_MINUS)
  found = [m.group().replace(',', '').replace(' ', '') for m in _NUMBER.finditer(text)]
  if found:
    return found
  words = (w.lower() for w in _WORD.findall(text))
  return [str(_SPELLED[w]) for w in words if w in _SPELLED]
