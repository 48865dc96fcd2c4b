"""Imports point downwards only, and what must run without jax does."""

import ast
import pathlib
import re
import subprocess
import sys

from absl.testing import absltest, parameterized

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Bottom to top. A module is in the layer of its longest listed prefix; it may import its own layer and those below.
LAYERS = (
    ('types',),
    ('models', 'learn', 'verify'),
    ('data', 'sample', 'weights', 'tasks', 'learn.trainer'),
    ('rl', 'learn.supervised', 'evals', 'runtime'),
    ('config', 'serve', 'pipeline', 'jobs', 'main'),
)
SHARDING_ONLY = ('models', 'sample', 'weights', 'learn')  # of runtime, these may import `devices` and no more
NO_RUNTIME = ('types', 'verify', 'tasks', 'data')

NO_JAX = ('types', 'verify', 'tasks', 'config')


def modules() -> dict[str, pathlib.Path]:
  """Name below ptjax ('learn.losses') -> file."""
  found = {}
  for path in sorted((ROOT / 'ptjax').rglob('*.py')):
    parts = path.relative_to(ROOT / 'ptjax').with_suffix('').parts
    found['.'.join(parts[:-1] if parts[-1] == '__init__' else parts)] = path
  found.pop('')
  return found


def imports(path: pathlib.Path, known: set[str]) -> set[str]:
  """Modules of ptjax that a file imports anywhere in it."""
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and (node.module or '').split('.')[0] == 'ptjax':
      base = node.module.removeprefix('ptjax').removeprefix('.')
      for alias in node.names:
        full = f'{base}.{alias.name}'.removeprefix('.')
        found.add(full if full in known else base)
    elif isinstance(node, ast.Import):
      found |= {a.name.removeprefix('ptjax.') for a in node.names if a.name.startswith('ptjax.')}
  return found


def layer(module: str) -> int:
  matches = [
      (len(prefix), i) for i, names in enumerate(LAYERS) for prefix in names if f'{module}.'.startswith(f'{prefix}.')
  ]
  if not matches:
    raise AssertionError(f'ptjax.{module} is in no layer; add it to LAYERS')
  return max(matches)[1]


def inside(module: str, packages: tuple[str, ...]) -> bool:
  return any(f'{module}.'.startswith(f'{package}.') for package in packages)


class LayeringTest(absltest.TestCase):

  def test_imports_point_down(self):
    files, wrong = modules(), []
    for module, path in files.items():
      for target in imports(path, set(files)):
        if target == 'runtime.devices' and inside(module, SHARDING_ONLY):
          continue
        if layer(target) > layer(module) or (inside(target, ('runtime',)) and inside(module, NO_RUNTIME)):
          wrong.append(f'ptjax.{module} imports ptjax.{target}')
    self.assertEqual(wrong, [])

  def test_the_parser_sees_imports(self):
    files = modules()
    self.assertIn('runtime.devices', imports(files['learn.trainer'], set(files)))

  def test_no_relative_imports(self):
    for module, path in modules().items():
      for node in ast.walk(ast.parse(path.read_text())):
        self.assertFalse(isinstance(node, ast.ImportFrom) and node.level, f'{module} has a relative import')


class NoJaxTest(parameterized.TestCase):

  def test_parts_that_never_start_jax(self):
    files = modules()
    # Files that run inside the sandbox import their neighbours by bare name, so they are not importable from here.
    neighbours = {name.split('.')[-1] for name in files if name.startswith('verify.')} - set(sys.stdlib_module_names)
    bare = re.compile(rf'^ *import ({"|".join(neighbours)})\b', re.MULTILINE)
    names = [
        f'ptjax.{name}' for name, path in files.items() if inside(name, NO_JAX) and not bare.search(path.read_text())
    ]
    self.assertGreater(len(names), 5)
    code = (
        'import importlib, sys\n'
        f'for name in {names!r}:\n'
        '  importlib.import_module(name)\n'
        '  loaded = {"jax", "jaxlib", "flax", "optax", "orbax"} & {m.split(".")[0] for m in sys.modules}\n'
        '  assert not loaded, f"{name} loads {loaded}"\n'
    )
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    self.assertEqual(done.returncode, 0, done.stderr[-2000:])


if __name__ == '__main__':
  absltest.main()
