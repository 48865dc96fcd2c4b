"""The record that a stage leaves behind: enough to repeat it, compare it with another, or roll it back.

A manifest is written when a stage starts (`finished` is None) and again when it ends. A stage directory whose manifest
belongs to another config, or to another parent, is never reused in silence: that is an error which says what differs
and how to go on. No jax here, so that jobs which need no accelerator can read manifests.
"""

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import datetime
import fcntl
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
from typing import Any

from absl import logging

from ptjax.runtime import metrics

FILE_NAME = 'manifest.json'
RERUN_FLAG = '--config.pipeline.rerun_changed=True'
_PACKAGES = ('ptjax', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy', 'grain', 'tokenizers')


@dataclasses.dataclass
class Manifest:
  """Where a stage came from and what it came to; every field is plain JSON."""

  stage: str
  parents: dict[str, str]  # stage (or model source) -> its config hash (or file hash)
  config: dict[str, Any]  # resolved, every field
  config_hash: str  # sha256 of `config`
  seed: int
  overrides: list[str] = dataclasses.field(default_factory=list)  # as given on the command line
  data: dict[str, Any] = dataclasses.field(default_factory=dict)  # hashes and the mixture as it was drawn
  code: dict[str, Any] = dataclasses.field(default_factory=dict)  # see code_revision
  versions: dict[str, str] = dataclasses.field(default_factory=dict)
  machine: dict[str, Any] = dataclasses.field(default_factory=dict)
  metrics: dict[str, Any] = dataclasses.field(default_factory=dict)  # the last values of the stage
  gate: dict[str, Any] | None = None  # GateResult.to_json(), None where no gate was asked for
  checkpoint: str | None = None  # relative to the workdir
  started: str | None = None  # ISO 8601, UTC
  finished: str | None = None  # None while the stage runs, or was stopped


def begin(stage: str, *, parents: Mapping[str, str], config: Mapping[str, Any], seed: int,
          overrides: Sequence[str] = (), config_hash: str | None = None,
          devices: Sequence[str] = ()) -> Manifest:
  """Returns the manifest of a stage that starts now on this machine with this code.

  Args:
    config_hash: of `config`; by default `digest(config)`.
    devices: what the stage runs on, such as 'TPU v5e' once per device.
  """
  return Manifest(
      stage=stage, parents=dict(parents), config=dict(config), config_hash=config_hash or digest(config), seed=seed,
      overrides=list(overrides), code=code_revision(), versions=versions(), machine=machine(devices),
      started=now())


def write(workdir: str | os.PathLike, manifest: Manifest) -> pathlib.Path:
  """Writes <workdir>/<stage>/manifest.json, whole or not at all, and returns its path."""
  path = _path(workdir, manifest.stage)
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(f'{FILE_NAME}.partial')
  with open(partial, 'w', encoding='utf-8') as f:
    json.dump(dataclasses.asdict(manifest), f, indent=1, sort_keys=True, default=str)
    f.flush()
    os.fsync(f.fileno())
  os.replace(partial, path)
  return path


@contextlib.contextmanager
def locked(workdir: str | os.PathLike):
  """Holds the workdir for this process while stages are written to it; the system lets go when the process ends.

  Raises:
    ValueError: another process holds it.
  """
  path = pathlib.Path(workdir) / '.lock'
  path.parent.mkdir(parents=True, exist_ok=True)
  with open(path, 'w', encoding='utf-8') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise ValueError(f'another run is writing to {path.parent}; fix: wait for it or stop it, or another --workdir'
                       ) from None
    except OSError as error:  # a file system without locks
      logging.warning('%s cannot be locked (%s): do not start the same run twice', path, error.strerror)
    yield


def read(workdir: str | os.PathLike, stage: str) -> Manifest | None:
  """Returns the stage's manifest, or None if it has none.

  Raises:
    RuntimeError: the file is there but is not a manifest.
  """
  path = _path(workdir, stage)
  if not path.exists():
    return None
  try:
    return Manifest(**json.loads(path.read_text(encoding='utf-8')))
  except (json.JSONDecodeError, TypeError) as e:
    raise RuntimeError(f'{path} is not a manifest ({e}); move {path.parent} away and run the stage again') from e


def is_done(workdir: str | os.PathLike, stage: str, config_hash: str, *, config: Mapping[str, Any] | None = None,
            parents: Mapping[str, str] | None = None) -> bool:
  """Returns whether the stage has finished with this config (and these parents, when given).

  False also means that it may start or go on: its directory is empty or belongs to the same config.

  Args:
    config: this run's config, to say which fields differ.

  Raises:
    ValueError: the directory belongs to another config or other parents.
  """
  manifest = read(workdir, stage)
  if manifest is None:
    return False
  changes = _changes(manifest, config_hash, config, parents)
  if not changes:
    return manifest.finished is not None
  lines = '\n'.join(f'  {change}' for change in changes)
  raise ValueError(f'{_path(workdir, stage).parent} holds stage {stage!r} of another config:\n{lines}\n'
                   f'To go on, use a new --workdir, or put back the old values, or pass {RERUN_FLAG} to set the old '
                   'stage aside and run it again.')


def set_aside_changed(workdir: str | os.PathLike, stage: str, config_hash: str, *,
                      parents: Mapping[str, str] | None = None, rerun: bool) -> None:
  """Renames a stage's directory to `<stage>.replaced-N` when it is of another config and the stage is to start anew.

  That is so when `rerun` asks for it, when the stage never came to its first checkpoint and there is nothing to lose,
  and when it has checkpoints but no manifest, so that nothing says what they are of. Its metrics go with it.
  """
  manifest = read(workdir, stage)
  directory = _path(workdir, stage).parent
  checkpoints = directory / 'checkpoints'
  saved = checkpoints.is_dir() and any(checkpoints.iterdir())
  if manifest is None:
    if not saved:
      return
  elif not _changes(manifest, config_hash, None, parents) or (saved or manifest.finished is not None) and not rerun:
    return
  number = 1
  while (target := directory.with_name(f'{stage}.replaced-{number}')).exists():
    number += 1
  metrics.copy(workdir, stage, directory / metrics.FILE_NAME)
  os.rename(directory, target)
  logging.warning('%s belongs to another config, or has no manifest; it is now %s', directory, target)


def _changes(manifest: Manifest, config_hash, config, parents) -> list[str]:
  """How the manifest's config and parents differ from these; empty when they are the same."""
  changes = []
  if manifest.config_hash != config_hash:
    fields = diff_fields(manifest.config, config) if config is not None else {}
    changes += [f'{name} was {old!r}, is {new!r}' for name, (old, new) in fields.items()]
    changes = changes or [f'config hash was {manifest.config_hash[:12]}, is {config_hash[:12]}']
  if parents is not None and dict(parents) != manifest.parents:
    changes += [f'parent {name} was {old!r}, is {new!r}'
                for name, (old, new) in diff_fields(manifest.parents, parents).items()]
  return changes


def chain(workdir: str | os.PathLike) -> list[Manifest]:
  """Returns the workdir's manifests, parents before children; [] if there are none.

  Raises:
    RuntimeError: the parents form a circle.
  """
  found = {}
  for path in sorted(pathlib.Path(workdir).glob(f'*/{FILE_NAME}')):
    manifest = read(workdir, path.parent.name)
    if manifest.stage == path.parent.name:  # a stage set aside has another name than its directory
      found[manifest.stage] = manifest
  ordered = []
  while found:
    ready = [m for m in found.values() if not any(p in found for p in m.parents)]
    if not ready:
      raise RuntimeError(f'the manifests of {sorted(found)} in {os.fspath(workdir)} are each other\'s parents')
    first = min(ready, key=lambda m: (m.started or '', m.stage))
    ordered.append(found.pop(first.stage))
  return ordered


def diff(a: Manifest, b: Manifest) -> dict[str, tuple[Any, Any]]:
  """Returns the fields that differ, {'config.rl.lr': (in a, in b)}; None stands for a field that is absent."""
  return diff_fields(dataclasses.asdict(a), dataclasses.asdict(b))


def diff_fields(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
  """Returns the leaves that differ between two nested mappings, by dotted path, sorted."""
  left, right = dict(_leaves('', a)), dict(_leaves('', b))
  return {name: (left.get(name), right.get(name)) for name in sorted(left.keys() | right.keys())
          if left.get(name) != right.get(name)}


def digest(value: Any) -> str:
  """Returns the sha256 of a JSON-able value, the same for any order of its keys."""
  return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def file_digest(path: str | os.PathLike) -> str:
  """sha256 of a file's bytes."""
  with open(path, 'rb') as f:
    return hashlib.file_digest(f, 'sha256').hexdigest()


def code_revision(root: str | os.PathLike | None = None) -> dict[str, Any]:
  """Returns {'commit', 'dirty'} of the checkout that this code runs from, else {'version'} of the package.

  A package installed inside somebody else's repository is not that repository's code: the commit is given only when
  this very file is tracked there.

  Args:
    root: the package's directory, by default this package's.
  """
  root = pathlib.Path(root or pathlib.Path(__file__).parents[1])
  if _git(root, 'ls-files', '--error-unmatch', 'runtime/lineage.py') is not None:
    commit = _git(root, 'rev-parse', 'HEAD')
    if commit:
      return {'commit': commit, 'dirty': bool(_git(root, 'status', '--porcelain', '--', '.'))}
  return {'version': _version('ptjax')}


def versions() -> dict[str, str]:
  """Returns the versions of Python and of the packages that decide a run's numbers."""
  return {'python': platform.python_version(), **{name: _version(name) for name in _PACKAGES}}


def machine(devices: Sequence[str] = ()) -> dict[str, Any]:
  """Returns what the stage runs on; no host name, so a manifest can be shown to others."""
  return {'system': platform.system(), 'arch': platform.machine(), 'cpus': os.cpu_count(), 'devices': list(devices)}


def now() -> str:
  """Returns the time in UTC, to the second, as ISO 8601."""
  return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds')


def _path(workdir: str | os.PathLike, stage: str) -> pathlib.Path:
  return pathlib.Path(workdir) / stage / FILE_NAME


def _leaves(prefix: str, value: Any):
  if isinstance(value, Mapping) and value:
    for key, item in value.items():
      yield from _leaves(f'{prefix}.{key}' if prefix else str(key), item)
  else:
    yield prefix, json.loads(json.dumps(value, default=str))  # as it is once written: tuples are lists


def _git(root: pathlib.Path, *args: str) -> str | None:
  """Returns what git says, or None where there is no git, no repository or no answer."""
  try:
    done = subprocess.run(['git', '-C', str(root), *args], capture_output=True, text=True, timeout=20, check=False)
  except (OSError, subprocess.TimeoutExpired) as e:
    logging.info('no code revision from git: %s', e)
    return None
  return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return 'not installed'
