"""SmolLM2-135M-Instruct through SFT, DPO and RL on seven verifiable domains, on two CPU cores.

  launch/quickstart.sh
  python -m ptjax.main --config=configs/quickstart.py --workdir=runs/quickstart
"""

from configs import base


def get_config():
  config = base.get_config()
  config.name = 'quickstart'
  return config
