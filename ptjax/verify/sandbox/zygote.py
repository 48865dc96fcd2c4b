"""A worker's main program: enters its isolation once, then forks one keeper after another, ready before a job comes.

Started as `python -I -S zygote.py CONFIG` with an empty environment, so it imports its neighbours by their folder and
nothing of ptjax. Ends itself, and with it every job, when the trainer is gone, even by kill -9.
"""

import gc
import json
import os
import select
import signal
import socket
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import jail as jails  # pylint: disable=wrong-import-position
import keeper  # pylint: disable=wrong-import-position
import linux  # pylint: disable=wrong-import-position

# Warm in every job that runs in this interpreter. Each costs every fork a little, so only what most programs import.
PRELOADED = ('bisect', 'collections', 'copy', 'functools', 'heapq', 'itertools', 'json', 'math', 'operator', 're',
             'random', 'string', 'traceback', 'typing')
GAVE_UP = 3
CONTROL = 3
GRACE_MS = 3000  # for a keeper to clean up after the trainer has gone


def main():
  config = json.loads(sys.argv[1])
  os.dup2(config['control'], CONTROL, inheritable=False)
  os.closerange(CONTROL + 1, config['control'] + 1)  # from here on every descriptor has a low number
  control = socket.socket(fileno=CONTROL)
  trainer = os.pidfd_open(os.getppid())
  os.environ.clear()  # of what the interpreter itself put there
  for name in PRELOADED:
    __import__(name)
  sys.path.pop(0)
  jail = jails.JAILS[config['tier']](config['tier'], config['readable'])
  try:
    jail.enter()
  except OSError as error:
    keeper.send_message(control, {'failed': str(error)})
    return
  linux.load_filter(config['tier'] in ('userns', 'root'), config['tier'] != 'landlock')  # made once
  compile('0', '', 'exec')  # what the first one sets up takes milliseconds
  gc.collect()
  gc.freeze()  # collections in the children do not copy these pages
  while keep_one(control, trainer, jail):
    continue


def keep_one(control: socket.socket, trainer: int, jail) -> bool:
  """Runs one keeper to its end and says so to the trainer. False when there is nobody to serve, or no way to."""
  pid = jail.fork()
  if pid == 0:
    status = GAVE_UP
    try:
      os.close(trainer)
      status = keeper.serve(control, jail)
    except BaseException as error:  # this process must never return into the worker's loop
      keeper.send_message(control, {'failed': f'{type(error).__name__}: {error}'})
    finally:
      os._exit(status)
  poll = select.poll()
  watched = os.pidfd_open(pid)
  poll.register(watched, select.POLLIN)
  poll.register(trainer, select.POLLIN)
  alone = any(descriptor == trainer for descriptor, _ in poll.poll())
  if alone:
    poll.unregister(trainer)
    if not poll.poll(GRACE_MS):
      os.kill(pid, signal.SIGKILL)
  _, status = os.waitpid(pid, 0)
  os.close(watched)
  if status:
    jail.kill_orphans()
  code = os.waitstatus_to_exitcode(status)
  if alone or code in (GAVE_UP, keeper.HUNG_UP):
    return False
  if code != keeper.AFRESH:
    try:
      keeper.send_message(control, {'died': code})
    except OSError:
      return False  # the trainer has closed this worker
  return True


if __name__ == '__main__':
  main()
