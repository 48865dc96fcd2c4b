"""A running server for tests, and an engine that says what a test tells it to."""

import functools
import threading
import time
from types import SimpleNamespace

from flax import nnx
import httpx
import numpy as np
import openai

from ptjax import types
from ptjax.data.tokenizer import byte_level
from ptjax.models.families import RANDOM_SIZES, ModelConfig
from ptjax.models.transformer import Transformer
from ptjax.sample.engine import Engine, Event
from ptjax.sample.requests import SamplerLimits
from ptjax.serve import server

CONFIG = ModelConfig(**RANDOM_SIZES['tiny'])
TOKENIZER = byte_level(CONFIG.vocab_size)
MODEL = 'tiny'
SETTINGS = dict(api_key_file='', max_waiting=8, max_body_bytes=100_000, drain_s=5.0)


class Live:
  """A server on a free port, in threads of this process, until `stop`."""

  def __init__(self, engine, tokenizer=TOKENIZER, **settings):
    settings = SimpleNamespace(**(SETTINGS | settings))
    self.engine, self.service = engine, server.Service(engine, tokenizer, settings, model=MODEL)
    bound = server.listen('127.0.0.1', 0)
    self.address = f'http://127.0.0.1:{bound.getsockname()[1]}'
    self._server = server.Server(self.service, settings)
    self._thread = threading.Thread(target=lambda: self._server.run(sockets=[bound]))
    self._thread.start()
    wait_for(lambda: self._server.started)

  def client(self, **settings) -> openai.OpenAI:
    return openai.OpenAI(base_url=f'{self.address}/v1', **(dict(api_key='none', max_retries=0, timeout=60) | settings))

  def async_client(self) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f'{self.address}/v1', api_key='none', max_retries=0, timeout=60)

  def post(self, body, path='/v1/completions', **settings) -> httpx.Response:
    return httpx.post(self.address + path, json=body, timeout=60, **settings)

  def metric(self, name: str) -> float:
    """The value of a metric without labels, or the sum over its labels."""
    lines = httpx.get(f'{self.address}/metrics').text.splitlines()
    return sum(float(line.rpartition(' ')[2]) for line in lines if line.startswith((f'{name} ', f'{name}{{')))

  def begin_stop(self) -> None:
    self._server.should_exit = True

  def stop(self) -> None:
    self.begin_stop()
    self._thread.join(60)
    assert not self._thread.is_alive()


def wait_for(condition, timeout_s=30.0) -> None:
  end = time.monotonic() + timeout_s
  while not condition():
    assert time.monotonic() < end, 'waited in vain'
    time.sleep(0.01)


@functools.cache
def engine() -> Engine:
  """The sampler with random weights."""
  limits = SamplerLimits(slots=8, page_size=8, max_context=256, window=6, prefill_chunk=32, top_logp=5, biases=2)
  made = Engine(CONFIG, limits, decode_text=functools.partial(TOKENIZER.decode, skip_special=True))
  made.load_params(nnx.state(nnx.jit(lambda: Transformer(CONFIG, nnx.Rngs(0)))()), 0)
  return made


class Scripted:
  """Stands in for the engine: every sample says `text`, `window` tokens a step of `step_s` seconds, and then ends.

  Stop strings are looked for after each token, as the engine does.
  """

  def __init__(self, text='', *, window=3, step_s=0.0, slots=8, context=256, guesses=(0, 0)):
    self.text, self.window, self.step_s, self.broken = text, window, step_s, None
    self.drafted, self.accepted = guesses
    self.config = CONFIG
    self.limits = SimpleNamespace(slots=slots, max_context=context, top_logp=5, biases=2)
    self.running, self.requests = {}, []

  def submit(self, request) -> int:
    ids = TOKENIZER.encode(self.text)
    self.requests.append(request)
    for sample in range(request.samples):
      self.running[len(self.requests), sample] = request, ids, []
    return len(self.requests)

  def cancel(self, ticket):
    for key in [key for key in self.running if key[0] == ticket]:
      del self.running[key]
    return []

  @property
  def idle(self) -> bool:
    return not self.running

  def stats(self) -> dict[str, float]:
    return dict(submitted=float(len(self.requests)))

  def step(self) -> list[Event]:
    time.sleep(self.step_s)
    if self.broken:
      raise self.broken
    return [self._draw(*key) for key in list(self.running)[:self.limits.slots]]

  def _draw(self, ticket, sample) -> Event:
    request, ids, drawn = self.running[ticket, sample]
    before, reason, stop = len(drawn), '', ''
    while not reason and len(drawn) < before + self.window:
      drawn.append(ids[len(drawn)] if len(drawn) < len(ids) else TOKENIZER.eos_id)
      text = TOKENIZER.decode(drawn, skip_special=True)
      stop = min((s for s in request.stop_strings if s in text), key=text.find, default='')
      reason = 'stop' if stop or drawn[-1] in request.stop_ids else 'length' if len(drawn) == request.max_tokens else ''
    rollout = None
    if reason:
      del self.running[ticket, sample]
      logp = np.full(len(drawn), -1.0, np.float32)
      rollout = types.Rollout(
          task_id=request.id, group_id='', prompt_ids=request.prompt_ids, token_ids=np.asarray(drawn, np.int32),
          mask=np.ones(len(drawn), bool), behavior_logp=logp, version=np.zeros(len(drawn), np.int32),
          finish_reason=reason, temperature=1.0, stop_string=stop or '', drafted=self.drafted,
          accepted=self.accepted)
    new = np.asarray(drawn[before:], np.int32)
    logp = np.full(len(new), -1.0, np.float32)
    return Event(ticket, sample, before, new, logp, logp, new[:, None], logp[:, None], rollout)
