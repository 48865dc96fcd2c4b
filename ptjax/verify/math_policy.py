"""The worker's side of math: reads two formulas with math-verify's parser and compares them exactly.

Where the library errs, this layer is right: decimals become fractions before anything is compared, digits with a base
are read in it, and a list of answers is a set. Only LaTeX is parsed, by grammar; nothing here evaluates text as code.
"""

import re

import math_verify
import sympy

_CONFIG = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]
_BASED = re.compile(r'(-?)\(?([0-9A-Za-z]+)\)?_\{?(?:\\text\{)?(?:base\s*)?(\d+)\}?\}?')
_MIXED = re.compile(r'(-?)(\d+)\s*\\frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))')
_MIXED_PLAIN = re.compile(r'(-?)(\d+)\s+(\d+)/(\d+)')
_SCIENTIFIC = re.compile(r'(-?\d+(?:\.\d+)?)[eE]([+-]?\d{1,3})')


def respond(request: dict) -> dict:
  """{'equal'} for {'gold', 'answer'}. Raises ValueError when the gold cannot be read."""
  gold = read(request['gold'])
  if gold is None:
    raise ValueError(f'the reference {request["gold"]!r} cannot be read')
  try:
    answer = read(request['answer'])
    return {'equal': answer is not None and bool(math_verify.verify(
        gold, answer, strict=True, allow_set_relation_comp=True, timeout_seconds=None))}
  except Exception as e:  # pylint: disable=broad-except
    # The answer is the policy's: what cannot be read or compared is wrong, and never the host's failure.
    return {'equal': False, 'why': f'{type(e).__name__}: {e}'[:200]}


def read(formula: str):
  """The exact sympy value of a formula, or None when it cannot be read."""
  based = _BASED.fullmatch(formula)
  if based and 2 <= int(based[3]) <= 36:
    return _in_base(based)
  for pattern in (_MIXED, _MIXED_PLAIN):
    mixed = pattern.fullmatch(formula)
    if mixed:
      sign, whole, *rest = mixed.groups()
      numerator, denominator = [int(x) for x in rest if x is not None]
      if not denominator:
        return None
      value = int(whole) + sympy.Rational(numerator, denominator)
      return -value if sign else value
  scientific = _SCIENTIFIC.fullmatch(formula)
  if scientific:
    return sympy.Rational(scientific[1]) * sympy.Integer(10)**int(scientific[2])
  parsed = math_verify.parse(f'\\boxed{{{formula}}}', extraction_config=_CONFIG, parsing_timeout=None)
  values = [p for p in parsed if not isinstance(p, str)]
  value = exact(values[0]) if values else None
  if isinstance(value, sympy.core.relational.Relational) and not value.free_symbols and '=' in formula:
    return None if value.doit() != sympy.true else value  # 41 = 42 states nothing
  return value


def _in_base(based: re.Match):
  try:
    value = sympy.Integer(int(based[2], int(based[3])))
  except ValueError:
    return None
  return -value if based[1] else value


def exact(value):
  """The value with each decimal as the fraction that was written, and i as the imaginary unit where it stands alone."""
  if not hasattr(value, 'atoms'):
    return value
  better = {f: sympy.Rational(str(f)) for f in value.atoms(sympy.Float)}
  symbols = {s for s in value.atoms(sympy.Symbol)}
  if {s.name for s in symbols} == {'i'}:
    better |= {s: sympy.I for s in symbols}
  return value.xreplace(better) if better else value
