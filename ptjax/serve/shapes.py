"""Pieces of an answer -> JSON of OpenAI's shapes."""

from collections.abc import Sequence

from ptjax.data.tokenizer import Tokenizer
from ptjax.serve import tools
from ptjax.serve.answer import Delta, Token

_LEAST = -9999.0  # stands for a log-prob of -inf, which JSON has no number for


def spell(tokenizer: Tokenizer, token_id: int) -> str:
  """One token as text that tells it from others: bytes that are no character by themselves are written as bytes."""
  spelled = tokenizer.token_bytes(token_id)
  if not spelled:
    return f'token_id:{token_id}'
  try:
    return spelled.decode()
  except UnicodeDecodeError:
    return 'bytes:' + ''.join(f'\\x{b:02x}' for b in spelled)


class Shapes:
  """The JSON of one answer.

  Args:
    fields: id, created and model.
    top: alternatives per token; None leaves log-probs out.
  """

  def __init__(self, tokenizer: Tokenizer, fields: dict, *, is_chat: bool, top: int | None):
    self._tokenizer, self._fields, self._chat, self._top = tokenizer, fields, is_chat, top
    self._calls: dict[int, int] = {}  # choice -> calls streamed

  def whole(self, choices: Sequence[Delta], usage: dict) -> dict:
    """The answer that is not streamed."""
    kind = 'chat.completion' if self._chat else 'text_completion'
    made = []
    for i, delta in enumerate(choices):
      said = dict(message=_message(delta)) if self._chat else dict(text=delta.text)
      made.append(dict(index=i, **said, logprobs=self._logprobs(delta.tokens), finish_reason=delta.finish_reason))
    return dict(self._fields, object=kind, choices=made, usage=usage)

  def opened(self, index: int) -> dict:
    """The chunk that opens a chat's choice."""
    return self._chunk([dict(index=index, delta=dict(role='assistant', content=''), logprobs=None, finish_reason=None)])

  def piece(self, index: int, delta: Delta) -> dict:
    """The chunk of a delta."""
    if self._chat:
      said = dict(delta=self._message_delta(index, delta))
    else:
      said = dict(text=delta.text)
    logprobs = self._logprobs(delta.tokens) if delta.tokens else None
    return self._chunk([dict(index=index, **said, logprobs=logprobs, finish_reason=delta.finish_reason)])

  def usage(self, usage: dict) -> dict:
    """The chunk after the last one, where usage was asked for."""
    return self._chunk([]) | dict(usage=usage)

  def _chunk(self, choices: list) -> dict:
    return dict(self._fields, object='chat.completion.chunk' if self._chat else 'text_completion', choices=choices)

  def _message_delta(self, index: int, delta: Delta) -> dict:
    said = dict(content=delta.text) if delta.text else {}
    if delta.calls:
      first = self._calls.get(index, 0)
      self._calls[index] = first + len(delta.calls)
      said['tool_calls'] = [dict(index=first + k, **_call(call)) for k, call in enumerate(delta.calls)]
    return said

  def _logprobs(self, tokens: Sequence[Token]) -> dict | None:
    if self._top is None:
      return None
    return self._chat_logprobs(tokens) if self._chat else self._completion_logprobs(tokens)

  def _chat_logprobs(self, tokens: Sequence[Token]) -> dict:
    def entry(token_id, logp):
      return dict(token=spell(self._tokenizer, token_id), logprob=max(logp, _LEAST),
                  bytes=list(self._tokenizer.token_bytes(token_id)))
    return dict(refusal=None, content=[
        dict(entry(t.id, t.logp), top_logprobs=[entry(*x) for x in (t.top or ())[:self._top]]) for t in tokens])

  def _completion_logprobs(self, tokens: Sequence[Token]) -> dict:
    """Beside the alternatives asked for, the token itself always stands among them."""
    spelled = [spell(self._tokenizer, t.id) for t in tokens]
    tops = []
    for text, t in zip(spelled, tokens):
      others = reversed((t.top or ())[:self._top])  # of two that are spelled alike the likelier stays
      tops.append(None if t.logp is None else
                  {spell(self._tokenizer, i): max(x, _LEAST) for i, x in others} | {text: max(t.logp, _LEAST)})
    return dict(tokens=spelled, token_logprobs=[None if t.logp is None else max(t.logp, _LEAST) for t in tokens],
                top_logprobs=tops, text_offset=[t.offset for t in tokens])


def _message(delta: Delta) -> dict:
  said = dict(role='assistant', content=delta.text or (None if delta.calls else ''), refusal=None)
  return said | (dict(tool_calls=[_call(call) for call in delta.calls]) if delta.calls else {})


def _call(call: tools.Call) -> dict:
  return dict(id=call.id, type='function', function=dict(name=call.name, arguments=call.arguments))
