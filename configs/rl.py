"""RL with verifiable rewards on your own tasks, behind a gate on your held-out tasks.

  python -m ptjax.main --config=configs/rl.py --workdir=runs/rl \
    --config.tasks.path=train.jsonl --config.tasks.heldout_path=heldout.jsonl

Lines are {"prompt" | "messages", "domain", "verifier", "reference" | "tests", ...}: see the README.
"""

from configs import base


def get_config():
  config = base.get_config()
  config.name = 'rl'
  config.pipeline.stages = ('rl',)
  config.rl.steps = 100
  config.rl.max_tokens = 128
  config.rl.seq_len = config.rl.loss_tokens = 512
  config.eval.max_tokens = 128
  config.sampler.max_context = 512
  config.sampler.pages = 2048
  return config
