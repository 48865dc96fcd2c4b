"""The quickstart's pipeline from random weights: seconds per stage, for tests and for a first look.

  launch/quickstart.sh --config=configs/quickstart_tiny.py --workdir=runs/tiny

Nothing is learnt worth having; every part runs for real.
"""

from configs import base


def get_config():
  config = base.get_config()
  config.name = 'quickstart_tiny'
  config.model.source = 'random:tiny'
  config.tasks.domains = ('count_bits', 'gcd', 'functions')
  config.tasks.train_per_domain = 24
  for stage in (config.sft, config.dpo, config.rl):
    stage.steps, stage.rows, stage.seq_len, stage.loss_tokens, stage.lora_rank = 4, 8, 256, 192, 4
  config.sft.steps, config.sft.lr, config.sft.lora_rank = 60, 3e-3, 0  # enough to state an answer at all
  config.sft.examples = config.dpo.examples = 8
  config.dpo.sample_tasks, config.dpo.samples_per_task = 72, 4
  config.rl.tasks_per_step, config.rl.rollouts_per_task, config.rl.max_tokens = 4, 4, 12
  config.eval.tasks_per_domain, config.eval.max_tokens = 6, 12
  config.sampler.slots, config.sampler.pages, config.sampler.window = 8, 0, 8
  config.checkpoint.every = 2
  config.sft.schedule = 'linear'
  return config
