"""The optimizer of a stage, from optax: AdamW, a schedule, and clipping by global norm."""

import optax

SCHEDULES = {
    'constant': lambda lr, steps: optax.constant_schedule(lr),
    'linear': lambda lr, steps: optax.linear_schedule(lr, 0.0, steps),
    'cosine': lambda lr, steps: optax.cosine_decay_schedule(lr, steps),
}


def schedule(name: str, *, lr: float, steps: int, warmup_steps: int) -> optax.Schedule:
  """Linear warm-up from lr / warmup_steps to lr, then the named decay over what is left of `steps`."""
  if name not in SCHEDULES:
    raise ValueError(f'schedule {name!r} is unknown; known: {sorted(SCHEDULES)}')
  decay = SCHEDULES[name](lr, max(steps - warmup_steps, 1))
  if not warmup_steps:
    return decay
  warmup = optax.linear_schedule(lr / warmup_steps, lr, max(warmup_steps - 1, 1))
  return optax.join_schedules([warmup, decay], [warmup_steps])


def adamw(lr: optax.Schedule, *, weight_decay: float, clip_norm: float, b1: float,
          b2: float) -> optax.GradientTransformation:
  """AdamW (arXiv 1711.05101) behind clipping by global norm.

  Both moments are f32: so is every parameter that trains (models.adapters.split).
  """
  return optax.chain(optax.clip_by_global_norm(clip_norm),
                     optax.adamw(lr, b1=b1, b2=b2, weight_decay=weight_decay, mu_dtype='float32'))
