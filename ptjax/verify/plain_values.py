"""Writes plain Python values as JSON and reads them back type for type. Runs inside sandboxes too: stdlib only.

Only exact built-in types arrive, so nothing that arrives can have behaviour of its own. An instance of anything else,
even of a subclass of int, is refused; a tuple of any class goes as a plain one.
"""

import collections

MAX_DEPTH = 60
MAX_COLLISIONS = 1000
_DICTS = (dict, collections.Counter, collections.OrderedDict, collections.defaultdict)
_SEQUENCES = {list: 'l', tuple: 't', set: 's', frozenset: 'z'}
_MAKERS = {'l': list, 't': tuple, 's': set, 'z': frozenset}


def encode(value, depth=0):
  """JSON-able form of a plain value. Raises TypeError for any other."""
  kind = type(value)
  if value is None or kind is bool or kind is str:
    return value
  if depth > MAX_DEPTH:
    raise TypeError('a value nested too deep cannot be passed on')
  if kind is int:
    return ['i', hex(value)]
  if kind is float:
    return ['f', value.hex()]
  if kind is complex:
    return ['c', value.real.hex(), value.imag.hex()]
  if kind is bytes:
    return ['b', value.hex()]
  if isinstance(value, tuple):  # a named one too, which equals its plain form
    kind = tuple
  if kind in _SEQUENCES:
    return [_SEQUENCES[kind], [encode(item, depth + 1) for item in value]]
  if kind in _DICTS:
    return ['d', [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in value.items()]]
  raise TypeError('a value of type %s cannot be passed on' % kind.__name__)


def decode(form, depth=0):
  """The value of a form made by `encode`. Raises ValueError or TypeError for anything malformed."""
  if form is None or isinstance(form, (bool, str)):
    return form
  if not isinstance(form, list) or len(form) < 2 or depth > MAX_DEPTH + 1:
    raise ValueError('malformed value')
  tag, payload = form[0], form[1]
  if tag == 'i':
    return int(payload, 16)
  if tag == 'f':
    return float.fromhex(payload)
  if tag == 'c':
    return complex(float.fromhex(payload), float.fromhex(form[2]))
  if tag == 'b':
    return bytes.fromhex(payload)
  if tag == 'd':
    keys = _distinct([decode(k, depth + 1) for k, _ in payload])
    return dict(zip(keys, [decode(v, depth + 1) for _, v in payload]))
  if tag in _MAKERS:
    items = [decode(item, depth + 1) for item in payload]
    return _MAKERS[tag](_distinct(items) if tag in 'sz' else items)
  raise ValueError('malformed value')


def _distinct(items):
  """The items of a set or keys of a dict. ValueError where so many share a hash that to collect them takes for ever."""
  if len(items) - len({hash(item) for item in items}) > MAX_COLLISIONS:
    raise ValueError('malformed value')
  return items
