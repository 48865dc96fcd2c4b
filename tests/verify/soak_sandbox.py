"""Runs very many jobs and says what they left behind: processes, descriptors, mounts, files, memory.

  PYTHONPATH=. python tests/verify/soak_sandbox.py [JOBS [TIER]]

A tool, not a test: it takes minutes. Ends with status 1 when anything is left or has grown.
"""

import concurrent.futures
import os
import sys
import tempfile
import time

from ptjax.verify import sandbox

MESSY = '''
import os, subprocess
for folder in (".", os.environ["TMPDIR"]):
  open(folder + "/left", "w").write("x" * 100000)
if os.fork() == 0:
  os.setsid()
  while True: pass
'''
COLLECTING = 'open("out", "w").write("y" * 50000)'
BATCH = 100
LIMITS = sandbox.Limits(wall_s=20, cpu_s=5, memory_mb=128, pids=16, disk_mb=8)


def workers() -> list[str]:
  found = []
  for pid in filter(str.isdigit, os.listdir('/proc')):
    try:
      with open(f'/proc/{pid}/cmdline', 'rb') as file:
        found += [pid] if b'zygote.py' in file.read() else []
    except OSError:
      continue  # ended since it was listed
  return found


def left() -> dict[str, int]:
  with open('/proc/self/mountinfo') as mounts:
    count = len(mounts.readlines())
  return {'processes': len(workers()), 'descriptors': len(os.listdir('/proc/self/fd')), 'mounts': count,
          'files': len([n for n in os.listdir(tempfile.gettempdir()) if 'ptjax' in n])}


def resident_kb(pids) -> int:
  total = 0
  for pid in pids:
    with open(f'/proc/{pid}/smaps_rollup') as file:
      total += sum(int(line.split()[1]) for line in file if line.startswith('Pss:'))
  return total


def main():
  jobs, tier = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000, sys.argv[2] if len(sys.argv) > 2 else 'auto'
  before = left()
  began = time.monotonic()
  with sandbox.Sandbox(tier=tier) as box, concurrent.futures.ThreadPoolExecutor(8) as threads:

    def run(i: int):
      code, collect = (MESSY, []) if i % 10 == 3 else (COLLECTING, ['out']) if i % 10 == 7 else ('print(7)', [])
      result = box.run([sandbox.WARM_PYTHON, '-c', code], limits=LIMITS, collect=collect)
      files = {name: b'y' * 50_000 for name in collect}
      if (result.verdict, result.returncode, result.files) != ('contained', 0, files):
        raise RuntimeError(f'job {i}: {result}')

    def run_all(first: int, last: int):
      for i in range(first, last, BATCH):  # a call that waits takes memory as well
        list(threads.map(run, range(i, min(i + BATCH, last))))

    run_all(0, jobs // 10)
    warm = {'trainer_kb': resident_kb(['self']), 'workers_kb': resident_kb(workers())}
    run_all(jobs // 10, jobs)
    grown = {'trainer_kb': resident_kb(['self']) - warm['trainer_kb'],
             'workers_kb': resident_kb(workers()) - warm['workers_kb']}
  after = left()
  print(f'{jobs} jobs in tier {box.tier}, {jobs / (time.monotonic() - began):.0f} per s; before {before}, '
        f'after {after}; memory after the first tenth {warm}, grown by {grown}')
  sys.exit(after != before or max(grown.values()) > 8192)


if __name__ == '__main__':
  main()
