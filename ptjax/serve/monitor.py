"""What a server tells Prometheus: its requests, tokens, queue and latencies, and the engine's own counts."""

from collections.abc import Iterable
import re

import prometheus_client
from prometheus_client import core

from ptjax.serve.worker import Worker

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Monitor:
  """The metrics of one server, in a registry of their own."""

  content_type = prometheus_client.CONTENT_TYPE_LATEST

  def __init__(self, worker: Worker):
    self._worker = worker
    self._registry = registry = prometheus_client.CollectorRegistry()
    registry.register(self)
    self.requests = prometheus_client.Counter(
        'ptjax_requests', 'Requests answered.', ('path', 'status'), registry=registry)
    self.prompt_tokens = prometheus_client.Counter(
        'ptjax_prompt_tokens', 'Prompt tokens of answered requests.', registry=registry)
    self.drawn_tokens = prometheus_client.Counter(
        'ptjax_generation_tokens', 'Tokens drawn for answered requests.', registry=registry)
    self.first_token_s = prometheus_client.Histogram(
        'ptjax_time_to_first_token_seconds', 'From a request to its first tokens.', buckets=_SECONDS, registry=registry)
    self.request_s = prometheus_client.Histogram(
        'ptjax_request_seconds', 'From a request to the end of its answer.', buckets=_SECONDS, registry=registry)

  def collect(self) -> Iterable[core.Metric]:
    """Of what is read when asked: the queue, and the engine's counts at its latest step."""
    running, waiting = self._worker.load
    yield core.GaugeMetricFamily('ptjax_samples_running', 'Samples being drawn.', running)
    yield core.GaugeMetricFamily('ptjax_samples_waiting', 'Samples waiting for a slot.', waiting)
    for name, value in self._worker.stats.items():
      yield core.GaugeMetricFamily('ptjax_engine_' + re.sub(r'\W', '_', name), f'Sampler: {name}.', value)

  def exposition(self) -> bytes:
    return prometheus_client.generate_latest(self._registry)
