"""The worker's side of math: reads two formulas with math-verify's parser and compares them exactly.

Where the library errs, this layer is right: decimals become fractions before anything is compared, two numbers are
equal only where their difference is proved to be zero, digits with a base are read in it, and a list of answers is a
set. Only LaTeX is parsed, by grammar; nothing here evaluates text as code.
"""

import dataclasses
import itertools
import re

import math_verify
from math_verify import grader
import sympy

_LATEX = math_verify.LatexExtractionConfig(boxed_match_priority=0)
# Units are not for the library, which takes the t of 3t for one.
_CONFIG = [dataclasses.replace(
    _LATEX, normalization_config=dataclasses.replace(_LATEX.normalization_config, units=False))]
_BASED = re.compile(r'(-?)\(?(\d[0-9A-Za-z]*|[0-9A-Za-z]{2,})\)?_\{?(?:\\text\{)?(?:base\s*)?(\d+)\}?\}?')
_MIXED = re.compile(r'(-?)(\d+)\s*\\frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))')
_MIXED_PLAIN = re.compile(r'(-?)(\d+)\s+(\d+)/(\d+)')
_SCIENTIFIC = re.compile(r'(-?\d+(?:\.\d+)?)[eE]([+-]?\d{1,3})')
_REPEATING = re.compile(r'(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?')
_WHERE = re.compile(r'^\\\{\s*[a-z]\s*(?::|\||\\mid)\s*(.*)\\\}$')
_PERCENT = re.compile(
    r'^((?:[A-Za-z]\s*=)?\s*-?[\d\s.]*(?:\\frac\s*(?:\{\d+\}|\d)\s*(?:\{\d+\}|\d))?)\s*\\?%$')
_DEGREES = re.compile(r'\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))')
_MEASURED = re.compile(rf'(\d+(?:\.\d+)?)\s*{_DEGREES.pattern}')
_POINTS = [sympy.Rational(a, b) for a, b in ((38, 17), (97, 29), (51, 23), (131, 37), (67, 31), (83, 19))]
_DIGITS = 2000  # to which a difference is looked at before it may count as zero


def respond(request: dict) -> dict:
  """{'equal'} for {'gold', 'answer'}; without an answer, {} says that the gold can be read.

  Raises:
    ValueError: the gold cannot be read.
  """
  gold = read(request['gold'])
  if gold is None:
    raise ValueError(f'the reference {request["gold"]!r} cannot be read')
  if 'answer' not in request:
    return {}
  try:
    answer = read(request['answer'])
    if answer is None:
      return {'equal': False, 'why': 'the answer cannot be read'}
    # By convention 90 also states 90 degrees, and 25 also 25 %.
    bare = [_bare(request[side]) for side in ('gold', 'answer')]
    return {'equal': same(gold, answer) or bare != [request['gold'], request['answer']] and same(*map(read, bare))}
  except Exception as e:  # pylint: disable=broad-except
    # The answer is the policy's: what cannot be read or compared is wrong, and never the host's failure.
    return {'equal': False, 'why': f'{type(e).__name__}: {e}'[:200]}


def _bare(formula: str) -> str:
  return _PERCENT.sub(r'\1', _DEGREES.sub('', formula))


def read(formula: str):
  """The exact sympy value of a formula, or None when it cannot be read. A formula of several values is a set."""
  braces = re.findall(r'(?<!\\)[{}]', formula)
  if braces.count('{') != braces.count('}'):
    return None
  formula = _REPEATING.sub(_fraction, formula.replace('\\bmod', '\\mod'))
  formula = _WHERE.sub(r'\1', formula)
  formula = _MEASURED.sub(r'(\1\\cdot\\frac{\\pi}{180})', formula)
  percent = _PERCENT.match(formula)
  if percent and '=' not in formula:
    value = read(percent[1].strip())
    return None if value is None else value / 100
  if '\\pm' in formula:
    return _set([read(formula.replace('\\pm', a).replace('\\mp', b)) for a, b in ('+-', '-+')])
  if '\\lor' in formula:
    return _set([read(part.strip()) for part in formula.split('\\lor')])
  if ':' in formula and '\\{' not in formula:
    return _ratio(formula.split(':'))
  plain = _read_plain(formula)
  if plain is not None:
    return None if plain is sympy.nan else plain
  parsed = math_verify.parse(f'\\boxed{{{formula}}}', extraction_config=_CONFIG, parsing_timeout=None)
  values = [p for p in parsed if not isinstance(p, str)]
  value = exact(values[0]) if values else None
  if isinstance(value, sympy.core.relational.Relational) and not value.free_symbols and '=' in formula:
    return None if value.doit() != sympy.true else value  # 41 = 42 states nothing
  if isinstance(value, sympy.FiniteSet) and value.args and all(map(_is_inequality, value.args)):
    return _set(value.args)
  return value


def _fraction(decimal: re.Match) -> str:
  whole, fixed, repeated = decimal.groups()
  fixed = (whole or '0') + fixed
  scale = 10**(len(fixed) - len(whole or '0'))
  return f'\\frac{{{int(fixed + repeated) - int(fixed)}}}{{{scale * (10**len(repeated) - 1)}}}'


def _set(values: list):
  """All values together; inequalities that exclude each other are the union of their solutions."""
  if any(v is None for v in values):
    return None
  if all(map(_is_inequality, values)):
    regions = [v.as_set() for v in values]
    if all(a.intersect(b).is_empty for a, b in itertools.combinations(regions, 2)):
      return sympy.Union(*regions)
  return grader.FiniteSet(*(e for v in values for e in (v.args if isinstance(v, sympy.FiniteSet) else [v])))


def _ratio(parts: list[str]):
  """a:b is a/b; of more parts, all over the first."""
  first, *rest = [read(part.strip()) for part in parts]
  if first is None or any(r is None for r in rest) or not all(isinstance(r, sympy.Expr) for r in (first, *rest)):
    return None
  if len(rest) == 1:
    return None if zero(rest[0]) else first / rest[0]
  return None if zero(first) else sympy.Tuple(sympy.Symbol('ratio'), *(r / first for r in rest))


def _read_plain(formula: str):
  """The value of a number with a base, a mixed number or one in scientific notation, else None.

  One that is written so but has no value, as 5 in base 2, is not a number.
  """
  based = _BASED.fullmatch(formula)
  if based and 2 <= int(based[3]) <= 36:
    return _in_base(based)
  for pattern in (_MIXED, _MIXED_PLAIN):
    mixed = pattern.fullmatch(formula)
    if mixed:
      sign, whole, *rest = mixed.groups()
      numerator, denominator = [int(x) for x in rest if x is not None]
      if not denominator:
        return sympy.nan
      value = int(whole) + sympy.Rational(numerator, denominator)
      return -value if sign else value
  scientific = _SCIENTIFIC.fullmatch(formula)
  if scientific:
    return sympy.Rational(scientific[1]) * sympy.Integer(10)**int(scientific[2])
  return None


def _in_base(based: re.Match):
  try:
    value = sympy.Integer(int(based[2], int(based[3])))
  except ValueError:
    return sympy.nan if re.search(r'\d', based[2]) else None  # letters can be variables
  return -value if based[1] else value


def exact(value):
  """The value with each decimal as the fraction that was written, i as the imaginary unit where it stands alone, and
  an odd root of a negative number as the real one."""
  if not hasattr(value, 'atoms'):
    return value
  better = {f: sympy.Rational(str(f)) for f in value.atoms(sympy.Float)}
  symbols = {s for s in value.atoms(sympy.Symbol)}
  if {s.name for s in symbols} == {'i'}:
    better |= {s: sympy.I for s in symbols}
  better |= {p: (-1)**p.exp.p * (-p.base)**p.exp for p in value.atoms(sympy.Pow)
             if p.exp.is_Rational and p.exp.q > 1 and p.exp.q % 2 and p.base.is_negative}
  return value.xreplace(better) if better else value


def same(gold, answer) -> bool:
  """Whether two values are equal; inequalities in one variable where the same numbers solve them."""
  if all(_is_inequality(v) for v in (gold, answer)) and gold.free_symbols == answer.free_symbols:
    gold, answer = _solutions(gold, answer)
  return bool(math_verify.verify(gold, answer, strict=True, allow_set_relation_comp=True, timeout_seconds=None))


def _solutions(*inequalities):
  """The sets that solve them, or they themselves where one cannot be solved."""
  try:
    return [inequality.as_set() for inequality in inequalities]
  except RuntimeError:
    return inequalities


def _is_inequality(value) -> bool:
  return grader.is_relation(value) and not grader.is_equation(value) and len(value.free_symbols) == 1


def zero(value) -> bool:
  """Whether an expression is zero, proved: nearly zero is not."""
  value = value.doit()
  if value.is_Rational or value.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan):
    return value == 0
  symbols = sorted(value.free_symbols, key=str)
  for shift in range(3 if symbols else 1):
    points = itertools.islice(itertools.cycle(_POINTS), shift, None)
    if any(_size(value.subs(dict(zip(symbols, points))), digits) for digits in ((60,) if symbols else (60, _DIGITS))):
      return False
  return sympy.simplify(value) == 0 or bool(value.equals(0)) or not symbols and _is_ordinary(value)


def _size(number, digits: int) -> float:
  """The power of ten of a number, 0.5 for one of that is 1; 0 where so many digits do not tell it from zero."""
  try:
    parts = number.evalf(5, maxn=digits).as_real_imag()
  except (ValueError, TypeError, ArithmeticError, AttributeError, RuntimeError):
    return 0.0
  # A part that is lost in cancellation keeps one bit.
  seen = [p for p in parts if p.is_Float and p != 0 and p._prec > 1]  # pylint: disable=protected-access
  sizes = [sympy.log(abs(p), 10).evalf(5) for p in seen]
  return float(max(sizes)) or 0.5 if sizes else 0.0


def _is_ordinary(value) -> bool:
  """Whether all parts of a number are of ordinary size, so that a sum which vanishes in 2000 digits is zero."""
  parts = [p for p in sympy.preorder_traversal(value) if p != value and isinstance(p, sympy.Expr) and p != 0]
  return len(parts) < 200 and all(0 < abs(_size(p, 60)) < 50 for p in parts)


def _equal(a, b, *_) -> bool:
  """The library's comparison of two expressions, in place of one that takes what is nearly equal."""
  if isinstance(a, sympy.MatrixBase) or isinstance(b, sympy.MatrixBase):
    a, b = a.doit(), b.doit()
    return (isinstance(a, sympy.MatrixBase) and isinstance(b, sympy.MatrixBase) and a.shape == b.shape and
            all(zero(x - y) for x, y in zip(a.flat(), b.flat())))
  return zero(a - b)


def _same_solutions(gold, answer, *precisions) -> bool:
  """The library's comparison of two relations by what solves them, in place of one that takes any two without."""
  return (isinstance(gold, sympy.Eq) and bool(sympy.solve(gold, gold.free_symbols)) and
          _SOLVE_AND_COMPARE(gold, answer, *precisions))


_SOLVE_AND_COMPARE = grader.sympy_solve_and_compare
grader.sympy_numeric_eq = _equal
grader.sympy_symbolic_eq = lambda a, b: False
grader.sympy_solve_and_compare = _same_solutions
