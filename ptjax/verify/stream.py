"""Verifies answers from JSONL to JSONL: the body of --job=verify.

Order is kept and ids pass through. From standard input each line is answered before the next is awaited, so another
program can talk to it line by line; a file is verified many lines at a time. A malformed line ends the job.
"""

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from ptjax import types
from ptjax.verify import base

_FIELDS = {'id': (str, int), 'verifier': (str,), 'answer': (str,), 'reference': (str, int, float, dict),
           'tests': (dict,), 'files': (dict,), 'limits': (dict,)}
_REQUIRED = ('id', 'verifier', 'answer')
_WINDOW = 256  # lines verified at one time


def job(config, *, input: str, output: str, **unused) -> None:  # pylint: disable=redefined-builtin
  """--job=verify: see `run`."""
  run(input, output, min_isolation=config.sandbox.min_isolation, workers=config.sandbox.workers)


def run(input_path: str, output_path: str, *, min_isolation: str = 'uid', workers: int = 0) -> None:
  """{"id", "verifier", "answer", "reference" | "tests", "files", "limits"} -> {"id", "status", "score", "evidence"}.

  Evidence also tells the verifier's version and whether the answer was in the asked form.

  Args:
    input_path: JSONL file, or '-' for standard input.
    output_path: JSONL file, or '-' for standard output.
    min_isolation: weakest sandbox tier to run code in.
    workers: jobs in flight at most; 0 is one more than there are cores.
  Raises:
    ValueError: no such input, an output that is the input, or a malformed line, by line and field. What came before the
      line is answered; an output is opened only when the input is there.
  """
  if input_path != '-' and not os.path.exists(input_path):
    raise ValueError(f'{input_path}: no such file')
  if '-' not in (input_path, output_path) and os.path.exists(output_path) and os.path.samefile(input_path, output_path):
    raise ValueError(f'{output_path}: is the input too, and would be overwritten; fix: another --output')
  with contextlib.ExitStack() as stack:
    pool = stack.enter_context(base.VerifierPool(min_isolation=min_isolation, workers=workers))
    out = sys.stdout if output_path == '-' else stack.enter_context(open(output_path, 'w', encoding='utf-8'))
    requests = _requests(input_path)
    window = 1 if input_path == '-' else _WINDOW
    while True:
      some, broken = _take(requests, window)
      for (request_id, _, _), verdict in zip(some, pool.run([t for _, t, _ in some], [a for _, _, a in some])):
        out.write(json.dumps(_reply(request_id, verdict)) + '\n')
      out.flush()
      if broken:
        raise broken
      if not some:
        return


def _take(requests: Iterator, count: int) -> tuple[list, ValueError | None]:
  """Up to `count` requests, and the error that the next line would have raised."""
  some = []
  try:
    for request in itertools.islice(requests, count):
      some.append(request)
  except ValueError as e:
    return some, e
  return some, None


def _requests(path: str) -> Iterator[tuple[str | int, types.Task, str]]:
  """(id, task, answer) per line, as soon as it can be read."""
  name = 'standard input' if path == '-' else path
  with contextlib.nullcontext(sys.stdin.buffer) if path == '-' else open(path, 'rb') as lines:
    # readline, since iterating may read ahead and keep a caller waiting.
    for number, line in enumerate(iter(lines.readline, b''), 1):
      if line.strip():
        yield _request(f'{name}:{number}', line)


def _request(where: str, line: bytes) -> tuple[str | int, types.Task, str]:
  try:
    record = json.loads(line.decode('utf-8'), parse_constant=_no_number)
  except (ValueError, RecursionError) as e:
    raise ValueError(f'{where}: is not JSON in UTF-8: {e}') from e
  if not isinstance(record, dict):
    raise ValueError(f'{where}: must be a JSON object, not {record!r:.60}')
  for field in _REQUIRED:
    if field not in record:
      raise ValueError(f'{where}: field "{field}" is missing')
  for field, value in record.items():
    _check(where, field, value)
  rest = {k: v for k, v in record.items() if k not in _REQUIRED}
  task = types.Task(id=str(record['id']), domain='', messages=(), verifier=record['verifier'], **rest)
  try:
    base.check(task)
  except (ValueError, TypeError, OverflowError, RecursionError) as e:
    raise ValueError(f'{where}: {e}') from e
  return record['id'], task, record['answer']


def _no_number(name: str):
  raise ValueError(f'{name} is no JSON number')


def _check(where: str, field: str, value: Any) -> None:
  if field not in _FIELDS:
    raise ValueError(f'{where}: unknown field {json.dumps(field)}; known are {sorted(_FIELDS)}')
  if isinstance(value, bool) or not isinstance(value, _FIELDS[field]):
    kinds = ' or '.join({'str': 'text', 'int': 'a whole number', 'float': 'a number', 'dict': 'an object'}[t.__name__]
                        for t in _FIELDS[field])
    raise ValueError(f'{where}: field "{field}" must be {kinds}, not {value!r:.60}')


def _reply(request_id: str | int, verdict: types.Verdict) -> dict:
  evidence = dict(verdict.evidence, format_ok=verdict.format_ok, verifier_version=verdict.verifier_version)
  return {'id': request_id, 'status': verdict.status, 'score': verdict.score, 'evidence': evidence}
