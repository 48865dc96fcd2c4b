"""What a client asks for, checked: a JSON body of OpenAI's completions or chat API -> a plan for the engine.

Every field is either used, known and without effect here, known and refused with a reason, or unknown and refused by
name; a field that is null counts as absent. Fields beyond OpenAI's are those that vLLM takes: top_k, min_p, min_tokens
and ignore_eos.
"""

from collections.abc import Sequence
import dataclasses
import difflib
import json
import math
import secrets
from typing import Any

import numpy as np

from ptjax.data import chat
from ptjax.data.tokenizer import Tokenizer
from ptjax.sample.requests import Request
from ptjax.serve import tools
from ptjax.serve.errors import ApiError, invalid

MAX_STOPS, MAX_STOP_CHARS, MAX_BIASES, MAX_DEPTH = 16, 1024, 1024, 64

_SETTINGS = ('model', 'max_tokens', 'temperature', 'top_p', 'top_k', 'min_p', 'min_tokens', 'ignore_eos', 'seed', 'n',
             'stop', 'stream', 'stream_options', 'logprobs', 'logit_bias', 'frequency_penalty', 'presence_penalty')
_COMPLETION = (*_SETTINGS, 'prompt', 'echo', 'best_of')
_CHAT = (*_SETTINGS, 'messages', 'max_completion_tokens', 'top_logprobs', 'tools', 'tool_choice', 'parallel_tool_calls',
         'response_format', 'modalities')
_WITHOUT_EFFECT = ('user', 'metadata', 'store', 'service_tier', 'safety_identifier', 'prompt_cache_key',
                   'prompt_cache_retention')
_REFUSED = ('suffix', 'functions', 'function_call', 'audio', 'prediction', 'reasoning_effort', 'verbosity',
            'web_search_options')


@dataclasses.dataclass(frozen=True)
class Offer:
  """What is served."""

  model: str
  tokenizer: Tokenizer
  vocab_size: int
  max_context: int  # tokens of prompt and completion
  top_logp: int  # alternatives per token
  biases: int  # different logit biases at one time
  samples: int  # in work or waiting at one time, of all requests together


@dataclasses.dataclass(frozen=True)
class Plan:
  """A checked request."""

  requests: tuple[Request, ...]  # one per prompt
  is_chat: bool
  stream: bool = False
  include_usage: bool = False
  logprobs: int | None = None  # alternatives to report per token; None: no log-probs at all
  echo: tuple[tuple[str, int], ...] = ()  # per prompt: its text, and tokens at its start that are not in the text
  tools: frozenset[str] = frozenset()  # functions the model may call

  @property
  def samples(self) -> int:
    return self.requests[0].samples


def decode(body: bytes) -> dict:
  """The JSON object in a request's body.

  Raises:
    ApiError: it is not UTF-8, not JSON, no object, nested too deep, or holds numbers or text that JSON can't.
  """
  try:
    value = json.loads(body.decode('utf-8'), parse_constant=_no_constant, parse_float=_finite)
    if b'\\u' in body:
      json.dumps(value, ensure_ascii=False).encode('utf-8')  # fails for half a surrogate pair
  except (ValueError, RecursionError) as error:
    raise ApiError(400, f'the body is not JSON in UTF-8: {error}', code='invalid_json') from error
  if not isinstance(value, dict):
    raise ApiError(400, 'the body must be a JSON object', code='invalid_json')
  level, depth = [value], 0
  while level := [x for v in level for x in (v.values() if isinstance(v, dict) else v) if isinstance(x, dict | list)]:
    depth += 1
    if depth > MAX_DEPTH:
      raise ApiError(400, f'the body is nested over {MAX_DEPTH} levels deep', code='invalid_json')
  return value


def completion(body: dict, offer: Offer, request_id: str) -> Plan:
  """The plan of POST /v1/completions."""
  fields = _Fields(body, _COMPLETION, offer)
  samples = fields.whole('n', 1, 1, offer.samples)
  if fields.whole('best_of', samples, 1) != samples:
    raise invalid('best_of', 'is supported only where it equals n', 'unsupported_value')
  logprobs = fields.whole('logprobs', None, 0, offer.top_logp)
  echo = fields.flag('echo')
  prompts = [_prompt(p, offer) for p in _prompts(fields.get('prompt'))]
  if len(prompts) * samples > offer.samples:
    raise invalid('prompt', f'{len(prompts)} prompts of {samples} samples each are over the {offer.samples} that may '
                            'be in work at one time')
  max_tokens = fields.whole('max_tokens', 16, 0)
  settings = _settings(fields, offer, max_tokens)
  requests = tuple(
      Request(id=f'{request_id}-{i}', prompt_ids=ids, max_tokens=_room(fields, ids, max_tokens, offer), samples=samples,
              prompt_logp=max_tokens == 0 or (echo and logprobs is not None), top_logp=logprobs or 0,
              seed=fields.seed(), **settings)
      for i, (ids, _, _) in enumerate(prompts))
  return Plan(requests, is_chat=False, logprobs=logprobs,
              echo=tuple((text, hidden) for _, text, hidden in prompts) if echo else (), **_streaming(fields))


def conversation(body: dict, offer: Offer, request_id: str) -> Plan:
  """The plan of POST /v1/chat/completions."""
  fields = _Fields(body, _CHAT, offer)
  if (fields.get('response_format') or {'type': 'text'}) != {'type': 'text'}:
    raise invalid('response_format', 'only {"type": "text"} is supported', 'unsupported_value')
  if (fields.get('modalities') or ['text']) != ['text']:
    raise invalid('modalities', 'only ["text"] is supported', 'unsupported_value')
  asked, logprobs = fields.flag('logprobs'), fields.whole('top_logprobs', None, 0, offer.top_logp)
  if logprobs is not None and not asked:
    raise invalid('top_logprobs', 'needs logprobs to be true')
  offered = tools.check([] if fields.get('tools') is None else fields.get('tools'))
  if not _may_call(fields, offered):
    offered = []
  try:
    ids = tools.encode(offer.tokenizer, _messages(fields), offered)
  except ValueError as error:
    raise invalid('messages', str(error)) from error
  name = 'max_tokens' if fields.get('max_completion_tokens') is None else 'max_completion_tokens'
  max_tokens = fields.whole(name, max(1, offer.max_context - len(ids)), 1)
  settings = _settings(fields, offer, max_tokens)
  if offered and not fields.flag('parallel_tool_calls', True):
    settings['stop_strings'] += (tools.CLOSE,)
  request = Request(
      id=f'{request_id}-0', prompt_ids=ids, max_tokens=_room(fields, ids, max_tokens, offer, name, 'messages'),
      samples=fields.whole('n', 1, 1, offer.samples), top_logp=(logprobs or 0), seed=fields.seed(), **settings)
  return Plan((request,), is_chat=True, logprobs=(logprobs or 0) if asked else None,
              tools=frozenset(tool['function']['name'] for tool in offered), **_streaming(fields))


class _Fields:
  """The fields of a body, each read once its type and range are known to be right."""

  def __init__(self, body: dict, known: Sequence[str], offer: Offer):
    self._body = {name: value for name, value in body.items() if value is not None}
    for name in self._body:
      if name in _REFUSED:
        raise ApiError(400, f'{name}: is not supported', param=name, code='unsupported_parameter')
      if name not in known and name not in _WITHOUT_EFFECT:
        near = difflib.get_close_matches(name, known, 1)
        hint = f'; did you mean {near[0]!r}?' if near else ''
        raise ApiError(400, f'Unknown parameter: {name[:80]!r}{hint}', param=name[:80], code='unknown_parameter')
    if not isinstance(self.get('model'), str):
      raise invalid('model', f'must be given; here it is {offer.model!r}', 'missing_required_parameter')
    if self.get('model') != offer.model:
      raise ApiError(404, f'The model {self.get("model")[:200]!r} does not exist; here it is {offer.model!r}',
                     param='model', code='model_not_found')

  def get(self, name: str) -> Any:
    return self._body.get(name)

  def flag(self, name: str, default: bool = False) -> bool:
    value = self._body.get(name, default)
    if not isinstance(value, bool):
      raise invalid(name, f'must be true or false, got {_short(value)}', 'invalid_type')
    return value

  def whole(self, name: str, default: int | None, low: int, high: int | None = None) -> int | None:
    value = self._body.get(name, default)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
      raise invalid(name, f'must be a whole number, got {_short(value)}', 'invalid_type')
    return None if value is None else _ranged(name, value, low, high)

  def number(self, name: str, default: float, low: float, high: float | None = None) -> float:
    value = self._body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
      raise invalid(name, f'must be a number, got {_short(value)}', 'invalid_type')
    return float(_ranged(name, value, low, high))

  def seed(self) -> int:
    """The seed, or another at each call where none is given."""
    return self.whole('seed', secrets.randbits(63), -2 ** 63, 2 ** 64 - 1) % 2 ** 64


def _ranged(name: str, value, low, high):
  if value < low or (high is not None and value > high):
    limits = f'at least {low}' if high is None else f'in [{low}, {high}]'
    raise invalid(name, f'must be {limits}, got {_short(value)}', 'integer_out_of_range' if isinstance(value, int)
                  else 'decimal_out_of_range')
  return value


def _short(value: Any) -> str:
  return f'{json.dumps(value):.80}'


def _no_constant(name: str):
  raise ValueError(f'{name} is no number of JSON')


def _finite(text: str) -> float:
  if not math.isfinite(value := float(text)):
    raise ValueError(f'the number {text[:80]} is too large')
  return value


def _settings(fields: _Fields, offer: Offer, max_tokens: int) -> dict:
  """The engine's settings that both APIs have."""
  for name in ('frequency_penalty', 'presence_penalty'):
    if fields.number(name, 0.0, -2, 2):
      raise invalid(name, 'only 0 is supported', 'unsupported_value')
  top_p = fields.number('top_p', 1.0, 0, 1)
  if top_p == 0:
    raise invalid('top_p', 'must be in (0, 1], got 0')
  min_p = fields.number('min_p', 0.0, 0, 1)
  if min_p == 1:
    raise invalid('min_p', 'must be in [0, 1), got 1')
  return dict(
      temperature=fields.number('temperature', 1.0, 0, 2), top_p=top_p, min_p=min_p,
      top_k=max(0, fields.whole('top_k', 0, -1, 2 ** 31 - 1)),  # -1, too, keeps all
      min_tokens=fields.whole('min_tokens', 0, 0, max_tokens), stop_strings=_stops(fields.get('stop')),
      stop_ids=() if fields.flag('ignore_eos') else offer.tokenizer.eos_ids,
      logit_bias=_bias(fields.get('logit_bias'), offer))


def _stops(value: Any) -> tuple[str, ...]:
  stops = [value] if isinstance(value, str) else value or []
  if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
    raise invalid('stop', f'must be a string or a list of strings, got {_short(value)}', 'invalid_type')
  if len(stops) > MAX_STOPS or not all(0 < len(s) <= MAX_STOP_CHARS for s in stops):
    raise invalid('stop', f'must be at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters')
  return tuple(dict.fromkeys(stops))


def _bias(value: Any, offer: Offer) -> np.ndarray | None:
  if value is None or value == {}:
    return None
  vocab_size = offer.vocab_size
  if not offer.biases:
    raise invalid('logit_bias', 'is not offered here (the server was started with sampler.biases = 0)',
                  'unsupported_value')
  if not isinstance(value, dict) or len(value) > MAX_BIASES:
    raise invalid('logit_bias', f'must be an object of at most {MAX_BIASES} token ids')
  bias_V = np.zeros(vocab_size, np.float32)
  for key, x in value.items():
    if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
      raise invalid('logit_bias', f'keys must be token ids in [0, {vocab_size}), got {_short(key)}')
    if isinstance(x, bool) or not isinstance(x, int | float) or not -100 <= x <= 100:
      raise invalid('logit_bias', f'values must be numbers in [-100, 100], got {_short(x)}')
    bias_V[int(key)] = x
  return bias_V


def _streaming(fields: _Fields) -> dict:
  stream, options = fields.flag('stream'), fields.get('stream_options')
  if options is None:
    return dict(stream=stream)
  if not stream:
    raise invalid('stream_options', 'needs stream to be true')
  if not isinstance(options, dict) or set(options) - {'include_usage', 'include_obfuscation'}:
    raise invalid('stream_options', 'must be {"include_usage": true or false}')
  if not isinstance(options.get('include_usage', False), bool):
    raise invalid('stream_options.include_usage', 'must be true or false', 'invalid_type')
  return dict(stream=True, include_usage=options.get('include_usage', False))


def _room(fields: _Fields, ids, max_tokens: int, offer: Offer, name: str = 'max_tokens', param: str = 'prompt') -> int:
  """max_tokens, once prompt and completion are known to fit the context."""
  if len(ids) + max(max_tokens, 1) > offer.max_context:
    raise ApiError(
        400, f'the context holds {offer.max_context} tokens; {param} has {len(ids)} and {name} asks for {max_tokens}',
        param=param if fields.get(name) is None else name, code='context_length_exceeded')
  return max_tokens


def _prompts(value: Any) -> list:
  """The prompts of a request: each a string or a list of token ids."""
  if isinstance(value, str) or (isinstance(value, list) and value and all(_is_id(x) for x in value)):
    return [value]
  if isinstance(value, list) and value and (
      all(isinstance(x, str) for x in value) or
      all(isinstance(x, list) and x and all(_is_id(i) for i in x) for x in value)):
    return value
  raise invalid('prompt', 'must be a string, token ids, or a list of either, none of them empty', 'invalid_type')


def _is_id(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)


def _prompt(prompt: str | list[int], offer: Offer) -> tuple[np.ndarray, str, int]:
  """(ids, text, tokens at the start that are not in the text) of one prompt."""
  tokenizer, hidden = offer.tokenizer, 0
  if isinstance(prompt, str):
    ids = tokenizer.encode(prompt, add_special=True)
    plain = tokenizer.encode(prompt)
    hidden = len(ids) - len(plain) if ids[len(ids) - len(plain):] == plain else 0
    text = prompt
    if not ids:
      raise invalid('prompt', 'has no token, and nothing predicts the first one')
  else:
    if min(prompt) < 0 or max(prompt) >= offer.vocab_size:
      raise invalid('prompt', f'token ids must be in [0, {offer.vocab_size})')
    ids, text = prompt, tokenizer.decode(prompt)
  return np.asarray(ids, np.int32), text, hidden


def _messages(fields: _Fields) -> list:
  messages = fields.get('messages')
  if not isinstance(messages, list) or not messages:
    raise invalid('messages', 'must be a list of at least one message', 'missing_required_parameter')
  for i, message in enumerate(messages):
    for name in ('audio', 'function_call', 'prefix'):
      if isinstance(message, dict) and message.get(name) is not None:
        raise invalid(f'messages[{i}].{name}', 'is not supported', 'unsupported_value')
    if isinstance(message, dict) and message.get('role') == 'tool' and not isinstance(message.get('tool_call_id'), str):
      raise invalid(f'messages[{i}].tool_call_id', 'must name the call that this is the result of')
  return messages


def _may_call(fields: _Fields, offered: list) -> bool:
  choice = fields.get('tool_choice')
  if choice not in (None, 'none', 'auto'):
    raise invalid('tool_choice', f'only "none" and "auto" are supported, since nothing here forces a call; got '
                                 f'{_short(choice)}', 'unsupported_value')
  if choice is not None and not offered:
    raise invalid('tool_choice', 'needs tools')
  return choice != 'none'
