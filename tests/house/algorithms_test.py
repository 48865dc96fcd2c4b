"""Every algorithm that a config may name exists, is named in the config's rules, and has the settings it needs."""

from absl.testing import absltest

from configs import base
from ptjax import config
from ptjax.learn import advantages, losses, objectives, off_policy, policy_losses

TABLES = {
    'dpo.loss': losses.PREFERENCE_LOSSES, 'rl.advantage': advantages.ADVANTAGES,
    'rl.policy_loss': policy_losses.POLICY_LOSSES, 'rl.aggregation': policy_losses.AGGREGATIONS,
    'rl.kl': policy_losses.KL_ESTIMATORS, 'rl.correction': off_policy.CORRECTIONS}


class AlgorithmsTest(absltest.TestCase):

  def test_the_rules_name_the_rows_of_the_tables(self):
    self.assertEqual({name: sorted(table) for name, table in TABLES.items()},
                     {name: sorted(rows) for name, rows in config.ALGORITHMS.items()})

  def test_every_row_can_be_built_from_the_base_config(self):
    for name, rows in config.ALGORITHMS.items():
      section, field = name.split('.')
      for row in rows:
        with self.subTest(f'{name}={row}'):
          settings = base.get_config()[section]
          settings[field] = row
          build = objectives.preference if section == 'dpo' else objectives.policy
          build(settings)

  def test_an_unknown_name_is_refused_before_anything_runs(self):
    built = base.get_config()
    built.rl.kl = 'k7'
    with self.assertRaisesRegex(ValueError, r"rl\.kl = 'k7': must be one of .*k3_ratio"):
      config.validate(built, base.get_config())


if __name__ == '__main__':
  absltest.main()
