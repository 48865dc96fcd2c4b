"""Text of a completion as its tokens come in, and where it first spells a stop string, though that may span tokens."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

DecodeText = Callable[[Sequence[int]], str]

UNKNOWN = '\ufffd'  # what bytes decode to that are no character, or not yet


class Detokenizer:
  """Text of ids as they come; the pieces joined are what decoding all ids at once gives."""

  def __init__(self, decode: DecodeText):
    self._decode = decode
    self._ids: list[int] = []  # the latest ones: those of the last text given out, then those still held
    self._told = 0  # of them given out

  def add(self, token_id: int) -> str:
    """Text that is certain with this id."""
    self._ids.append(int(token_id))
    text = self._new()
    if self._told and not text and not self._decode(self._ids[-1:]):
      self._ids.pop()  # nothing in the text depends on it, as it is with special tokens
    if not text or text.endswith(UNKNOWN):
      return ''
    self._ids, self._told = self._ids[self._told:], len(self._ids) - self._told
    return text

  def rest(self) -> str:
    """Text of the ids still held, when no more come."""
    text = self._new()
    self._told = len(self._ids)
    return text

  def _new(self) -> str:
    return self._decode(self._ids)[len(self._decode(self._ids[:self._told])):]


class Stop(NamedTuple):
  tokens: int  # of the completion, through the one that completed the string
  string: str
  start: int  # of the string in the completion's text


class StopStrings:
  """Watches one completion."""

  def __init__(self, strings: Sequence[str], decode: DecodeText, *, min_tokens: int):
    self._strings, self._decode, self._min_tokens = tuple(strings), decode, min_tokens
    self._detokenizer, self._text, self._tokens = Detokenizer(decode), '', 0

  def again(self) -> 'StopStrings':
    """A watch over the same strings that has seen nothing."""
    return StopStrings(self._strings, self._decode, min_tokens=self._min_tokens)

  def see(self, token_ids: Sequence[int]) -> Stop | None:
    """Takes the next tokens; says which of them ended the completion, or None."""
    for token in token_ids:
      before, self._tokens = len(self._text), self._tokens + 1
      self._text += self._detokenizer.add(token)
      if len(self._text) > before and self._tokens >= self._min_tokens and (stop := self._stop(before)):
        return stop
    return None

  def _stop(self, before: int) -> Stop | None:
    """The earliest string that ends after the first `before` characters."""
    found = []
    for string in self._strings:
      start = self._text.find(string, max(0, before - len(string) + 1))
      if start >= 0:
        found.append((start, string))
    return Stop(self._tokens, min(found)[1], min(found)[0]) if found else None
