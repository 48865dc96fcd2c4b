"""Hostile programs, in every tier: each must be held, and the host must be as it was. A tier that this host cannot
give must say so and refuse."""

import concurrent.futures
import json
import os
import pathlib
import shutil
import socket
import subprocess
import tempfile
import uuid

from absl.testing import absltest, parameterized

from ptjax.verify import sandbox
from ptjax.verify.sandbox import tiers

PROGRAMS = pathlib.Path(__file__).parent.parent / 'data' / 'sandbox'
LIMITS = sandbox.Limits(wall_s=8, cpu_s=4, memory_mb=256, pids=32, output_bytes=1 << 20, disk_mb=16)
SLEEPERS = sandbox.Limits(**{**vars(LIMITS), 'wall_s': 1.5})  # for programs that only time can end


class Host:
  """What the programs try to reach: files, an environment variable, a process, and sockets of four kinds."""

  def __init__(self):
    self.token, self.secret = uuid.uuid4().hex[:12], f'SECRET-{uuid.uuid4().hex}'
    self.folder = tempfile.mkdtemp(prefix='ptjax_corpus_', dir='/tmp')
    os.chmod(self.folder, 0o755)
    self.secret_path, self.canary = f'{self.folder}/secret.txt', f'{self.folder}/canary'
    os.mkdir(self.canary)
    for path, text, mode in ((self.secret_path, self.secret, 0o644), (f'{self.canary}/canary.txt', 'ORIGINAL', 0o666)):
      pathlib.Path(path).write_text(text)
      os.chmod(path, mode)
    os.chmod(self.canary, 0o777)
    self.variable = f'ENVCANARY-{uuid.uuid4().hex}'
    self.victim = subprocess.Popen(['/bin/sleep', '300'], env={'CORPUS_CANARY_TOKEN': self.variable})
    self.listeners = [self._listen(family, address) for family, address in (
        (socket.AF_INET, ('127.0.0.1', 0)), (socket.AF_UNIX, f'\0corpus{self.token}'),
        (socket.AF_UNIX, f'{self.folder}/host.sock'))]
    os.chmod(f'{self.folder}/host.sock', 0o777)
    self.datagrams = []
    for family, address in ((socket.AF_INET, ('127.0.0.1', 0)), (socket.AF_UNIX, f'{self.folder}/datagrams.sock')):
      self.datagrams.append(socket.socket(family, socket.SOCK_DGRAM))
      self.datagrams[-1].bind(address)
      self.datagrams[-1].setblocking(False)
    os.chmod(f'{self.folder}/datagrams.sock', 0o777)

  def _listen(self, family, address) -> socket.socket:
    listener = socket.socket(family)
    listener.bind(address)
    listener.listen()
    listener.setblocking(False)
    return listener

  def parameters(self) -> str:
    return json.dumps({
        **vars(LIMITS), 'secret': self.secret_path, 'secret_value': self.secret, 'env_canary': self.variable,
        'victim_pid': self.victim.pid, 'port': self.listeners[0].getsockname()[1],
        'udp_port': self.datagrams[0].getsockname()[1],
        'datagram_path': f'{self.folder}/datagrams.sock', 'abstract': f'corpus{self.token}',
        'unix_path': f'{self.folder}/host.sock', 'canary_dir': self.canary, 'token': self.token, 'pair': self.token})

  def harm(self) -> list[str]:
    """What was touched, and what still runs."""
    found = []
    if self.victim.poll() is not None:
      found.append('a process of the host was killed')
    if os.listdir(self.canary) != ['canary.txt'] or pathlib.Path(self.canary, 'canary.txt').read_text() != 'ORIGINAL':
      found.append('a file of the host was changed')
    for waiting in (*self.listeners, *self.datagrams):
      try:
        waiting.recv(1) if waiting in self.datagrams else waiting.accept()[0].close()
        found.append(f'{waiting.getsockname()!r} was reached')
      except BlockingIOError:
        continue
    for pid in filter(str.isdigit, os.listdir('/proc')):
      try:
        if f'corpus-{self.token}'.encode() in pathlib.Path('/proc', pid, 'cmdline').read_bytes():
          found.append(f'process {pid} still runs')
      except OSError:
        continue
    return found

  def close(self):
    self.victim.kill()
    self.victim.wait()
    for one in (*self.listeners, *self.datagrams):
      one.close()
    shutil.rmtree(self.folder)


class CorpusTest(parameterized.TestCase):

  def check(self, box: sandbox.Sandbox, host: Host, row: dict) -> list[str]:
    """Runs one program; returns what went wrong."""
    source = (PROGRAMS / f'{row["id"]}.py').read_text().replace('@PARAMS@', host.parameters())
    limits = SLEEPERS if 'limit:time' in row['accept'] else LIMITS
    result = box.run([box.interpreter, '-I', 'prog.py'], files={'prog.py': source}, limits=limits)
    output = (result.stdout + result.stderr).decode(errors='replace')
    wrong = [line for line in output.splitlines() if line.startswith('BREACH')]
    if host.secret in output or host.variable in output:
      wrong.append('a secret is in the output')
    if result.verdict not in row['accept']:
      wrong.append(f'{result.verdict}, accepted are {row["accept"]}')
    if result.wall_s > limits.wall_s + 2 or len(output) > LIMITS.output_bytes:
      wrong.append(f'{result.wall_s} s, {len(output)} characters')
    return wrong + [f'{text} was not printed' for text in row.get('must_print', []) if text not in output]

  @parameterized.parameters('userns', 'root', 'uid', 'landlock')
  def test_every_program_is_held(self, tier):
    failed = sandbox.survey()[tier]
    if failed:
      with self.assertRaises(sandbox.SandboxUnavailable) as caught:
        sandbox.Sandbox(tier=tier)
      self.assertIn(failed, str(caught.exception))
      self.assertIn(tiers.FIXES[tier], str(caught.exception))
      return
    host = Host()
    self.addCleanup(host.close)
    rows = json.loads((PROGRAMS / 'programs.json').read_text())
    pair = [row for row in rows if row['id'].startswith('cross_job')]
    with sandbox.Sandbox(tier=tier, workers=4) as box, concurrent.futures.ThreadPoolExecutor(4) as threads:
      alone = [row for row in rows if row not in pair]
      found = threads.map(lambda row: self.check(box, host, row), alone)
      wrong = {row['id']: problems for row, problems in zip(alone, found)}
      wrong |= {row['id']: self.check(box, host, row) for row in pair}  # the second looks for traces of the first
    self.assertEqual({name: problems for name, problems in wrong.items() if problems}, {})
    self.assertEmpty(host.harm())


if __name__ == '__main__':
  absltest.main()
