"""What a sandbox promises to honest callers, and that it keeps hold of jobs and workers when things break."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import unittest.mock

from absl.testing import absltest, parameterized

from ptjax.verify import sandbox
from ptjax.verify.sandbox import tiers

QUICK = sandbox.Limits(wall_s=8, cpu_s=4, memory_mb=256, pids=16, output_bytes=65536, disk_mb=8)


def warm(code: str) -> list[str]:
  return [sandbox.WARM_PYTHON, '-c', textwrap.dedent(code)]


class SandboxTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.box = sandbox.Sandbox(min_isolation='landlock', workers=2)

  @classmethod
  def tearDownClass(cls):
    cls.box.close()
    super().tearDownClass()

  def run_warm(self, code: str, **changes):
    limits = sandbox.Limits(**{**vars(QUICK), **changes})
    return self.box.run(warm(code), limits=limits)


class RunTest(SandboxTest):

  def test_bytes_in_and_bytes_out(self):
    result = self.box.run(
        [self.box.interpreter, '-I', 'folder/prog.py', 'an argument'],
        files={'folder/prog.py': 'import sys, os\ndata = sys.stdin.buffer.read()\n'
                                 'os.write(2, b"\\xff" + sys.argv[1].encode())\nos.write(1, data[::-1])\n'
                                 'open("folder/out.bin", "wb").write(data)\nsys.exit(7)'},
        limits=QUICK, stdin=b'\0\xfe' * 20000, collect=['folder/out.bin'])
    self.assertEqual((result.verdict, result.returncode, result.stderr), ('contained', 7, b'\xffan argument'))
    self.assertEqual(result.stdout, b'\xfe\0' * 20000)
    self.assertEqual(result.files, {'folder/out.bin': b'\0\xfe' * 20000})
    self.assertEqual(result.tier, self.box.tier)

  def test_files_come_back_only_when_regular(self):
    result = self.box.run(warm('''
        import os
        os.mkdir("sub"); open("sub/a", "wb").write(b"\\x00\\xff"); os.symlink("/etc/passwd", "link")
        os.symlink("sub", "way"); os.mkfifo("pipe")'''), limits=QUICK,
        collect=['sub/a', 'link', 'way/a', 'pipe', 'sub', 'none'])
    self.assertEqual(result.files, {'sub/a': b'\0\xff'}, str(result))

  def test_a_compiled_file_can_be_run_by_the_next_job(self):
    made = self.box.run(warm('open("tool", "w").write("#!/bin/sh\\necho ran $1")'), limits=QUICK, collect=['tool'])
    result = self.box.run(['./tool', 'well'], files=made.files, limits=QUICK)
    self.assertEqual((result.returncode, result.stdout), (0, b'ran well\n'), str(result))

  def test_only_named_variables_arrive(self):
    with unittest.mock.patch.dict(os.environ, {'SOME_SECRET': 'x'}):
      result = self.box.run(warm('import os; print(sorted(os.environ), os.environ["MINE"])'), limits=QUICK,
                            env={'MINE': 'yes'})
    self.assertEqual(result.stdout.decode().strip(), "['HOME', 'LANG', 'MINE', 'PATH', 'TMPDIR'] yes")

  @parameterized.parameters(
      ('raise SystemExit(3)', 3), ('exit()', 0), ('import os; os.abort()', -signal.SIGABRT),
      ('import os, signal; os.kill(os.getpid(), signal.SIGTERM)', -signal.SIGTERM), ('1 / 0', 1),
      ('import sys; sys.exit("why")', 1), ('import os; os._exit(9)', 9))
  def test_status(self, code, status):
    result = self.run_warm(code)
    self.assertEqual((result.verdict, result.returncode), ('contained', status), str(result))

  def test_warm_python_ends_like_an_interpreter(self):
    result = self.run_warm('''
        import atexit, sys, threading, time
        atexit.register(print, "atexit")
        threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
        print(__name__, sys.argv, sys.flags.isolated, sys.flags.no_site)''')
    self.assertEqual(result.stdout.decode().split('\n')[:3], ["__main__ ['-c'] 1 1", 'thread', 'atexit'], str(result))
    result = self.run_warm('def f():\n  raise KeyError(5)\nf()')
    self.assertEqual(result.stderr.count(b'File'), 2, result.stderr)

  def test_standard_streams_open_by_name(self):
    if self.box.tier in ('userns', 'root'):
      script = 'cat /dev/stdin > /dev/stderr; echo out > /dev/stdout'
      result = self.box.run(['sh', '-c', script], limits=QUICK, stdin=b'in')
      self.assertEqual((result.stdout, result.stderr), (b'out\n', b'in'))

  def test_no_program(self):
    result = self.box.run(['no-such-program'], limits=QUICK)
    self.assertEqual((result.verdict, result.returncode), ('contained', 127))
    self.assertIn(b'no-such-program', result.stderr)

  @parameterized.parameters(
      ({'argv': []},), ({'argv': 'ls'},), ({'argv': ['warm-python', '-c']},), ({'argv': ['a\0b']},),
      ({'argv': ['a'], 'files': {'../x': b''}},), ({'argv': ['a'], 'files': {'/x': b''}},),
      ({'argv': ['a'], 'collect': ['a//b']},), ({'argv': ['a'], 'files': {'x': b'', 'x/y': b''}},),
      ({'argv': ['a'], 'files': {'x': b'0' * (65 << 20)}},), ({'argv': ['a\ud800']},),
      ({'argv': ['a'], 'files': {'x' * 300: b''}},),
      ({'argv': ['a'], 'env': {'A=B': 'c'}},))
  def test_malformed_arguments(self, arguments):
    with self.assertRaises(ValueError):
      self.box.run(**arguments)

  def test_run_async(self):
    async def two():
      return await asyncio.gather(*(self.box.run_async(warm(f'print({i})'), limits=QUICK) for i in range(2)))
    self.assertEqual([r.stdout for r in asyncio.run(two())], [b'0\n', b'1\n'])


class LimitsTest(SandboxTest):

  @parameterized.parameters('wall_s', 'cpu_s', 'memory_mb', 'pids', 'output_bytes', 'disk_mb')
  def test_limits_are_checked(self, name):
    for value in (0, -1, float('nan'), float('inf'), '3', True, None):
      with self.assertRaisesRegex(ValueError, name):
        sandbox.Limits(**{name: value})

  def test_wall(self):
    result = self.run_warm('import time; time.sleep(30)', wall_s=0.3)
    self.assertEqual((result.verdict, result.returncode), ('limit:time', -9))
    self.assertBetween(result.wall_s, 0.3, 2.0)

  def test_cpu_of_all_processes_together(self):
    result = self.run_warm('''
        import os
        for i in range(3): os.fork()
        while True: pass''', cpu_s=1)
    self.assertEqual(result.verdict, 'limit:cpu')
    self.assertLess(result.cpu_s, 3)

  def test_cpu_of_children_that_nobody_waits_for(self):
    result = self.run_warm('''
        import os, signal, time
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
          child = os.fork()
          if child == 0:
            end = time.process_time() + 0.2
            while time.process_time() < end: pass
            os._exit(0)
          try: os.waitpid(child, 0)
          except ChildProcessError: pass''', cpu_s=1, wall_s=20)
    self.assertEqual(result.verdict, 'limit:cpu', str(result))

  def test_memory(self):
    result = self.run_warm('x = bytearray(b"x") * (200 << 20)\nimport time\ntime.sleep(1)', memory_mb=100)
    self.assertEqual(result.verdict, 'limit:memory')
    self.assertGreater(result.peak_memory_bytes, 100 << 20)
    self.assertEqual(self.run_warm('x = bytearray(60 << 20)', memory_mb=100).verdict, 'contained')

  def test_memory_that_processes_share_counts_once(self):
    result = self.run_warm('''
        import os, time
        data = b"x" * (60 << 20)
        for i in range(4):
          if os.fork() == 0: time.sleep(0.5); os._exit(0)
        time.sleep(0.5)''', memory_mb=120)
    self.assertEqual(result.verdict, 'contained', str(result))
    self.assertLess(result.peak_memory_bytes, 120 << 20)

  def test_children_that_nobody_waits_for_are_no_offence(self):
    result = self.run_warm('import os, time\nif os.fork() == 0: os._exit(0)\ntime.sleep(3.5)')
    self.assertEqual(result.verdict, 'contained', str(result))

  def test_shared_memory_without_a_file_is_refused(self):
    result = self.run_warm("""
        import mmap
        mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mmap.mmap(-1, 4096)""")
    self.assertIn(b'PermissionError', result.stderr)
    self.assertIn(b'line 4', result.stderr)

  def test_output(self):
    result = self.run_warm('import os\nwhile True: os.write(2, b"x" * 4096)', output_bytes=10000)
    self.assertEqual((result.verdict, len(result.stderr), result.stdout), ('limit:output', 10000, b''))

  def test_disk(self):
    result = self.run_warm('''
        import time
        files = [open(f"file{i}", "wb") for i in range(4)]
        for file in files: file.write(b"x" * (1 << 20)); file.flush()
        for file in files: file.write(b"x" * (1 << 20)); file.flush()
        time.sleep(1)
        print("wrote it all")''', disk_mb=4)
    self.assertNotIn(b'wrote', result.stdout)

  def test_pids(self):
    result = self.run_warm('''
        import os, time
        made = 0
        try:
          for i in range(200):
            if os.fork() == 0: time.sleep(5); os._exit(0)
            made += 1
        except OSError: pass
        print(made, flush=True)''')
    if result.verdict == 'contained':
      self.assertLess(int(result.stdout), 17)
    else:
      self.assertEqual(result.verdict, 'limit:pids')

  def test_the_keeper_cannot_be_fooled_or_starved(self):
    result = self.run_warm('''
        import ctypes, os, time
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(15, b"\\xff) \\n\\x80")  # a process name that is no text
        print(libc.prctl(4, 0, 0, 0, 0), libc.setpriority(0, os.getppid(), 19))
        for change in (lambda: os.sched_setaffinity(os.getppid(), {0}), lambda: os.kill(os.getppid(), 9)):
          try: change()
          except PermissionError: pass
        time.sleep(0.3); print("alive")''')
    self.assertEqual((result.verdict, result.stdout), ('contained', b'-1 -1\nalive\n'), str(result))


  @parameterized.parameters('SIGKILL', 'SIGSTOP')
  def test_a_job_that_signals_all_it_can_is_ended(self, name):
    result = self.run_warm(f'''
        import os, signal
        if os.fork() == 0:
          while True:
            try: os.kill(-1, signal.{name})
            except OSError: pass
        while True: pass''', wall_s=1, cpu_s=10)
    self.assertIn(result.verdict, ('contained', 'limit:time', 'limit:memory'), str(result))
    self.assertLess(result.wall_s, 4)


class InteractiveTest(SandboxTest):

  ECHO = '''
      import os
      while data := os.read(3, 65536): os.write(3, data.upper())
      print("done")'''

  def test_questions_and_answers(self):
    with self.box.start(warm(self.ECHO), limits=QUICK) as job:
      for word in (b'one', b'two'):
        job.send(word)
        self.assertEqual(job.receive(5), word.upper())
      with self.assertRaises(TimeoutError):
        job.receive(0.05)
      result = job.finish()
    self.assertEqual((result.verdict, result.returncode, result.stdout), ('contained', 0, b'done\n'))
    with self.assertRaises(BrokenPipeError):
      job.send(b'late')
    self.assertEqual(job.receive(1), b'')
    self.assertIs(job.finish(), result)

  def test_large_messages_do_not_deadlock(self):
    with self.box.start(warm(self.ECHO), limits=QUICK) as job:
      job.send(b'a' * 900_000)
      got = 0
      while got < 900_000:
        got += len(job.receive(5))
    self.assertEqual(got, 900_000)

  def test_an_ended_job_hangs_up(self):
    with self.box.start(warm('0'), limits=QUICK) as job:
      self.assertEqual(job.receive(5), b'')
      with self.assertRaises(BrokenPipeError):
        for _ in range(100):
          job.send(b'x' * 100_000)
      self.assertEqual(job.finish().returncode, 0)

  def test_leaving_kills(self):
    started = time.monotonic()
    with self.box.start(warm('import time; time.sleep(60)'), limits=QUICK) as job:
      pass
    self.assertLess(time.monotonic() - started, 5)
    self.assertEqual((job.finish().verdict, job.finish().returncode), ('contained', -9))

  def test_a_job_beside_another_needs_no_place(self):
    with self.box.start(warm(self.ECHO), limits=QUICK) as one, self.box.start(warm(self.ECHO), limits=QUICK) as two:
      with self.box.start(warm(self.ECHO), limits=QUICK, beside=one) as third:
        third.send(b'x')
        self.assertEqual(third.receive(5), b'X')
      two.send(b'y')
      self.assertEqual(two.receive(5), b'Y')

  def test_a_flooded_channel_ends_the_job(self):
    with self.box.start(warm('import os\nwhile True: os.write(3, b"x" * 65536)'), limits=QUICK) as job:
      with self.assertRaises(BrokenPipeError):
        while True:
          job.send(b'x' * 100_000)
      self.assertEqual(job.finish().verdict, 'limit:output')


  def test_rights_sent_over_the_channel_hold_nobody_up(self):
    code = """
        import os, socket
        ours = socket.socket(fileno=3)
        for i in range(50): socket.send_fds(ours, [b"x"], [1])
        os._exit(0)"""
    started = time.monotonic()
    with self.box.start(warm(code), limits=QUICK) as job:
      time.sleep(0.3)  # its standard output is in flight, in the queue of its own channel
      self.assertEqual(job.finish().verdict, 'contained')
    self.assertLess(time.monotonic() - started, 3)

  def test_urgent_data_is_data(self):
    code = 'import socket, time\nsocket.socket(fileno=3).send(b"x", socket.MSG_OOB)\ntime.sleep(0.2)'
    with self.box.start(warm(code), limits=QUICK) as job:
      self.assertEqual(job.receive(5), b'x')
      self.assertEqual(job.finish().verdict, 'contained')

  def test_a_child_of_the_trainer_holds_no_end_of_a_job(self):
    with self.box.start(warm('import sys; print(len(sys.stdin.read()))'), limits=QUICK, stdin=b'x' * 300_000) as job:
      child = os.fork()
      if child == 0:
        time.sleep(60)
        os._exit(0)
      self.addCleanup(os.waitpid, child, 0)
      self.addCleanup(os.kill, child, signal.SIGKILL)
      self.assertEqual(job.finish().stdout, b'300000\n')


class TierTest(parameterized.TestCase):

  def test_refuses_below_the_minimum_and_says_why(self):
    with unittest.mock.patch.object(tiers, 'rehearse', side_effect=sandbox.SandboxError('mount proc: refused')), \
         unittest.mock.patch.object(sandbox, '_rehearsed', {}):
      with self.assertRaises(sandbox.SandboxUnavailable) as caught:
        sandbox.Sandbox()
      message = str(caught.exception)
      for name in ('userns', 'root', 'uid'):
        self.assertIn(f'{name}: mount proc: refused\n      fix: {tiers.FIXES[name]}', message)
      self.assertNotIn('landlock:', message)
      with self.assertRaisesRegex(sandbox.SandboxUnavailable, 'landlock: mount proc'):
        sandbox.Sandbox(min_isolation='landlock')

  def test_a_named_tier_below_the_minimum_is_refused(self):
    with self.assertRaisesRegex(sandbox.SandboxUnavailable, "weaker than min_isolation = 'uid'"):
      sandbox.Sandbox(tier='landlock', min_isolation='uid')

  @parameterized.parameters(({}, None), ({}, 'none'), ({sandbox.UNSAFE_SWITCH: '1'}, None),
                            ({sandbox.UNSAFE_SWITCH: '1'}, 'uid'))
  def test_no_isolation_takes_two_keys(self, environment, minimum):
    with unittest.mock.patch.dict(os.environ, environment), self.assertRaises(sandbox.SandboxUnavailable):
      sandbox.Sandbox(tier='none', min_isolation=minimum)

  def test_with_both_keys_it_runs_and_warns(self):
    with unittest.mock.patch.dict(os.environ, {sandbox.UNSAFE_SWITCH: '1'}), self.assertLogs(level='WARNING') as logs:
      with sandbox.Sandbox(tier='none', min_isolation='none', workers=1) as box:
        self.assertEqual(box.run(warm('print(1)'), limits=QUICK).tier, 'none')
    self.assertIn('UNPROTECTED', logs.output[0])

  def test_unknown_names_list_the_known(self):
    for arguments in ({'tier': 'docker'}, {'min_isolation': 'strong'}):
      with self.assertRaisesRegex(ValueError, 'userns'):
        sandbox.Sandbox(**arguments)

  def test_a_rehearsal_that_finds_a_breach_fails_the_tier(self):
    printed = b'BREACH read a file of the host\nDONE 1 x\n'
    result = sandbox.JobResult('contained', 0, printed, b'', {'out.txt': b'written'}, 0, 0, 0, 'uid')
    with self.assertRaisesRegex(sandbox.SandboxError, 'read a file of the host'):
      tiers._judge('uid', result, 'x')

  def test_a_step_that_the_kernel_denies_is_named(self):
    wrong_for_this_user = 'landlock' if os.geteuid() == 0 else 'root'
    with self.assertRaisesRegex(sandbox.SandboxError, wrong_for_this_user):
      tiers.launch(wrong_for_this_user, ())

  def test_never_imports_jax(self):
    code = 'import sys; from ptjax.verify import sandbox; assert not [m for m in sys.modules if m.startswith("jax")]'
    subprocess.run([sys.executable, '-c', code], check=True,
                   env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)})


if __name__ == '__main__':
  absltest.main()
