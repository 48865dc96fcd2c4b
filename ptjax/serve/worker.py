"""The one thread that owns the engine: takes work from the server's threads, steps, hands out what each step drew."""

from collections.abc import Callable, Sequence
import dataclasses
import queue
import threading

from absl import logging

from ptjax.sample.engine import Engine, Event
from ptjax.sample.requests import Request
from ptjax.serve.errors import ApiError

Deliver = Callable[[list[tuple[int, Event]] | ApiError], None]  # [(which request, event)], or why there is no more


@dataclasses.dataclass(eq=False)
class Work:
  """The requests of one client's call; lives until its last sample ends, it is cancelled, or it fails."""

  requests: Sequence[Request]
  deliver: Deliver  # called in the engine's thread
  left: int  # samples
  tickets: list[int] = dataclasses.field(default_factory=list)


class Worker:
  """Runs an engine in a thread of its own.

  Args:
    engine: with weights; nobody else may use it between `start` and `stop`.
    slots: samples decoded at one time.
    waiting: samples that may wait beyond those.
  """

  def __init__(self, engine: Engine, *, slots: int, waiting: int):
    self._engine, self._slots, self._capacity = engine, slots, slots + waiting
    self._inbox: queue.SimpleQueue[tuple[str, Work | None]] = queue.SimpleQueue()
    self._lock = threading.Lock()
    self._live: set[Work] = set()
    self._tickets: dict[int, tuple[Work, int]] = {}
    self._refusal: ApiError | None = None  # why no work is taken any more
    self._thread = threading.Thread(target=self._run, name='engine', daemon=True)
    self.stats: dict[str, float] = {}

  def start(self) -> None:
    self._thread.start()

  def stop(self, timeout_s: float) -> None:
    """Ends the thread after its present step; work still in flight fails."""
    self.abort(ApiError(503, 'the server is shutting down', code='shutting_down'))
    self._inbox.put(('stop', None))
    self._thread.join(timeout_s)

  @property
  def refusal(self) -> ApiError | None:
    """Why no new work is taken; None while it is."""
    return self._refusal

  @property
  def load(self) -> tuple[int, int]:
    """Samples (running, waiting)."""
    with self._lock:
      samples = sum(work.left for work in self._live)
    return min(samples, self._slots), max(0, samples - self._slots)

  def submit(self, requests: Sequence[Request], deliver: Deliver) -> Work:
    """Queues requests; from now on `deliver` hears of them.

    Raises:
      ApiError: there is too much waiting (429), or no work is taken any more (503).
    """
    work = Work(requests, deliver, sum(request.samples for request in requests))
    with self._lock:
      if self._refusal:
        raise self._refusal.again()
      if sum(other.left for other in self._live) + work.left > self._capacity:
        raise ApiError(429, f'{self._capacity} samples are in work or waiting already; try again later',
                       code='rate_limit_exceeded', headers={'Retry-After': '1'})
      self._live.add(work)
      self._inbox.put(('submit', work))
    return work

  def cancel(self, work: Work) -> None:
    """Ends the work; nothing more is delivered. Has no effect on work that has ended."""
    with self._lock:
      if work in self._live:
        self._live.remove(work)
        self._inbox.put(('cancel', work))

  def close(self, reason: ApiError) -> None:
    """Takes no new work from now on."""
    with self._lock:
      self._refusal = self._refusal or reason

  def abort(self, reason: ApiError) -> None:
    """Takes no new work, and fails what is in flight."""
    self.close(reason)
    with self._lock:
      ended, self._live = self._live, set()
      for work in ended:
        self._inbox.put(('cancel', work))
    for work in ended:
      work.deliver(reason)

  def _run(self) -> None:
    try:
      while self._take():
        if not self._engine.idle:
          self._hand_out(self._engine.step())
        self.stats = self._engine.stats()
    except Exception as error:  # whatever it is, each client must hear of it
      logging.exception('the engine failed')
      self._refusal = ApiError(503, 'the engine has failed; the server must be restarted', code='engine_failed')
      self.abort(ApiError(500, f'the engine failed: {type(error).__name__}', code='engine_failed'))

  def _take(self) -> bool:
    """Gives the engine what has come, and waits for something to come if it has nothing to do; False at the end."""
    while self._engine.idle or not self._inbox.empty():
      kind, work = self._inbox.get()
      if kind == 'stop':
        return False
      if kind == 'submit' and work in self._live:
        self._begin(work)
      elif kind == 'cancel':
        self._forget(work)
    return True

  def _begin(self, work: Work) -> None:
    try:
      for index, request in enumerate(work.requests):
        ticket = self._engine.submit(request)
        work.tickets.append(ticket)
        self._tickets[ticket] = work, index
    except ValueError as error:
      self._forget(work)
      self._fail(work, ApiError(400, str(error)))

  def _forget(self, work: Work) -> None:
    for ticket in work.tickets:
      if self._tickets.pop(ticket, None):
        self._engine.cancel(ticket)

  def _fail(self, work: Work, reason: ApiError) -> None:
    with self._lock:
      self._live.discard(work)
    work.deliver(reason)

  def _hand_out(self, events: Sequence[Event]) -> None:
    """Delivers each client's events of a step together."""
    by_work: dict[Work, list[tuple[int, Event]]] = {}
    for event in events:
      if event.ticket in self._tickets:
        work, index = self._tickets[event.ticket]
        by_work.setdefault(work, []).append((index, event))
    for work, some in by_work.items():
      with self._lock:
        work.left -= sum(event.rollout is not None for _, event in some)
        heard = work in self._live
        if not work.left:
          self._live.discard(work)
      if not work.left:
        for ticket in work.tickets:
          del self._tickets[ticket]
      if heard:
        work.deliver(some)
