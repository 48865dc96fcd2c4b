"""Reads what users bring as JSONL: tasks, conversations, preference pairs, plain text, and inputs of the small jobs.

Nothing is guessed or dropped: a line that is not what its reader takes ends the reading with a ValueError that names
the file, the line and the field. '-' is standard input.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
import hashlib
import json
import os
import sys
from typing import Any

from ptjax import types
from ptjax.verify import base as verifiers

ROLES = ('system', 'developer', 'user', 'assistant', 'tool')
_SHARE_GPT = {'system': 'system', 'human': 'user', 'user': 'user', 'gpt': 'assistant', 'assistant': 'assistant',
              'tool': 'tool', 'function': 'tool', 'observation': 'tool'}


def _is_messages(value: Any) -> str:
  if not isinstance(value, list) or not value:
    return 'must be a list of messages with at least one'
  for i, message in enumerate(value):
    if not isinstance(message, dict) or message.get('role') not in ROLES:
      return f'message {i} needs a "role" out of {ROLES}'
    content = message.get('content')
    if isinstance(content, list):
      if not all(isinstance(p, dict) and p.get('type') == 'text' and isinstance(p.get('text'), str) for p in content):
        return f'message {i} has content parts other than {{"type": "text", "text"}}'
    elif not isinstance(content, str) and not (content is None and message.get('tool_calls')):
      return f'message {i} needs "content", text or a list of text parts'
    calls = message.get('tool_calls') or []
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get('function', call), dict) for call in calls):
      return f'message {i} needs "tool_calls" that are a list of objects, each with an object as its "function"'
  return ''


def _is(kinds: tuple[type, ...], words: str) -> Callable[[Any], str]:
  def check(value: Any) -> str:
    # bool is an int to Python, and to no one else.
    right = isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds)
    return '' if right else f'must be {words}, not {value!r:.60}'
  return check


def _is_ids(value: Any) -> str:
  right = isinstance(value, list) and len(value) >= 2 and all(type(v) is int and v >= 0 for v in value)
  return '' if right else 'must be a list of at least 2 whole numbers >= 0'


def _is_files(value: Any) -> str:
  right = isinstance(value, dict) and all(isinstance(v, str) for v in value.values())
  return '' if right else 'must be an object of path -> text'


def _is_share_gpt(value: Any) -> str:
  if not isinstance(value, list) or not value:
    return 'must be a list of turns with at least one'
  right = all(isinstance(t, dict) and t.get('from') in _SHARE_GPT and isinstance(t.get('value'), str) for t in value)
  return '' if right else f'each turn needs "from", out of {sorted(_SHARE_GPT)}, and "value", text'


def _is_column(value: Any) -> str:
  return '' if isinstance(value, str) else _is_messages(value) and f'must be text or messages: {_is_messages(value)}'


_TEXT = _is((str,), 'text')
_ID = _is((str, int), 'text or a whole number')
_OBJECT = _is((dict,), 'an object')
_FIELDS = {
    'id': _ID, 'text': _TEXT, 'prompt': _is_column, 'completion': _is_column, 'chosen': _is_column,
    'rejected': _is_column, 'messages': _is_messages, 'conversations': _is_share_gpt, 'token_ids': _is_ids,
    'label': _is((bool,), 'true or false'), 'domain': _TEXT, 'verifier': _TEXT,
    'reference': _is((str, int, float, dict), 'text, a number or an object'), 'tests': _OBJECT, 'files': _is_files,
    'limits': _OBJECT, 'level': _is((int,), 'a whole number'), 'demonstration': _TEXT,
}


def tasks(path: str) -> list[types.Task]:
  """Tasks from {"prompt" | "messages", "domain", "verifier", "reference" | "tests", ...}.

  Optional are `id` (else made from domain and prompt), `files`, `limits`, `level` and `demonstration`.
  """
  made, seen = [], {}
  optional = ('id', 'reference', 'tests', 'files', 'limits', 'level', 'demonstration')
  for where, record in _records(path, ('domain', 'verifier'), optional, one_of=(('prompt',), ('messages',))):
    messages = _messages(record.get('messages', record.get('prompt')), 'user')
    key = json.dumps([record['domain'], messages], sort_keys=True)
    task_id = str(record.get('id', f'{record["domain"]}/{hashlib.sha256(key.encode()).hexdigest()[:12]}'))
    fields = {name: record[name] for name in ('domain', 'verifier', *optional[1:]) if name in record}
    task = types.Task(id=task_id, messages=tuple(messages), **fields)
    try:
      verifiers.check(task)
    except (ValueError, TypeError, OverflowError, RecursionError) as e:
      raise ValueError(f'{where}: {e}') from e
    if task_id in seen:
      raise ValueError(f'{where}: id {task_id!r} was on {seen[task_id]} already; ids (or prompts) must be distinct')
    seen[task_id] = where
    made.append(task)
  return _at_least_one(made, path)


def by_domain(some: Iterable[types.Task]) -> dict[str, dict[int, list[types.Task]]]:
  """domain -> level -> tasks, in the order in which they come."""
  grouped = collections.defaultdict(lambda: collections.defaultdict(list))
  for task in some:
    grouped[task.domain][task.level].append(task)
  return {domain: dict(levels) for domain, levels in grouped.items()}


def conversations(path: str) -> list[list[dict]]:
  """Message lists from {"messages"}, ShareGPT's {"conversations"}, or {"prompt", "completion"}."""
  made = []
  for _, record in _records(path, one_of=(('messages',), ('conversations',), ('prompt', 'completion'))):
    if 'conversations' in record:
      made.append([{'role': _SHARE_GPT[t['from']], 'content': t['value']} for t in record['conversations']])
    elif 'messages' in record:
      made.append(record['messages'])
    else:
      made.append(_messages(record['prompt'], 'user') + _messages(record['completion'], 'assistant'))
  return _at_least_one(made, path)


def preferences(path: str) -> list[dict]:
  """{'prompt', 'chosen', 'rejected'} as message lists; without "prompt" it is what both sides begin with."""
  made = []
  for where, record in _records(path, ('chosen', 'rejected'), ('prompt',)):
    chosen, rejected = record['chosen'], record['rejected']
    if isinstance(chosen, str) != isinstance(rejected, str):
      raise ValueError(f'{where}: field "rejected" must be text or messages as "chosen" is')
    if 'prompt' in record:
      prompt = record['prompt']
    else:
      length = _common(chosen, rejected)
      if not length:
        raise ValueError(f'{where}: field "prompt" is missing, and "chosen" and "rejected" share no beginning')
      prompt, chosen, rejected = chosen[:length], chosen[length:], rejected[length:]
    if chosen == rejected or not chosen or not rejected:
      raise ValueError(f'{where}: fields "chosen" and "rejected" must differ and not be empty after the prompt')
    made.append({'prompt': _messages(prompt, 'user'), 'chosen': _messages(chosen, 'assistant'),
                 'rejected': _messages(rejected, 'assistant')})
  return _at_least_one(made, path)


def labelled(path: str) -> list[dict]:
  """{'prompt', 'completion', 'label'} with message lists: a completion that is wanted (True) or not."""
  return _at_least_one(
      [{'prompt': _messages(r['prompt'], 'user'), 'completion': _messages(r['completion'], 'assistant'),
        'label': r['label']} for _, r in _records(path, ('prompt', 'completion', 'label'))], path)


def texts(path: str) -> list[str]:
  """Documents from {"text"}."""
  return _at_least_one([record['text'] for _, record in _records(path, ('text',))], path)


def prompts(path: str) -> Iterator[dict]:
  """Records {"id", "prompt" | "messages"} of --job=generate, where a prompt is text."""
  return (_text_only(where, record, 'prompt')
          for where, record in _records(path, ('id',), one_of=(('prompt',), ('messages',))))


def scorables(path: str) -> Iterator[dict]:
  """Records {"id", "prompt", "completion"} or {"id", "token_ids"} of --job=score, where the text is text."""
  return (_text_only(where, record, 'prompt', 'completion')
          for where, record in _records(path, ('id',), one_of=(('prompt', 'completion'), ('token_ids',))))


def lines(path: str) -> Iterator[tuple[str, dict]]:
  """('file:line', object) for each line that is not blank, as soon as it can be read."""
  name = 'standard input' if path == '-' else path
  if path != '-' and not os.path.exists(path):
    raise ValueError(f'{path}: no such file')
  stream = sys.stdin if path == '-' else open(path, encoding='utf-8')
  try:
    # readline, since iterating may read ahead and keep a caller waiting for its answer.
    for number, line in enumerate(iter(stream.readline, ''), 1):
      if line.strip():
        yield f'{name}:{number}', _object(f'{name}:{number}', line)
  except UnicodeDecodeError as e:
    raise ValueError(f'{name}: is not UTF-8 text: {e}') from e
  finally:
    if path != '-':
      stream.close()


def check_fields(where: str, record: dict, required: Sequence[str], optional: Sequence[str] = (),
                 one_of: Sequence[Sequence[str]] = ((),)) -> None:
  """Raises ValueError, naming line and field, unless the record has the fields asked for and no others.

  `one_of` are groups of fields of which a record has exactly one, whole.
  """
  known = {*required, *optional, *(name for group in one_of for name in group)}
  for name in record:
    if name not in known:
      raise ValueError(f'{where}: unknown field {json.dumps(name)}; known are {sorted(known)}')
  for name in required:
    if name not in record:
      raise ValueError(f'{where}: field "{name}" is missing')
  grouped = {name for group in one_of for name in group} & set(record)
  if not any(grouped == set(group) for group in one_of):
    wanted = ' or '.join(' with '.join(f'"{name}"' for name in group) for group in one_of)
    raise ValueError(f'{where}: needs exactly {wanted}; it has {sorted(grouped) or "none of them"}')
  for name, value in record.items():
    problem = _FIELDS[name](value)
    if problem:
      raise ValueError(f'{where}: field "{name}" {problem}')


def _records(path: str, required: Sequence[str] = (), optional: Sequence[str] = (),
             one_of: Sequence[Sequence[str]] = ((),)) -> Iterator[tuple[str, dict]]:
  for where, record in lines(path):
    check_fields(where, record, required, optional, one_of)
    yield where, record


def _object(where: str, line: str) -> dict:
  try:
    record = json.loads(line, parse_constant=_no_constant)
  except (ValueError, RecursionError) as e:
    raise ValueError(f'{where}: is not JSON: {e}') from e
  if not isinstance(record, dict):
    raise ValueError(f'{where}: must be a JSON object, not {line.strip():.60}')
  return record


def _no_constant(name: str):
  raise ValueError(f'{name} is not a JSON number')


def _messages(column: str | list[dict], role: str) -> list[dict]:
  return [{'role': role, 'content': column}] if isinstance(column, str) else column


def _text_only(where: str, record: dict, *names: str) -> dict:
  for name in names:
    if name in record and not isinstance(record[name], str):
      raise ValueError(f'{where}: field "{name}" must be text')
  return record


def _common(a: Sequence, b: Sequence) -> int:
  """How many items both begin with; in text, whole words."""
  length = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
  if isinstance(a, str):
    while length and not a[length - 1].isspace():
      length -= 1
  return length


def _at_least_one(made: list, path: str) -> list:
  if not made:
    raise ValueError(f'{path}: holds no line')
  return made
