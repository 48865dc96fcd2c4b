"""Where a completion first spells a stop string, found as its tokens come in, though the string may span tokens."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

DecodeText = Callable[[Sequence[int]], str]

_UNFINISHED = '\ufffd'  # what bytes decode to while the rest of their character is missing


class Stop(NamedTuple):
  tokens: int  # of the completion, through the one that completed the string
  string: str
  start: int  # of the string in the completion's text


class StopStrings:
  """Watches one completion. Its text is decoded piece by piece, each with the tokens before it that it leans on."""

  def __init__(self, strings: Sequence[str], decode: DecodeText, *, min_tokens: int):
    self._strings, self._decode, self._min_tokens = tuple(strings), decode, min_tokens
    self.text = ''  # of the tokens seen so far, up to an unfinished character
    self._ids: list[int] = []
    self._lean, self._read = 0, 0  # ids [lean, read) are in the text already and decode the next ones rightly

  def again(self) -> 'StopStrings':
    """A watch over the same strings that has seen nothing."""
    return StopStrings(self._strings, self._decode, min_tokens=self._min_tokens)

  def see(self, token_ids: Sequence[int]) -> Stop | None:
    """Takes the next tokens; says which of them ended the completion, or None."""
    for token in token_ids:
      new = self._text_of(int(token))
      before, self.text = len(self.text), self.text + new
      if new and len(self._ids) >= self._min_tokens and (stop := self._stop(before)):
        return stop
    return None

  def _text_of(self, token: int) -> str:
    self._ids.append(token)
    known = self._decode(self._ids[self._lean:self._read])
    both = self._decode(self._ids[self._lean:])
    if both.endswith(_UNFINISHED) and len(self._ids) - self._read < 8 or len(both) <= len(known):
      return ''
    self._lean, self._read = self._read, len(self._ids)
    return both[len(known):]

  def _stop(self, before: int) -> Stop | None:
    """The earliest string that ends after the first `before` characters."""
    found = []
    for string in self._strings:
      start = self.text.find(string, max(0, before - len(string) + 1))
      if start >= 0:
        found.append((start, string))
    return Stop(len(self._ids), min(found)[1], min(found)[0]) if found else None
