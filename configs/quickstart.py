"""SmolLM2-135M-Instruct through SFT, DPO and RL on seven verifiable domains, on two CPU cores."""

from configs import base


def get_config():
  config = base.get_config()
  config.name = 'quickstart'
  return config
