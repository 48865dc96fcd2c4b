"""Processes, the device mesh, and the one table that says which mesh axes an axis letter is laid over.

No partition spec is written anywhere else (kernels excepted): code names the axes of an array by letters ('LDNH') and
asks here. This file refuses to guess: a mesh that does not cover the devices, or a dimension that its mesh axes do not
divide, is an error that says which number to change, unless the caller asks with `fit` to drop those axes.
"""

import base64
import json
import logging as stdlib_logging
import math
import os
import signal
import types
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from flax import nnx
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ('data', 'fsdp', 'context', 'tensor', 'expert')

# Letter -> mesh axes, in the order they are tried. Within one array a mesh axis goes to the first letter that wants it,
# so 'BTD' keeps fsdp for B while 'DNH' spends it on D.
AXES = {
  'B': ('data', 'fsdp'),  # sequences in a batch
  'T': ('context',),  # token positions
  'S': (),  # key/value positions: every query shard sees all of them
  'D': ('fsdp',),  # model width
  'N': ('tensor',),  # query heads
  'K': ('tensor',),  # key/value heads
  'G': (),  # query heads per key/value head
  'H': (),  # head width
  'F': ('tensor',),  # feed-forward width
  'V': ('tensor',),  # vocabulary
  'E': ('expert',),  # experts
  'L': (),  # layers, the scan axis
  'A': (),  # LoRA rank
  'M': (),  # micro-batches
  'U': ('data', 'fsdp'),  # tasks of a step
  'R': (),  # rollouts of a task
  'W': (),  # draft window
  'X': (),  # a few of something, named where it is used
  'Z': ('context',),  # pages in the pool
  'C': (),  # tokens per page
  'J': (),  # pages per sequence
}


def initialize(
    *,
    coordinator: str = '',
    num_processes: int = 0,
    process_id: int = -1,
    cache_dir: str = '',
    matmul_precision: str = '',
) -> None:
  """Starts jax for this process; call once, before anything touches a device.

  With no coordinator and no JAX_COORDINATOR_ADDRESS in the environment this is a single process. 'auto' lets jax ask
  the cluster (TPU VM metadata, GKE, Slurm). An address 'host:port' needs the other two.

  Args:
    coordinator: '', 'auto', or the address of process 0.
    num_processes: processes in all; 0 leaves it to JAX_NUM_PROCESSES.
    process_id: this process, from 0; -1 leaves it to JAX_PROCESS_ID.
    cache_dir: where compiled programs are kept between runs, unless JAX_COMPILATION_CACHE_DIR says otherwise; '' keeps
      none.
    matmul_precision: jax's default matmul precision; '' means 'highest' on a CPU backend and jax's own elsewhere.

  Raises:
    ValueError: an address without a usable process count and id.
  """
  if cache_dir and 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
    os.makedirs(cache_dir, exist_ok=True)
    jax.config.update('jax_compilation_cache_dir', cache_dir)
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
    jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
  if coordinator == 'auto':
    jax.distributed.initialize()
  elif coordinator or 'JAX_COORDINATOR_ADDRESS' in os.environ:
    _join_processes(coordinator, num_processes, process_id)
  elif num_processes > 1 or process_id > 0:
    raise ValueError(
        f'num_processes={num_processes}, process_id={process_id} but no coordinator; '
        'fix: --coordinator=HOST:PORT (the address of process 0) or --coordinator=auto on a TPU pod'
    )
  stdlib_logging.getLogger('jax._src.xla_bridge').setLevel(stdlib_logging.WARNING)  # it reports each absent backend
  if not matmul_precision and jax.default_backend() == 'cpu':
    matmul_precision = 'highest'
  if matmul_precision:
    jax.config.update('jax_default_matmul_precision', matmul_precision)
  logging.info(
      'process %d of %d: %d %s devices here, %d in all',
      jax.process_index(), jax.process_count(), jax.local_device_count(), jax.default_backend(), jax.device_count(),
  )


def _join_processes(coordinator: str, num_processes: int, process_id: int) -> None:
  address = coordinator or os.environ['JAX_COORDINATOR_ADDRESS']
  count = num_processes or int(os.environ.get('JAX_NUM_PROCESSES', '0'))
  index = process_id if process_id >= 0 else int(os.environ.get('JAX_PROCESS_ID', '-1'))
  if ':' not in address or not 0 <= index < count:
    raise ValueError(
        f'coordinator={address!r} with num_processes={count}, process_id={index}: needs HOST:PORT and '
        '0 <= process_id < num_processes; fix: --coordinator=127.0.0.1:8476 --num_processes=2 --process_id=0'
    )
  # Collectives between CPU processes; ignored by accelerator backends.
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.distributed.initialize(coordinator_address=address, num_processes=count, process_id=index)


def is_main() -> bool:
  """True on the one process that writes reports, metrics and exports."""
  return jax.process_index() == 0


def make_mesh(
    data: int = 1,
    fsdp: int = 1,
    context: int = 1,
    tensor: int = 1,
    expert: int = 1,
    *,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
  """A mesh over all devices with the axes MESH_AXES, data outermost; one size may be -1 and is filled.

  Devices of several TPU slices are laid so that only `data` crosses slices.

  Raises:
    ValueError: the sizes do not multiply to the number of devices.
  """
  devices = jax.devices() if devices is None else list(devices)
  sizes = dict(zip(MESH_AXES, (data, fsdp, context, tensor, expert), strict=True))
  shape = _fill_sizes(sizes, len(devices))
  slice_count = len({getattr(d, 'slice_index', 0) for d in devices})
  if slice_count > 1:
    if shape[0] % slice_count:
      raise ValueError(
          f'mesh.data = {shape[0]}: must be a multiple of the {slice_count} slices; '
          f'fix: --config.mesh.data={slice_count}'
      )
    within = (shape[0] // slice_count, *shape[1:])
    across = (slice_count, 1, 1, 1, 1)
    grid = mesh_utils.create_hybrid_device_mesh(within, across, devices)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
  return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES), devices=devices)


def _fill_sizes(sizes: dict[str, int], device_count: int) -> tuple[int, ...]:
  bad = {name: size for name, size in sizes.items() if size < 1 and size != -1}
  open_axes = [name for name, size in sizes.items() if size == -1]
  if bad or len(open_axes) > 1:
    raise ValueError(f'mesh sizes {sizes}: each must be >= 1, and at most one may be -1 (filled)')
  known = math.prod(size for size in sizes.values() if size != -1)
  if open_axes and device_count % known == 0:
    sizes = {**sizes, open_axes[0]: device_count // known}
  if math.prod(sizes.values()) != device_count:
    raise ValueError(
        f'mesh sizes {sizes} multiply to {known}, which does not cover {device_count} devices; '
        f'fix: set the sizes so that their product is {device_count}, or one of them to -1'
    )
  return tuple(sizes.values())


def sharding(
    mesh: Mesh, axes: str, *, shape: Sequence[int] | None = None, fit: Sequence[int] | None = None
) -> NamedSharding:
  """How an array whose axes are these letters is laid over the mesh; '' replicates.

  Args:
    mesh: from `make_mesh`.
    axes: one letter of AXES per dimension.
    shape: if given, every dimension must be divided by its mesh axes.
    fit: if given, a shape for which mesh axes that do not divide their dimension are dropped (that dimension is then
      laid over fewer devices, at the cost of memory).

  Raises:
    ValueError: an unknown letter, a shape of another rank, or a dimension that is not divided.
  """
  dims = fit if fit is not None else shape
  if dims is not None and len(dims) != len(axes):
    raise ValueError(f'axes {axes!r} name {len(axes)} dimensions, the array has shape {tuple(dims)}')
  taken: set[str] = set()
  spec = []
  for i, letter in enumerate(axes):
    if letter not in AXES:
      raise ValueError(f'axis letter {letter!r} in {axes!r} is not one of {"".join(AXES)}')
    names = [name for name in AXES[letter] if name not in taken and mesh.shape[name] > 1]
    if fit is not None:
      names = _dividing(mesh, names, fit[i])
    elif shape is not None and shape[i] % math.prod(mesh.shape[name] for name in names):
      sizes = ', '.join(f'{name}={mesh.shape[name]}' for name in names)
      raise ValueError(
          f'dimension {letter} = {shape[i]} of an array {axes}{tuple(shape)} is not divided by the mesh axes it is '
          f'laid over ({sizes}); fix: change that size or --config.mesh.{names[-1]}=1'
      )
    taken.update(names)
    spec.append(tuple(names) if len(names) > 1 else names[0] if names else None)
  return NamedSharding(mesh, PartitionSpec(*spec))


def _dividing(mesh: Mesh, names: list[str], size: int) -> list[str]:
  kept: list[str] = []
  for name in names:
    if size % math.prod(mesh.shape[n] for n in [*kept, name]) == 0:
      kept.append(name)
  return kept


def shardings_of(mesh: Mesh, abstract_state: Any) -> Any:
  """The same tree with a NamedSharding for each array, from the `axes` metadata of its nnx.Param.

  Works on nnx.State (of `nnx.eval_shape`) and on any tree that holds nnx Variables; a bare array and a Variable
  without `axes` are replicated. Dimensions that the mesh does not divide are laid over fewer devices.
  """
  def leaf(variable: Any) -> Any:
    axes = variable.get_metadata().get('axes', '') if isinstance(variable, nnx.Variable) else ''
    def place(x: Any) -> NamedSharding:
      return sharding(mesh, axes, fit=x.shape) if axes else sharding(mesh, '')
    return jax.tree.map(place, variable)

  return jax.tree.map(leaf, abstract_state, is_leaf=lambda x: isinstance(x, nnx.Variable))


def put_global(mesh: Mesh, host_array: np.ndarray, axes: str, *, fit: bool = False) -> jax.Array:
  """A global array with these axes; every process passes the same whole host array and keeps its own shards.

  Args:
    fit: drop mesh axes that do not divide their dimension, as `shardings_of` does for parameters.

  Raises:
    ValueError: without `fit`, a dimension is not divided by its mesh axes.
  """
  host_array = np.asarray(host_array)
  where = sharding(mesh, axes, **{'fit' if fit else 'shape': host_array.shape})
  return jax.make_array_from_callback(host_array.shape, where, lambda index: host_array[index])


def gather_bytes(obj: Any) -> list[Any]:
  """The host values that all processes passed, in process order; every process must call it at the same point.

  Values are what JSON holds, plus numpy arrays anywhere inside (dtype, shape and bytes are kept) and tuples, which come
  back as lists. With one process the value makes the same round trip, so its type does not depend on the launch.
  """
  raw = np.frombuffer(json.dumps(obj, default=_array_to_json).encode(), np.uint8)
  if jax.process_count() == 1:
    return [_from_bytes(raw)]
  lengths = multihost_utils.process_allgather(np.asarray([raw.size], np.int32)).reshape(-1)
  padded = np.zeros(int(lengths.max()), np.uint8)
  padded[: raw.size] = raw
  parts = multihost_utils.process_allgather(padded).reshape(len(lengths), -1)
  return [_from_bytes(part[:length]) for part, length in zip(parts, lengths, strict=True)]


def _array_to_json(value: Any) -> Any:
  if isinstance(value, np.generic):
    return value.item()
  array = np.asarray(value)
  if array.dtype.hasobject:
    raise TypeError(f'{type(value).__name__} is neither JSON nor a numpy array')
  data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
  return {'__array__': [array.dtype.str, list(array.shape), data]}


def _from_bytes(raw: np.ndarray) -> Any:
  def hook(value: dict[str, Any]) -> Any:
    if '__array__' not in value:
      return value
    dtype, shape, data = value['__array__']
    return np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape).copy()

  return json.loads(raw.tobytes().decode(), object_hook=hook)


class Interrupt:
  """Turns the first SIGINT or SIGTERM into a flag that a loop reads at its step borders.

  The second one acts as it would have without this context (Ctrl-C aborts, SIGTERM kills). Handlers are restored on
  exit. Use in the main thread only.
  """

  SIGNALS = (signal.SIGINT, signal.SIGTERM)

  def __init__(self) -> None:
    self.received = 0  # number of the signal, 0 for none
    self._previous: dict[int, Any] = {}

  def __enter__(self) -> 'Interrupt':
    self._previous = {number: signal.signal(number, self._on_signal) for number in self.SIGNALS}
    return self

  def __exit__(self, *unused: Any) -> None:
    self._restore()

  def _restore(self) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def _on_signal(self, number: int, unused_frame: types.FrameType | None) -> None:
    self.received = number
    self._restore()
    logging.warning('%s: stopping after this step; send it again to abort now', signal.Signals(number).name)

  def stop_requested(self) -> bool:
    """True on every process once any of them got a signal; with several processes this is a collective."""
    if jax.process_count() == 1:
      return self.received != 0
    return bool(np.any(multihost_utils.process_allgather(np.asarray([self.received], np.int32))))


def settled(x):
  """`x`, on a host's CPUs once it is computed.

  CPU devices of one process share its threads, and programs in flight together that each wait for every device have
  been seen to starve each other for ever.
  """
  return jax.block_until_ready(x) if jax.default_backend() == 'cpu' else x


def fetch(x: jax.Array) -> np.ndarray:
  """The whole array on the host of every process; a collective when its shards lie on several."""
  if x.is_fully_addressable:
    return np.asarray(x)
  return multihost_utils.process_allgather(x, tiled=True)


def barrier(name: str) -> None:
  """Waits until every process is here."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


def rows_over(mesh: Mesh, rows: int) -> int:
  """`rows` rounded up so that the devices that rows are laid over divide it."""
  over = math.prod(mesh.shape[name] for name in AXES['B'])
  return -(-rows // over) * over
