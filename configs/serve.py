"""Serving: a longer context, log-probs and logit biases, for at most 16 samples at one time.

  python -m ptjax.main --job=serve --config=configs/serve.py --config.serve.model_name=smollm2
  python -m ptjax.main --job=serve --config=configs/serve.py --workdir=runs/quickstart

The pool of keys and values holds 16 thousand tokens, 0.75 GB for SmolLM2-135M in float32.
"""

from configs import base


def get_config():
  config = base.get_config()
  config.name = 'serve'
  config.sampler.slots = 16
  config.sampler.max_context = 2048
  config.sampler.pages = 1025
  config.sampler.window = 8  # steps between two looks at new requests: a trade of latency for throughput
  config.sampler.prefill_budget = 256
  config.sampler.top_logp = 5
  config.sampler.biases = 8
  return config
