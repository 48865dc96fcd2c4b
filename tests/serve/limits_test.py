"""What a server refuses, and what it does when a client leaves, too many come, the engine fails, or a signal comes."""

import concurrent.futures
import json
import pathlib
import socket
import threading
import time

from absl.testing import absltest, parameterized
import httpx
import openai

from configs import base
from ptjax import config as configs
from ptjax.serve import server
from tests.serve import live

LONG = 'x' * 200
BODY = dict(model=live.MODEL, prompt='hi')
CHAT = dict(model=live.MODEL, messages=[{'role': 'user', 'content': 'hi'}])


class Case(parameterized.TestCase):

  def start(self, engine=None, **settings) -> live.Live:
    started = live.Live(engine or live.Scripted('hello'), **settings)
    self.addCleanup(started.stop)
    return started

  def check_error(self, response: httpx.Response, status: int, code: str | None = None, param: str | None = None):
    self.assertEqual(response.status_code, status, response.text)
    self.assertEqual(set(response.json()), {'error'})
    error = response.json()['error']
    self.assertEqual(set(error), {'message', 'type', 'param', 'code'})
    self.assertIsInstance(error['message'], str)
    if code:
      self.assertEqual(error['code'], code)
    if param:
      self.assertEqual(error['param'], param)


class RefusalsTest(Case):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.live = live.Live(live.Scripted('hello'))
    cls.addClassCleanup(cls.live.stop)

  @parameterized.parameters(
      (dict(prompt=None), 'prompt'), (dict(prompt=''), 'prompt'), (dict(prompt=[]), 'prompt'),
      (dict(prompt=[1, 'a']), 'prompt'), (dict(prompt=[[]]), 'prompt'), (dict(prompt=[320]), 'prompt'),
      (dict(prompt=[-1]), 'prompt'), (dict(prompt=[True]), 'prompt'), (dict(prompt={'a': 1}), 'prompt'),
      (dict(max_tokens=-1), 'max_tokens'), (dict(max_tokens=1.5), 'max_tokens'), (dict(max_tokens='5'), 'max_tokens'),
      (dict(max_tokens=255), 'max_tokens'), (dict(max_tokens=10 ** 30), 'max_tokens'),
      (dict(prompt='x' * 256), 'prompt'), (dict(n=0), 'n'), (dict(n=10 ** 9), 'n'), (dict(best_of=2), 'best_of'),
      (dict(temperature=-1), 'temperature'), (dict(temperature=True), 'temperature'), (dict(top_p=0), 'top_p'),
      (dict(top_p=1.1), 'top_p'), (dict(min_p=1), 'min_p'), (dict(top_k=-2), 'top_k'), (dict(seed=2 ** 64), 'seed'),
      (dict(seed='a'), 'seed'), (dict(stop=['a'] * 17), 'stop'), (dict(stop=''), 'stop'), (dict(stop=[1]), 'stop'),
      (dict(stop='a' * 2000), 'stop'), (dict(logprobs=6), 'logprobs'), (dict(logprobs=True), 'logprobs'),
      (dict(echo=1), 'echo'), (dict(stream='yes'), 'stream'), (dict(stream_options={}), 'stream_options'),
      (dict(stream=True, stream_options={'x': 1}), 'stream_options'),
      (dict(frequency_penalty=0.5), 'frequency_penalty'), (dict(presence_penalty=-1), 'presence_penalty'),
      (dict(logit_bias=[1]), 'logit_bias'),
      (dict(logit_bias={'a': 1}), 'logit_bias'), (dict(logit_bias={'320': 1}), 'logit_bias'),
      (dict(logit_bias={'1': 101}), 'logit_bias'), (dict(logit_bias={'1': True}), 'logit_bias'),
      (dict(logit_bias={str(i): 1 for i in range(2000)}), 'logit_bias'), (dict(min_tokens=17), 'min_tokens'),
      (dict(suffix='a'), 'suffix'), (dict(temprature=1), 'temprature'), (dict(model=None), 'model'),
      (dict(prompt=['a'] * 17), 'prompt'))
  def test_fields_of_completions(self, fields, param):
    self.check_error(self.live.post(BODY | fields), 400, param=param)
    if 'stream_options' not in fields:
      self.check_error(self.live.post(BODY | dict(stream=True) | fields), 400, param=param)

  @parameterized.parameters(
      (dict(messages=[]), 'messages'), (dict(messages='hi'), 'messages'), (dict(messages=[1]), 'messages'),
      (dict(messages=[{'role': 'nobody', 'content': 'a'}]), 'messages'),
      (dict(messages=[{'role': 'user'}]), 'messages'), (dict(messages=[{'role': 'user', 'content': 5}]), 'messages'),
      (dict(messages=[{'role': 'user', 'content': [{'type': 'text'}]}]), 'messages'),
      (dict(messages=[{'role': 'user', 'content': [{'type': 'image_url', 'image_url': {}}]}]), 'messages'),
      (dict(messages=[{'role': 'user', 'content': 'x' * 300}]), 'messages'),
      (dict(messages=[{'role': 'tool', 'content': 'a'}]), 'messages[0].tool_call_id'),
      (dict(messages=[{'role': 'assistant', 'tool_calls': [{'function': {'name': 'f', 'arguments': '{'}}]}]),
       'messages'),
      (dict(top_logprobs=2), 'top_logprobs'), (dict(logprobs=True, top_logprobs=6), 'top_logprobs'),
      (dict(logprobs=1), 'logprobs'), (dict(max_tokens=0), 'max_tokens'),
      (dict(max_completion_tokens=300), 'max_completion_tokens'), (dict(tools={}), 'tools'),
      (dict(tools=[{'type': 'x'}]), 'tools[0]'), (dict(tool_choice='auto'), 'tool_choice'),
      (dict(tools=[{'type': 'function', 'function': {'name': 'a b'}}]), 'tools[0].function.name'),
      (dict(tools=[{'type': 'function', 'function': {'name': 'a', 'parameters': 1}}]), 'tools[0].function.parameters'),
      (dict(tools=[{'type': 'function', 'function': {'name': 'a', 'strict': True}}]), 'tools[0].function.strict'),
      (dict(tools=[{'type': 'function', 'function': {'name': 'a'}}], tool_choice='required'), 'tool_choice'),
      (dict(tools=[{'type': 'function', 'function': {'name': 'a'}}],
            tool_choice={'type': 'function', 'function': {'name': 'a'}}), 'tool_choice'),
      (dict(response_format={'type': 'json_object'}), 'response_format'), (dict(functions=[]), 'functions'),
      (dict(modalities=['audio']), 'modalities'), (dict(echo=True), 'echo'), (dict(prompt='a'), 'prompt'))
  def test_fields_of_chat(self, fields, param):
    self.check_error(self.live.post(CHAT | fields, '/v1/chat/completions'), 400, param=param)

  @parameterized.parameters(
      b'', b'{', b'[]', b'null', b'5', b'"a"', b'{"model": "tiny", "prompt": "\xff"}', b'{"a": NaN}',
      b'{"a": Infinity}', b'{"a": 1e999}', b'{"model": "tiny", "prompt": "\\ud800"}', b'[' * 100_000, b'{"a":' * 50_000,
      b'{"model": "tiny", "metadata": ' + b'[' * 100 + b']' * 100 + b'}', b'{"a": ' + b'9' * 5000 + b'}')
  def test_bodies(self, body):
    response = httpx.post(f'{self.live.address}/v1/completions', content=body,
                          headers={'Content-Type': 'application/json'})
    self.assertIn(response.status_code, (400, 413))
    self.check_error(response, response.status_code)

  def test_harmless_fields(self):
    harmless = dict(user='me', metadata={'a': 'b'}, store=False, service_tier='auto', seed=None, stop=[], best_of=1,
                    logit_bias={}, frequency_penalty=0, presence_penalty=0.0, suffix=None)
    self.assertEqual(self.live.post(BODY | harmless).status_code, 200)

  def test_paths_methods_and_types(self):
    get = lambda path, **settings: httpx.get(self.live.address + path, **settings)
    self.check_error(get('/v1/completions'), 405, 'method_not_allowed')
    self.check_error(get('/v1/embeddings'), 404, 'unknown_url')
    self.check_error(get('/v1/models/none'), 404, 'model_not_found')
    self.check_error(self.live.post(BODY | dict(model='gpt')), 404, 'model_not_found')
    plain = httpx.post(f'{self.live.address}/v1/completions', content=json.dumps(BODY))
    self.check_error(plain, 400, 'unsupported_content_type')
    self.check_error(self.live.post(BODY | dict(prompt='x' * 200_000)), 413, 'body_too_large')
    pieces = (b' ' * 10_000 for _ in range(20))  # without a Content-Length
    self.check_error(httpx.post(f'{self.live.address}/v1/completions', content=pieces,
                                headers={'Content-Type': 'application/json'}), 413, 'body_too_large')
    self.assertEqual(get('/health').json(), {'status': 'ok'})
    for host in ('rebound.example', 'rebound.example:80', '[', '', '127.0.0.1.example', '10.0.0.1:8000'):
      self.check_error(get('/health', headers={'Host': host}), 403, 'forbidden')
    for host in ('localhost', 'localhost:1', '[::1]:80', '127.0.0.1'):
      self.assertEqual(get('/health', headers={'Host': host}).status_code, 200)

  def test_errors_are_those_that_the_client_knows(self):
    client = self.live.client()
    with self.assertRaises(openai.BadRequestError) as caught:
      client.completions.create(**BODY, n=0)
    self.assertEqual((caught.exception.param, caught.exception.code), ('n', 'integer_out_of_range'))
    with self.assertRaises(openai.NotFoundError):
      client.completions.create(model='gpt', prompt='hi')


class KeysTest(Case):

  def test_a_key_is_asked_for(self):
    path = self.create_tempfile(content='first-key\n\nsecond-key\n').full_path
    asked = self.start(api_key_file=path)
    for key in ('first-key', 'second-key'):
      self.assertEqual(asked.client(api_key=key).completions.create(**BODY).choices[0].text, 'hello')
    for headers in ({}, {'Authorization': 'Bearer third'}, {'Authorization': 'Basic first-key'},
                    {'Authorization': 'Bearer first-ke'}, {'Authorization': 'Bearer \xe9'.encode('latin-1')}):
      response = asked.post(BODY, headers=headers)
      self.check_error(response, 401, 'invalid_api_key')
      self.assertEqual(response.headers['WWW-Authenticate'], 'Bearer')
    self.assertEqual(httpx.get(f'{asked.address}/metrics').status_code, 401)
    self.assertEqual(httpx.get(f'{asked.address}/health').status_code, 200)
    with self.assertRaises(openai.AuthenticationError):
      asked.client().models.list()

  def test_files_of_keys(self):
    for content in ('', '\n', 'a key', 'schlüssel'):
      with self.assertRaisesRegex(ValueError, 'api_key_file.*fix:'):
        server.read_keys(self.create_tempfile(content=content).full_path)

  def test_another_interface_needs_keys(self):
    config = base.get_config()
    for host in ('0.0.0.0', '::', '10.0.0.1', 'example.org'):
      config.serve.host = host
      with self.assertRaisesRegex(ValueError, 'serve.host.*\n.*fix: --config.serve.api_key_file'):
        configs.validate(config, base.get_config())
    config.serve.api_key_file = self.create_tempfile(content='key').full_path
    configs.validate(config, base.get_config())
    for host in ('127.0.0.1', '::1', 'localhost', '127.9.9.9'):
      self.assertTrue(configs.is_loopback(host))

  def test_an_address_that_is_taken(self):
    with socket.create_server(('127.0.0.1', 0)) as taken, self.assertRaisesRegex(ValueError, 'serve.port.*fix:'):
      server.listen('127.0.0.1', taken.getsockname()[1])


class LoadTest(Case):

  def test_too_many_are_told_to_come_later(self):
    asked = self.start(live.Scripted(LONG, step_s=0.02, slots=2), max_waiting=2)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
      responses = list(pool.map(lambda _: asked.post(BODY | dict(max_tokens=60)), range(8)))
    refused = [r for r in responses if r.status_code != 200]
    self.assertBetween(len(refused), 1, 4)
    for response in refused:
      self.check_error(response, 429, 'rate_limit_exceeded')
      self.assertEqual(response.headers['Retry-After'], '1')
    self.assertEqual(asked.post(BODY).status_code, 200)
    self.assertEqual(asked.post(BODY | dict(n=4)).status_code, 200)
    self.check_error(asked.post(BODY | dict(n=5)), 400, param='n')

  def test_the_client_tries_again_by_itself(self):
    asked = self.start(live.Scripted(LONG, step_s=0.02, slots=1), max_waiting=0)
    first = threading.Thread(target=asked.post, args=(BODY | dict(max_tokens=60),))
    first.start()
    live.wait_for(lambda: asked.service.worker.load[0] == 1)
    self.assertEqual(asked.client(max_retries=5).completions.create(**BODY).choices[0].text, LONG[:16])
    first.join()

  @parameterized.parameters(True, False)
  def test_a_client_that_leaves_ends_its_work(self, stream):
    engine = live.Scripted(LONG, window=1, step_s=0.02)
    asked = self.start(engine)
    client = httpx.Client(timeout=0.4)
    with client, self.assertRaises(httpx.ReadTimeout):
      if stream:
        self.read_two(client, asked)
      client.post(f'{asked.address}/v1/completions', json=BODY | dict(max_tokens=200, n=3))
    live.wait_for(lambda: engine.idle and asked.service.worker.load == (0, 0), 3)
    self.assertEqual(asked.post(BODY).status_code, 200)

  def read_two(self, client, asked):
    with client.stream('POST', f'{asked.address}/v1/completions',
                       json=BODY | dict(max_tokens=200, n=3, stream=True)) as response:
      for line, _ in zip(response.iter_lines(), range(4)):
        self.assertTrue(not line or line.startswith('data: {'))
    raise httpx.ReadTimeout('left')

  def test_a_client_that_leaves_while_it_waits(self):
    engine = live.Scripted(LONG, window=1, step_s=0.02, slots=1)
    asked = self.start(engine)
    first = threading.Thread(target=asked.post, args=(BODY | dict(max_tokens=100),))
    first.start()
    live.wait_for(lambda: asked.service.worker.load == (1, 0))
    for stream in (False, True):
      with self.assertRaises(httpx.ReadTimeout):
        httpx.post(f'{asked.address}/v1/completions', json=BODY | dict(stream=stream), timeout=0.2)
    live.wait_for(lambda: asked.service.worker.load == (1, 0), 1)
    first.join()
    self.assertEqual(asked.metric('ptjax_requests_total'), 3)


class FailureTest(Case):

  @parameterized.parameters(True, False)
  def test_an_engine_that_fails(self, late):
    engine = live.Scripted(LONG, step_s=0.02)
    asked = self.start(engine)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
      if not late:
        engine.broken = RuntimeError('out of memory')
      some = [pool.submit(asked.post, BODY | dict(max_tokens=200)) for _ in range(2)]
      streamed = pool.submit(asked.post, BODY | dict(max_tokens=200, stream=True))
      if late:
        live.wait_for(lambda: len(engine.requests) == 3)
        time.sleep(0.2)
        engine.broken = RuntimeError('out of memory')
      statuses = {future.result().status_code for future in some}
    self.assertLessEqual(statuses, {500, 503})
    self.assertIn(500, statuses | {streamed.result().status_code})
    if late:
      self.assertEqual(statuses, {500})
      self.assertIn('"code": "engine_failed"', streamed.result().text)
      self.assertNotIn('[DONE]', streamed.result().text)
    self.check_error(asked.post(BODY), 503, 'engine_failed')
    self.check_error(httpx.get(f'{asked.address}/health'), 503, 'engine_failed')

  def test_the_client_hears_of_a_failure_within_a_stream(self):
    engine = live.Scripted(LONG, window=1, step_s=0.02)
    asked = self.start(engine)
    with self.assertRaisesRegex(openai.APIError, 'the engine failed'):
      for _ in asked.client().completions.create(**BODY, max_tokens=200, stream=True):
        engine.broken = RuntimeError('out of memory')


class EndTest(Case):

  def test_what_is_in_flight_is_finished(self):
    engine = live.Scripted('hello, world', window=1, step_s=0.05)
    asked = live.Live(engine)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
      some = [pool.submit(asked.post, BODY | dict(stream=stream)) for stream in (False, True)]
      live.wait_for(lambda: len(engine.requests) == 2)
      asked.stop()
      self.assertEqual(some[0].result().json()['choices'][0]['text'], 'hello, world')
      self.assertIn('[DONE]', some[1].result().text)
    with self.assertRaises(httpx.ConnectError):
      httpx.get(asked.address)

  def test_what_takes_too_long_is_ended(self):
    engine = live.Scripted(LONG, window=1, step_s=0.05)
    asked = live.Live(engine, drain_s=0.5)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
      some = [pool.submit(asked.post, BODY | dict(max_tokens=200, stream=stream)) for stream in (False, True)]
      live.wait_for(lambda: len(engine.requests) == 2)
      time.sleep(0.2)
      begun = time.monotonic()
      asked.stop()
      self.assertLess(time.monotonic() - begun, 4)
      self.check_error(some[0].result(), 503, 'shutting_down')
      self.assertIn('"code": "shutting_down"', some[1].result().text)


if __name__ == '__main__':
  absltest.main()
