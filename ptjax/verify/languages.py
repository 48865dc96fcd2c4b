"""Languages other than Python that a solution may be written in, and how the sandbox builds and runs them.

A row of LANGUAGES is usable where its compiler is on this host's PATH and works in the sandbox's tier, which is found
out by building and running a small program once for each sandbox. The compiler reads model-written text, so it runs
in a job of its own under BUILD_LIMITS; tests are not there. What a build uses up is the solution's fault.
"""

import dataclasses
import functools
import os
import shutil
import subprocess
import threading
import weakref
from collections.abc import Mapping

from ptjax.verify import sandbox

BUILD_LIMITS = sandbox.Limits(wall_s=60.0, cpu_s=20.0, memory_mb=1024, pids=64, output_bytes=1 << 18, disk_mb=128)
_RUN_LIMITS = sandbox.Limits(wall_s=20.0, cpu_s=5.0, memory_mb=256, pids=32)
_BINARY = 'solution'
_SYSTEM = ('/usr/', '/bin/')  # which every job can read


@dataclasses.dataclass(frozen=True)
class Language:
  """One row. `build` and `run` are argument lists in which {program} is the compiler or interpreter."""

  program: str  # what the PATH is searched for
  fix: str  # how to get it
  source: str  # the solution's file
  build: tuple[str, ...]  # makes a file named `solution`; () when the source runs as it is
  run: tuple[str, ...]
  marks: tuple[str, ...]  # what a fenced block of it may be marked with
  echo: str  # a program that prints the number it reads


LANGUAGES = {
    'c': Language(
        'gcc', 'apt-get install gcc', 'solution.c',
        ('{program}', '-O2', '-std=gnu17', '-o', _BINARY, 'solution.c', '-lm'), (f'./{_BINARY}',), ('c',),
        '#include <stdio.h>\nint main(void) { int x; scanf("%d", &x); printf("%d\\n", x); }'),
    'cpp': Language(
        'g++', 'apt-get install g++', 'solution.cpp',
        ('{program}', '-O2', '-std=gnu++20', '-o', _BINARY, 'solution.cpp'), (f'./{_BINARY}',),
        ('cpp', 'c++', 'cc', 'cxx'),
        '#include <iostream>\nint main() { int x; std::cin >> x; std::cout << x << "\\n"; }'),
    'rust': Language(
        'rustc', 'install Rust, https://rustup.rs, and a C linker', 'solution.rs',
        ('{program}', '-O', '--edition=2021', '-o', _BINARY, 'solution.rs'), (f'./{_BINARY}',), ('rust', 'rs'),
        'fn main() { let mut s = String::new(); std::io::stdin().read_line(&mut s).unwrap(); print!("{}", s); }'),
    'javascript': Language(
        'node', 'apt-get install nodejs', 'solution.js', (), ('{program}', 'solution.js'), ('javascript', 'js', 'node'),
        'console.log(require("fs").readFileSync(0, "utf8").trim())'),
}


@dataclasses.dataclass(frozen=True)
class Program:
  """A solution that can be run: its command, and the files it needs beside those of the task."""

  argv: tuple[str, ...]
  files: Mapping[str, bytes | str]
  env: Mapping[str, str]


class BuildFailed(Exception):
  """The solution does not build. `limit` is the limit that its build broke, or ''."""

  def __init__(self, message: str, limit: str = ''):
    super().__init__(message)
    self.limit = limit


_tried: weakref.WeakKeyDictionary[sandbox.Sandbox, dict[str, str]] = weakref.WeakKeyDictionary()
_trying = threading.Lock()


def lookup(name: str) -> Language:
  """A language's row. Raises ValueError for an unknown name, or one whose program this host does not have."""
  if name not in LANGUAGES:
    raise ValueError(f'unknown language {name!r}; known are python and {sorted(LANGUAGES)}')
  if _locate(name) is None:
    raise ValueError(f'language {name!r} needs {LANGUAGES[name].program} on the PATH, and it must run; fix: '
                     f'{LANGUAGES[name].fix}')
  return LANGUAGES[name]


def readable() -> list[str]:
  """The folders outside the system's own that the languages on this host live in; a sandbox must be given them."""
  found = [place[1] for name in LANGUAGES if (place := _locate(name)) is not None]
  return [folder for folder in dict.fromkeys(found) if folder]


def build(name: str, source: bytes, files: Mapping[str, str], box: sandbox.Sandbox, most_bytes: int) -> Program:
  """Makes a runnable program of a solution, whatever the solution does to its compiler.

  Args:
    most_bytes: the largest program to accept.
  Raises:
    BuildFailed: it does not build, or not within the limits.
    RuntimeError: the compiler does not work in this sandbox.
    sandbox.SandboxError: the host broke.
  """
  language = lookup(name)
  failure = try_out(name, box)
  if failure:
    raise RuntimeError(f'{language.program} does not work in sandbox tier {box.tier}: {failure}')
  return _build(name, source, files, box, most_bytes)


def _build(name: str, source: bytes, files: Mapping[str, str], box: sandbox.Sandbox, most_bytes: int) -> Program:
  language, (program, _) = LANGUAGES[name], _locate(name)
  fill = lambda argv: tuple(word.format(program=program) for word in argv)
  env = {'OPENSSL_CONF': os.devnull} if language.program == 'node' else {}  # its own may be out of a job's reach
  if not language.build:
    return Program(fill(language.run), {**files, language.source: source}, env)
  result = box.run(fill(language.build), files={**files, language.source: source}, limits=BUILD_LIMITS, env=env,
                   collect=[_BINARY])
  if result.verdict != 'contained':
    raise BuildFailed(f'building it: {result.verdict}', result.verdict)
  if result.returncode != 0 or _BINARY not in result.files:
    raise BuildFailed(f'it does not build: {result.stderr.decode(errors="replace")[:400]}')
  if len(result.files[_BINARY]) > most_bytes:
    raise BuildFailed(f'the program has {len(result.files[_BINARY])} bytes, at most {most_bytes} can be run')
  return Program(fill(language.run), {**files, _BINARY: result.files[_BINARY]}, env)


def try_out(name: str, box: sandbox.Sandbox) -> str:
  """'' when a language that this host has builds and runs in this sandbox, else what went wrong. Tried once."""
  language = LANGUAGES[name]
  with _trying:
    tried = _tried.setdefault(box, {})
    if name not in tried:
      try:
        program = _build(name, language.echo.encode(), {}, box, BUILD_LIMITS.disk_mb << 20)
        result = box.run(program.argv, files=program.files, limits=_RUN_LIMITS, stdin=b'42\n', env=program.env)
        tried[name] = '' if result.stdout.split() == [b'42'] else f'{result.verdict}, {result.stderr[-300:]!r}'
      except BuildFailed as e:
        tried[name] = str(e)
    return tried[name]


def _locate(name: str) -> tuple[str, str] | None:
  """(a language's program, the folder to make readable for it or '' where jobs see it anyway); None: not here."""
  path = shutil.which(LANGUAGES[name].program)
  if path is None:
    return None
  if name == 'rust':  # often a front that looks for the compiler in the caller's home
    asked = _sysroot(path)
    if asked is None:
      return None
    path = os.path.join(asked, 'bin', 'rustc')
  if path.startswith(_SYSTEM):
    return path, ''
  path = os.path.realpath(path)
  return path, os.path.dirname(os.path.dirname(path))


@functools.cache
def _sysroot(rustc: str) -> str | None:
  asked = subprocess.run([rustc, '--print', 'sysroot'], capture_output=True, text=True, check=False)
  return asked.stdout.strip() if asked.returncode == 0 else None
