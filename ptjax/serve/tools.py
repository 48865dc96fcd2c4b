"""Functions offered to a model, and the calls it makes, in the form that Hermes and Qwen models are trained on.

A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` in the model's text. What is not such a call, or
names a function that was not offered, stays text. Where the chat template knows no tools, they are stated in the system
message instead, calls of earlier turns are written out as the model would write them, and results come as a user's
message inside `<tool_response>`.
"""

from collections.abc import Mapping, Sequence
import json
import re
import secrets
from typing import NamedTuple

from ptjax.data import chat
from ptjax.data.tokenizer import Tokenizer
from ptjax.serve.errors import invalid

OPEN, CLOSE = '<tool_call>', '</tool_call>'
MAX_TOOLS = 128

_SYSTEM = """You may call functions to help with the request. Each line inside <tools></tools> describes one:
<tools>
{tools}
</tools>
To call a function, write a JSON object with its name and arguments inside <tool_call></tool_call>:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>
Results come back inside <tool_response></tool_response>."""


class Call(NamedTuple):
  """One function call that the model wrote."""

  id: str
  name: str
  arguments: str  # a JSON object


def check(tools) -> list[dict]:
  """The functions a request offers.

  Raises:
    ApiError: they are not a list of well-formed function tools.
  """
  if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
    raise invalid('tools', f'must be a list of at most {MAX_TOOLS}')
  for i, tool in enumerate(tools):
    where = f'tools[{i}]'
    if not isinstance(tool, dict) or tool.get('type') != 'function' or not isinstance(tool.get('function'), dict):
      raise invalid(where, 'must be {"type": "function", "function": {...}}')
    function = tool['function']
    if not isinstance(function.get('name'), str) or not re.fullmatch(r'[a-zA-Z0-9_-]{1,64}', function['name']):
      raise invalid(f'{where}.function.name', 'must be 1 to 64 letters, digits, _ or -')
    for name, kind in (('description', str), ('parameters', dict)):
      if not isinstance(function.get(name), kind | None):
        raise invalid(f'{where}.function.{name}', f'must be {"a string" if kind is str else "a JSON schema object"}')
    if function.get('strict'):
      raise invalid(f'{where}.function.strict', 'is not supported: nothing here forces arguments to fit a schema',
                    'unsupported_value')
  names = [tool['function']['name'] for tool in tools]
  if len(set(names)) < len(names):
    raise invalid('tools', f'two functions are named {max(names, key=names.count)!r}')
  return tools


def encode(tokenizer: Tokenizer, messages: Sequence[Mapping], tools: Sequence[Mapping]):
  """Ids [P] of the conversation with the functions offered, ready for the assistant's turn.

  Raises:
    ValueError: a message is malformed, or the template rejects the conversation.
  """
  if chat.takes_tools(tokenizer):
    return chat.encode_prompt(tokenizer, messages, tools=tools)
  return chat.encode_prompt(tokenizer, plain(messages, tools))


def plain(messages: Sequence[Mapping], tools: Sequence[Mapping]) -> list[dict]:
  """The conversation without tools, calls and results as such: all of them written out as text."""
  written = []
  for i, message in enumerate(messages):
    message = chat.normalize(message, i)
    if message['role'] == 'tool':
      text = f'<tool_response>\n{message["content"]}\n</tool_response>'
      if i and messages[i - 1]['role'] == 'tool':
        written[-1]['content'] += f'\n{text}'
      else:
        written.append(dict(role='user', content=text))
      continue
    if calls := message.pop('tool_calls', None):
      said = [message['content']] if message.get('content') else []
      message['content'] = '\n'.join(said + [_written(call) for call in calls])
    written.append(message)
  if tools:
    text = _SYSTEM.format(tools='\n'.join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if written[0]['role'] in ('system', 'developer'):
      text = f'{written.pop(0)["content"]}\n\n{text}'
    written.insert(0, dict(role='system', content=text))
  return written


def _written(call: Mapping) -> str:
  function = call.get('function', call)
  text = json.dumps(dict(name=function.get('name'), arguments=function.get('arguments', {})), ensure_ascii=False)
  return f'{OPEN}\n{text}\n{CLOSE}'


class Parser:
  """Splits a model's text, as it comes, into text and calls; how it is cut into pieces changes nothing.

  Args:
    names: the functions offered.
  """

  def __init__(self, names: frozenset[str]):
    self._names = names
    self._rest = ''  # not yet told what it is
    self._gap: str | None = None  # the space before a call, until more text comes

  def feed(self, text: str) -> tuple[str, list[Call]]:
    """The text and calls that are certain now."""
    self._rest += text
    said, calls = [], []
    while True:
      start = self._rest.find(OPEN)
      end = self._rest.find(CLOSE, start + len(OPEN)) if start >= 0 else -1
      if end < 0:
        break
      start = self._rest.rfind(OPEN, 0, end)
      end += len(CLOSE)
      call = _parse(self._rest[start + len(OPEN):end - len(CLOSE)], self._names)
      if call:
        calls.append(call)
        said.append(self._said_before_call(self._rest[:start]))
      else:
        said.append(self._said(self._rest[:end]))
      self._rest = self._rest[end:]
    keep = self._uncertain(start)
    said.append(self._said(self._rest[:keep]))
    self._rest = self._rest[keep:]
    return ''.join(said), calls

  def finish(self) -> tuple[str, list[Call]]:
    """What is left at the end of the text: a call whose end tag is missing counts when it is whole otherwise."""
    start = self._rest.rfind(OPEN)
    call = _parse(self._rest[start + len(OPEN):], self._names) if start >= 0 else None
    text = self._said_before_call(self._rest[:start]) if call else self._said(self._rest)
    self._rest = ''
    return text, [call] if call else []

  def _uncertain(self, start: int) -> int:
    """Where the part begins that may still turn out to be a call, the space before it included."""
    text = self._rest
    if start < 0:
      start = next((len(text) - n for n in range(min(len(text), len(OPEN) - 1), 0, -1)
                    if OPEN.startswith(text[-n:])), len(text))
    return len(text[:start].rstrip())

  def _said(self, text: str) -> str:
    """The text; the space around the calls before it counts once."""
    if self._gap is None:
      return text
    text = text.lstrip()
    gap, self._gap = self._gap, None if text else self._gap
    return text and gap + text

  def _said_before_call(self, text: str) -> str:
    said = self._said(text.rstrip())
    if self._gap is None:
      self._gap = text[len(text.rstrip()):]
    return said


def _parse(text: str, names: frozenset[str]) -> Call | None:
  try:
    value = json.loads(text)
    name, arguments = value['name'], value.get('arguments', {})
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
  except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
    return None
  if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
    return None
  return Call(f'call_{secrets.token_hex(12)}', name, written)
