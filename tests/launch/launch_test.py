"""The shell scripts: what they would run, from any directory, with what a user passes."""

import os
import pathlib
import shlex
import subprocess
import sys
import time

from absl.testing import absltest, parameterized

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Stands in for Python with ptjax: says what it was asked to run. Process 1 ends as FAIL says, the others wait for it.
FAKE_PYTHON = f"""#!/usr/bin/env bash
if [ "$1" = -c ]; then exec {shlex.quote(sys.executable)} "$@"; fi
printf '%s\\n' "$@"
case "$*" in
  *process_id=1*) exit "${{FAIL:-0}}" ;;
  *process_id=*) [ "${{FAIL:-0}}" = 0 ] || exec sleep 60 ;;
esac
"""


class LaunchTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = self.create_tempdir().full_path
    fake = pathlib.Path(self.directory, 'python')
    fake.write_text(FAKE_PYTHON)
    fake.chmod(0o755)
    self.fake = str(fake)

  def script(self, name: str, *args: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(ROOT / 'launch' / name), *args], cwd=self.directory, capture_output=True, text=True, timeout=60,
        env={**os.environ, 'PTJAX_PYTHON': self.fake, **env}, stdin=subprocess.DEVNULL,
    )

  def test_quickstart_defaults(self):
    done = self.script('quickstart.sh')
    self.assertEqual(done.stdout.split('\n')[:-1], [
        '-m', 'ptjax.main', f'--config={ROOT}/configs/quickstart.py', f'--workdir={ROOT}/runs/quickstart',
    ])

  def test_quickstart_passes_overrides_and_finds_its_configs_from_anywhere(self):
    done = self.script('quickstart.sh', '--config.rl.steps=5', '--config=configs/base.py', '--workdir=here', '--a=b c')
    self.assertEqual(done.stdout.split('\n')[2:-1], [
        f'--config={ROOT}/configs/base.py', '--workdir=here', '--config.rl.steps=5', '--a=b c',
    ])
    pathlib.Path(self.directory, 'mine.py').touch()
    self.assertIn('--config=mine.py\n', self.script('quickstart.sh', '--config=mine.py').stdout)

  def test_tests_and_continuous_integration_are_one_command(self):
    self.assertIn('launch/test.sh', (ROOT / '.ci' / 'run').read_text())
    self.assertIn('pytest\n', self.script('test.sh', 'tests/house').stdout)

  def test_local_starts_every_process(self):
    done = self.script('local.sh', '2', '--config=x.py', f'--workdir={self.directory}/run')
    self.assertEqual(done.returncode, 0, done.stderr)
    first = done.stdout.split('\n')
    second = pathlib.Path(self.directory, 'run', 'process_1.log').read_text().split('\n')
    self.assertEqual(first[:5], second[:5])  # the same job, at the same coordinator
    self.assertEqual(first[5:-1], ['--num_processes=2', '--process_id=0'])
    self.assertEqual(second[5:-1], ['--num_processes=2', '--process_id=1'])

  def test_local_ends_when_one_process_breaks(self):
    start = time.monotonic()
    done = self.script('local.sh', '2', '--config=x.py', FAIL='3')
    self.assertEqual(done.returncode, 3)
    self.assertLess(time.monotonic() - start, 30)

  def test_tpu_vm_dry_run(self):
    done = self.script('tpu_vm.sh', '--dry-run', 'pod', 'us-east5-a', '--config=configs/rl.py', '--config.name=a b')
    archive, copy, start = (shlex.split(line) for line in done.stdout.splitlines())
    self.assertEqual(archive[:2], ['git', 'archive'])
    self.assertEqual(copy[:5], ['gcloud', 'compute', 'tpus', 'tpu-vm', 'scp'])
    self.assertEqual(start[:8], [
        'gcloud', 'compute', 'tpus', 'tpu-vm', 'ssh', 'pod', '--zone=us-east5-a', '--worker=all'])
    remote = shlex.split(start[8].removeprefix('--command='))
    self.assertEqual(remote[-6:], [
        '$python', '-m', 'ptjax.main', '--coordinator=auto', '--config=configs/rl.py', '--config.name=a b'])

  def test_tpu_vm_says_what_it_needs(self):
    done = self.script('tpu_vm.sh', '--dry-run', 'pod')
    self.assertEqual(done.returncode, 2)
    self.assertIn('NAME ZONE --config=FILE', done.stderr)

  def test_a_machine_without_a_usable_python_is_told_in_one_line(self):
    copy = pathlib.Path(self.directory, 'repository', 'launch')
    copy.mkdir(parents=True)
    for name in ('venv.sh', 'constraints.txt'):
      (copy / name).write_bytes((ROOT / 'launch' / name).read_bytes())
    (copy.parent / 'pyproject.toml').write_bytes((ROOT / 'pyproject.toml').read_bytes())
    tools = pathlib.Path(self.directory, 'bin')
    tools.mkdir()
    for tool in ('bash', 'cat', 'cksum', 'dirname'):
      (tools / tool).symlink_to(subprocess.check_output(['which', tool], text=True).strip())
    done = subprocess.run(
        [tools / 'bash', copy / 'venv.sh'], env={'PATH': str(tools)}, capture_output=True, text=True)
    self.assertEqual(done.returncode, 1)
    self.assertEqual(len(done.stderr.splitlines()), 1)
    self.assertIn('needs Python 3.11 or 3.12', done.stderr)


if __name__ == '__main__':
  absltest.main()
