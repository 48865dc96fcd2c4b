"""A tiny engine, made once per set of limits, and what the uncached forward of the same weights says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ptjax.models.families import RANDOM_SIZES, ModelConfig
from ptjax.models.transformer import Transformer
from ptjax.sample.engine import Engine
from ptjax.sample.requests import Request, SamplerLimits

CONFIG = ModelConfig(**RANDOM_SIZES['tiny'])
LENGTH = 64


def random_weights(config, seed=0):
  return nnx.state(nnx.jit(lambda: Transformer(config, nnx.Rngs(seed)))())


@functools.cache
def weights(seed=0):
  return random_weights(CONFIG, seed)


@functools.cache
def forward():
  graph = nnx.graphdef(nnx.eval_shape(lambda: Transformer(CONFIG, nnx.Rngs(0))))

  def run(state, token_T):
    model = nnx.merge(graph, state)
    mask_BTS = np.tri(LENGTH, dtype=bool)[None]
    return model.logits(model.hidden(token_T[None], np.arange(LENGTH)[None], mask_BTS))[0]

  return jax.jit(run)


def expected(rollout, seed=0):
  """Logits [n, V] that the uncached forward predicts each drawn token with."""
  tokens, start = np.concatenate([rollout.prompt_ids, rollout.token_ids]), len(rollout.prompt_ids)
  logits_TV = np.asarray(forward()(weights(seed), np.pad(tokens, (0, LENGTH - len(tokens)))))
  return logits_TV[start - 1:len(tokens) - 1]


def truncated(logits_V, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
  p_V = np.exp(np.asarray(logits_V, np.float64) / temperature)
  order = np.argsort(-p_V)
  p_V[order[top_k or 320:]] = 0
  p_V /= p_V.sum()
  p_V[order[np.cumsum(p_V[order]) - p_V[order] >= top_p]] = 0
  p_V[p_V < min_p * p_V.max()] = 0
  return p_V / p_V.sum()


def log_softmax(logits_TV):
  return np.asarray(jax.nn.log_softmax(jnp.asarray(logits_TV), axis=-1))


def spell(ids):
  return ''.join(f'{i:03}' for i in ids)


@functools.cache
def engine(**limits):
  made = Engine(CONFIG, SamplerLimits(**(dict(slots=8, page_size=8, max_context=LENGTH, window=6, prefill_chunk=32,
                                              top_logp=3, biases=3) | limits)), decode_text=spell)
  made.load_params(weights(), 0)
  return made


def prompts(seed, count, shared=11, longest=25):
  """Prompts that begin alike, of different lengths, one of them a single token."""
  rng = np.random.default_rng(seed)
  common = rng.integers(0, 320, shared)
  rest = [rng.integers(0, 320, n) for n in rng.integers(1, longest, count - 1)]
  return [np.concatenate([common, r]) for r in rest] + [common[:1]]


def all_greedy(rows, max_tokens=20, **settings):
  return [Request(id=str(i), prompt_ids=p, max_tokens=max_tokens, temperature=0.0, **settings)
          for i, p in enumerate(rows)]


def drawn(groups):
  return [[r.token_ids.tolist() for r in group] for group in groups]
