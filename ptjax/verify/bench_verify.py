"""--job=bench_verify: how fast this host runs isolated jobs and gives verdicts, beside a bare Python subprocess.

  python -m ptjax.main --job=bench_verify --output=bench.json

Every workload is measured in each of ROUNDS rounds, in turn, so that a busy moment of the host falls on all of them;
what counts are the ratios within one run, which takes a minute or two. `bare` starts `python3 -I -S -c pass` without
any isolation.
"""

import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
from rich import console
from rich import table

from ptjax import types
from ptjax.verify import base
from ptjax.verify import languages
from ptjax.verify import sandbox

ROUNDS = 5
ONE_BY_ONE, ONE_BY_ONE_S = 20, 1.0  # calls of a round, for the latency, and the seconds after which they are enough
IN_FLIGHT, TOGETHER = 8, 200  # callers at one time, for the throughput, and calls of a round; fewer where they are slow
MANY = 64  # callers at one time, for the latency of a crowd

_CALLS = json.dumps({'entry': 'f', 'cases': [{'args': [i], 'expected': i + 1} for i in range(8)]})
_STDIO = '{"cases": [{"stdin": "1\\n", "expected": "2"}, {"stdin": "5\\n", "expected": "6"}]}'
_ASSERTS = 'assert f(1) == 2\nassert f(2) == 3\nassert f(-1) == 0'
_UNITTEST = ('import unittest\nfrom solution import f\nclass T(unittest.TestCase):\n  def test_a(self):\n'
             '    self.assertEqual(f(1), 2)')
_PYTEST = 'from solution import f\ndef test_a():\n  assert f(1) == 2'
_F = 'def f(x):\n  return x + 1'
_C = '#include <stdio.h>\nint main(void) { int x; scanf("%d", &x); printf("%d\\n", x + 1); }'
# name -> (verifier, reference, tests, a right answer)
ANSWERS = {
    'exact': ('exact', '42', None, 'Answer: 42'),
    'math, numbers': ('math', r'\frac{1}{2}', None, r'\boxed{0.5}'),
    'math, formulas': ('math', 'x^2-1', None, r'\boxed{(x-1)(x+1)}'),
    'procedural, scored': ('procedural', {
        'answer': '2*5 + 4', 'family': 'countdown', 'metadata': {'numbers': [2, 5, 4], 'target': 14}}, None,
                           'Answer: 4 + 5*2'),
    'code, call': ('code', None, {'style': 'call', 'text': _CALLS}, _F),
    'code, stdio': ('code', None, {'style': 'stdio', 'text': _STDIO}, 'print(int(input()) + 1)'),
    'code, asserts': ('code', None, {'style': 'asserts', 'text': _ASSERTS}, _F),
    'code, unittest': ('code', None, {'style': 'unittest', 'text': _UNITTEST}, _F),
    'code, pytest': ('code', None, {'style': 'pytest', 'text': _PYTEST}, _F),
    'code, stdio in C': ('code', None, {'style': 'stdio', 'text': _STDIO, 'language': 'c'}, _C),
}


def job(config, *, output: str, **unused) -> None:
  """Prints the table; --output=FILE takes the figures as JSON too."""
  with sandbox.Sandbox(min_isolation=config.sandbox.min_isolation, workers=config.sandbox.workers or None,
                       readable=languages.readable()) as box, base.VerifierPool(box=box) as pool:
    works = {'bare': _bare, 'sandbox, warm Python': lambda: box.run([sandbox.WARM_PYTHON, '-c', 'pass']),
             'sandbox, new Python': lambda: box.run([box.interpreter, '-I', '-S', '-c', 'pass'])}
    for name, row in ANSWERS.items():
      if name != 'code, stdio in C' or shutil.which(languages.LANGUAGES['c'].program):
        works[name] = _verdict(pool, *row)
    figures = measure(works)
    figures['sandbox, warm Python'] |= {'p95_of_64_ms': crowd(works['sandbox, warm Python'])}
    tier = box.tier
  figures = {'tier': tier, 'cores': len(os.sched_getaffinity(0)), 'rows': figures}
  if output != '-':
    with open(output, 'w', encoding='utf-8') as file:
      json.dump(figures, file, indent=1)
  _show(figures)


def _bare():
  subprocess.run([sys.executable, '-I', '-S', '-c', 'pass'], stdin=subprocess.DEVNULL, check=True)


def _verdict(pool: base.VerifierPool, verifier: str, reference, tests, answer: str) -> Callable[[], None]:
  task = types.Task(verifier, '', (), verifier, reference, tests=tests)

  def verify():
    verdict = pool.verify(task, answer)
    if verdict.status != 'pass':
      raise RuntimeError(f'{verifier}: a right answer got {verdict}')

  return verify


def measure(works: dict[str, Callable[[], object]]) -> dict[str, dict[str, float]]:
  """By workload: p50 and p95 of one call at a time, in ms; calls per second with IN_FLIGHT callers; beside bare."""
  together = {}
  for name, work in works.items():
    work()  # starts what is started once
    together[name] = min(TOGETHER, max(IN_FLIGHT, round(2 / _seconds(work))))
  latencies, rates = {name: [] for name in works}, {name: [] for name in works}
  with concurrent.futures.ThreadPoolExecutor(IN_FLIGHT) as threads:
    for _ in range(ROUNDS):
      for name, work in works.items():
        began = time.perf_counter()
        for _ in range(ONE_BY_ONE):
          latencies[name].append(_seconds(work))
          if time.perf_counter() - began > ONE_BY_ONE_S:
            break
        began = time.perf_counter()
        list(threads.map(lambda _, work=work: work(), range(together[name])))
        rates[name].append(together[name] / (time.perf_counter() - began))
  figures = {name: {'p50_ms': 1e3 * float(np.median(latencies[name])),
                    'p95_ms': 1e3 * float(np.quantile(latencies[name], 0.95)),
                    'per_s': float(np.median(rates[name]))} for name in works}
  for row in figures.values():
    row |= {'p50_of_bare': row['p50_ms'] / figures['bare']['p50_ms'],
            'per_s_of_bare': row['per_s'] / figures['bare']['per_s']}
  return figures


def crowd(work: Callable[[], object]) -> float:
  """p95 in ms, of the time from asking to having, with MANY callers at one time."""
  with concurrent.futures.ThreadPoolExecutor(MANY) as threads:
    seconds = list(threads.map(lambda _: _seconds(work), range(8 * MANY)))
  return 1e3 * float(np.quantile(seconds, 0.95))


def _seconds(work: Callable[[], object]) -> float:
  began = time.perf_counter()
  work()
  return time.perf_counter() - began


def _show(figures: dict):
  rows = table.Table('workload', 'p50 ms', 'p95 ms', 'p50 of bare', f'per s, {IN_FLIGHT} in flight', 'of bare',
                     title=f'tier {figures["tier"]}, {figures["cores"]} cores')
  for name, row in figures['rows'].items():
    rows.add_row(name, f'{row["p50_ms"]:.1f}', f'{row["p95_ms"]:.1f}', f'{row["p50_of_bare"]:.2f}',
                 f'{row["per_s"]:.0f}', f'{row["per_s_of_bare"]:.2f}')
  shown = console.Console(file=sys.stdout)
  shown.print(rows, highlight=False, markup=False)
  shown.print(f'{MANY} jobs in flight: p95 {figures["rows"]["sandbox, warm Python"]["p95_of_64_ms"]:.0f} ms',
              highlight=False)
