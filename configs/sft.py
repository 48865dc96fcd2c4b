"""Supervised fine-tuning on your own JSONL: conversations, or prompt and completion.

  python -m ptjax.main --config=configs/sft.py --workdir=runs/sft --config.sft.data=mine.jsonl

Lines are {"messages": [...]}, {"conversations": [...]} or {"prompt", "completion"}; only what the assistant says is
trained on. Set tasks.domains (or tasks.path and tasks.heldout_path) to put the stage behind a gate.
"""

from configs import base


def get_config():
  config = base.get_config()
  config.name = 'sft'
  config.pipeline.stages = ('sft',)
  config.tasks.domains = ()
  config.sft.steps = 200
  config.sft.lr = 3e-4
  config.sft.schedule = 'cosine'
  config.sft.seq_len = config.sft.loss_tokens = 512
  config.checkpoint.every = 20
  return config
