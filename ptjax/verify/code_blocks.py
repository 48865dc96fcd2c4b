"""Finds the source code in a completion. Runs on the trusted side, on any text, in time that is linear in it.

A model that chats must be graded as fairly as one that answers with code alone, so what is around the code is looked
through, and whether the asked form (code and nothing else) was kept is reported beside it.
"""

import ast
import builtins
import dataclasses
import itertools
import re
import textwrap
import warnings
from collections.abc import Collection, Iterator

from ptjax.verify import answers
from ptjax.verify import languages

MAX_CHARS = 1 << 16
_FENCE = re.compile(r'([ \t]*)(`{3,}|~{3,})[ \t]*([\w+-]*)')
_PYTHON_MARKS = ('python', 'python3', 'py')
_PROGRAM = re.compile(r'[ \t]*(?:def|class|import|from|async|print[ \t]*\()')
_CODE_LINE = re.compile(r'(?:def|class|import|from|async|@)\b|@\w|[A-Za-z_]\w*[ \t]*=(?!=)')
_MOST_STARTS, _MOST_CUTS = 8, 8  # lines tried as the first of raw code, and last lines tried for each
_MOST_LONGER = 3  # closing fences tried after the first

warnings.filterwarnings('ignore', category=SyntaxWarning, module='solution')


@dataclasses.dataclass(frozen=True)
class _Block:
  """A fenced block: what it is marked with, its text, and its first and last line."""

  mark: str
  source: str
  first: int
  last: int
  tree: ast.Module | None  # where it parses as Python

  def defines(self) -> set[str]:
    return _defined(self.tree) if self.tree else set()


def extract(text: str, wanted: Collection[str] = (), language: str = 'python') -> tuple[str, bool]:
  """The source in a completion and whether it was given in the asked form: code and nothing else.

  A model's thoughts are no answer. A fenced block wins over raw text: the last that parses and
  defines one of the `wanted` names, with the earlier blocks that define what it lacks; else the last that parses, one
  marked as Python or with a definition, an import or a print first; else the last that has a wanted name after `def`;
  else the last. Raw text that does not parse loses the prose around its code. In other languages the last block marked
  as such wins, else the last unmarked one, else the last one; raw text is taken whole.
  """
  text = answers.without_thoughts(text[:MAX_CHARS]).replace('\r\n', '\n').removeprefix('\ufeff')
  blocks = list(_blocks(text, language))
  if not blocks:
    return _raw(text) if language == 'python' else (text, bool(text.strip()))
  block = _choose(blocks, wanted) if language == 'python' else _choose_marked(blocks, language)
  before = _lacked(block, blocks) if language == 'python' else []
  lines = text.split('\n')
  around = [*lines[:block.first], *lines[block.last + 1:]]
  return '\n'.join([*(b.source for b in before), block.source]), not before and not ''.join(around).strip()


def parses(source: str) -> bool:
  return _parse(source) is not None


def _parse(source: str) -> ast.Module | None:
  try:
    tree = ast.parse(source, filename='solution')
    return tree if tree.body else None
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return None


def _blocks(text: str, language: str) -> Iterator[_Block]:
  """The fenced blocks in order; one that is never closed goes on to the end."""
  lines = text.split('\n')
  fences = [(number, found) for number, line in enumerate(lines) if (found := _FENCE.match(line))]
  next_line = 0
  for i, (first, opened) in enumerate(fences):
    if first < next_line:
      continue
    closing = (n for n, found in fences[i + 1:] if lines[n].strip() == found[2] and found[2].startswith(opened[2]))
    last = next(closing, len(lines))
    block = _block(opened, lines, first, last, language)
    if block.tree is None and language == 'python' and block.mark in ('', *_PYTHON_MARKS):
      # A docstring may hold a fence of its own.
      longer = (_block(opened, lines, first, n, language) for n in itertools.islice(closing, _MOST_LONGER))
      block = next((b for b in longer if b.tree), block)
    yield block
    next_line = block.last + 1


def _block(opened: re.Match, lines: list[str], first: int, last: int, language: str) -> _Block:
  source = '\n'.join(lines[first + 1:last])
  source = (textwrap.dedent(source) if opened[1] else source) + ('\n' if last < len(lines) else '')
  return _Block(opened[3].lower(), source, first, last, _parse(source) if language == 'python' else None)


def _choose(blocks: list[_Block], wanted: Collection[str]) -> _Block:
  parsing = [b for b in blocks if b.tree and b.mark in ('', *_PYTHON_MARKS)]
  ranks = ([b for b in parsing if b.defines() & set(wanted)],
           [b for b in blocks if any(re.search(rf'\bdef[ \t]+{re.escape(name)}\b', b.source) for name in wanted)],
           [b for b in parsing if b.mark],
           [b for b in parsing if any(map(_PROGRAM.match, b.source.split('\n')))],
           parsing, blocks)
  return next(rank for rank in ranks if rank)[-1]


def _choose_marked(blocks: list[_Block], language: str) -> _Block:
  marked = [b for b in blocks if b.mark in languages.LANGUAGES[language].marks]
  return (marked or [b for b in blocks if not b.mark] or blocks)[-1]


def _lacked(block: _Block, blocks: list[_Block]) -> list[_Block]:
  """The earlier blocks that define names which this one reads and does not define."""
  if block.tree is None:
    return []
  read = {n.id for n in ast.walk(block.tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
  bound = {n.id for n in ast.walk(block.tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
  lacks = read - bound - block.defines() - set(dir(builtins)) - {
      a.arg for a in ast.walk(block.tree) if isinstance(a, ast.arg)}
  return [b for b in blocks if b.last < block.first and b.defines() & lacks]


def _defined(tree: ast.Module) -> set[str]:
  """The names that a module binds at its top level."""
  names = set()
  for node in tree.body:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
      names.add(node.name)
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
      names |= {(alias.asname or alias.name).partition('.')[0] for alias in node.names}
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
      names |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
  return names


def _raw(text: str) -> tuple[str, bool]:
  """Code without a fence: all of the text, else what parses from one of its first lines that look like code."""
  if parses(text):
    return text, bool(text.strip())
  lines = text.split('\n')
  for start in [i for i, line in enumerate(lines) if _CODE_LINE.match(line)][:_MOST_STARTS]:
    end = len(lines)
    for _ in range(_MOST_CUTS):
      try:
        if ast.parse('\n'.join(lines[start:end]), filename='solution').body:
          return '\n'.join(lines[start:end]), False
        break
      except SyntaxError as error:  # prose: the code ends above it
        end = start + min(error.lineno or 1, end - start) - 1
      except (ValueError, RecursionError, MemoryError):
        break
      if end <= start:
        break
  return text, False
