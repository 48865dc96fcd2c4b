"""Checkpoints of a running stage: written in the background, complete or absent, restored to the bit on any mesh.

A step holds two items: `state`, every array of a pytree under its path ('params/layers/attn/q/w'), and `host`, what
JSON holds (data position, curriculum, counters). Arrays are stored by path, not by container type, so nnx.State, optax
states and dicts all restore into whatever tree has the same paths. A step directory gets its name only when all of it
is on disk: kill -9 during a save leaves the step before it as the latest.

A sum over the bits of every array is stored with it and compared on restore, because the array format itself does not
notice a flipped bit. This file never picks another step on its own: when the latest one is damaged it says so and names
the step that a person can go back to.
"""

import logging as stdlib_logging
import os
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging


class Checkpoints:
  """The checkpoints of one stage in one directory; every process of the job makes one and calls it alike."""

  def __init__(self, directory: str, *, keep: int = 2):
    """Opens or creates the directory and removes what an interrupted save left there.

    Args:
      directory: where the checkpoints lie.
      keep: newest steps that are kept; at least 2, so that one is usable whatever happens to the other.
    """
    if keep < 2:
      raise ValueError(f'checkpoint.keep = {keep}: must be >= 2; fix: --config.checkpoint.keep=2')
    self.directory = directory if '://' in directory else os.path.abspath(directory)
    self._pending = None  # the step being written
    self._manager = _manager(self.directory, max_to_keep=keep, create=True, cleanup_tmp_directories=True)

  def latest_step(self) -> int | None:
    """The newest step that was started or found here; None when there is none."""
    return self._manager.latest_step()

  def save(self, step: int, state: Any, host_state: dict[str, Any]) -> None:
    """Starts writing this step and returns once the arrays are copied off the devices, so they may be donated.

    A step that is already there is left alone.

    Raises:
      RuntimeError: the disk has too little room, or the save before this one failed.
    """
    if self.latest_step() == step:
      return
    arrays = {name: _to_stored(x) for name, x in _named_leaves(state).items()}
    self._check_room(step, arrays)
    self.wait()
    host = {'host_state': host_state, 'bit_sums': _bit_sums(arrays)}
    self._pending = step
    try:
      self._manager.save(
          step, args=ocp.args.Composite(state=ocp.args.PyTreeSave(arrays), host=ocp.args.JsonSave(host)), force=True
      )
    except (OSError, ValueError, RuntimeError) as error:
      raise self._write_error(error) from error

  def wait(self) -> None:
    """Blocks until the save in flight is on disk.

    Raises:
      RuntimeError: it could not be written; says why and which step is usable.
    """
    try:
      self._manager.wait_until_finished()
    except (OSError, ValueError, RuntimeError) as error:
      raise self._write_error(error) from error
    self._pending = None

  def close(self) -> None:
    """Waits for the save in flight and releases the directory."""
    self.wait()
    self._manager.close()

  def __enter__(self) -> 'Checkpoints':
    return self

  def __exit__(self, *unused: Any) -> None:
    self.close()

  def restore_latest(self, abstract_state: Any) -> tuple[Any, dict[str, Any], int] | None:
    """(state, host_state, step) of the newest step, or None when no step was ever completed.

    Args:
      abstract_state: the tree to fill; leaves are arrays or jax.ShapeDtypeStruct whose `sharding` says where to put
        them (the default device when None), on any mesh. Typed PRNG keys stay typed.

    Raises:
      ValueError: the paths or shapes stored are not those of abstract_state.
      RuntimeError: the step is damaged.
    """
    self.wait()
    step = self.latest_step()
    return None if step is None else _restore(self._manager, self.directory, step, abstract_state, subset=False)

  def _check_room(self, step: int, arrays: dict[str, Any]) -> None:
    if '://' in self.directory:
      return
    needed = sum(x.nbytes for x in arrays.values())
    free = shutil.disk_usage(self.directory).free
    if free < needed:
      raise RuntimeError(
          f'checkpoint of step {step} needs up to {needed / 1e6:.0f} MB and {self.directory} has {free / 1e6:.0f} MB '
          f'free; {self._usable(step)} Free some room and run the same command again.'
      )

  def _write_error(self, error: Exception) -> RuntimeError:
    step, self._pending = self._pending, None
    self._manager.reload()  # forget the step that did not make it
    return RuntimeError(
        f'checkpoint of step {step} could not be written to {self.directory}: {_one_line(error)} '
        f'{self._usable(step)} Free some room or fix the directory, and run the same command again.'
    )

  def _usable(self, step: int | None) -> str:
    usable = [s for s in self._manager.all_steps() if s != step]
    return f'Step {max(usable)} is safe and will be used.' if usable else 'There is no earlier step.'


def load(directory: str, abstract_state: Any, *, step: int | None = None) -> tuple[Any, dict[str, Any], int]:
  """(state, host_state, step) from the checkpoints of a stage that has ended, e.g. the parent of the next one.

  Only the paths of `abstract_state` are read, so {'params': ...} leaves the optimizer on disk.

  Args:
    directory: where the stage's `Checkpoints` wrote.
    abstract_state: as for `Checkpoints.restore_latest`.
    step: None means the latest.

  Raises:
    RuntimeError: the directory or the step is not there, or is damaged.
    ValueError: a path is missing or has another shape.
  """
  directory = directory if '://' in directory else os.path.abspath(directory)
  gone = f'delete the manifest beside it to run that stage again, or put the checkpoint back at {directory}'
  if '://' not in directory and not os.path.isdir(directory):
    raise RuntimeError(f'checkpoint directory {directory} does not exist, though a finished stage wrote it; {gone}')
  with _manager(directory, create=False) as manager:
    steps = sorted(manager.all_steps())
    if not steps or (step is not None and step not in steps):
      wanted = 'any step' if step is None else f'step {step}'
      raise RuntimeError(f'checkpoint directory {directory} does not hold {wanted} (it holds {steps}); {gone}')
    return _restore(manager, directory, steps[-1] if step is None else step, abstract_state, subset=True)


def _manager(directory: str, **options: Any) -> ocp.CheckpointManager:
  logging.get_absl_logger().addFilter(_not_chatter)
  return ocp.CheckpointManager(
      directory,
      item_handlers={'state': ocp.PyTreeCheckpointHandler(), 'host': ocp.JsonCheckpointHandler()},
      options=ocp.CheckpointManagerOptions(**options),
  )


def _not_chatter(record: Any) -> bool:
  return record.levelno >= stdlib_logging.WARNING or '/orbax/' not in record.pathname


def _restore(
    manager: ocp.CheckpointManager, directory: str, step: int, abstract_state: Any, *, subset: bool
) -> tuple[Any, dict[str, Any], int]:
  wanted = _named_leaves(abstract_state)
  abstract = {name: _abstract_stored(x) for name, x in wanted.items()}
  try:
    stored = manager.item_metadata(step).state
    _check_same(f'{directory}/{step}', abstract, {name: stored[name] for name in stored}, subset=subset)
    restored = manager.restore(
        step,
        args=ocp.args.Composite(
            state=ocp.args.PyTreeRestore(
                abstract,
                restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
                partial_restore=subset,
            ),
            host=ocp.args.JsonRestore(),
        ),
    )
    sums = _bit_sums(restored.state)
    changed = [name for name in sums if sums[name] != restored.host['bit_sums'][name]]
    if changed:
      raise ValueError(f'the bits of {", ".join(changed[:5])} are not those that were saved')
  except _Mismatch as error:
    raise ValueError(str(error)) from None
  except (PermissionError, MemoryError, jax.errors.JaxRuntimeError) as error:
    raise RuntimeError(f'checkpoint step {step} in {directory} could not be read, which says nothing about the files: '
                       f'{_one_line(error)} Run again once that is mended.') from error
  except Exception as error:  # orbax raises the bare class when a chunk does not decode
    earlier = [s for s in manager.all_steps() if s < step]
    then = f'move {directory}/{step} away and run again to go on from step {max(earlier)}' if earlier else (
        f'there is no earlier step: move {directory} away to start this stage again')
    raise RuntimeError(
        f'checkpoint step {step} in {directory} is damaged: {_one_line(error)} To go on, {then}.'
    ) from error
  leaves = [_from_stored(restored.state[name], x) for name, x in wanted.items()]
  logging.info('restored step %d from %s', step, directory)
  return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves), restored.host['host_state'], step


class _Mismatch(Exception):
  """What is stored does not have the asked paths and shapes."""


def _check_same(where: str, abstract: dict[str, Any], stored: dict[str, Any], *, subset: bool) -> None:
  problems = [f'{name}: not stored' for name in abstract if name not in stored]
  problems += [f'{name}: stored but not asked for' for name in stored if name not in abstract and not subset]
  for name in abstract.keys() & stored.keys():
    have = (tuple(stored[name].shape), np.dtype(stored[name].dtype).name)
    want = (tuple(abstract[name].shape), np.dtype(abstract[name].dtype).name)
    if have != want:
      problems.append(f'{name}: stored as {have[1]}{list(have[0])}, asked for as {want[1]}{list(want[0])}')
  if problems:
    shown = '\n  '.join(sorted(problems)[:20])
    raise _Mismatch(
        f'{where} was written by another model, optimizer or config ({len(problems)} differences):\n  {shown}\n'
        '  fix: use the config it was written with, or another --workdir'
    )


def _named_leaves(tree: Any) -> dict[str, Any]:
  """Path -> leaf, in leaf order. The `value` step that an nnx Variable adds to a path is left out."""
  named = {}
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    if path and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == 'value':
      path = path[:-1]
    named[jax.tree_util.keystr(path, simple=True, separator='/')] = leaf
  if len(named) != len(jax.tree.leaves(tree)):
    raise ValueError('two leaves of the checkpointed state have the same path')
  return named


def _bit_sum(x: jax.Array) -> jax.Array:
  bits = x if x.dtype == bool else jax.lax.bitcast_convert_type(x, f'uint{8 * x.dtype.itemsize}')
  return jnp.sum(bits, dtype=jnp.uint32)  # modulo 2**32, so the same in any order and on any mesh


@jax.jit
def _all_bit_sums(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
  return {name: _bit_sum(x) for name, x in arrays.items()}


def _bit_sums(arrays: dict[str, Any]) -> dict[str, int]:
  # One program, not one for each array: see devices.settled.
  return {name: int(x) for name, x in jax.device_get(_all_bit_sums(arrays)).items()}


def _is_key(x: Any) -> bool:
  return hasattr(x, 'dtype') and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _to_stored(x: Any) -> Any:
  if _is_key(x):
    return jax.random.key_data(x)
  return x if isinstance(x, jax.Array) else np.asarray(x, jax.dtypes.canonicalize_dtype(np.asarray(x).dtype))


def _abstract_stored(x: Any) -> jax.ShapeDtypeStruct:
  where = getattr(x, 'sharding', None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  if _is_key(x):
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(x.shape, x.dtype))
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=where)
  dtype = x.dtype if hasattr(x, 'dtype') else np.asarray(x).dtype
  return jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.canonicalize_dtype(dtype), sharding=where)


def _from_stored(stored: jax.Array, wanted: Any) -> Any:
  return jax.random.wrap_key_data(stored) if _is_key(wanted) else stored


def _one_line(error: Exception) -> str:
  text = ' '.join(str(error).split())
  return f'{type(error).__name__}: {text[:300]}'.rstrip('. ') + '.'
