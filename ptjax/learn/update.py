"""One jitted, sharded optimizer step for every objective, and the forward pass that scores a batch.

An algorithm reaches this file as data: per-token advantages in the batch and an `objective`, a pure function from
log-probs to (sum, weight, metrics). The update sums gradients over micro-batches and divides once by the summed weight,
so any split of a batch takes the same step. Random draws elsewhere are folded from (seed, step): there is no generator
state to carry.
"""

from collections.abc import Callable
import functools
from typing import NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import optax

from ptjax import types
from ptjax.models import scoring
from ptjax.runtime import devices

# (logp_BT, entropy_BT, batch) -> (sum, weight, {name: (sum, weight)}); a name ending in _max is reduced by maximum and
# holds (value, 1).
Objective = Callable[[jax.Array, jax.Array, types.Batch], tuple[jax.Array, jax.Array, dict]]


class TrainState(NamedTuple):
  """What a step changes: donated to it and returned."""

  step: jax.Array  # int32, steps taken; one without anything to train on is none
  params: nnx.State  # the trainable parameters: all of them, or the adapters
  opt_state: optax.OptState


def init(params: nnx.State, optimizer: optax.GradientTransformation) -> TrainState:
  return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def make_update(graphdef: nnx.GraphDef, objective: Objective, optimizer: optax.GradientTransformation, *,
                temperature: float, loss_tokens: int):
  """update(state, frozen, batches) -> (state, metrics): one optimizer step over any number of micro-batches.

  Donates `state`. Batches of one shape share one compiled program, whatever their number. When nothing in them is
  trained on, parameters and moments stay as they were.
  """

  def total_loss(params, frozen, batch):
    model = nnx.merge(graphdef, params, frozen)
    logp_BT, entropy_BT = scoring.token_logp(model, batch, temperature=temperature, loss_tokens=loss_tokens)
    total, weight, metrics = objective(logp_BT, entropy_BT, batch)
    return total, dict(metrics, loss=(total, weight))

  def gradient(params, frozen, batch):
    grads, sums = jax.grad(total_loss, has_aux=True)(params, frozen, batch)
    return jax.tree.map(lambda g: g.astype(jnp.float32), grads), sums

  @functools.partial(jax.jit, donate_argnums=0)
  def accumulate(so_far, params, frozen, batch):
    grads, sums = gradient(params, frozen, batch)
    old_grads, old_sums = so_far
    return jax.tree.map(jnp.add, old_grads, grads), {k: _combine(k, old_sums[k], v) for k, v in sums.items()}

  @jax.jit
  def zeros(params, frozen, batch):
    shapes = jax.eval_shape(gradient, params, frozen, batch)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

  @functools.partial(jax.jit, donate_argnums=0)
  def apply(state, grads, sums):
    weight = sums['loss'][1]
    some = weight > 0
    scale = jnp.where(some, 1.0 / jnp.where(some, weight, 1.0), 0.0)
    grads = jax.tree.map(lambda g: g * scale, grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    keep = functools.partial(jax.tree.map, lambda new, old: jnp.where(some, new, old))
    state = TrainState(state.step + some, keep(params, state.params), keep(opt_state, state.opt_state))
    means = {k: _mean(k, *pair) for k, pair in sums.items()}
    return state, dict(means, weight=weight, grad_norm=optax.global_norm(grads))

  def update(state, frozen, batches):
    so_far = devices.settled(zeros(state.params, frozen, batches[0]))
    for batch in batches:
      so_far = devices.settled(accumulate(so_far, state.params, frozen, batch))
    return devices.settled(apply(state, *so_far))

  return update


def make_score(graphdef: nnx.GraphDef, *, temperature: float, loss_tokens: int):
  """score(params, frozen, batch) -> logp_BT of the trained tokens, f32 nats; no gradient."""

  @jax.jit
  def score(params, frozen, batch):
    model = nnx.merge(graphdef, params, frozen)
    return scoring.token_logp(model, batch, temperature=temperature, loss_tokens=loss_tokens)[0]

  return score


def _combine(name, old, new):
  reduce = jnp.maximum if name.endswith('_max') else jnp.add
  return jax.tree.map(reduce, old, new)


def _mean(name, total, weight):
  return total if name.endswith('_max') else total / jnp.maximum(weight, 1e-8)
