"""BUILD, pyproject.toml and launch/constraints.txt name what is there, and agree with what the code imports."""

import ast
import glob
import importlib.metadata
import pathlib
import re
import sys
import tomllib

from absl.testing import absltest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())
EXTRAS = PYPROJECT['project']['optional-dependencies']
# Names under which distributions are imported, where it is not their own with - for _.
IMPORTED_AS = {
    'absl-py': 'absl', 'jinja2': 'jinja2', 'ml-collections': 'ml_collections', 'orbax-checkpoint': 'orbax',
    'ipykernel': None,  # started by nbclient, never imported
    'pytest-xdist': None,  # the -n of launch/test.sh
}


def distribution(requirement: str) -> str:
  return re.match(r'[A-Za-z0-9_.-]+', requirement).group().lower().replace('_', '-')


def required(*extras: str) -> set[str]:
  names = set()
  for extra in extras:
    listed = PYPROJECT['project']['dependencies'] if not extra else EXTRAS[extra]
    names |= {distribution(r) for r in listed}
  return names


def imported(folder: str) -> set[str]:
  """Top-level modules from outside the standard library that the files of a folder import."""
  found = set()
  for path in (ROOT / folder).rglob('*.py'):
    if path.is_relative_to(ROOT / 'tests' / 'data'):
      continue
    # What runs inside the sandbox imports its neighbours by bare name.
    siblings = {p.stem for p in path.parent.glob('*.py')} if 'verify' in path.parts else set()
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Import):
        found |= {a.name.split('.')[0] for a in node.names} - siblings
      elif isinstance(node, ast.ImportFrom) and not node.level:
        found.add(node.module.split('.')[0])
  return found - set(sys.stdlib_module_names) - {'ptjax', 'configs', 'tests'}


def evaluate_build() -> tuple[list[dict], set[str]]:
  """The targets of BUILD as dicts, and the pip requirements it names."""
  targets, requirements = [], set()

  def target(rule: str):
    return lambda **fields: targets.append({'rule': rule, **fields})

  def requirement(name: str) -> str:
    requirements.add(name)
    return f'@pip//{name}'

  def glob_files(patterns: list[str]) -> list[str]:
    found = []
    for pattern in patterns:
      matched = sorted(p for p in glob.glob(pattern, root_dir=ROOT, recursive=True) if (ROOT / p).is_file())
      assert matched, f'glob {pattern} matches nothing'
      found += matched
    return found

  loaded = []
  scope = {
      'load': lambda *names: loaded.extend(names), 'glob': glob_files, 'requirement': requirement,
      'package': lambda **_: None, 'licenses': lambda _: None, 'exports_files': lambda names: glob_files(names),
      **{rule: target(rule) for rule in ('py_library', 'py_binary', 'py_test')},
      '__builtins__': {'len': len},
  }
  exec(compile((ROOT / 'BUILD').read_text(), 'BUILD', 'exec'), scope)  # the Starlark in it is also Python
  assert {'py_library', 'py_binary', 'py_test', 'requirement'} <= set(loaded), loaded
  return targets, requirements


class BuildTest(absltest.TestCase):

  def test_sources_and_labels_exist(self):
    targets, _ = evaluate_build()
    names = [t['name'] for t in targets]
    self.assertEqual(len(names), len(set(names)))
    for target in targets:
      for source in target['srcs']:
        self.assertTrue((ROOT / source).is_file(), source)
      for label in [*target.get('deps', []), *target.get('data', [])]:
        if label.startswith(':'):
          self.assertIn(label[1:], names)
        elif not label.startswith('@pip//'):
          self.assertTrue((ROOT / label).is_file(), label)

  def test_every_source_is_in_a_target(self):
    targets, _ = evaluate_build()
    listed = {source for t in targets for source in t['srcs']}
    there = {
        p.relative_to(ROOT).as_posix() for pattern in ('ptjax/**/*.py', 'configs/**/*.py', 'tests/**/*_test.py')
        for p in ROOT.glob(pattern)
    }
    self.assertEqual(there - listed, set())

  def test_requirements_are_those_of_pyproject(self):
    targets, _ = evaluate_build()
    (library,) = [t for t in targets if t['name'] == 'ptjax']
    self.assertEqual({distribution(d.removeprefix('@pip//')) for d in library['deps']}, required(''))
    test_deps = {d.removeprefix('@pip//') for t in targets if t['rule'] == 'py_test' for d in t['deps'] if '@' in d}
    self.assertLessEqual(test_deps, required('test', 'notebooks'))

  def test_no_versions(self):
    self.assertIsNone(re.search(r'\d+\.\d+', (ROOT / 'BUILD').read_text()))

  def test_flags_of_tests_are_those_of_conftest(self):
    targets, _ = evaluate_build()
    conftest = (ROOT / 'tests' / 'conftest.py').read_text()
    for name, value in next(t['env'] for t in targets if t['rule'] == 'py_test').items():
      self.assertIn(f"{name}='{value}'", conftest)


class DependenciesTest(absltest.TestCase):

  def test_imports_are_required_and_requirements_imported(self):
    wanted = {IMPORTED_AS.get(d, d.replace('-', '_')): d for d in required('') if IMPORTED_AS.get(d, d)}
    found = {m.lower() for m in imported('ptjax') | imported('configs')}
    self.assertEqual(found - set(wanted), set(), 'imported, but not in the dependencies of pyproject.toml')
    self.assertEqual(set(wanted) - found, set(), 'in the dependencies of pyproject.toml, but never imported')

  def test_imports_of_tests_are_in_the_test_extra(self):
    wanted = {IMPORTED_AS.get(d, d.replace('-', '_')) for d in required('', 'test', 'notebooks', 'reference')}
    self.assertEqual({m.lower() for m in imported('tests')} - wanted, set())
    only_reference = {d.replace('-', '_') for d in required('reference') - required('', 'test', 'notebooks')}
    for path in (ROOT / 'tests').rglob('*_test.py'):
      self.assertEqual(set(re.findall(r'^\s*(?:import|from) (\w+)', path.read_text(), re.M)) & only_reference, set())

  def test_every_requirement_is_pinned_to_what_is_installed(self):
    pins = {}
    for line in (ROOT / 'launch' / 'constraints.txt').read_text().splitlines():
      if line and not line.startswith('#'):
        requirement, _, marker = line.partition(';')
        name, _, version = requirement.strip().partition('==')
        older = sys.version_info < (3, 12)
        if not marker or (older == ('<' in marker)):
          pins[distribution(name)] = version
    for name in required('', 'test', 'notebooks') - {'ptjax'}:
      self.assertEqual(pins.get(name), importlib.metadata.version(name), name)

  def test_no_index_or_path_in_the_files_of_installation(self):
    for name in ('pyproject.toml', 'launch/constraints.txt'):
      text = (ROOT / name).read_text()
      self.assertNotRegex(text, r'index-url|find-links|file:|https?://|/opt/|/work/')


if __name__ == '__main__':
  absltest.main()
