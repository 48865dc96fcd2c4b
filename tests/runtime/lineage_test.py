"""Manifests: written whole, compared by field, chained by parent, and never reused for another config."""

import json
import os
import pathlib
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized

from ptjax.runtime import lineage, metrics


def make_manifest(stage, parents=(), config=None, **fields):
  config = config or {'rl': {'lr': 0.1, 'steps': 5}}
  fields = {'finished': lineage.now(), 'started': '2026-01-01T00:00:00+00:00', **fields}
  return lineage.Manifest(stage=stage, parents={p: 'hash of ' + p for p in parents}, config=config,
                          config_hash=lineage.digest(config), seed=1, **fields)


class LineageTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = self.create_tempdir().full_path

  def test_written_is_read_the_same(self):
    manifest = lineage.begin('rl', parents={'dpo': 'abc'}, config={'rl': {'lr': 0.1, 'ks': (1, 8)}}, seed=3,
                             overrides=['rl.lr=0.1'], devices=['cpu'])
    self.assertIsNone(manifest.finished)
    self.assertEqual(manifest.versions['python'].split('.')[0], '3')
    self.assertNotEqual(manifest.versions['jax'], 'not installed')
    path = lineage.write(self.workdir, manifest)
    self.assertEqual(path, pathlib.Path(self.workdir, 'rl', 'manifest.json'))
    self.assertEmpty(lineage.diff(lineage.read(self.workdir, 'rl'), manifest))
    self.assertEqual(os.listdir(path.parent), ['manifest.json'])

  def test_absent_and_broken(self):
    self.assertIsNone(lineage.read(self.workdir, 'rl'))
    os.makedirs(os.path.join(self.workdir, 'rl'))
    for text in ('{"stage": "rl"}', '{"sta', '[1]'):
      pathlib.Path(self.workdir, 'rl', 'manifest.json').write_text(text, encoding='utf-8')
      with self.assertRaisesRegex(RuntimeError, 'is not a manifest'):
        lineage.read(self.workdir, 'rl')

  def test_digest_does_not_depend_on_order(self):
    self.assertEqual(lineage.digest({'a': 1, 'b': [1, 2]}), lineage.digest({'b': [1, 2], 'a': 1}))
    self.assertNotEqual(lineage.digest({'a': 1}), lineage.digest({'a': 2}))

  def test_diff(self):
    a = make_manifest('rl', config={'rl': {'lr': 0.1, 'steps': 5}, 'x': {}})
    b = make_manifest('rl', config={'rl': {'lr': 0.2, 'steps': 5, 'clip': 1}, 'x': {}}, finished=a.finished)
    changed = lineage.diff(a, b)
    self.assertEqual(changed.pop('config_hash'), (a.config_hash, b.config_hash))
    self.assertEqual(changed, {'config.rl.lr': (0.1, 0.2), 'config.rl.clip': (None, 1)})

  def test_diff_does_not_see_how_json_writes_things(self):
    a = {'stages': (('a', 1), pathlib.Path('x')), 'none': None, 'empty': {}}
    self.assertEmpty(lineage.diff_fields(a, {'stages': [['a', 1], 'x'], 'none': None, 'empty': {}}))

  def test_chain_puts_parents_first(self):
    for stage, parents in (('rl', ['dpo']), ('dpo', ['sft']), ('base', ['pypi:model==1']), ('sft', ['base'])):
      lineage.write(self.workdir, make_manifest(stage, parents))
    self.assertEqual([m.stage for m in lineage.chain(self.workdir)], ['base', 'sft', 'dpo', 'rl'])
    self.assertEmpty(lineage.chain(self.create_tempdir()))

  def test_a_circle_is_an_error(self):
    lineage.write(self.workdir, make_manifest('a', ['b']))
    lineage.write(self.workdir, make_manifest('b', ['a']))
    with self.assertRaisesRegex(RuntimeError, "each other's parents"):
      lineage.chain(self.workdir)


class IsDoneTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = self.create_tempdir().full_path
    self.config = {'rl': {'lr': 0.1, 'steps': 5}}
    self.hash = lineage.digest(self.config)
    self.other = {'rl': {'lr': 0.3, 'steps': 5}}

  def is_done(self, config, **kwargs):
    return lineage.is_done(self.workdir, 'rl', lineage.digest(config), config=config, **kwargs)

  def test_states(self):
    self.assertFalse(self.is_done(self.config))
    lineage.write(self.workdir, make_manifest('rl', config=self.config, finished=None))
    self.assertFalse(self.is_done(self.config))
    lineage.write(self.workdir, make_manifest('rl', config=self.config))
    self.assertTrue(self.is_done(self.config))

  @parameterized.parameters(None, '2026-01-01T00:00:00+00:00')
  def test_another_config_is_an_error_that_says_what_differs(self, finished):
    lineage.write(self.workdir, make_manifest('rl', config=self.config, finished=finished))
    with self.assertRaisesRegex(ValueError, r'rl\.lr was 0\.1, is 0\.3\n.*new --workdir.*--config\.') as caught:
      self.is_done(self.other)
    self.assertNotIn('steps', str(caught.exception))
    with self.assertRaisesRegex(ValueError, f'config hash was {self.hash[:12]}, is 0123'):
      lineage.is_done(self.workdir, 'rl', '0123')

  def test_another_parent_is_an_error(self):
    lineage.write(self.workdir, make_manifest('rl', ['dpo'], config=self.config))
    self.assertTrue(self.is_done(self.config, parents={'dpo': 'hash of dpo'}))
    with self.assertRaisesRegex(ValueError, "parent dpo was 'hash of dpo', is 'new'"):
      self.is_done(self.config, parents={'dpo': 'new'})

  def set_aside(self, config, rerun):
    lineage.set_aside_changed(self.workdir, 'rl', lineage.digest(config), rerun=rerun)
    return not os.path.exists(os.path.join(self.workdir, 'rl'))

  def test_rerun_sets_the_old_stage_aside(self):
    for number in (1, 2):
      lineage.write(self.workdir, make_manifest('rl', config=self.config))
      self.assertFalse(self.set_aside(self.config, rerun=True))
      self.assertFalse(self.set_aside(self.other, rerun=False))
      self.assertTrue(self.set_aside(self.other, rerun=True))
      self.assertTrue(os.path.exists(os.path.join(self.workdir, f'rl.replaced-{number}', 'manifest.json')))
    self.assertEmpty(lineage.chain(self.workdir))

  def test_an_unfinished_stage_is_set_aside_unasked_only_before_its_first_checkpoint(self):
    lineage.write(self.workdir, make_manifest('rl', config=self.config, finished=None))
    self.assertFalse(self.set_aside(self.config, rerun=False))
    os.makedirs(os.path.join(self.workdir, 'rl', 'checkpoints', '5'))
    self.assertFalse(self.set_aside(self.other, rerun=False))
    os.rmdir(os.path.join(self.workdir, 'rl', 'checkpoints', '5'))
    self.assertTrue(self.set_aside(self.other, rerun=False))


  def test_checkpoints_without_a_manifest_are_set_aside_and_metrics_go_with_the_stage(self):
    self.assertTrue(self.set_aside(self.config, rerun=False))
    os.makedirs(os.path.join(self.workdir, 'rl', 'checkpoints', '5'))
    with metrics.Metrics(self.workdir, 'rl') as written:
      written.write(0, rl={'kl': 0.5})
    self.assertTrue(self.set_aside(self.config, rerun=False))
    kept = os.path.join(self.workdir, 'rl.replaced-1', 'metrics.jsonl')
    self.assertEqual([json.loads(line)['rl/kl'] for line in open(kept, encoding='utf-8')], [0.5])

  def test_a_workdir_is_written_to_by_one_run(self):
    with lineage.locked(self.workdir):
      with self.assertRaisesRegex(ValueError, 'another run is writing to .*fix:'):
        with lineage.locked(self.workdir):
          pass
    with lineage.locked(self.workdir):
      pass


class CodeRevisionTest(absltest.TestCase):

  def git(self, *args):
    subprocess.run(['git', '-C', self.root, '-c', 'user.name=t', '-c', 'user.email=t@t', *args], check=True,
                   capture_output=True)

  def setUp(self):
    super().setUp()
    self.root = self.create_tempdir().full_path
    self.package = pathlib.Path(self.root, 'ptjax')
    (self.package / 'runtime').mkdir(parents=True)
    (self.package / 'runtime' / 'lineage.py').write_text('x = 1\n', encoding='utf-8')
    self.git('init')
    pathlib.Path(self.root, 'other').write_text('x', encoding='utf-8')
    self.git('add', 'other')
    self.git('commit', '-m', 'first')

  def test_installed_in_another_repository(self):
    self.assertIn('version', lineage.code_revision(self.package))

  def test_checkout(self):
    self.git('add', '.')
    self.git('commit', '-m', 'second')
    revision = lineage.code_revision(self.package)
    self.assertRegex(revision['commit'], '^[0-9a-f]{40}$')
    self.assertFalse(revision['dirty'])
    (self.package / 'runtime' / 'lineage.py').write_text('x = 2\n', encoding='utf-8')
    self.assertTrue(lineage.code_revision(self.package)['dirty'])

  def test_no_repository(self):
    self.assertEqual(list(lineage.code_revision(self.create_tempdir().full_path)), ['version'])

  def test_never_imports_jax(self):
    code = 'import sys; from ptjax.runtime import lineage; lineage.versions(); sys.exit("jax" in sys.modules)'
    self.assertEqual(subprocess.run([sys.executable, '-c', code], check=False).returncode, 0)


if __name__ == '__main__':
  absltest.main()
