"""--job=serve as a process: from the command line to the first answer, and to its end by a signal."""

import os
import pathlib
import re
import signal
import subprocess
import sys

from absl.testing import absltest
import openai

ROOT = pathlib.Path(__file__).resolve().parents[2]
SMALL = ('--config.model.source=random:tiny', '--config.sampler.slots=2', '--config.sampler.window=4',
         '--config.sampler.pages=0', '--config.serve.port=0', '--config.serve.model_name=tiny')


class JobTest(absltest.TestCase):

  def test_serves_until_a_signal(self):
    env = dict(os.environ, JAX_NUM_CPU_DEVICES='1')
    process = subprocess.Popen([sys.executable, '-m', 'ptjax.main', '--job=serve', *SMALL], cwd=ROOT, env=env,
                               stderr=subprocess.PIPE, text=True)
    self.addCleanup(process.kill)
    lines = []
    for line in process.stderr:
      lines.append(line)
      if found := re.search(r'serving tiny on (http://127\.0\.0\.1:\d+/v1) without API keys', line):
        break
    else:
      self.fail(''.join(lines))
    client = openai.OpenAI(base_url=found[1], api_key='none', max_retries=2)
    stream = client.completions.create(model='tiny', prompt='hi', max_tokens=100, stream=True, seed=1,
                                       extra_body={'ignore_eos': True})
    chunks = [next(stream)]
    process.send_signal(signal.SIGTERM)
    chunks += stream  # what is in flight is finished
    self.assertEqual(chunks[-1].choices[0].finish_reason, 'length')
    _, log = process.communicate(timeout=60)
    self.assertEqual(process.returncode, 0, log)
    self.assertNotIn('Traceback', log)

  def test_refuses_before_any_work(self):
    done = subprocess.run([sys.executable, '-m', 'ptjax.main', '--job=serve', '--config.serve.host=0.0.0.0'], cwd=ROOT,
                          capture_output=True, text=True, check=False)
    self.assertEqual(done.returncode, 1)
    self.assertIn('serve.api_key_file', done.stderr)


if __name__ == '__main__':
  absltest.main()
