"""Chat messages -> text -> token ids, and the mask of what the assistant said.

Templates run in jinja2's sandbox with what Hugging Face templates expect. Which tokens are the assistant's is found by
rendering the conversation up to each turn; a template for which one rendering is not a prefix of the next is refused,
since any mask would be a guess. The end-of-turn token is trained on, the template's glue after it is not.
"""

from collections.abc import Mapping, Sequence
import datetime
import functools
import json
import re
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
import numpy as np

from ptjax.data.tokenizer import Tokenizer

ROLES = ('system', 'developer', 'user', 'assistant', 'tool')
TODAY = datetime.date(2024, 7, 26)  # to templates that print it: a prompt must not change overnight


def render(tokenizer: Tokenizer, messages: Sequence[Mapping], *, add_generation_prompt: bool = False,
           tools: Sequence[Mapping] | None = None, **variables: Any) -> str:
  """The conversation as the tokenizer's chat template writes it.

  Args:
    messages: {"role", "content", ...} in chat order; tool-call arguments may be objects or JSON strings.
    add_generation_prompt: ends with what opens an assistant turn.
    tools: JSON schemas offered to the model.
    **variables: further template variables (`chat_template_kwargs` of a dataset row).

  Raises:
    ValueError: there is no template, a message is malformed, or the template rejects the conversation.
  """
  if tokenizer.chat_template is None:
    raise ValueError('the tokenizer has no chat template; give prompts as text, or add one to tokenizer_config.json')
  template = _compile(tokenizer.chat_template)
  clean = [normalize(message, i) for i, message in enumerate(messages)]
  try:
    return template.render(messages=clean, tools=tools or None, documents=None,
                           add_generation_prompt=add_generation_prompt, **(tokenizer.special_tokens | variables))
  except (jinja2.TemplateError, TypeError) as error:
    roles = [message['role'] for message in clean]
    raise ValueError(f'the chat template rejects a conversation with roles {roles}: {error}') from error


def takes_tools(tokenizer: Tokenizer) -> bool:
  """True when the chat template looks at the tools that `render` is given."""
  template = tokenizer.chat_template
  return template is not None and 'tools' in jinja2.meta.find_undeclared_variables(_environment().parse(template))


def encode_prompt(tokenizer: Tokenizer, messages: Sequence[Mapping], *, tools: Sequence[Mapping] | None = None,
                  **variables: Any) -> np.ndarray:
  """Ids [P] (int32) of a conversation that the assistant is to go on with; only the template adds special tokens."""
  text = render(tokenizer, messages, add_generation_prompt=True, tools=tools, **variables)
  return np.asarray(tokenizer.encode(text), np.int32)


def encode_conversation(tokenizer: Tokenizer, messages: Sequence[Mapping], *, tools: Sequence[Mapping] | None = None,
                        **variables: Any) -> tuple[np.ndarray, np.ndarray]:
  """Ids [T] (int32) of a whole conversation and their mask [T] (bool), True where the assistant speaks.

  Each turn is encoded by itself, so the ids before a turn are those of `encode_prompt`. Tokens after the last
  assistant turn's end-of-turn token are dropped: nothing would be learnt from them.

  Raises:
    ValueError: no assistant turn, or a template whose renderings are not prefixes of each other or that does not
      close an assistant turn with one of the tokenizer's `eos_ids`.
  """
  draw = functools.partial(render, tokenizer, tools=tools, **variables)
  turns = [i for i, message in enumerate(messages) if message.get('role') == 'assistant']
  if not turns:
    raise ValueError('the conversation has no assistant message, so there is nothing to train on')
  if tokenizer.decode([*tokenizer.encode('x'), *tokenizer.encode('y')]) != 'xy':
    raise ValueError('the vocabulary alters the start of each text (a space in front), so turns cannot be encoded one '
                     'by one; models with such a vocabulary are not trained on conversations')
  ids, mask, done = [], [], ''
  for i in turns:
    opened = draw(messages[:i], add_generation_prompt=True)
    closed = draw(messages[:i + 1])
    if not opened.startswith(done) or not closed.startswith(opened):
      raise ValueError(f'message {i}: the chat template rewrites earlier text when this turn is added, so the '
                       "assistant's tokens cannot be told apart; split the conversation so that each row ends with "
                       'one assistant turn, or use another template')
    end = len(opened) + _end_of_turn(tokenizer, closed[len(opened):], i)
    _check_kept(messages[i], closed[len(opened):end], i)
    for text, trained in ((opened[len(done):], False), (closed[len(opened):end], True)):
      piece = tokenizer.encode(text)
      ids += piece
      mask += [trained] * len(piece)
    done = closed[:end]
  return np.asarray(ids, np.int32), np.asarray(mask, bool)


def _check_kept(message: Mapping, turn: str, index: int) -> None:
  """Raises ValueError when the end of an assistant's text is not in its rendered turn."""
  lines = (normalize(message, index).get('content') or '').strip().splitlines()
  if lines and lines[-1].strip() not in turn:
    raise ValueError(f'message {index}: the chat template leaves out what the assistant says; it may want another form '
                     'of content')


def normalize(message: Mapping, index: int = 0) -> dict:
  """A message as templates want it: content as one string, tool-call arguments as objects, null fields absent.

  Raises:
    ValueError: names the message and the field at fault.
  """
  where = f'message {index}'
  if not isinstance(message, Mapping) or message.get('role') not in ROLES:
    raise ValueError(f'{where}: needs a "role" out of {ROLES}, got {message!r:.80}')
  content, calls = message.get('content'), message.get('tool_calls')
  if isinstance(content, Sequence) and not isinstance(content, str):
    kinds = {str(part.get('type')) if isinstance(part, Mapping) else type(part).__name__ for part in content}
    if kinds - {'text'}:
      raise ValueError(f'{where}: content parts of type {sorted(kinds - {"text"})}; only "text" is supported')
    if not all(isinstance(part.get('text'), str) for part in content):
      raise ValueError(f'{where}: a content part of type "text" needs a "text" that is a string')
    content = ''.join(part['text'] for part in content)
  if not isinstance(content, str) and not (content is None and calls):
    raise ValueError(f'{where}: "content" must be text or a list of text parts, got {content!r:.80}')
  clean = {name: value for name, value in dict(message, content=content).items() if value is not None}
  if calls:
    if not isinstance(calls, list):
      raise ValueError(f'{where}: "tool_calls" must be a list, got {calls!r:.80}')
    clean['tool_calls'] = [_normalize_call(call, where) for call in calls]
  return clean


def _normalize_call(call: Mapping, where: str) -> dict:
  function = call.get('function', call) if isinstance(call, Mapping) else None
  if not isinstance(function, Mapping):
    raise ValueError(f'{where}: a tool call must be an object, as must its "function", got {call!r:.80}')
  arguments = function.get('arguments', {})
  if isinstance(arguments, str):
    try:
      arguments = json.loads(arguments)
    except json.JSONDecodeError as error:
      raise ValueError(f'{where}: tool_calls arguments are not JSON: {error}') from error
  function = dict(function, arguments=arguments)
  return dict(call, function=function) if 'function' in call else function


def _end_of_turn(tokenizer: Tokenizer, text: str, index: int) -> int:
  """Where the end-of-turn token of a rendered assistant turn ends: the first one with only glue and others after it."""
  tokens = [tokenizer.token(i) for i in tokenizer.eos_ids]
  ends = '|'.join(map(re.escape, tokens)) or r'(?!)'
  found = re.search(rf'(?:{ends})(?=(?:\s|{ends})*\Z)', text)
  if found is None:
    raise ValueError(f'message {index}: the chat template does not close the assistant turn with one of {tokens}')
  return found.end()


class _GenerationMarker(jinja2.ext.Extension):
  """Accepts {% generation %} ... {% endgeneration %} and leaves the text between as it is."""

  tags = {'generation'}

  def parse(self, parser: jinja2.parser.Parser) -> list:
    next(parser.stream)
    return parser.parse_statements(('name:endgeneration',), drop_needle=True)


@functools.cache
def _environment() -> jinja2.Environment:
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationMarker, jinja2.ext.loopcontrols])
  environment.filters['tojson'] = _to_json
  environment.globals['raise_exception'] = _raise_exception
  environment.globals['strftime_now'] = TODAY.strftime
  return environment


@functools.lru_cache(maxsize=8)
def _compile(text: str) -> jinja2.Template:
  try:
    return _environment().from_string(text)
  except jinja2.TemplateError as error:
    raise ValueError(f'the chat template does not parse: {error}') from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators=None,
             sort_keys: bool = False) -> str:
  return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
  raise jinja2.TemplateError(message)
