"""The mesh, the letter table, global arrays, and what processes say to each other."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx
from jax.sharding import PartitionSpec

from ptjax.runtime import devices

ROOT = pathlib.Path(__file__).resolve().parents[2]

# One of two processes with two devices each: gathers host values, sums a global array, agrees to stop.
PROCESS = """
import json, sys
import jax, numpy as np
from ptjax.runtime import checkpoint, devices

devices.initialize(coordinator=sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
index = jax.process_index()
parts = devices.gather_bytes({'who': index, 'ids': np.arange(index * 3, dtype=np.int32)})
mesh = devices.make_mesh(fsdp=2, data=2)
x_BD = devices.put_global(mesh, np.arange(32, dtype=np.float32).reshape(8, 4), 'BD')
total = jax.jit(lambda x: x.sum(axis=0), out_shardings=devices.sharding(mesh, ''))(x_BD)
with checkpoint.Checkpoints(sys.argv[3]) as saves:
  saves.save(1, {'x': x_BD}, {'parts': len(parts)})
  restored, host_state, step = saves.restore_latest({'x': x_BD})
same = jax.jit(lambda a, b: (a == b).all(), out_shardings=devices.sharding(mesh, ''))(restored['x'], x_BD)
with devices.Interrupt() as interrupt:
  before = interrupt.stop_requested()
  interrupt.received = 15 * index
  after = interrupt.stop_requested()
print(json.dumps({
    'parts': [[p['who'], p['ids'].tolist()] for p in parts], 'total': np.asarray(total).tolist(),
    'local': len(x_BD.addressable_shards), 'main': devices.is_main(), 'same': bool(same), 'stops': [before, after]}))
"""


class MeshTest(parameterized.TestCase):

  @parameterized.parameters(
      ({'data': -1}, (8, 1, 1, 1, 1)),
      ({'fsdp': -1, 'tensor': 2}, (1, 4, 1, 2, 1)),
      ({'data': 2, 'context': 2, 'expert': 2}, (2, 1, 2, 1, 2)),
  )
  def test_sizes_are_filled(self, sizes, want):
    mesh = devices.make_mesh(**sizes)
    self.assertEqual(tuple(mesh.shape.values()), want)
    self.assertEqual(mesh.axis_names, devices.MESH_AXES)

  @parameterized.parameters(
      ({'data': 3}, 'multiply to 3, which does not cover 8 devices'),
      ({'data': -1, 'tensor': 3}, 'does not cover 8 devices'),
      ({'data': -1, 'fsdp': -1}, 'at most one may be -1'),
      ({'data': 0}, 'each must be >= 1'),
  )
  def test_bad_sizes(self, sizes, message):
    with self.assertRaisesRegex(ValueError, message):
      devices.make_mesh(**sizes)

  def test_one_device_of_eight(self):
    self.assertEqual(devices.make_mesh(devices=jax.devices()[:1]).size, 1)


class ShardingTest(parameterized.TestCase):

  @parameterized.parameters(
      ('', ()),
      ('BT', (('data', 'fsdp'), None)),
      ('BTD', (('data', 'fsdp'), None, None)),  # fsdp is spent on B
      ('LDNH', (None, 'fsdp', 'tensor', None)),
      ('VD', ('tensor', 'fsdp')),
      ('DKGH', ('fsdp', 'tensor', None, None)),
  )
  def test_letters(self, axes, want):
    mesh = devices.make_mesh(data=2, fsdp=2, tensor=2)
    self.assertEqual(devices.sharding(mesh, axes).spec, PartitionSpec(*want))

  def test_every_mesh_axis_is_used_by_a_letter_and_known(self):
    self.assertEqual({name for names in devices.AXES.values() for name in names}, set(devices.MESH_AXES))

  def test_undivided_dimension(self):
    mesh = devices.make_mesh(fsdp=2, tensor=4)
    with self.assertRaisesRegex(ValueError, r'dimension K = 3 of an array DKH\(8, 3, 4\) is not divided .*tensor=4'):
      devices.sharding(mesh, 'DKH', shape=(8, 3, 4))
    self.assertEqual(devices.sharding(mesh, 'DKH', fit=(8, 3, 4)).spec, PartitionSpec('fsdp', None, None))

  def test_fit_keeps_what_divides(self):
    mesh = devices.make_mesh(data=2, fsdp=4)
    self.assertEqual(devices.sharding(mesh, 'B', fit=(2,)).spec, PartitionSpec('data'))
    self.assertEqual(devices.sharding(mesh, 'B', fit=(8,)).spec, PartitionSpec(('data', 'fsdp')))

  def test_unknown_letter_and_rank(self):
    mesh = devices.make_mesh(data=-1)
    with self.assertRaisesRegex(ValueError, "'Q' in 'BQ' is not one of BTSD"):
      devices.sharding(mesh, 'BQ')
    with self.assertRaisesRegex(ValueError, r"'BT' name 2 dimensions, the array has shape \(8,\)"):
      devices.sharding(mesh, 'BT', shape=(8,))

  def test_put_global(self):
    mesh = devices.make_mesh(data=2, fsdp=2, tensor=2)
    host = np.arange(32).reshape(8, 4)
    x_BT = devices.put_global(mesh, host, 'BT')
    np.testing.assert_array_equal(np.asarray(x_BT), host)
    self.assertEqual({s.data.shape for s in x_BT.addressable_shards}, {(2, 4)})
    with self.assertRaisesRegex(ValueError, 'dimension B = 6'):
      devices.put_global(mesh, host[:6], 'BT')
    fitted = devices.put_global(mesh, host[:6], 'BT', fit=True)
    self.assertEqual(fitted.sharding.spec, PartitionSpec('data', None))
    self.assertEqual((devices.rows_over(mesh, 1), devices.rows_over(mesh, 8)), (4, 8))

  def test_shardings_of_follows_the_metadata(self):
    class Model(nnx.Module):
      def __init__(self):
        self.w = nnx.Param(jnp.ones((8, 16)), axes='DF')
        self.k = nnx.Param(jnp.ones((8, 3, 4)), axes='DKH')
        self.bare = nnx.Param(jnp.ones(5))

    mesh = devices.make_mesh(fsdp=4, tensor=2)
    state = nnx.split(nnx.eval_shape(Model))[1]
    where = devices.shardings_of(mesh, {'params': state, 'step': jax.ShapeDtypeStruct((), jnp.int32)})
    placed = jax.device_put({'params': nnx.split(Model())[1], 'step': jnp.int32(1)}, where)
    self.assertEqual([x.sharding.spec for x in jax.tree.leaves(placed)], [
        PartitionSpec(),  # params/bare
        PartitionSpec('fsdp', None, None),  # params/k: 3 heads over tensor=2 do not divide
        PartitionSpec('fsdp', 'tensor'),  # params/w
        PartitionSpec(),  # step
    ])


class ProcessesTest(parameterized.TestCase):

  def test_gather_of_one_process_round_trips(self):
    value = {'a': (1, 'x'), 'b': np.float32(1.5), 'c': [np.ones((0, 3), bool), np.int64(2)], 'd': None}
    (got,) = devices.gather_bytes(value)
    self.assertEqual([got['a'], got['b'], got['c'][1], got['d']], [[1, 'x'], 1.5, 2, None])
    self.assertEqual((got['c'][0].shape, got['c'][0].dtype), ((0, 3), np.dtype(bool)))
    with self.assertRaisesRegex(TypeError, 'object is neither JSON nor a numpy array'):
      devices.gather_bytes({'a': object()})

  @parameterized.parameters(
      ({'num_processes': 2}, 'no coordinator'),
      ({'coordinator': '127.0.0.1:1', 'num_processes': 2, 'process_id': 2}, '0 <= process_id < num_processes'),
      ({'coordinator': 'localhost', 'num_processes': 2, 'process_id': 0}, 'needs HOST:PORT'),
  )
  def test_bad_launch(self, flags, message):
    with self.assertRaisesRegex(ValueError, message):
      devices.initialize(**flags)

  def test_two_processes(self):
    with socket.socket() as probe:
      probe.bind(('127.0.0.1', 0))
      address = f'127.0.0.1:{probe.getsockname()[1]}'
    directory = self.create_tempdir().full_path
    env = {**os.environ, 'JAX_NUM_CPU_DEVICES': '2'}
    processes = [
        subprocess.Popen(
            [sys.executable, '-c', PROCESS, address, str(i), directory],
            cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for i in range(2)
    ]
    for i, process in enumerate(processes):
      out, err = process.communicate(timeout=120)
      self.assertEqual(process.returncode, 0, err[-2000:])
      self.assertEqual(json.loads(out.splitlines()[-1]), {
          'parts': [[0, []], [1, [0, 1, 2]]],
          'total': [112.0, 120.0, 128.0, 136.0],  # 8 rows of 4 k + j: 4 * 28 + 8 j
          'local': 2, 'main': i == 0, 'same': True, 'stops': [False, True],
      })


class InterruptTest(parameterized.TestCase):

  @parameterized.parameters(signal.SIGINT, signal.SIGTERM)
  def test_first_signal_is_a_flag(self, number):
    before = signal.getsignal(number)
    with devices.Interrupt() as interrupt:
      self.assertFalse(interrupt.stop_requested())
      os.kill(os.getpid(), number)
      self.assertTrue(interrupt.stop_requested())
      self.assertEqual(interrupt.received, number)
    self.assertEqual(signal.getsignal(number), before)

  def test_second_ctrl_c_aborts(self):
    # A shell starts background jobs with SIGINT ignored, and then that is what the second one acts as.
    self.addCleanup(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))
    with self.assertRaises(KeyboardInterrupt), devices.Interrupt():
      os.kill(os.getpid(), signal.SIGINT)
      os.kill(os.getpid(), signal.SIGINT)


if __name__ == '__main__':
  absltest.main()
