"""The HTTP side: routes, keys, limits and the end of a server's life. OpenAI's client and lm-eval work with it.

  POST /v1/completions   POST /v1/chat/completions   GET /v1/models[/ID]   GET /health   GET /metrics

With API keys every path but /health needs one. Without, only a loopback address is bound and only requests addressed to
a loopback name are answered, so that a web page in the user's browser can't reach the model.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
import contextlib
import functools
import hmac
import json
import pathlib
import re
import secrets
import signal
import socket
import time

from absl import logging
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
import uvicorn

from ptjax import config
from ptjax.data.tokenizer import Tokenizer
from ptjax.sample.engine import Engine
from ptjax.serve import protocol
from ptjax.serve.answer import Choice, Delta, join
from ptjax.serve.errors import ApiError
from ptjax.serve.monitor import Monitor
from ptjax.serve.shapes import Shapes
from ptjax.serve.worker import Work, Worker

_BODY_S = 30.0  # in which a body must have come
_GONE = 499  # status in the metrics of a request whose client left
_SHUTTING_DOWN = ApiError(503, 'the server is shutting down', code='shutting_down')


class Service:
  """The application of one engine.

  Args:
    engine: with weights and `decode_text`.
    settings: config.serve.
    model: its name to clients.
  """

  def __init__(self, engine: Engine, tokenizer: Tokenizer, settings, *, model: str):
    limits = engine.limits
    self.keys, self.tokenizer, self._settings = read_keys(settings.api_key_file), tokenizer, settings
    self.offer = protocol.Offer(
        model=model, tokenizer=tokenizer, vocab_size=engine.config.vocab_size, max_context=limits.max_context,
        top_logp=limits.top_logp, biases=limits.biases, samples=limits.slots + settings.max_waiting)
    self.worker = Worker(engine, slots=limits.slots, waiting=settings.max_waiting)
    self.monitor, self._created = Monitor(self.worker), int(time.time())
    self.app = Starlette(
        routes=[
            Route('/v1/completions', functools.partial(self._answer, read=protocol.completion), methods=['POST']),
            Route('/v1/chat/completions', functools.partial(self._answer, read=protocol.conversation),
                  methods=['POST']),
            Route('/v1/models', self._models),
            Route('/v1/models/{name:path}', self._model),
            Route('/health', self._health),
            Route('/metrics', self._metrics)],
        middleware=[Middleware(_Edge, service=self)], lifespan=self._lifespan,
        exception_handlers={ApiError: _told, HTTPException: _told_plainly, ClientDisconnect: _left, Exception: _broken})

  @contextlib.asynccontextmanager
  async def _lifespan(self, unused_app):
    self.worker.start()
    yield
    await asyncio.to_thread(self.worker.stop, self._settings.drain_s + 5)

  async def shut_down(self) -> None:
    """Takes no new work; what is not done when `drain_s` have passed is ended with an error."""
    self.worker.close(_SHUTTING_DOWN)
    asyncio.get_running_loop().call_later(self._settings.drain_s, self.worker.abort, _SHUTTING_DOWN)

  # Routes

  async def _health(self, unused_request) -> Response:
    if self.worker.refusal:
      raise self.worker.refusal.again()
    return JSONResponse({'status': 'ok'})

  async def _metrics(self, unused_request) -> Response:
    return Response(self.monitor.exposition(), headers={'Content-Type': self.monitor.content_type})

  async def _models(self, unused_request) -> Response:
    return JSONResponse(dict(object='list', data=[self._card()]))

  async def _model(self, request: Request) -> Response:
    if request.path_params['name'] != self.offer.model:
      raise ApiError(404, f'The model {request.path_params["name"]!r:.200} does not exist', param='model',
                     code='model_not_found')
    return JSONResponse(self._card())

  def _card(self) -> dict:
    return dict(id=self.offer.model, object='model', created=self._created, owned_by='ptjax',
                max_model_len=self.offer.max_context)

  async def _answer(self, request: Request, read: Callable) -> Response:
    begun = time.monotonic()
    body = await self._body(request)
    name = ('chatcmpl-' if read is protocol.conversation else 'cmpl-') + secrets.token_hex(12)
    plan = await asyncio.to_thread(lambda: read(protocol.decode(body), self.offer, name))
    answer = _Answer(self, plan, name, begun)
    if plan.stream:
      if not await _unless_gone(request, answer.begin()):
        return Response(status_code=_GONE)
      return _Stream(answer)
    with answer:
      whole = await _unless_gone(request, answer.whole())
    return Response(status_code=_GONE) if whole is None else JSONResponse(whole)

  async def _body(self, request: Request) -> bytes:
    """The body of a request, once its kind and size are known to be right."""
    if request.headers.get('content-type', '').partition(';')[0].strip().lower() != 'application/json':
      raise ApiError(400, 'the Content-Type must be application/json', code='unsupported_content_type')
    limit, body = self._settings.max_body_bytes, bytearray()
    too_large = ApiError(413, f'the body is over {limit} bytes', code='body_too_large')
    length = request.headers.get('content-length', '0')
    if length.isdigit() and int(length) > limit:
      raise too_large
    try:
      async with asyncio.timeout(_BODY_S):
        async for piece in request.stream():
          body += piece
          if len(body) > limit:
            raise too_large
    except TimeoutError as error:
      raise ApiError(408, f'the body did not come within {_BODY_S:g} s', code='timeout') from error
    return bytes(body)


class _Answer:
  """One request in work; leaving its context cancels what has not ended."""

  def __init__(self, service: Service, plan: protocol.Plan, name: str, begun: float):
    self._service, self._plan, self._begun = service, plan, begun
    self._loop, self._news = asyncio.get_running_loop(), asyncio.Queue()
    self._choices = [Choice(plan, service.tokenizer, p) for p in range(len(plan.requests)) for _ in range(plan.samples)]
    fields = dict(id=name, created=int(time.time()), model=service.offer.model)
    self._shapes = Shapes(service.tokenizer, fields, is_chat=plan.is_chat, top=plan.logprobs)
    self._drawn, self._first, self._left = 0, None, len(self._choices)
    self._accepted = self._rejected = 0  # guessed tokens
    self._work: Work = service.worker.submit(plan.requests, self._hear)

  def __enter__(self) -> '_Answer':
    return self

  def __exit__(self, *unused) -> None:
    self._service.worker.cancel(self._work)

  def _hear(self, news) -> None:
    self._loop.call_soon_threadsafe(self._news.put_nowait, news)

  async def begin(self) -> bool:
    """Waits for the first tokens, so that a request that can't be served gets a status of its own."""
    try:
      self._first = await self._next()
    except BaseException:
      self.__exit__()
      raise
    return True

  async def _next(self) -> list:
    news = await self._news.get()
    if isinstance(news, ApiError):
      raise news.again()
    return news

  async def _deltas(self) -> AsyncIterator[tuple[int, Delta]]:
    """(choice, what is new of it), to the end of all choices."""
    monitor = self._service.monitor
    news = self._first or await self._next()
    monitor.first_token_s.observe(time.monotonic() - self._begun)
    while True:
      for prompt, event in news:
        index = prompt * self._plan.samples + event.sample
        self._drawn += len(event.token_ids)
        if event.rollout is not None:
          self._left -= 1
          self._accepted += event.rollout.accepted
          self._rejected += event.rollout.drafted - event.rollout.accepted
        yield index, self._choices[index].feed(event)
      if not self._left:
        break
      news = await self._next()
    monitor.request_s.observe(time.monotonic() - self._begun)
    monitor.prompt_tokens.inc(self._usage['prompt_tokens'])
    monitor.drawn_tokens.inc(self._drawn)

  @property
  def _usage(self) -> dict:
    prompt = sum(len(request.prompt_ids) for request in self._plan.requests)
    guesses = {}
    if self._accepted + self._rejected:
      guesses = dict(completion_tokens_details=dict(accepted_prediction_tokens=self._accepted,
                                                    rejected_prediction_tokens=self._rejected))
    return dict(prompt_tokens=prompt, completion_tokens=self._drawn, total_tokens=prompt + self._drawn, **guesses)

  async def whole(self) -> dict:
    deltas: list[list[Delta]] = [[] for _ in self._choices]
    async for index, delta in self._deltas():
      deltas[index].append(delta)
    return self._shapes.whole([join(some) for some in deltas], self._usage)

  async def events(self) -> AsyncIterator[bytes]:
    """The answer as server-sent events; a failure on the way is the last one."""
    opened, nothing = set(), dict(usage=None) if self._plan.include_usage else {}
    try:
      async for index, delta in self._deltas():
        if self._plan.is_chat and index not in opened:
          opened.add(index)
          yield _event(self._shapes.opened(index) | nothing)
        if delta:
          yield _event(self._shapes.piece(index, delta) | nothing)
    except ApiError as error:
      yield _event(error.body)
      return
    if self._plan.include_usage:
      yield _event(self._shapes.usage(self._usage))
    yield b'data: [DONE]\n\n'


class _Stream(StreamingResponse):
  """An answer sent as it is drawn; whatever ends the sending ends the work."""

  def __init__(self, answer: _Answer):
    super().__init__(answer.events(), media_type='text/event-stream', headers={'Cache-Control': 'no-store'})
    self._answer = answer

  async def __call__(self, scope, receive, send) -> None:
    with self._answer:
      await super().__call__(scope, receive, send)


def _event(value: dict) -> bytes:
  return b'data: ' + json.dumps(value, ensure_ascii=False, allow_nan=False).encode() + b'\n\n'


async def _unless_gone(request: Request, work):
  """What the coroutine returns; None, with it cancelled, once the client has left."""
  working, leaving = asyncio.create_task(work), asyncio.create_task(_disconnect(request))
  try:
    await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
    return await working if working.done() else None
  finally:
    for task in (working, leaving):
      task.cancel()
    await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(request: Request) -> None:
  while (await request.receive())['type'] != 'http.disconnect':
    continue


class _Edge:
  """Around all routes: asks for the key, and counts what was answered."""

  def __init__(self, app, service: Service):
    self._app, self._service = app, service
    self._paths = ('/v1/completions', '/v1/chat/completions', '/v1/models', '/health', '/metrics')

  async def __call__(self, scope, receive, send) -> None:
    if scope['type'] != 'http':
      await self._app(scope, receive, send)
      return
    path, status = scope['path'] if scope['path'] in self._paths else 'other', 500

    async def counted(message):
      nonlocal status
      status = message.get('status', status)
      await send(message)

    refusal = self._refusal(Request(scope))
    try:
      await (_response(refusal) if refusal else self._app)(scope, receive, counted)
    finally:
      self._service.monitor.requests.labels(path, status).inc()

  def _refusal(self, request: Request) -> ApiError | None:
    keys = self._service.keys
    if not keys:
      host = request.headers.get('host', '')
      name = re.sub(r':\d*$', '', host).removeprefix('[').removesuffix(']')
      if config.is_loopback(name):
        return None
      return ApiError(403, f'the host {host!r:.80} is not this machine; without API keys only requests to a loopback '
                           'name are answered', code='forbidden')
    kind, _, given = request.headers.get('authorization', '').partition(' ')
    right = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in keys]
    if request.url.path == '/health' or kind.lower() == 'bearer' and any(right):
      return None
    return ApiError(401, 'a right API key must be given: Authorization: Bearer KEY', code='invalid_api_key',
                    headers={'WWW-Authenticate': 'Bearer'})


def _response(error: ApiError) -> Response:
  return JSONResponse(error.body, error.status, headers=error.headers)


async def _told(unused_request, error: ApiError) -> Response:
  return _response(error)


async def _told_plainly(request: Request, error: HTTPException) -> Response:
  """Of what the router itself refuses: an unknown path, or a method that a path does not have."""
  what = f'{request.method} {request.url.path[:200]}'
  codes = {404: (f'there is no {what}', 'unknown_url'), 405: (f'there is no {what}', 'method_not_allowed')}
  message, code = codes.get(error.status_code, (error.detail, None))
  return _response(ApiError(error.status_code, message, code=code, headers=error.headers))


async def _left(unused_request, unused_error) -> Response:
  return Response(status_code=_GONE)


async def _broken(unused_request, unused_error) -> Response:
  return _response(ApiError(500, 'the server failed; its log says more', code='internal_error'))


def read_keys(path: str) -> tuple[str, ...]:
  """The API keys in a file, one a line; none without a file.

  Raises:
    ValueError: the file holds none, or what no HTTP header can carry.
  """
  if not path:
    return ()
  keys = tuple(line.strip() for line in pathlib.Path(path).read_text(encoding='utf-8').splitlines() if line.strip())
  if not keys or not all(key.isascii() and key.isprintable() and ' ' not in key for key in keys):
    raise ValueError(f'serve.api_key_file = {path!r}: must hold at least one key of printable ASCII, one a line; fix: '
                     f'python -c "import secrets; print(secrets.token_urlsafe())" > {path}')
  return keys


class Server(uvicorn.Server):
  """Serves until SIGINT or SIGTERM, then ends what is in flight within `drain_s`."""

  def __init__(self, service: Service, settings):
    super().__init__(uvicorn.Config(
        service.app, http='h11', ws='none', loop='asyncio', lifespan='on', log_config=None, access_log=False,
        server_header=False, proxy_headers=False, timeout_graceful_shutdown=int(settings.drain_s) + 5))
    self._service = service

  async def shutdown(self, sockets: Sequence[socket.socket] | None = None) -> None:
    await self._service.shut_down()
    await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
  """A socket on the address.

  Raises:
    ValueError: it can't be bound.
  """
  try:
    return socket.create_server((host, port), family=socket.AF_INET6 if ':' in host else socket.AF_INET)
  except OSError as error:
    raise ValueError(f'serve.host = {host!r}, serve.port = {port}: {error}; fix: --config.serve.port=0 takes a free '
                     'one') from error


def serve(engine: Engine, tokenizer: Tokenizer, settings, *, model: str) -> None:
  """Serves until a signal comes.

  Raises:
    ValueError: the address can't be bound, or the keys can't be read.
  """
  service = Service(engine, tokenizer, settings, model=model)
  logging.info('compiling for every size of request')
  engine.warm_up()
  with listen(settings.host, settings.port) as bound:
    server = Server(service, settings)
    host, port = bound.getsockname()[:2]
    logging.info('serving %s on http://%s:%d/v1 %s', model, f'[{host}]' if ':' in host else host, port,
                 'with API keys' if service.keys else 'without API keys, to this machine only')
    # uvicorn raises the signal it ended by once more, for the handlers from before it; these let the job end well.
    before = {number: signal.signal(number, server.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
      server.run(sockets=[bound])
    finally:
      for number, handler in before.items():
        signal.signal(number, handler)
