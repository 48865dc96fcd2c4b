"""The program beside a solution in its sandbox: loads solution.py and answers calls on descriptor 3.

One JSON request per line in, one reply per line out. Whatever the solution does to this process only spoils its own
replies: nothing here knows what they should be.
"""

import builtins
import json
import os
import sys
import types

sys.path.insert(0, os.getcwd())
import plain_values  # pylint: disable=g-import-not-at-top,wrong-import-position


def load():
  """(module, None), or (module, error reply) when the solution does not load."""
  module = types.ModuleType('solution')
  module.__file__ = 'solution.py'
  sys.modules['solution'] = module
  try:
    with open('solution.py', encoding='utf-8') as f:
      source = f.read()
    exec(compile(source, 'solution.py', 'exec'), module.__dict__)  # pylint: disable=exec-used
  except BaseException as e:  # pylint: disable=broad-except
    return module, error_of(e)
  return module, None


def error_of(error):
  """What may be told of an exception: the name of the built-in one that it is or derives from, or RemoteError."""
  kinds = type(error).__mro__ if isinstance(error, Exception) else ()
  name = next((k.__name__ for k in kinds if getattr(builtins, k.__name__, None) is k), 'RemoteError')
  try:
    message = error.args[0] if len(error.args) == 1 and type(error.args[0]) is str else str(error)
  except BaseException:  # pylint: disable=broad-except
    message = ''
  return {'error': name if name != 'Exception' else 'RemoteError', 'message': message[:500]}


def answer(module, request):
  """The reply to one request: a call's value or error, or the module's names with the plain values among them."""
  try:
    if 'names' in request:
      return {'value': names_of(module)}
    args = plain_values.decode(request['args'])
    kwargs = plain_values.decode(request['kwargs'])
    if request['call'] not in module.__dict__:
      raise NameError('name %r is not defined' % request['call'])
    return {'value': plain_values.encode(module.__dict__[request['call']](*args, **kwargs))}
  except BaseException as e:  # pylint: disable=broad-except
    return error_of(e)


def names_of(module):
  """Encoded dict: name -> None for a callable, (value,) for a plain value."""
  names = {}
  for name, value in list(module.__dict__.items()):
    if type(name) is not str or name.startswith('__'):
      continue
    if callable(value):
      names[name] = None
      continue
    try:
      plain_values.encode(value)
      names[name] = (value,)
    except (TypeError, RecursionError):
      continue
  return plain_values.encode(names)


def main():
  dumps, loads, write = json.dumps, json.loads, os.write
  requests = os.fdopen(os.dup(3), 'rb')
  module, broken = load()
  for line in requests:
    request = loads(line)
    reply = dict(broken or answer(module, request), id=request['id'])
    data = dumps(reply).encode() + b'\n'
    while data:
      data = data[write(3, data):]
  os._exit(0)


main()
