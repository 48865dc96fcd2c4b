"""A stage's learner: trainable and frozen parameters, optimizer, the compiled update, and their place on the mesh."""

from collections.abc import Sequence
import functools

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np

from ptjax import types
from ptjax.data import batching
from ptjax.learn import optimizer as optimizers
from ptjax.learn import update as updates
from ptjax.models import adapters
from ptjax.runtime import devices


class Trainer:
  """Trains a plain model state on batches under one objective; the reference policy is the state it started from."""

  def __init__(self, settings, model_config, plain, objective, *, mesh, temperature=1.0, seed=0, updates_per_step=1):
    self.settings, self.mesh, self.vocab_size = settings, mesh, model_config.vocab_size
    self.graphdef, params, self.frozen = adapters.split(
        model_config, plain, rank=settings.lora_rank, alpha=settings.lora_alpha, seed=seed)
    self.schedule = optimizers.schedule(
        settings.schedule, lr=settings.lr, steps=settings.steps * updates_per_step,
        warmup_steps=settings.warmup_steps * updates_per_step)
    optimizer = optimizers.adamw(self.schedule, weight_decay=settings.weight_decay, clip_norm=settings.clip_norm,
                                 b1=settings.b1, b2=settings.b2)
    place = functools.partial(devices.shardings_of, mesh)
    params = jax.device_put(params, place(params))
    self.reference_params = jax.tree.map(jnp.copy, params)  # `update` donates the others
    abstract = jax.eval_shape(lambda p: updates.init(p, optimizer), params)
    self.state = jax.jit(lambda p: updates.init(p, optimizer), out_shardings=place(abstract))(params)
    kwargs = dict(temperature=temperature, loss_tokens=settings.loss_tokens)
    self._update = updates.make_update(self.graphdef, objective, optimizer, **kwargs)
    self._score = updates.make_score(self.graphdef, **kwargs)
    self._merge = jax.jit(adapters.merge, static_argnums=0)
    count = sum(x.size for x in jax.tree.leaves(params))
    logging.info('training %.2fM parameters, %.2fM frozen', count / 1e6,
                 sum(x.size for x in jax.tree.leaves(self.frozen)) / 1e6)

  @property
  def step(self) -> int:
    """Optimizer steps taken."""
    return int(self.state.step)

  @property
  def rows(self) -> int:
    """B of a micro-batch: settings.rows, rounded up to the devices that rows are laid over."""
    return devices.rows_over(self.mesh, self.settings.rows)

  def place(self, batch: types.Batch) -> types.Batch:
    return types.Batch(*(devices.put_global(self.mesh, x, 'BT') for x in batch))

  def update(self, batches: Sequence[types.Batch]) -> dict[str, float]:
    """One optimizer step over the micro-batches; returns its metrics.

    Raises:
      ValueError: a batch breaks a promise of types.Batch.
      FloatingPointError: the loss or gradient is not finite; names the first parameter whose value went bad.
    """
    for batch in batches:
      batching.check_batch(batch, max_branches=self.settings.branches, vocab_size=self.vocab_size)
    lr = float(self.schedule(self.step))
    self.state, metrics = self._update(self.state, self.frozen, [self.place(b) for b in batches])
    metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
    if not np.isfinite([metrics['loss'], metrics['grad_norm']]).all():
      raise FloatingPointError(
          f"step {self.step}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}; first bad parameter: "
          f'{self._first_bad()}; fix: a lower lr, or look at the batch of this step')
    return dict(metrics, lr=lr)

  def _first_bad(self) -> str:
    for path, leaf in jax.tree_util.tree_leaves_with_path(self.state.params):
      if not bool(jnp.isfinite(leaf).all()):
        return jax.tree_util.keystr(path)
    return 'none'

  def score(self, batches: Sequence[types.Batch], params=None) -> list[np.ndarray]:
    """logp_BT of each batch's trained tokens under `params` (default: the learner's), on the host."""
    params = self.state.params if params is None else params
    placed = [devices.settled(self._score(params, self.frozen, self.place(b))) for b in batches]
    return [devices.fetch(x) for x in placed]

  def with_reference(self, batches: Sequence[types.Batch]) -> list[types.Batch]:
    """The batches with ref_logp_BT filled in from the policy this stage started from."""
    return [b._replace(ref_logp_BT=logp_BT)
            for b, logp_BT in zip(batches, self.score(batches, self.reference_params))]

  def with_old(self, batches: Sequence[types.Batch]) -> list[types.Batch]:
    """The batches with old_logp_BT from the present learner in place of the sampler's own log-probs."""
    return [b._replace(old_logp_BT=logp_BT) for b, logp_BT in zip(batches, self.score(batches))]

  def merged(self):
    """The plain state of the present policy."""
    return devices.settled(self._merge(self.graphdef, self.state.params, self.frozen))
