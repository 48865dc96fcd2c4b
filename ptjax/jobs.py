"""What each job does with a checked config: the pipeline's stages, and the small jobs people script with.

Small jobs read JSONL and write JSONL in the same order, pass ids through, and use the model that `config.model` names:
the source itself, or a finished stage of --workdir.
"""

import contextlib
import json
import os
import sys

from absl import logging
from flax import nnx
import jax
import numpy as np

from ptjax import pipeline as pipelines
from ptjax import types
from ptjax.data import batching, chat
from ptjax.evals import suites
from ptjax.learn import update
from ptjax.models import adapters
from ptjax.runtime import devices
from ptjax.sample.requests import Request
from ptjax.serve import server
from ptjax.tasks import jsonl
from ptjax.weights import peft, safetensors

SCORE_ROWS = 8  # sequences scored at one time


def pipeline(config, *, workdir, overrides, **unused) -> None:
  """Runs config.pipeline.stages from the source, each behind its gate."""
  with devices.Interrupt() as interrupt:
    pipelines.run(config, workdir, config.pipeline.stages, interrupt=interrupt, overrides=overrides)


def sft(config, **options) -> None:
  _only(config, 'sft', **options)


def dpo(config, **options) -> None:
  _only(config, 'dpo', **options)


def rl(config, **options) -> None:
  _only(config, 'rl', **options)


def _only(config, stage, *, workdir, overrides, **unused) -> None:
  with devices.Interrupt() as interrupt:
    pipelines.run(config, workdir, (stage,), interrupt=interrupt, overrides=overrides)


def evaluate(config, *, workdir, output, **unused) -> None:
  """Evaluates the model on the held-out tasks, prints the table; --output takes the whole result as JSON."""
  _check_output(output)
  parts, plain = _model(config, workdir, tasks=True)
  pipelines.check_prompts(config, parts, ())
  with parts.verifiers:
    result = pipelines.evaluate(config, parts, plain)
  pipelines.show_table({'model': result})
  if output != '-' and devices.is_main():
    suites.save(result, output)


def generate(config, *, workdir, input, output, **unused) -> None:
  """{"id", "prompt" | "messages"} -> {"id", "sample", "text", "token_ids", "logprobs", "finish_reason"}."""
  _check_output(output)
  records = list(jsonl.prompts(input))
  parts, plain = _model(config, workdir)
  parts.load_policy(plain, version=0)
  g = config.generate
  requests = []
  for i, record in enumerate(records):
    ids = _prompt_ids(parts.tokenizer, record)
    if len(ids) + g.max_tokens > config.sampler.max_context:
      raise ValueError(f"record {record['id']!r}: {len(ids)} tokens of prompt and generate.max_tokens = {g.max_tokens} "
                       f'are over sampler.max_context = {config.sampler.max_context}; fix: '
                       f'--config.sampler.max_context={len(ids) + g.max_tokens}')
    requests.append(Request(
        id=str(record['id']), prompt_ids=ids, max_tokens=g.max_tokens, temperature=g.temperature, top_k=g.top_k,
        top_p=g.top_p, min_p=g.min_p, samples=g.samples, seed=config.seed + i, stop_ids=parts.tokenizer.eos_ids))
  groups = parts.engine.generate(requests)
  _write(output, (
      dict(id=record['id'], sample=k, text=parts.tokenizer.decode(r.token_ids, skip_special=True),
           token_ids=r.token_ids.tolist(), logprobs=[float(x) for x in r.behavior_logp],
           finish_reason=r.finish_reason)
      for record, group in zip(records, groups) for k, r in enumerate(group)))


def score(config, *, workdir, input, output, **unused) -> None:
  """Log-probs in nats of given text.

  {"id", "prompt", "completion"} -> {"id", "token_ids", "logprobs", "sum"} of the completion's tokens given the prompt;
  {"id", "token_ids"} -> the same ids, and the log-prob of each but the first, which nothing predicts.
  """
  _check_output(output)
  records = list(jsonl.scorables(input))
  parts, plain = _model(config, workdir)
  sequences = [_scorable(parts.tokenizer, record, parts.model_config.vocab_size) for record in records]
  logps = _score_all(config, parts, plain, sequences)
  _write(output, (
      dict(id=record['id'], token_ids=record.get('token_ids', sequence.completions[0]['token_ids'].tolist()),
           logprobs=[float(x) for x in logp], sum=float(np.sum(logp, dtype=np.float64)))
      for record, sequence, logp in zip(records, sequences, logps)))


def export(config, *, workdir, output, **unused) -> None:
  """Writes the model to the directory --output as transformers loads it.

  With config.export.merge_lora off, the last stage's adapter goes to <output>/adapter and its parent to <output>.
  """
  if output == '-':
    raise ValueError('--job=export needs --output=DIRECTORY')
  if os.path.exists(output) and os.path.exists(config.model.source) and os.path.samefile(output, config.model.source):
    raise ValueError(f'--output={output} is the model source itself, which would be overwritten; fix: another --output')
  if config.export.merge_lora and os.path.exists(os.path.join(output, 'adapter')):
    raise ValueError(f'{output}/adapter is of an earlier export and would be applied twice to a merged model; fix: '
                     'another --output, or move it away')
  mesh = devices.make_mesh(**config.mesh)
  model = pipelines.load_model(config, mesh)
  stages = pipelines.finished_stages(config, workdir)
  apart = [name for name in stages[-1:] if name != 'base' and not config.export.merge_lora]
  plain = pipelines.restore(workdir, mesh, model.config, model.params, stages[:len(stages) - len(apart)])
  safetensors.export_hf(output, model.config, plain, model.tokenizer)
  for name in apart:
    _, adapter, _, settings = pipelines.trained(workdir, mesh, model.config, plain, name)
    adapter = jax.tree.map(devices.fetch, adapter)
    if devices.is_main():
      peft.export_adapter(os.path.join(output, 'adapter'), model.config, adapter, rank=settings['lora_rank'],
                          alpha=settings['lora_alpha'] or settings['lora_rank'], base=output)
  if devices.is_main():
    logging.info('wrote %s: %s', output, ' -> '.join(stages) or 'the source as it is')


def serve(config, *, workdir, **unused) -> None:
  """Serves the model over HTTP, as OpenAI's API does, until a signal comes."""
  if jax.process_count() > 1:
    raise ValueError(f'--job=serve runs in one process, not {jax.process_count()}; fix: start one server per host')
  parts, plain = _model(config, workdir)
  parts.load_policy(plain, version=0)
  server.serve(parts.engine, parts.tokenizer, config.serve, model=config.serve.model_name or config.model.source)


def _model(config, workdir, *, tasks=False):
  """The parts and the plain state that config.model names."""
  parts, plain = pipelines.build(config, tasks=tasks)
  stages = pipelines.finished_stages(config, workdir)
  return parts, pipelines.restore(workdir, parts.mesh, parts.model_config, plain, stages)


def _prompt_ids(tokenizer, record) -> np.ndarray:
  if 'messages' in record:
    return chat.encode_prompt(tokenizer, record['messages'])
  return np.asarray(tokenizer.encode(record['prompt'], add_special=True), np.int32)


def _scorable(tokenizer, record, vocab_size: int):
  if 'token_ids' in record:
    if max(record['token_ids']) >= vocab_size:
      raise ValueError(f"record {record['id']!r}: token id {max(record['token_ids'])} is outside [0, {vocab_size})")
    ids = np.asarray(record['token_ids'], np.int32)
    return batching.supervised(ids[:1], ids[1:])
  prompt = tokenizer.encode(record['prompt'], add_special=True)
  if not prompt:
    raise ValueError(f"record {record['id']!r}: the prompt has no token, so nothing predicts the first one")
  return batching.supervised(prompt, tokenizer.encode(record['completion']))


def _score_all(config, parts, plain, sequences) -> list[np.ndarray]:
  """Log-probs of each sequence's completion, in order; one sequence per row, rows of like width together."""
  graphdef, nothing = adapters.graphdef_of(parts.model_config), nnx.State({})
  rows = devices.rows_over(parts.mesh, SCORE_ROWS)
  logps = [None] * len(sequences)
  for width, members in _by_width(sequences, parts.model_config.max_position).items():
    scorer = update.make_score(graphdef, temperature=1.0, loss_tokens=width)
    for i in range(0, len(members), rows):
      some = members[i:i + rows]
      padded = [sequences[k] for k in some] + [sequences[some[0]]] * (rows - len(some))
      singles = [batching.pack([s], rows=1, seq_len=width, max_branches=1).batches[0] for s in padded]
      batch = types.Batch(*(devices.put_global(parts.mesh, np.concatenate(field), 'BT')
                                     for field in zip(*singles)))
      for k, logp_T in zip(some, devices.fetch(scorer(plain, nothing, batch))):
        start = len(sequences[k].prompt_ids)
        logps[k] = logp_T[start:start + len(sequences[k].completions[0]['token_ids'])]
  return logps


def _by_width(sequences, limit: int) -> dict[int, list[int]]:
  """Sequence indices by the power of two that holds them, so that few widths are compiled."""
  members = {}
  for k, s in enumerate(sequences):
    length = len(s.prompt_ids) + len(s.completions[0]['token_ids'])
    if length > limit:
      raise ValueError(f'sequence {k + 1} has {length} tokens, over the model\'s {limit}; shorten it')
    members.setdefault(min(limit, max(32, 1 << (length - 1).bit_length())), []).append(k)
  return members


def _check_output(output: str) -> None:
  """Raises ValueError, before any work, for an output that cannot be written."""
  directory = os.path.dirname(output) or '.'
  if output != '-' and (os.path.isdir(output) or not os.access(directory, os.W_OK)):
    raise ValueError(f'--output={output}: no such file can be written; fix: a file in a directory that exists')


def _write(output: str, records) -> None:
  if not devices.is_main():
    return
  with contextlib.nullcontext(sys.stdout) if output == '-' else open(output, 'w', encoding='utf-8') as f:
    for record in records:
      f.write(json.dumps(record, ensure_ascii=False) + '\n')
    f.flush()
