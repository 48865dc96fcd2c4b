"""Preference optimisation on your own JSONL of prompt, chosen and rejected.

  python -m ptjax.main --config=configs/dpo.py --workdir=runs/dpo --config.dpo.data=mine.jsonl

Each side is text or a list of messages; without "prompt" it is what both sides begin with. Set tasks.domains (or
tasks.path and tasks.heldout_path) to put the stage behind a gate.
"""

from configs import base


def get_config():
  config = base.get_config()
  config.name = 'dpo'
  config.pipeline.stages = ('dpo',)
  config.tasks.domains = ()
  config.dpo.steps = 100
  config.dpo.lr = 5e-5
  config.dpo.schedule = 'linear'
  config.dpo.seq_len = config.dpo.loss_tokens = 1024
  config.checkpoint.every = 20
  return config
