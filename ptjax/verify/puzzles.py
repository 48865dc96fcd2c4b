"""Scores answers to puzzles that have more than one right answer, exactly and by rules of our own.

reasoning-gym's scorers for these families round, skip what they cannot read, or let an answer choose the puzzle. A
scorer here gets the answer's text and the puzzle as the task's reference holds it. Every move must be one that the
question allows; text that is no answer raises, which is no pass.
"""

import ast
import collections
import dataclasses
import fractions
import functools
import itertools
import json
import operator
import re
import string
from collections.abc import Callable

_ANYTHING = re.compile(r'.*', re.DOTALL)
# A minus may open an expression or a parenthesis, as in the families' own answers, but not follow an operator.
_ARITHMETIC = re.compile(r'(?!.*[-+*/×÷]\s*[-+*/×÷])(?![\s(]*\+)(?!.*[0-9]{20})[0-9\s+\-*/()×÷]{1,200}', re.DOTALL)
# Names are the families' variables and functions; exponents are small and never stacked, so that expansion ends.
_SYMBOLIC = re.compile(
    r'(?s)(?!.*\d{20})(?:\b(?:[A-Za-z]|sin|cos|tan|exp|log|sqrt|asin|acos|atan|sinh|cosh|tanh|pi)\b|\d++(?:\.\d++)?+'
    r'|[\s+\-/(),]|\*\*\s*(?:\d{1,2}|\(\s*-?\d{1,2}(?:\s*/\s*\d{1,2})?\s*\))(?!\s*\*\s*\*|\d)|\*(?!\s*\*)){1,400}')
_TERM = r'(?:[0-9]{1,100}+(?:\s*\*\s*[a-z](?:\*\*[0-9]{1,3})?)?|[a-z](?:\*\*[0-9]{1,3})?)'
_POLYNOMIAL = re.compile(rf'\s*-?\s*{_TERM}(?:\s*[+-]\s*{_TERM})*\s*')
_LOGIC = re.compile(r'[A-Z¬∧∨→↔()\s]{1,200}')
_CUBE_MOVES = re.compile(r"(?:[1-3]?[LRUDBF]w?'?2?\s+)*[1-3]?[LRUDBF]w?'?2?")
_CONNECTIVES = ('↔', '→', '∨', '∧')  # loosest first
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_STEPS = {'right': (0, 1), 'down': (1, 0), 'left': (0, -1), 'up': (-1, 0)}


@dataclasses.dataclass(frozen=True)
class Puzzle:
  """How a family's answers are scored: on which metadata, and which text may be an answer at all."""

  fields: tuple[str, ...]
  right: Callable[..., bool]  # (answer, *fields); raises for what is no answer
  text: re.Pattern = _ANYTHING


def _loads(answer: str):
  """The JSON value of an answer, in a code fence or bare, in which no key stands twice."""
  def unique(pairs):
    if len(dict(pairs)) < len(pairs):
      raise ValueError('a key stands twice')
    return dict(pairs)
  return json.loads(re.sub(r'^\s*```(?:json)?\s|\s*```\s*$', '', answer), object_pairs_hook=unique)


def _list(answer: str, of: type) -> list:
  value = _loads(answer)
  if not isinstance(value, list) or not all(isinstance(item, of) for item in value):
    raise ValueError(f'no list of {of.__name__}')
  return value


def _groups(answer: str) -> list[list[str]]:
  groups = _list(answer, list)
  if not all(isinstance(word, str) for group in groups for word in group):
    raise ValueError('no lists of strings')
  return groups


def _arithmetic(answer: str, numbers: list[int], target: int = 24) -> bool:
  """Whether an expression of exactly these numbers, each used once, has exactly this value."""
  used = []

  def value(node):
    if isinstance(node, ast.BinOp):
      return _OPERATORS[type(node.op)](value(node.left), value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
      return -value(node.operand)
    if not isinstance(node, ast.Constant) or type(node.value) is not int:
      raise ValueError('no arithmetic on whole numbers')
    used.append(node.value)
    return fractions.Fraction(node.value)

  text = ' '.join(answer.translate(str.maketrans('×÷', '*/')).split())
  return value(ast.parse(text, mode='eval').body) == target and sorted(used) == sorted(numbers)


def _boxnet(answer: str, initial_state: dict) -> bool:
  state = {square: collections.Counter(items) for square, items in initial_state.items()}
  for plan in _list(answer, dict):
    before = {square: +items for square, items in state.items()}  # agents of one step act at once
    for agent, move in plan.items():
      square = '_'.join(re.fullmatch(r'Agent\[(\d+\.\d), ?(\d+\.\d)\]', agent).groups())
      box, x, y, target = re.fullmatch(
          r'move\((box_\w+), ?(?:square\[(\d+\.\d), ?(\d+\.\d)\]|(target_\w+))\)', move).groups()
      if not before[square][box]:
        return False
      state[square][box] -= 1
      if target:
        if target[7:] != box[4:] or state[square][target] < 1:
          return False
        state[square][target] -= 1
      else:
        if sum(abs(float(a) - float(b)) for a, b in zip(square.split('_'), (x, y))) != 1:
          return False
        state[f'{x}_{y}'][box] += 1
  return not any(count for items in state.values() for item, count in items.items() if item.startswith('box_'))


def _graph_color(answer: str, puzzle: dict) -> bool:
  colors = _loads(answer)
  return (set(colors) == {str(v) for v in puzzle['vertices']}
          and all(type(c) is int and c in puzzle['color_options'] for c in colors.values())
          and all(colors[str(a)] != colors[str(b)] for a, b in puzzle['edges']))


def _jugs(answer: str, puzzle: dict) -> bool:
  capacities = dict(zip(string.ascii_uppercase, puzzle['jug_capacities']))
  water = dict.fromkeys(capacities, 0)
  for move in _list(answer, str):
    what, jug, other = re.fullmatch(r'(?:(fill|empty) |pour (?=.->))([A-Z])(?:->([A-Z]))?', move).groups()
    if (what is None) != (other is not None):
      return False
    if other:
      amount = min(water[jug], capacities[other] - water[other])
      water[jug] -= amount
      water[other] += amount
    else:
      water[jug] = capacities[jug] if what == 'fill' else 0
  return puzzle['target'] in water.values()


def _knight_swap(answer: str, board: dict, pieces: dict, start_turn: str) -> bool:
  now, turn = dict(pieces), start_turn
  for move in _list(answer, str):
    color, start, end = move.split(',')
    if color != turn or now[start] != color or end not in board[start] or now[end] is not None:
      return False
    now[start], now[end], turn = None, color, 'B' if turn == 'w' else 'w'
  return all(now[square] == {'w': 'B', 'B': 'w'}.get(piece) for square, piece in pieces.items())


def _n_queens(answer: str, puzzle: list[list[str]]) -> bool:
  board, n = [''.join(line.split()) for line in answer.split('\n') if line.strip()], len(puzzle)
  queens = [(row, column) for row, line in enumerate(board) for column, cell in enumerate(line) if cell == 'Q']
  kept = all(board[row][column] == 'Q' for row in range(n) for column in range(n) if puzzle[row][column] == 'Q')
  lines = ([q[0] for q in queens], [q[1] for q in queens], [q[0] + q[1] for q in queens], [q[0] - q[1] for q in queens])
  return [len(line) for line in board] == [n] * n == [len(set(line)) for line in lines] + [n] * (n - 4) and kept \
      and len(queens) == n


def _palindrome(answer: str, letters: list[str]) -> bool:
  word = answer.strip().lower()
  return word == word[::-1] and sorted(word) == sorted(letters)


def _factors(answer: str, factors: list[int]) -> bool:
  return sorted(int(factor) for factor in re.split('[×x*]', answer)) == sorted(factors)


@functools.lru_cache
def _bits(count: int) -> list[int]:
  """Of each of so many variables, a truth table: bit i says whether it holds in row i."""
  return [sum(1 << i for i in range(2**count) if i >> j & 1) for j in range(count)]


@functools.lru_cache(maxsize=1024)
def _truth(text: str, variables: tuple[str, ...]) -> int:
  """The truth table of a formula."""
  tables = dict(zip(variables, _bits(len(variables))))
  full, tokens = (1 << 2 ** len(variables)) - 1, re.findall(r'\S', text)[::-1]

  def take(level=0):
    if level == len(_CONNECTIVES):
      token = tokens.pop()
      if token == '¬':
        return full & ~take(level)
      if token != '(':
        return tables[token]
      value = take()
      if tokens.pop() != ')':
        raise ValueError('a parenthesis stays open')
      return value
    value = take(level + 1)
    while tokens and tokens[-1] == _CONNECTIVES[level]:
      tokens.pop()
      right = take(level + 1)
      value = (full & ~(value ^ right), full & ~value | right, value | right, value & right)[level]
    return value

  value = take()
  if tokens:
    raise ValueError('no formula')
  return value


def _conclusion(answer: str, premises: list[str], variables: list[str]) -> bool:
  """Whether a short formula follows from consistent premises, and from no single one of them."""
  tables = [_truth(premise, tuple(variables)) for premise in premises]
  together, concluded = functools.reduce(operator.and_, tables), _truth(answer, tuple(variables))
  return (together != 0 and not together & ~concluded and all(table & ~concluded for table in tables)
          and sum(answer.count(connective) for connective in _CONNECTIVES) <= 1)


def conclusion(premises: list[str], variables: list[str]) -> str | None:
  """A right answer to a task of propositional_logic, or None where there is none."""
  literals = [sign + v for v in variables for sign in ('', '¬')]
  pairs = (f'{a} {connective} {b}' for connective in '∨∧↔' for a, b in itertools.combinations(literals, 2))
  return next((text for text in (*literals, *pairs) if _conclusion(text, premises, variables)), None)


def _quantum_lock(answer: str, buttons: list[dict], initial_value: int, initial_state: str, target_value: int,
                  solution_path: list[str]) -> bool:
  known, value, light = {button['name']: button for button in buttons}, initial_value, initial_state
  pressed = re.split(r'\s*(?:→|->|,|\s)\s*', answer.strip())
  for name in pressed:
    button = known[name]
    if button['active_state'] not in (light, 'any'):
      return False
    value = {'add': operator.add, 'subtract': operator.sub, 'multiply': operator.mul}[button['type']](
        value, button['value'])
    light = 'green' if light == 'red' else 'red'
  return value == target_value and len(pressed) <= len(solution_path)  # which is a shortest one


def _rubiks_cube(answer: str, cube_size: int, scramble_moves: str) -> bool:
  from reasoning_gym.cognition import rubiks_cube  # pylint: disable=g-import-not-at-top
  turned = rubiks_cube.Cube(cube_size)
  turned.rotate(scramble_moves)
  turned.rotate(' '.join(answer.split()))
  return turned.is_done()


def _rush_hour(answer: str, board_config: str) -> bool:
  letters = sorted(set(board_config) - {'o', 'x'})  # the question names cars anew, in this order
  cars = {name: [i for i, c in enumerate(board_config) if c == letter]
          for name, letter in zip(string.ascii_uppercase, letters)}
  taken = {i for i, c in enumerate(board_config) if c != 'o'}
  for move in re.split(r'[\s,]+', answer.strip()):
    name, sign, steps = re.fullmatch(r'([A-Z])([+-])([1-5])', move).groups()
    for _ in range(int(steps)):
      cells, stride = cars[name], (cars[name][1] - cars[name][0]) * (1 if sign == '+' else -1)
      moved = [cell + stride for cell in cells]
      across = abs(stride) == 1 and any(cell // 6 != cells[0] // 6 for cell in moved)
      if across or not all(0 <= cell < 36 and (cell in cells or cell not in taken) for cell in moved):
        return False
      taken, cars[name] = taken - set(cells) | set(moved), moved
  return cars['A'][-1] == 17  # the exit


def _shortest_path(answer: str, matrix: list[list[str]], solution: list[str]) -> bool:
  if not solution:
    return answer.strip().lower() == 'infeasible'
  cells = {(r, c): cell for r, row in enumerate(matrix) for c, cell in enumerate(row)}
  here, steps = next(at for at, cell in cells.items() if cell == '*'), answer.lower().split()
  for step in steps:
    here = here[0] + _STEPS[step][0], here[1] + _STEPS[step][1]
    if cells.get(here, 'X') == 'X':
      return False
  return cells[here] == '#' and len(steps) == len(solution)


def _sokoban(answer: str, gamestr: str) -> bool:
  cells = {(r, c): cell for r, row in enumerate(gamestr.strip().split('\n'))
           for c, cell in enumerate(row.replace(' ', ''))}
  boxes = {at for at, cell in cells.items() if cell in '@$'}
  [here] = [at for at, cell in cells.items() if cell in '*%']
  steps = {'R': (0, 1), 'D': (1, 0), 'L': (0, -1), 'U': (-1, 0)}
  for move in answer.strip():
    down, right = steps[move]
    here, beyond = (here[0] + down, here[1] + right), (here[0] + 2 * down, here[1] + 2 * right)
    if here in boxes:
      boxes = boxes - {here} | {beyond}
      if len(boxes) < sum(cell in '@$' for cell in cells.values()) or cells.get(beyond, '+') == '+':
        return False
    if cells.get(here, '+') == '+':
      return False
  return all(cells[box] in 'X$%' for box in boxes)


def _symbols() -> dict:
  import sympy  # pylint: disable=g-import-not-at-top
  return {letter: sympy.Symbol(letter) for letter in string.ascii_letters}


def _formula(text: str):
  """A formula in which decimals are exact and each letter is a variable."""
  from sympy.parsing import sympy_parser  # pylint: disable=g-import-not-at-top
  return sympy_parser.parse_expr(text, local_dict=_symbols(), transformations=(
      *sympy_parser.standard_transformations, sympy_parser.rationalize))


def _integral(answer: str, integrand: str, variable: str) -> bool:
  import sympy  # pylint: disable=g-import-not-at-top
  derivative = sympy.diff(_formula(answer), sympy.Symbol(variable))
  return sympy.simplify(derivative - _formula(integrand)) == 0


def _polynomial(answer: str, polynomial_expr: str) -> bool:
  import sympy  # pylint: disable=g-import-not-at-top
  return _formula(answer) == sympy.expand(_formula(polynomial_expr))


def _hanoi(answer: str, num_disks: int, num_pegs: int, start_peg: int, target_peg: int) -> bool:
  pegs = {peg: [] for peg in range(1, num_pegs + 1)}
  pegs[start_peg] = list(range(num_disks, 0, -1))
  for line in answer.strip().splitlines():
    move = re.fullmatch(r'\s*Move disk (\d+) from Peg (\d+) to Peg (\d+)\.?\s*', line)
    disk, source, target = map(int, move.groups())
    if pegs[source][-1:] != [disk] or source == target or pegs[target] and pegs[target][-1] < disk:
      return False
    pegs[target].append(pegs[source].pop())
  return len(pegs[target_peg]) == num_disks


@functools.lru_cache
def _words(length: int) -> set[str]:
  from reasoning_gym.algorithmic import word_ladder  # pylint: disable=g-import-not-at-top
  return word_ladder.WordLadderDataset._load_words_from_csv(length, length)[length]  # pylint: disable=protected-access


def _word_ladder(answer: str, start_word: str, end_word: str) -> bool:
  words = [word.strip() for word in answer.upper().split(',')]
  return (words[0] == start_word and words[-1] == end_word and set(words) <= _words(len(start_word))
          and all(sum(a != b for a, b in zip(*pair)) == 1 for pair in itertools.pairwise(words)))


# Families in which more than one answer can be right.
PUZZLES = {
    'boxnet': Puzzle(('initial_state',), _boxnet),
    'countdown': Puzzle(('numbers', 'target'), _arithmetic, _ARITHMETIC),
    'graph_color': Puzzle(('puzzle',), _graph_color),
    'group_anagrams': Puzzle(
        ('solution',), lambda answer, solution: sorted(map(sorted, _groups(answer))) == sorted(map(sorted, solution))),
    'intermediate_integration': Puzzle(('integrand', 'variable'), _integral, _SYMBOLIC),
    'jugs': Puzzle(('puzzle',), _jugs),
    'knight_swap': Puzzle(('board', 'pieces', 'start_turn'), _knight_swap),
    'n_queens': Puzzle(('puzzle',), _n_queens, re.compile(r'[Q_\s]+')),
    'palindrome_generation': Puzzle(('letters',), _palindrome),
    'palindrome_partitioning': Puzzle(
        ('solution',), lambda answer, solution: sorted(_groups(answer)) == sorted(solution)),
    'polynomial_multiplication': Puzzle(('polynomial_expr',), _polynomial, _POLYNOMIAL),
    'prime_factorization': Puzzle(('factors',), _factors, re.compile(r'[0-9\s×x*]+')),
    'propositional_logic': Puzzle(('premises', 'variables'), _conclusion, _LOGIC),
    'puzzle24': Puzzle(('numbers',), _arithmetic, _ARITHMETIC),
    'quantum_lock': Puzzle(('buttons', 'initial_value', 'initial_state', 'target_value', 'solution_path'),
                           _quantum_lock),
    'rubiks_cube': Puzzle(('cube_size', 'scramble_moves'), _rubiks_cube, _CUBE_MOVES),
    'rush_hour': Puzzle(('board_config',), _rush_hour),
    'shortest_path': Puzzle(('matrix', 'solution'), _shortest_path),
    'simple_integration': Puzzle(('integrand', 'variable'), _integral, _SYMBOLIC),
    'sokoban': Puzzle(('gamestr',), _sokoban, re.compile(r'[LRUD]+')),
    'tower_of_hanoi': Puzzle(('num_disks', 'num_pegs', 'start_peg', 'target_peg'), _hanoi),
    'word_ladder': Puzzle(('start_word', 'end_word'), _word_ladder),
}
# Those of them whose entries bring no answer.
UNANSWERED = ('boxnet', 'graph_color', 'rubiks_cube', 'rush_hour')


def right(family: str, metadata: dict, answer: str) -> bool:
  """Whether an answer solves the puzzle. Text that is no answer does not; only a lack in the metadata raises."""
  puzzle = PUZZLES[family]
  asked = [metadata[field] for field in puzzle.fields]
  answer = answer.strip().removesuffix('.')
  if not puzzle.text.fullmatch(answer):
    return False
  try:
    return bool(puzzle.right(answer, *asked))
  except Exception:  # pylint: disable=broad-except
    return False
