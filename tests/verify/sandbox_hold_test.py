"""Nothing that a job does or leaves reaches the next one, and nothing is left over, whoever dies."""

import asyncio
import concurrent.futures
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import unittest.mock

from absl.testing import absltest

from ptjax.verify import sandbox
from ptjax.verify.sandbox import worker as workers

QUICK = sandbox.Limits(wall_s=8, cpu_s=4, memory_mb=256, pids=16, output_bytes=65536, disk_mb=8)


def warm(code: str) -> list[str]:
  return [sandbox.WARM_PYTHON, '-c', textwrap.dedent(code)]


def processes_named(token: str) -> list[str]:
  found = []
  for pid in os.listdir('/proc'):
    if pid.isdigit():
      try:
        with open(f'/proc/{pid}/cmdline', 'rb') as file:
          found += [pid] if token.encode() in file.read().split(b'\0')[0] else []
      except OSError:
        continue
  return found


class HoldTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.box = sandbox.Sandbox(min_isolation='landlock', workers=2)

  @classmethod
  def tearDownClass(cls):
    cls.box.close()
    super().tearDownClass()

  def test_many_threads_share_the_pool_and_jobs_share_nothing(self):
    code = 'import os, sys; open("mine", "x").write("x"); print(len(os.listdir(".")), sys.stdin.read())'
    with concurrent.futures.ThreadPoolExecutor(12) as threads:
      results = list(threads.map(lambda i: self.box.run(warm(code), limits=QUICK, stdin=b'%d' % i), range(36)))
    self.assertEqual([r.stdout for r in results], [b'1 %d\n' % i for i in range(36)])

  def test_daemons_die_with_their_job(self):
    token = f'daemon-{os.getpid()}-{time.time()}'
    result = self.box.run(warm(f'''
        import os
        for i in range(3):
          if os.fork() == 0:
            os.setsid()
            if os.fork() == 0: os.execv("/bin/sleep", ["{token}", "30"])
            os._exit(0)
        import time; time.sleep(0.2); print("DONE")'''), limits=QUICK)
    self.assertEqual(result.stdout, b'DONE\n', str(result))
    self.assertEmpty(processes_named(token))

  def test_everything_dies_with_a_trainer_killed_by_signal_9(self):
    token = f'orphan-{os.getpid()}-{time.time()}'
    code = f'import os; os.execv("/bin/sleep", ["{token}", "60"])'
    program = ('from ptjax.verify import sandbox\n'
               'box = sandbox.Sandbox(min_isolation="landlock")\n'
               f'job = box.start([sandbox.WARM_PYTHON, "-c", {code!r}], limits=sandbox.Limits(wall_s=60))\n'
               'print("up", flush=True)\njob.finish()\n')
    trainer = subprocess.Popen([sys.executable, '-c', program], stdout=subprocess.PIPE, cwd=os.getcwd(),
                               env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)})
    self.addCleanup(trainer.stdout.close)
    self.assertEqual(trainer.stdout.readline(), b'up\n')
    deadline = time.monotonic() + 10
    while not processes_named(token) and time.monotonic() < deadline:
      time.sleep(0.02)
    self.assertLen(processes_named(token), 1)
    trainer.kill()
    trainer.wait()
    while processes_named(token) and time.monotonic() < deadline:
      time.sleep(0.02)
    self.assertEmpty(processes_named(token))

  def test_a_keeper_serves_many_jobs_and_each_finds_it_as_new(self):
    code = """
        import os
        seen = [os.listdir("/box"), os.listdir("/dev/shm"), os.listdir("/tmp")] if os.path.exists("/box") else []
        print(os.listdir("."), seen, len([p for p in os.listdir("/proc") if p.isdigit()]) if seen else 0)
        for folder in (".", "/tmp", "/dev/shm"):
          try: open(folder + "/left", "w").write("x")
          except OSError: pass
        if os.fork() == 0:
          os.setsid()
          while True: pass"""
    with sandbox.Sandbox(min_isolation='landlock', workers=1) as box:
      outputs = [box.run(warm(code), limits=QUICK) for _ in range(5)]
    self.assertLen({o.stdout for o in outputs}, 1, outputs)
    self.assertTrue(outputs[0].stdout.startswith(b'[] '), outputs[0])

  def test_the_network_of_a_job_is_not_the_next_ones(self):
    code = """
        import socket
        print(open("/proc/net/dev").read())
        one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        one.sendto(b"x", ("127.0.0.1", 9))"""
    with sandbox.Sandbox(min_isolation='landlock', workers=1) as box:
      if box.tier in ('userns', 'root'):
        first, second = (box.run(warm(code), limits=QUICK).stdout for _ in range(2))
        self.assertEqual(first, second)
        self.assertIn(b'lo:', first)

  def test_cancelling_an_asynchronous_call_kills_its_job(self):
    token = f'cancelled-{os.getpid()}-{time.time()}'

    async def cancel():
      call = asyncio.create_task(self.box.run_async(
          warm(f'import os; os.execv("/bin/sleep", ["{token}", "60"])'), limits=sandbox.Limits(wall_s=60)))
      while not processes_named(token):
        await asyncio.sleep(0.02)
      call.cancel()
      with self.assertRaises(asyncio.CancelledError):
        await call

    asyncio.run(asyncio.wait_for(cancel(), 20))
    deadline = time.monotonic() + 5
    while processes_named(token) and time.monotonic() < deadline:
      time.sleep(0.02)
    self.assertEmpty(processes_named(token))

  def test_places_go_to_whoever_has_waited_longest(self):
    places = sandbox._Places(1)
    places.acquire()
    order = []

    def wait(i):
      places.acquire()
      order.append(i)
      places.release()

    threads = [threading.Thread(target=wait, args=(i,)) for i in range(5)]
    for i, thread in enumerate(threads):
      thread.start()
      while len(places._waiting) <= i:
        time.sleep(0.001)
    places.release()
    places.acquire()  # comes last, although it is running and they must first wake up
    self.assertEqual(order, [0, 1, 2, 3, 4])
    for thread in threads:
      thread.join()

  def test_a_step_of_the_jail_that_fails_is_the_hosts_fault(self):
    with tempfile.TemporaryDirectory() as folder:
      os.chmod(folder, 0o755)
      for path in pathlib.Path(sandbox.__file__).parent.glob('*.py'):
        shutil.copy(path, folder)
      with open(f'{folder}/linux.py', 'a') as file:
        file.write('\ndef install_filter(*a, **k):\n  raise OSError(1, "seccomp: refused")\n')
      with unittest.mock.patch.object(workers, 'ZYGOTE', f'{folder}/zygote.py'):
        box = sandbox.Sandbox(tier=self.box.tier, workers=1)
        with box, self.assertRaisesRegex(sandbox.SandboxError, 'could not shut the job in: .*seccomp: refused'):
          box.run(warm('print(1)'), limits=QUICK)

  def test_a_broken_worker_is_an_error_and_is_replaced(self):
    with sandbox.Sandbox(min_isolation='landlock', workers=1) as box:
      job = box.start(warm('import time; time.sleep(60)'), limits=QUICK)
      (worker,) = box._busy
      os.kill(worker._process.pid, signal.SIGKILL)
      worker.hang_up()
      with self.assertRaises(sandbox.SandboxError):
        job.finish()
      self.assertEqual(box.run(warm('print(1)'), limits=QUICK).stdout, b'1\n')
      (worker,) = box._idle
      os.kill(worker._process.pid, signal.SIGKILL)
      worker.hang_up()
      self.assertEqual(box.run(warm('print(2)'), limits=QUICK).stdout, b'2\n')

  def test_close_ends_calls_in_flight_and_leaves_nothing(self):
    before = set(os.listdir('/proc/self/fd'))
    box = sandbox.Sandbox(min_isolation='landlock', workers=2)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
      call = threads.submit(box.run, warm('import time; time.sleep(60)'), limits=sandbox.Limits(wall_s=60))
      while not box._busy:
        time.sleep(0.01)
      time.sleep(0.2)
      processes = [worker._process for worker in box._busy]
      box.close()
      with self.assertRaises(sandbox.SandboxError):
        call.result(15)
    with self.assertRaisesRegex(sandbox.SandboxError, 'closed'):
      box.run(warm('0'), limits=QUICK)
    self.assertTrue(all(process.returncode is not None for process in processes))
    self.assertLessEqual(len(set(os.listdir('/proc/self/fd')) - before), 0)


if __name__ == '__main__':
  absltest.main()
