"""The whole pipeline at tiny size, as a user runs it: stages, gates, report, kill -9 and resume, and the small jobs."""

import glob
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

from absl.testing import absltest
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHORT = ['--config.tasks.train_per_domain=12', '--config.eval.tasks_per_domain=3', '--config.rl.steps=3',
         '--config.dpo.steps=2', '--config.sft.steps=40', '--config.gate.enabled=False']


def command(*flags, config='configs/quickstart_tiny.py'):
  return [sys.executable, '-m', 'ptjax.main', f'--config={ROOT / config}', *flags]


def run(*flags, stdin='', **kwargs):
  """Standard output of one job of one CPU device; fails with what it logged."""
  env = dict(os.environ, JAX_NUM_CPU_DEVICES='1', PYTHONPATH=str(ROOT))
  done = subprocess.run(command(*flags, **kwargs), input=stdin, env=env, capture_output=True, text=True, timeout=600)
  if done.returncode:
    raise AssertionError(f'{flags} ended with {done.returncode}:\n{done.stderr[-3000:]}')
  return done.stdout


def start(workdir):
  return subprocess.Popen(command(f'--workdir={workdir}', *SHORT), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                          env=dict(os.environ, JAX_NUM_CPU_DEVICES='1', PYTHONPATH=str(ROOT)))


def numbers(workdir):
  """Every metric of every step but what depends on the clock."""
  clock = re.compile(r'time$|perf/|seconds/|.*(/|_)seconds$|.*_per_s$')
  lines = [json.loads(line) for line in open(os.path.join(workdir, 'metrics.jsonl'), encoding='utf-8')]
  return [{k: v for k, v in line.items() if not clock.match(k)} for line in lines]


def kill_when(process, happened, timeout_s=300):
  """kill -9 as soon as `happened()`; returns whether it came before the process ended."""
  deadline = time.monotonic() + timeout_s
  while time.monotonic() < deadline and process.poll() is None:
    if happened():
      process.send_signal(signal.SIGKILL)
      process.wait()
      return True
    time.sleep(0.002)
  process.wait()
  return False


class PipelineTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.workdir = tempfile.mkdtemp(dir=os.environ['TEST_TMPDIR'])
    cls.shown = run(f'--workdir={cls.workdir}', *SHORT)

  def manifest(self, stage):
    return json.loads(pathlib.Path(self.workdir, stage, 'manifest.json').read_text())

  def test_every_stage_is_evaluated_gated_and_recorded(self):
    parent = None
    for stage in ('base', 'sft', 'dpo', 'rl'):
      manifest = self.manifest(stage)
      self.assertIsNotNone(manifest['finished'])
      self.assertEqual(parent is None or list(manifest['parents']) == [parent], True)
      self.assertEqual(manifest['gate'] is None, stage == 'base')
      self.assertLen(json.loads(pathlib.Path(self.workdir, stage, 'eval.json').read_text())['tasks'], 9)
      parent = stage
    self.assertIn('average', self.shown)

  def test_the_loss_falls_and_the_sampler_agrees_with_the_trainer(self):
    lines = numbers(self.workdir)
    loss = [line['sft/loss'] for line in lines if line['stage'] == 'sft']
    self.assertLess(np.mean(loss[-5:]), 0.5 * np.mean(loss[:5]))
    rl = [line for line in lines if line['stage'] == 'rl']
    self.assertLen(rl, 3)
    for line in rl:
      self.assertLessEqual(line['rl/logp_diff_mean'], 1e-5)
      self.assertLessEqual(line['rl/logp_diff_max'], 1e-4)

  def test_the_report_holds_every_stage(self):
    page = pathlib.Path(self.workdir, 'report.html').read_text()
    for stage in ('base', 'sft', 'dpo', 'rl'):
      self.assertIn(stage, page)

  def test_a_finished_run_runs_nothing_again(self):
    before = {path: os.stat(path).st_mtime_ns for path in glob.glob(f'{self.workdir}/*/manifest.json')}
    run(f'--workdir={self.workdir}', *SHORT)
    self.assertEqual({path: os.stat(path).st_mtime_ns for path in before}, before)

  def test_a_finished_stage_is_judged_by_the_gate_as_it_is_set_now(self):
    before = self.manifest('rl')['gate']
    run(f'--workdir={self.workdir}', *SHORT, '--config.gate.max_drop=1.0')
    self.assertEqual((self.manifest('rl')['gate']['max_drop'], self.manifest('rl')['gate']['passed']), (1.0, True))
    run(f'--workdir={self.workdir}', *SHORT)
    self.assertEqual(self.manifest('rl')['gate'], before)

  def test_a_job_without_the_stage_it_is_to_use_says_so(self):
    with self.assertRaisesRegex(AssertionError, 'has not finished in workdir'):
      run('--job=generate', f'--workdir={self.workdir}-mistyped', stdin='{"id": 1, "prompt": "a"}')
    with self.assertRaisesRegex(AssertionError, 'token id 999999 is outside'):
      run('--job=score', f'--workdir={self.workdir}', stdin='{"id": 1, "token_ids": [1, 999999]}')

  def test_another_config_is_refused_with_the_difference(self):
    with self.assertRaisesRegex(AssertionError, r"rl\.lr was .* is 0\.5"):
      run(f'--workdir={self.workdir}', *SHORT, '--config.rl.lr=0.5')

  def test_killed_anywhere_it_ends_with_the_same_bits(self):
    workdir = tempfile.mkdtemp(dir=os.environ['TEST_TMPDIR'])
    logged = lambda stage, step: lambda: any(
        f'"stage": "{stage}", "step": {step},' in line for path in glob.glob(f'{workdir}/metrics.jsonl')
        for line in open(path, encoding='utf-8'))
    saving = lambda: glob.glob(f'{workdir}/sft/checkpoints/*tmp*')
    for happened in (logged('sft', 5), saving, lambda: glob.glob(f'{workdir}/dpo/pairs.jsonl'), logged('rl', 1)):
      self.assertTrue(kill_when(start(workdir), happened))
    self.assertEqual(start(workdir).wait(600), 0)
    self.assertEqual(numbers(workdir), numbers(self.workdir))
    for stage in ('base', 'sft', 'dpo', 'rl'):
      read = lambda where: json.loads(pathlib.Path(where, stage, 'eval.json').read_text())
      self.assertEqual(read(workdir), read(self.workdir))

  def test_sigterm_saves_and_ends_well_then_goes_on(self):
    workdir = tempfile.mkdtemp(dir=os.environ['TEST_TMPDIR'])
    process = start(workdir)
    deadline = time.monotonic() + 300
    while not any('"sft"' in open(p).read() for p in glob.glob(f'{workdir}/metrics.jsonl')):
      self.assertLess(time.monotonic(), deadline)
      time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    self.assertEqual(process.wait(120), 0)
    saved = max(int(pathlib.Path(p).name) for p in glob.glob(f'{workdir}/sft/checkpoints/[0-9]*'))
    self.assertEqual([line['step'] for line in numbers(workdir)], list(range(saved)))

  def test_generate_keeps_order_and_ids(self):
    lines = [{'id': 'b', 'prompt': 'one'},
             {'id': 7, 'messages': [{'role': 'user', 'content': 'What is the GCD of 4 and 6?'}]}]
    out = run('--job=generate', f'--workdir={self.workdir}', '--config.generate.max_tokens=6',
              '--config.generate.samples=2', '--config.generate.temperature=1.0',
              stdin='\n'.join(map(json.dumps, lines)))
    records = [json.loads(line) for line in out.splitlines()]
    self.assertEqual([(r['id'], r['sample']) for r in records], [('b', 0), ('b', 1), (7, 0), (7, 1)])
    for r in records:
      self.assertLen(r['logprobs'], len(r['token_ids']))
      self.assertLessEqual(len(r['token_ids']), 6)
      self.assertIn(r['finish_reason'], ('stop', 'length'))

  def test_score_equals_the_log_probs_of_generate(self):
    prompt = 'one two'
    drawn = json.loads(run('--job=generate', f'--workdir={self.workdir}', '--config.generate.max_tokens=5',
                           stdin=json.dumps({'id': 1, 'prompt': prompt})))
    out = run('--job=score', f'--workdir={self.workdir}', stdin='\n'.join(json.dumps(x) for x in (
        {'id': 'text', 'prompt': prompt, 'completion': 'three'},
        {'id': 'ids', 'token_ids': drawn['token_ids'] + [5, 6]})))
    text, by_ids = (json.loads(line) for line in out.splitlines())
    self.assertLen(text['token_ids'], 5)
    self.assertLen(by_ids['logprobs'], len(by_ids['token_ids']) - 1)
    for record in (text, by_ids):
      self.assertAlmostEqual(record['sum'], math.fsum(record['logprobs']), delta=1e-4)
      self.assertTrue(all(x < 0 for x in record['logprobs']))

  def test_bad_lines_are_named(self):
    for job, line, message in (
        ('generate', '{"id": 1}', '"prompt"'), ('score', '{"id": 1, "prompt": "a"}', '"completion"'),
        ('generate', '{"id": 1, "prompt": 3}', 'prompt'), ('generate', '{"id"', 'JSON')):
      with self.subTest(job=job, line=line), self.assertRaisesRegex(AssertionError, f'(?s):1.*{message}'):
        run(f'--job={job}', f'--workdir={self.workdir}', stdin=line)

  def test_a_prompt_without_room_for_what_is_asked_is_named(self):
    line = json.dumps({'id': 'long', 'prompt': 'a' * 240})
    with self.assertRaisesRegex(AssertionError, "'long': .*--config.sampler.max_context="):
      run('--job=generate', f'--workdir={self.workdir}', '--config.generate.max_tokens=64', stdin=line)

  def test_export_loads_as_a_directory_with_the_same_scores(self):
    line = json.dumps({'id': 1, 'token_ids': [5, 6, 7, 8]})
    want = json.loads(run('--job=score', f'--workdir={self.workdir}', stdin=line))
    target = os.path.join(self.workdir, 'exported')
    run('--job=export', f'--workdir={self.workdir}', f'--output={target}')
    got = json.loads(run('--job=score', f'--config.model.source={target}', stdin=line))
    np.testing.assert_allclose(got['logprobs'], want['logprobs'], atol=1e-5)
    apart = os.path.join(self.workdir, 'apart')
    run('--job=export', f'--workdir={self.workdir}', f'--output={apart}', '--config.export.merge_lora=False')
    self.assertEqual(json.loads(pathlib.Path(apart, 'adapter', 'adapter_config.json').read_text())['r'], 4)

  def test_eval_of_a_finished_stage_repeats_its_numbers(self):
    target = os.path.join(self.workdir, 'again.json')
    run('--job=eval', f'--workdir={self.workdir}', f'--output={target}', *SHORT)
    again = json.loads(pathlib.Path(target).read_text())
    self.assertEqual(again['macro'], json.loads(pathlib.Path(self.workdir, 'rl', 'eval.json').read_text())['macro'])


if __name__ == '__main__':
  absltest.main()
