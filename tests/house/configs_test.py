"""Every config file builds and passes its checks, and every field of configs/base.py is read by the code."""

import ast
import importlib.util
import pathlib
import re

from absl.testing import absltest

from ptjax import config

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILES = sorted(p for p in (ROOT / 'configs').rglob('*.py') if p.name != '__init__.py')


def build(path: pathlib.Path):
  spec = importlib.util.spec_from_file_location('config_under_test', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config()


def fields_read(names: list[str]) -> set[str]:
  """Which of these fields ptjax reads: as config.rl.steps or settings['loss'], or by passing a whole section on.

  A field of a section that is passed on (**config.sampler, objectives.preference(config.dpo)) counts as read where a
  parameter or a dataclass field has its name.
  """
  attributes, subscripts, passed_on, parameters = set(), set(), set(), set()
  for path in (ROOT / 'ptjax').rglob('*.py'):
    if path == ROOT / 'ptjax' / 'config.py':
      continue
    nodes = list(ast.walk(ast.parse(path.read_text())))
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
      if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        attributes.add(node.attr)
        if id(node) not in inner:
          passed_on.add(node.attr)
      elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        subscripts.add(node.slice.value)
      elif isinstance(node, ast.arg):
        parameters.add(node.arg)
      elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        parameters.add(node.target.id)
  found = set()
  for name in names:
    section, _, leaf = name.rpartition('.')
    if leaf in attributes or (section in passed_on and leaf in parameters | subscripts):
      found.add(name)
  return found


class ConfigsTest(absltest.TestCase):

  def test_each_builds_and_validates(self):
    base = build(ROOT / 'configs' / 'base.py')
    for path in FILES:
      with self.subTest(path.name):
        built = build(path)
        self.add_documented_files(built, path)
        config.validate(built, base, where=path.name)
        self.assertEqual({name for name, _ in config.leaves(built)}, {name for name, _ in config.leaves(base)})

  def add_documented_files(self, built, path):
    """Sets the fields that the command in the file's docstring sets to a JSONL of the user's own."""
    mine = self.create_tempfile('mine.jsonl').full_path
    for name in re.findall(r'--config\.([\w.]+)=\w+\.jsonl', ast.get_docstring(ast.parse(path.read_text()))):
      built.update_from_flattened_dict({name: mine})

  def test_experiments_are_short_and_say_how_they_are_run(self):
    for path in FILES:
      if path.name != 'base.py':
        with self.subTest(path.name):
          self.assertLessEqual(len(path.read_text().splitlines()), 60)
          self.assertIn(f'--config=configs/{path.name}', ast.get_docstring(ast.parse(path.read_text())))

  def test_every_field_is_read(self):
    names = [name for name, _ in config.leaves(build(ROOT / 'configs' / 'base.py'))]
    self.assertEqual(sorted(set(names) - fields_read(names)), [])


if __name__ == '__main__':
  absltest.main()
