"""The system-call filter, for both machines it has a table for, run here instruction by instruction."""

import struct
from unittest import mock

from absl.testing import absltest, parameterized

from ptjax.verify.sandbox import linux

ALLOW, REFUSE, ABSENT, KILL = 0x7FFF0000, 0x50001, 0x50026, 0x80000000
# Calls that every program makes: (x86_64, aarch64).
PLAIN = {'read': (0, 63), 'write': (1, 64), 'openat': (257, 56), 'execve': (59, 221), 'exit_group': (231, 94),
         'futex': (202, 98), 'getrandom': (318, 278), 'wait4': (61, 260), 'pipe2': (293, 59), 'close_range': (436, 436)}


def decide(machine: str, number: int, *arguments: int, sockets: bool = True, metadata: bool = True,
           arch: int | None = None) -> int:
  """What the filter says to one call."""
  with mock.patch.object(linux, 'MACHINE', machine):
    program = linux.seccomp_program(sockets, metadata)
  data = struct.pack('iIQ6Q', number, linux.ARCHES[machine][1] if arch is None else arch, 0,
                     *(arguments + (0,) * 6)[:6])
  value, at = 0, 0
  for _ in range(10_000):
    code, yes, no, operand = struct.unpack_from('HBBI', program, 8 * at)
    at += 1
    if code == 0x20:
      value = struct.unpack_from('I', data, operand)[0]
    elif code == 0x54:
      value &= operand
    elif code == 0x05:
      at += operand
    elif code == 6:
      return operand
    else:
      holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
      at += yes if holds else no
  raise AssertionError('the filter does not end')


class FilterTest(parameterized.TestCase):

  @parameterized.parameters('x86_64', 'aarch64')
  def test_calls_by_number(self, machine):
    column = linux.ARCHES[machine][0]
    for name, numbers in PLAIN.items():
      self.assertEqual(decide(machine, numbers[column]), ALLOW, name)
    for name, numbers in linux.DENIED.items():
      if numbers[column] >= 0:
        self.assertEqual(decide(machine, numbers[column]), REFUSE, name)
    for tables, options in ((linux.NETWORK, {'sockets': False}), (linux.METADATA, {'metadata': False})):
      for name, numbers in tables.items():
        if numbers[column] >= 0:
          self.assertEqual((decide(machine, numbers[column]), decide(machine, numbers[column], **options)),
                           (ALLOW, REFUSE), name)
    for number in (linux.FIRST_UNKNOWN, 0x40000000, linux.CLONE3[column]):  # x32 calls are numbers from 1 << 30 up
      self.assertEqual(decide(machine, number), ABSENT)
    self.assertEqual(decide(machine, PLAIN['read'][column], arch=0x40000003), KILL)  # a 32-bit call

  @parameterized.parameters('x86_64', 'aarch64')
  def test_calls_by_argument(self, machine):
    column = linux.ARCHES[machine][0]
    for numbers, arguments, wanted in (
        (linux.CLONE, (0x11,), ALLOW), (linux.CLONE, (0x3D0F00,), ALLOW),  # a fork, a thread
        *((linux.CLONE, (flag | 0x11,), REFUSE) for flag in (
            linux.NEWUSER, linux.NEWNS, linux.NEWPID, linux.NEWNET, linux.NEWIPC, linux.NEWUTS, linux.NEWCGROUP, 0x80)),
        (linux.SOCKET, (linux.AF_INET, 1), ALLOW), (linux.SOCKET, (linux.AF_INET, 2 | 0x80000), ALLOW),
        (linux.SOCKET, (linux.AF_INET, 3), REFUSE), (linux.SOCKET, (17, 3), REFUSE), (linux.SOCKET, (40, 1), REFUSE),
        (linux.SOCKET, (linux.AF_NETLINK, 3, 0), ALLOW), (linux.SOCKET, (linux.AF_NETLINK, 3, 9), REFUSE),
        (linux.IOCTL, (0, linux.TIOCSTI), REFUSE), (linux.IOCTL, (0, 0x5401), ALLOW),
        (linux.PRCTL, (4, 0), REFUSE), (linux.PRCTL, (4, 1), ALLOW), (linux.PRCTL, (15, 0), ALLOW),
        (linux.MMAP, (0, 4096, 3, 0x22), ALLOW), (linux.MMAP, (0, 4096, 3, 0x01), ALLOW),
        (linux.MMAP, (0, 4096, 3, 0x21), REFUSE),
        *((numbers, (0, 0, 0), ALLOW) for numbers, _ in linux.SELF_ONLY.values()),
        *((numbers, tuple(7 if i == which else 0 for i in range(3)), REFUSE)
          for numbers, checked in linux.SELF_ONLY.values() for which in checked)):
      self.assertEqual(decide(machine, numbers[column], *arguments), wanted, (numbers, arguments))
    for kind, wanted in ((1, ALLOW), (1 | 0x80000, ALLOW), (2, REFUSE), (3, REFUSE), (5, REFUSE)):
      self.assertEqual(decide(machine, linux.SOCKETPAIR[column], 1, kind, sockets=False), wanted, kind)
    self.assertEqual(decide(machine, linux.SOCKET[column], linux.AF_UNIX, 1, sockets=False), REFUSE)


if __name__ == '__main__':
  absltest.main()
