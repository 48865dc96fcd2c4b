"""Checkpoints: equal to the bit on any mesh, complete or absent after kill -9, damage and full disks in sentences."""

import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized
from flax import nnx

from ptjax.runtime import checkpoint, devices

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Saves steps 1, 2, ... of a state that says which step it is, as fast as it can, until it is killed.
WRITER = """
import sys
import jax.numpy as jnp
from ptjax.runtime import checkpoint

saves = checkpoint.Checkpoints(sys.argv[1], keep=2)
found = saves.restore_latest({'w': jnp.zeros(2_000_000)})
step = 0 if found is None else found[2]
print('start', step, flush=True)
while True:
  step += 1
  saves.save(step, {'w': jnp.full(2_000_000, step, jnp.float32)}, {'position': 10 * step})
  print(step, flush=True)
"""


class Model(nnx.Module):

  def __init__(self, rngs: nnx.Rngs):
    self.w = nnx.Param(jax.random.normal(rngs(), (8, 16)), axes='DF')
    self.k = nnx.Param(jax.random.normal(rngs(), (8, 3, 4), jnp.bfloat16), axes='DKH')


def make_state(seed: int) -> dict:
  params = nnx.split(Model(nnx.Rngs(seed)))[1]
  opt_state = optax.adamw(1e-3).init(params)
  return {'params': params, 'opt_state': opt_state, 'rng': jax.random.key(seed), 'step': jnp.int32(seed)}


def bits(tree: object) -> list[bytes]:
  keys_out = jax.tree.map(lambda x: jax.random.key_data(x) if checkpoint._is_key(x) else x, tree)
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(keys_out)]


def on_mesh(state: dict, device_count: int, **sizes: int) -> dict:
  mesh = devices.make_mesh(**sizes, devices=jax.devices()[:device_count])
  placed = devices.shardings_of(mesh, state)
  return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, placed)


class CheckpointTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.directory = os.path.join(self.create_tempdir().full_path, 'checkpoints')

  def test_restores_to_the_bit_on_eight_four_and_one_device(self):
    state = make_state(5)
    want = bits(state)
    for count, sizes in ((8, {'fsdp': 4, 'tensor': 2}), (4, {'fsdp': -1}), (1, {})):
      abstract = on_mesh(state, count, **sizes)
      with checkpoint.Checkpoints(self.directory) as saves:
        if count == 8:
          placed = jax.device_put(state, jax.tree.map(lambda x: x.sharding, abstract))
          saves.save(5, placed, {'position': 7, 'order': ['a', 'b'], 'none': None})
        restored, host_state, step = saves.restore_latest(abstract)
      self.assertEqual((step, host_state), (5, {'position': 7, 'order': ['a', 'b'], 'none': None}))
      self.assertEqual(bits(restored), want)
      self.assertEqual(jax.tree.structure(restored), jax.tree.structure(state))
      jax.tree.map(lambda x, a: self.assertEqual(x.sharding, a.sharding), restored['params'], abstract['params'])

  def test_empty_directory_has_nothing_to_restore(self):
    with checkpoint.Checkpoints(self.directory) as saves:
      self.assertIsNone(saves.restore_latest(make_state(0)))
      self.assertIsNone(saves.latest_step())

  def test_keep_and_a_second_save_of_a_step(self):
    with self.assertRaisesRegex(ValueError, 'keep = 1: must be >= 2'):
      checkpoint.Checkpoints(self.directory, keep=1)
    with checkpoint.Checkpoints(self.directory, keep=2) as saves:
      for step in (2, 4, 6):
        saves.save(step, {'w': jnp.full(3, step)}, {})
      saves.save(6, {'w': jnp.full(3, -1)}, {})
      restored, _, step = saves.restore_latest({'w': jnp.zeros(3, jnp.int32)})
    self.assertEqual((step, restored['w'].tolist()), (6, [6, 6, 6]))
    self.assertCountEqual(os.listdir(self.directory), ['4', '6'])

  def test_arrays_may_be_donated_as_soon_as_save_returns(self):
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    overwrite(jnp.ones(4_000_000)).block_until_ready()
    with checkpoint.Checkpoints(self.directory) as saves:
      w = jnp.arange(4_000_000, dtype=jnp.float32)
      saves.save(1, {'w': w}, {})
      overwrite(w).block_until_ready()
      restored, _, _ = saves.restore_latest({'w': jnp.zeros(4_000_000)})
    np.testing.assert_array_equal(restored['w'], np.arange(4_000_000, dtype=np.float32))

  def test_load_reads_only_the_paths_asked_for(self):
    state = make_state(3)
    with checkpoint.Checkpoints(self.directory) as saves:
      saves.save(1, make_state(1), {})
      saves.save(3, state, {'position': 1})
    restored, _, step = checkpoint.load(self.directory, {'params': state['params']})
    self.assertEqual((step, bits(restored)), (3, bits({'params': state['params']})))
    restored, _, _ = checkpoint.load(self.directory, {'rng': state['rng']}, step=1)
    self.assertEqual(bits(restored), bits({'rng': jax.random.key(1)}))

  def test_other_paths_and_shapes_are_all_named(self):
    with checkpoint.Checkpoints(self.directory) as saves:
      saves.save(1, {'a': jnp.ones(3), 'b': jnp.ones(2)}, {})
      with self.assertRaises(ValueError) as caught:
        saves.restore_latest({'a': jnp.ones(4), 'c': jnp.ones(2)})
    text = str(caught.exception)
    for part in ('3 differences', 'a: stored as float32[3], asked for as float32[4]', 'b: stored but', 'c: not stored'):
      self.assertIn(part, text)

  def test_vanished_directory_and_step(self):
    with self.assertRaisesRegex(RuntimeError, 'does not exist, though a finished stage wrote it; delete the manifest'):
      checkpoint.load(self.directory, {'a': jnp.ones(3)})
    with checkpoint.Checkpoints(self.directory) as saves:
      saves.save(1, {'a': jnp.ones(3)}, {})
    with self.assertRaisesRegex(RuntimeError, r'does not hold step 9 \(it holds \[1\]\)'):
      checkpoint.load(self.directory, {'a': jnp.ones(3)}, step=9)

  @parameterized.parameters('flip', 'truncate', 'remove')
  def test_damaged_step_is_named_with_the_one_to_go_back_to(self, kind):
    w = jax.random.normal(jax.random.key(0), (50_000,))
    with checkpoint.Checkpoints(self.directory) as saves:
      saves.save(1, {'w': w}, {})
      saves.save(2, {'w': w + 1}, {})
    files = pathlib.Path(self.directory, '2').rglob('*')
    largest = max((f for f in files if f.is_file()), key=lambda f: f.stat().st_size)
    content = bytearray(largest.read_bytes())
    if kind == 'flip':
      content[len(content) // 2] ^= 1
    largest.write_bytes(content[: len(content) // 2] if kind == 'truncate' else content)
    if kind == 'remove':
      largest.unlink()
    with checkpoint.Checkpoints(self.directory) as saves:
      with self.assertRaisesRegex(RuntimeError, r'step 2 in .* is damaged: .* to go on from step 1'):
        saves.restore_latest({'w': w})
    shutil.move(os.path.join(self.directory, '2'), self.directory + '_damaged')
    with checkpoint.Checkpoints(self.directory) as saves:
      restored, _, step = saves.restore_latest({'w': w})
    self.assertEqual((step, bits(restored)), (1, bits({'w': w})))

  def test_a_file_that_may_not_be_read_is_not_called_damaged(self):
    with checkpoint.Checkpoints(self.directory) as saves:
      saves.save(1, {'w': jnp.ones(3)}, {})
    with checkpoint.Checkpoints(self.directory) as saves:
      with mock.patch.object(checkpoint.ocp.CheckpointManager, 'restore', side_effect=PermissionError('not yours')):
        with self.assertRaisesRegex(RuntimeError, 'could not be read, which says nothing about the files: .*not yours'):
          saves.restore_latest({'w': jnp.ones(3)})

  def test_too_little_room_is_found_before_anything_is_written(self):
    with checkpoint.Checkpoints(self.directory) as saves:
      saves.save(1, {'w': jnp.ones(1000)}, {})
      saves.wait()
      with mock.patch.object(checkpoint.shutil, 'disk_usage', return_value=mock.Mock(free=100)):
        with self.assertRaisesRegex(RuntimeError, 'step 2 needs up to .* MB free; Step 1 is safe'):
          saves.save(2, {'w': jnp.ones(1000)}, {})
    self.assertEqual(os.listdir(self.directory), ['1'])

  def test_a_write_that_fails_leaves_the_step_before_usable(self):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    self.addCleanup(resource.setrlimit, resource.RLIMIT_FSIZE, (soft, hard))
    w = jax.random.normal(jax.random.key(0), (500_000,))
    saves = checkpoint.Checkpoints(self.directory)
    saves.save(1, {'w': w}, {})
    saves.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    with self.assertRaisesRegex(RuntimeError, 'step 2 could not be written to .* Step 1 is safe and will be used'):
      saves.save(2, {'w': w + 1}, {})
      saves.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    restored, _, step = saves.restore_latest({'w': w})
    self.assertEqual((step, bits(restored)), (1, bits({'w': w})))
    saves.save(2, {'w': w + 1}, {})
    self.assertEqual(saves.restore_latest({'w': w})[2], 2)
    saves.close()

  def test_kill_in_mid_save_leaves_a_whole_step(self):
    last = killed_in_save = 0
    for delay_s in (0.0, 0.013, 0.04, 0.09):
      command = [sys.executable, '-c', WRITER, self.directory]
      with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as writer:
        self.assertEqual(writer.stdout.readline(), f'start {last}\n')
        while writer.stdout.readline() != f'{last + 3}\n':
          pass
        time.sleep(delay_s)
        writer.send_signal(signal.SIGKILL)
      killed_in_save += any('tmp' in name for name in os.listdir(self.directory))
      restored, host_state, step = checkpoint.load(self.directory, {'w': jnp.zeros(2_000_000)})
      self.assertGreaterEqual(step, last + 2)
      np.testing.assert_array_equal(restored['w'], np.full(2_000_000, step, np.float32))
      self.assertEqual(host_state, {'position': 10 * step})
      last = step
    self.assertGreater(killed_in_save, 0)


if __name__ == '__main__':
  absltest.main()
