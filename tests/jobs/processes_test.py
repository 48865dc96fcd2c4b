"""One device, eight devices and two processes give the same losses."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile

from absl.testing import absltest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FLAGS = ['--config.tasks.train_per_domain=12', '--config.eval.tasks_per_domain=2', '--config.sft.steps=12',
         '--config.rl.steps=2', "--config.pipeline.stages=('sft','rl')", '--config.gate.enabled=False']


def losses(processes, devices):
  """(stage, step, loss) of every step, run by `processes` processes of `devices` CPU devices each."""
  workdir = tempfile.mkdtemp(dir=os.environ['TEST_TMPDIR'])
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    port = s.getsockname()[1]
  env = dict(os.environ, JAX_NUM_CPU_DEVICES=str(devices), PYTHONPATH=str(ROOT))
  running = []
  for i in range(processes):
    flags = [f'--coordinator=127.0.0.1:{port}', f'--num_processes={processes}', f'--process_id={i}']
    running.append(subprocess.Popen(
        [sys.executable, '-m', 'ptjax.main', f'--config={ROOT}/configs/quickstart_tiny.py', f'--workdir={workdir}',
         *FLAGS, *(flags if processes > 1 else [])],
        env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
  for process in running:
    _, shown = process.communicate(timeout=600)
    if process.returncode:
      raise AssertionError(shown[-3000:])
  lines = [json.loads(line) for line in pathlib.Path(workdir, 'metrics.jsonl').read_text().splitlines()]
  return [(line['stage'], line['step'], line[f'{line["stage"]}/loss'], line.get('rl/reward_mean', 0.0))
          for line in lines]


class ProcessesTest(absltest.TestCase):

  def test_the_layout_changes_no_loss(self):
    want = losses(1, 1)
    self.assertLen(want, 14)
    for processes, devices in ((1, 8), (2, 1)):
      with self.subTest(processes=processes, devices=devices):
        got = losses(processes, devices)
        self.assertEqual([x[:2] for x in got], [x[:2] for x in want])
        for (_, step, loss, reward), (_, _, other, reward_other) in zip(got, want):
          self.assertAlmostEqual(loss, other, delta=1e-3, msg=f'step {step}')
          self.assertEqual(reward, reward_other)


if __name__ == '__main__':
  absltest.main()
