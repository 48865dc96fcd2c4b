"""The report opens offline, shows what a run left, escapes what models wrote, and survives missing pieces."""

from html import parser
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile

from absl.testing import absltest

from ptjax.evals import gates
from ptjax.evals import report
from ptjax.evals import suites
from ptjax.runtime import lineage
from ptjax.runtime import metrics

HOSTILE = '</pre><script>alert("x")</script><img src=x onerror=alert(1)>$\\frac{$\x00\u202e\ud800{{ 7*7 }}'
DOMAINS = ('products', 'chain_sum', 'functions', '<b>gcd</b> $x_1')
STAGES = {'base': (None, 0.2, 0.3), 'sft': ('base', 0.5, 0.9), 'dpo': ('sft', 0.52, 0.95), 'rl': ('dpo', 0.7, 0.98)}


def make_suite(rate, form, rng, tasks=40):
  """Returns a suite in which a task is right when its difficulty, fixed but for some luck, is below the rate."""
  results = []
  for d, domain in enumerate(DOMAINS):
    for i in range(tasks):
      right = (7 * i % tasks) / tasks + 0.1 * rng.random() < rate + 0.12 * (d - 1.5)
      results.append(suites.TaskResult(f'{domain}/{i}', domain, 'd', (float(right),), ('pass' if right else 'fail',),
                                       (rng.random() < form,), (False,), HOSTILE))
  return suites.summarise(results, name='heldout', samples=1, ks=(1,), majority={d: 0.1 for d in DOMAINS},
                          confidence=0.95)


def write_stage(workdir, stage, parent, suite, parent_suite, *, enabled=True):
  gate = None
  if parent_suite is not None:
    gate = gates.compare(parent_suite, suite, confidence=0.95, max_drop=0.02).to_json() | {'enabled': enabled}
  config = {'model': {'source': 'random:tiny'}, 'stage': {'lr': 1e-4 if stage == 'rl' else 1e-3, 'note': HOSTILE}}
  manifest = lineage.begin(stage, parents={parent: 'a' * 64} if parent else {'pypi:model==1': 'b' * 64},
                           config=config, seed=1, overrides=['stage.note=' + HOSTILE])
  manifest.gate, manifest.checkpoint, manifest.finished = gate, f'{stage}/checkpoints/9', lineage.now()
  manifest.data = {'train.jsonl': 'c' * 64, 'mixture': {d: 0.25 for d in DOMAINS}}
  manifest.metrics = {f'{stage}/loss': 0.25}
  lineage.write(workdir, manifest)
  suites.save(suite, os.path.join(workdir, stage, 'eval.json'))


def write_metrics(workdir, steps, rng):
  for stage in ('sft', 'dpo', 'rl'):
    with metrics.Metrics(workdir, stage) as writer:
      for step in range(1, steps + 1):
        noise, done = rng.random(), step / steps
        groups = {'optim': {'grad_norm': 1 + noise, 'lr': 1e-3 * (1 - done)}, 'perf': {'tokens_per_s': 90 + 9 * noise}}
        if stage == 'rl':
          share = 0.1 + 0.2 * done
          groups['rl'] = {
              'reward_mean': 0.5 * done + 0.3 * noise, 'kl': 0.05 * done,
              'entropy': float('nan') if step == 3 else 0.4, 'logp_diff_mean': 1e-6 * (1 + noise),
              'logp_diff_max': 1e-5 * (1 + noise), 'length_mean': 20 - 9 * done, 'curriculum': {
                  d: {'share_frac': s, 'level': round(2 * done * s)}
                  for d, s in zip(DOMAINS, (share, 0.3, 0.3, 0.4 - share))},
              'reward': {d: noise * done for d in DOMAINS}}
          groups['verify'] = {'pass': int(40 * done), 'fail': 60 - int(40 * done), 'timeout': 3, 'error': step % 2}
        else:
          groups[stage] = {'loss': 2 / (1 + 9 * done) + 0.1 * noise, 'accuracy': 0.5 + 0.4 * done}
        writer.write(step, **groups)


def write_rollouts(workdir, count):
  with open(os.path.join(workdir, 'rl', 'rollouts.jsonl'), 'w', encoding='utf-8') as f:
    for i in range(count):
      status = ('pass', 'fail', 'timeout', 'error')[i % 4]
      f.write(json.dumps({
          'step': i, 'task_id': f't{i}', 'domain': DOMAINS[i % 3], 'prompt': 'What is 3 + 4?\nEnd with "Answer: ".',
          'completion': HOSTILE if i % 5 == 0 else '3 + 4 = 7\nAnswer: 7', 'status': status, 'score': 0.5,
          'format_ok': True, 'reference': {'answer': '7'}}) + '\n')


def make_run(workdir, steps=30):
  rng, parents = random.Random(0), {None: None}
  for stage, (parent, rate, form) in STAGES.items():
    parents[stage] = make_suite(rate, form, rng)
    write_stage(workdir, stage, parent, parents[stage], parents[parent])
  write_metrics(workdir, steps, rng)
  write_rollouts(workdir, 200)


class Outline(parser.HTMLParser):
  """Collects the tags, attributes and visible text of a page, runs of space made one."""

  def __init__(self, path):
    super().__init__()
    self.tags, self.attributes, self.parts = [], [], []
    self.feed(path.read_text(encoding='utf-8'))
    self.text = ' '.join(''.join(self.parts).split())

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.attributes += attrs

  def handle_data(self, data):
    if self.tags[-1:] != ['style']:
      self.parts.append(data)


class WholeRunTest(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.workdir = tempfile.mkdtemp(dir=os.environ.get('TEST_TMPDIR'))
    make_run(cls.workdir)
    cls.page = Outline(report.write(cls.workdir))

  def test_says_what_was_gained(self):
    evals = {stage: suites.load(os.path.join(self.workdir, stage, 'eval.json')) for stage in STAGES}
    gain = gates.compare(evals['base'], evals['rl'], confidence=0.95, max_drop=0.0).macro.change
    self.assertIn(f'+{100 * gain:.1f} points', self.page.text)
    self.assertIn('base → rl', self.page.text)
    self.assertIn('rl beat its parent dpo: +', self.page.text)

  def test_has_every_part(self):
    for part in ('A gain in right answers', 'Verifier outcomes', 'Curriculum: share of tasks', 'KL to the reference',
                 'Sampler minus trainer', 'SFT loss', 'constant answer', 'gate: passed', 'stage.lr: 0.001 → 0.0001'):
      self.assertIn(part, self.page.text)
    data, changed_configs = 4, 1
    self.assertEqual(self.page.tags.count('pre'), 3 * report.SHOWN_ROLLOUTS + data + changed_configs)
    self.assertEqual(self.page.tags.count('svg'), 16)

  def test_hostile_text_stays_text(self):
    self.assertNoCommonElements({'script', 'img', 'iframe', 'link', 'object', 'b'}, set(self.page.tags))
    self.assertEmpty([name for name, _ in self.page.attributes if name.startswith('on') or name == 'src'])
    for part in ('<script>alert("x")</script>', '<b>gcd</b> $x_1', '{{ 7*7 }}'):
      self.assertIn(part, self.page.text)
    self.assertNotRegex(self.page.text, '[\x00\u202e]')

  def test_opens_offline(self):
    links = [value for name, value in self.page.attributes if name in ('href', 'xlink:href')]
    self.assertNotEmpty(links)
    self.assertEmpty([link for link in links if not link.startswith('#')])
    self.assertIn(('content', "default-src 'none'; style-src 'unsafe-inline'"), self.page.attributes)

  def test_rollouts_show_every_domain_and_verdict(self):
    rows = report.collect(self.workdir).rollouts
    self.assertLen(rows, report.SHOWN_ROLLOUTS)
    self.assertEqual([row['status'] for row in rows[:12:3]], ['pass', 'fail', 'timeout', 'error'])
    self.assertEqual({row['domain'] for row in rows}, set(DOMAINS[:3]))
    self.assertGreater(min(row['step'] for row in rows), 170)


class PartialRunTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = self.create_tempdir().full_path

  def outline(self):
    path = report.write(self.workdir)
    self.assertEqual(path, pathlib.Path(self.workdir, 'report.html'))
    return Outline(path)

  def test_an_empty_workdir(self):
    page = self.outline()
    for part in ('No stage has been evaluated yet', 'No metrics', 'No rollouts', 'No stage has left a manifest'):
      self.assertIn(part, page.text)

  def test_only_the_base(self):
    write_stage(self.workdir, 'base', None, make_suite(0.3, 0.5, random.Random(0)), None)
    self.assertIn('the only stage to show', self.outline().text)

  def test_stages_without_a_manifest_keep_their_order(self):
    rng = random.Random(0)
    write_stage(self.workdir, 'sft', 'zero', make_suite(0.5, 0.5, rng, tasks=4), None)
    for stage in ('zero', 'late', 'after'):  # a parent, and two that no manifest names
      os.makedirs(os.path.join(self.workdir, stage))
      suites.save(make_suite(0.5, 0.5, rng, tasks=4), os.path.join(self.workdir, stage, 'eval.json'))
    os.makedirs(os.path.join(self.workdir, 'sft.replaced-1'))
    suites.save(make_suite(0.5, 0.5, rng, tasks=4), os.path.join(self.workdir, 'sft.replaced-1', 'eval.json'))
    self.assertEqual(list(report.collect(self.workdir).evals), ['zero', 'sft', 'late', 'after'])

  def test_a_blocked_stage_is_not_the_result(self):
    rng = random.Random(0)
    base, good, bad = make_suite(0.3, 0.5, rng), make_suite(0.8, 1.0, rng), make_suite(0.3, 1.0, rng)
    write_stage(self.workdir, 'base', None, base, None)
    write_stage(self.workdir, 'sft', 'base', good, base)
    write_stage(self.workdir, 'rl', 'sft', bad, good)
    page = self.outline()
    self.assertIn('base → sft', page.text)
    self.assertIn('The gate blocked rl', page.text)
    self.assertIn('rl fell behind its parent sft', page.text)
    write_stage(self.workdir, 'rl', 'sft', bad, good, enabled=False)
    page = self.outline()
    self.assertIn('base → rl', page.text)
    self.assertIn('failed, gate off', page.text)
    self.assertNotIn('blocked', page.text)

  def test_broken_pieces_are_named_and_do_not_stop_the_rest(self):
    rng = random.Random(0)
    for stage, (parent, rate, form) in STAGES.items():
      write_stage(self.workdir, stage, parent, make_suite(rate, form, rng, tasks=4), None)
    write_rollouts(self.workdir, 4)
    with open(os.path.join(self.workdir, 'rl', 'rollouts.jsonl'), 'a', encoding='utf-8') as f:
      f.write('{"step": 3}\n[]\nno\n')
    for name, text in (('sft/eval.json', '{'), ('dpo/manifest.json', '{'), ('metrics.jsonl', '{\n{"stage": "rl"}\n')):
      pathlib.Path(self.workdir, name).write_text(text, encoding='utf-8')
    page = self.outline()
    for part in ('eval.json is not an evaluation result', 'manifest.json is not a manifest',
                 '3 lines are not rollouts', 'metrics.jsonl, line 1 is not JSON', 'Answer: 7', 'base → rl'):
      self.assertIn(part, page.text)

  def test_other_tasks_are_said_not_compared(self):
    rng = random.Random(0)
    write_stage(self.workdir, 'base', None, make_suite(0.3, 0.5, rng), None)
    write_stage(self.workdir, 'sft', 'base', make_suite(0.3, 0.5, rng, tasks=10), None)
    self.assertIn('cannot compare evaluations of different tasks', self.outline().text)

  def test_never_imports_jax(self):
    code = 'import sys; from ptjax.evals import report; sys.exit("jax" in sys.modules)'
    self.assertEqual(subprocess.run([sys.executable, '-c', code], check=False).returncode, 0)


if __name__ == '__main__':
  absltest.main()
