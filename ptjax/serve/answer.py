"""Tokens as the engine draws them -> the pieces of an answer, each told once it is certain.

An answer that is not streamed is the same pieces joined, so both are always equal. Held back are: an incomplete
character, text that may be the beginning of a stop string or of a tool call, and the log-probs of tokens whose text is
held back.
"""

from collections.abc import Iterable
import functools
from typing import NamedTuple

import numpy as np

from ptjax.data.tokenizer import Tokenizer
from ptjax.sample.engine import Event
from ptjax.sample.stop_strings import Detokenizer
from ptjax.serve import tools
from ptjax.serve.protocol import Plan


class Token(NamedTuple):
  """One token with its log-probs in nats under the temperature-1 law."""

  id: int
  offset: int  # characters of the text before it
  logp: float | None  # None for the first token of a prompt, which nothing predicts
  top: tuple[tuple[int, float], ...] | None  # the most likely tokens, most likely first


class Delta(NamedTuple):
  """What is new of one choice."""

  text: str = ''
  calls: tuple[tools.Call, ...] = ()
  tokens: tuple[Token, ...] = ()
  finish_reason: str | None = None

  def __bool__(self) -> bool:
    return bool(self.text or self.calls or self.tokens or self.finish_reason)


def join(deltas: Iterable[Delta]) -> Delta:
  """The deltas as one; their order counts."""
  deltas = list(deltas)
  return Delta(''.join(d.text for d in deltas), tuple(c for d in deltas for c in d.calls),
               tuple(t for d in deltas for t in d.tokens), deltas[-1].finish_reason if deltas else None)


class Choice:
  """One sample of an answer.

  Args:
    plan: what was asked.
    prompt: which of its prompts.
  """

  def __init__(self, plan: Plan, tokenizer: Tokenizer, prompt: int):
    request = plan.requests[prompt]
    self._plan, self._tokenizer, self._stops = plan, tokenizer, request.stop_strings
    self._detokenizer = Detokenizer(functools.partial(tokenizer.decode, skip_special=True))
    self._parser = tools.Parser(plan.tools) if plan.tools else None
    self._text, self._told = '', 0  # certain as to its characters; of them given out or dropped
    self._tokens: list[Token] = []  # held back
    self._called = False
    self._prompt_ids = request.prompt_ids
    self._echo = plan.echo[prompt] if plan.echo else None
    self._base = len(self._echo[0]) if self._echo else 0  # where the drawn text begins
    self._waits = bool(plan.echo) and request.prompt_logp and plan.logprobs is not None
    self._early: list[Event] = []

  def feed(self, event: Event) -> Delta:
    """What is certain after an event. The prompt's log-probs come with the last event, and all else after them."""
    if self._waits:
      self._early.append(event)
      if event.rollout is None:
        return Delta()
    events, self._early = self._early or [event], []
    deltas = [self._echoed(event.rollout)] if self._echo else []
    return join(deltas + [self._drawn(e) for e in events])

  def _echoed(self, rollout) -> Delta:
    (text, hidden), self._echo = self._echo, None
    tokens, at = [], 0
    if self._waits:
      detokenizer = Detokenizer(self._tokenizer.decode)
      for t, token_id in enumerate(self._prompt_ids):
        logp = float(rollout.prompt_logp[t]) if t else None
        top = _top(rollout.prompt_top_ids, rollout.prompt_top_logp, t) if t else None
        tokens.append(Token(int(token_id), min(at, len(text)), logp, top))
        at += len(detokenizer.add(token_id)) if t >= hidden else 0
    return Delta(text, tokens=tuple(tokens))

  def _drawn(self, event: Event) -> Delta:
    last = 0  # where the latest token's text begins
    for k, token_id in enumerate(event.token_ids):
      last = len(self._text)
      self._text += self._detokenizer.add(token_id)
      if self._plan.logprobs is not None:
        self._tokens.append(Token(int(token_id), self._base + last, float(event.model_logp[k]),
                                  _top(event.top_ids, event.top_logp, k)))
    rollout = event.rollout
    if rollout is None:
      return self._told_to(len(self._text) - self._held())
    self._text += self._detokenizer.rest()
    end = len(self._text)
    if rollout.stop_string:
      end = self._text.find(rollout.stop_string, max(0, last - len(rollout.stop_string) + 1))
      end = len(self._text) if end < 0 else end
    delta = self._told_to(end, cut=bool(rollout.stop_string), final=True)
    stopped = 'tool_calls' if self._called and rollout.finish_reason == 'stop' else rollout.finish_reason
    return delta._replace(finish_reason=stopped)

  def _held(self) -> int:
    """Characters at the end of the text that may be the beginning of a stop string."""
    return max((n for stop in self._stops for n in range(1, min(len(stop) - 1, len(self._text) - self._told) + 1)
                if self._text.endswith(stop[:n])), default=0)

  def _told_to(self, end: int, *, cut: bool = False, final: bool = False) -> Delta:
    """The text up to `end`, with the tokens that begin before it; all tokens at an end that no stop string cut."""
    text, self._told = self._text[self._told:end], max(end, self._told)
    certain = sum(t.offset - self._base < end for t in self._tokens) if cut or not final else len(self._tokens)
    tokens, self._tokens = tuple(self._tokens[:certain]), self._tokens[certain:]
    calls = []
    if self._parser:
      text, calls = self._parser.feed(text)
      if final:
        rest, more = self._parser.finish()
        text, calls = text + rest, calls + more
      self._called = self._called or bool(calls)
    return Delta(text, tuple(calls), tokens)


def _top(ids: np.ndarray | None, logp: np.ndarray | None, t: int) -> tuple[tuple[int, float], ...] | None:
  return None if ids is None else tuple((int(i), float(x)) for i, x in zip(ids[t], logp[t]))
