"""Which stages made the model that a small job uses, and what the user's own tasks weigh."""

from types import SimpleNamespace

from absl.testing import absltest, parameterized

from configs import base
from ptjax import jobs, pipeline, types
from ptjax.data import chat
from ptjax.data.tokenizer import byte_level
from ptjax.runtime import lineage

SOURCE = base.get_config().model.source


class FinishedStagesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = self.create_tempdir().full_path
    self.config = base.get_config()
    self.fields = pipeline.relevant(self.config, ['base'])
    self.hours = 0

  def add(self, stage, parent, parent_hash=None, passed=True, finished=True):
    self.hours += 1
    parents = {parent: ('' if parent == SOURCE else f'hash of {parent}') if parent_hash is None else parent_hash}
    lineage.write(self.workdir, lineage.Manifest(
        stage=stage, parents=parents, config=self.fields, config_hash=f'hash of {stage}', seed=0,
        gate=None if stage == 'base' else dict(passed=passed), started=f'2026-01-01T{self.hours:02}:00:00+00:00',
        finished=lineage.now() if finished else None))

  def stages(self, stage='last'):
    self.config.model.stage = stage
    return pipeline.finished_stages(self.config, self.workdir)

  def test_a_chain(self):
    for stage, parent in (('base', SOURCE), ('sft', 'base'), ('dpo', 'sft'), ('rl', 'dpo')):
      self.add(stage, parent)
    self.assertEqual(self.stages(), ['base', 'sft', 'dpo', 'rl'])
    self.assertEqual(self.stages('sft'), ['base', 'sft'])
    self.assertEqual(self.stages('base'), [])

  def test_siblings_are_not_stacked(self):
    for stage in ('sft', 'rl'):
      self.add('base', SOURCE)
      self.add(stage, 'base')
    self.assertEqual(self.stages(), ['base', 'rl'])
    self.assertEqual(self.stages('sft'), ['base', 'sft'])

  def test_a_stage_of_a_parent_that_was_replaced_is_left_out(self):
    self.add('base', SOURCE)
    self.add('sft', 'base')
    self.add('dpo', 'sft', parent_hash='hash of an older sft')
    self.add('rl', 'dpo')
    self.assertEqual(self.stages(), ['base', 'sft'])
    with self.assertRaisesRegex(ValueError, "'rl': has not finished in workdir .*which has .'base', 'sft'.*fix:"):
      self.stages('rl')

  def test_a_blocked_stage_is_used_only_by_name_and_a_sibling_goes_on(self):
    self.add('base', SOURCE)
    self.add('sft', 'base', passed=False)
    self.add('rl', 'base')
    self.assertEqual(self.stages(), ['base', 'rl'])
    self.assertEqual(self.stages('sft'), ['base', 'sft'])

  def test_unfinished_and_missing(self):
    with self.assertRaisesRegex(ValueError, "'last': has not finished.*--config.model.stage=base"):
      self.stages()
    self.add('base', SOURCE)
    self.add('sft', 'base', finished=False)
    self.assertEqual(self.stages(), ['base'])


  def test_a_source_with_other_contents(self):
    self.fields['model.source contents'] = 'of an older file'
    self.add('base', SOURCE)
    with self.assertRaisesRegex(ValueError, 'trained from other contents of .*fix:'):
      self.stages()


class IdentityTest(absltest.TestCase):

  def test_what_is_in_a_data_file_is_part_of_the_stage(self):
    config = base.get_config()
    path = self.create_tempfile(content='one').full_path
    config.sft.data = path
    before = lineage.digest(pipeline.relevant(config, ['base', 'sft']))
    with open(path, 'w', encoding='utf-8') as f:
      f.write('two')
    self.assertNotEqual(before, lineage.digest(pipeline.relevant(config, ['base', 'sft'])))
    self.assertEqual(lineage.digest(pipeline.relevant(config, ['base'])),
                     lineage.digest(pipeline.relevant(base.get_config(), ['base'])))


class PromptsTest(absltest.TestCase):

  def test_a_prompt_without_room_is_named_before_any_work(self):
    config, tokenizer = base.get_config(), byte_level()
    long = types.Task(id='d/long', domain='d', messages=({'role': 'user', 'content': 'word ' * 40},),
                      verifier='exact', reference='1')
    need = len(chat.encode_prompt(tokenizer, long.messages))
    parts = SimpleNamespace(tokenizer=tokenizer, heldout_tasks=[long], train_tasks={'d': {0: [long]}})
    config.sampler.max_context = need + config.eval.max_tokens
    config.rl.seq_len = need + config.rl.max_tokens
    pipeline.check_prompts(config, parts, ('sft', 'dpo', 'rl'))
    config.rl.seq_len -= 1
    pipeline.check_prompts(config, parts, ('sft', 'dpo'))
    with self.assertRaisesRegex(ValueError, f'd/long.*rl.max_tokens.*--config.rl.seq_len={config.rl.seq_len + 1}'):
      pipeline.check_prompts(config, parts, ('rl',))
    config.sampler.max_context -= 1
    with self.assertRaisesRegex(ValueError, 'd/long.*eval.max_tokens.*--config.sampler.max_context='):
      pipeline.check_prompts(config, parts, ())


class ExportTest(absltest.TestCase):

  def test_refuses_before_any_work(self):
    config, output = base.get_config(), self.create_tempdir()
    config.model.source = output.full_path
    with self.assertRaisesRegex(ValueError, 'is the model source itself.*fix:'):
      jobs.export(config, workdir='', output=output.full_path + '/')
    config.model.source = SOURCE
    output.create_file('adapter/adapter_config.json')
    with self.assertRaisesRegex(ValueError, 'adapter is of an earlier export.*fix:'):
      jobs.export(config, workdir='', output=output.full_path)


class DomainWeightsTest(absltest.TestCase):

  def test_weights_go_by_name(self):
    config = base.get_config()
    config.tasks.domains, config.tasks.weights = ('math', 'code'), (3.0, 1.0)
    self.assertEqual(pipeline.domain_weights(config, {'code': {}, 'math': {}}), {'math': 3.0, 'code': 1.0})
    with self.assertRaisesRegex(ValueError, 'weights are for the domains .*fix:'):
      pipeline.domain_weights(config, {'code': {}, 'logic': {}})

  def test_more_domains_than_the_least_share_allows(self):
    with self.assertRaisesRegex(ValueError, r'min_share = 0\.05: 21 domains'):
      pipeline.domain_weights(base.get_config(), {str(i): {} for i in range(21)})


if __name__ == '__main__':
  absltest.main()
