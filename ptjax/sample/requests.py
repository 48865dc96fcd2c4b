"""What is asked of the sampler, and the sizes within which it answers."""

import dataclasses

import numpy as np

from ptjax.sample.paged_attention import KV_DTYPES, SCALED_DTYPES


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
  """A prompt to be completed `samples` times."""

  id: str
  prompt_ids: np.ndarray  # [P] int32
  max_tokens: int  # a completion also ends where the context does; 0 only scores the prompt (`prompt_logp`)
  min_tokens: int = 0  # drawn before a stop id can be, and before stop strings count
  temperature: float = 1.0  # 0 takes the most likely token
  top_k: int = 0  # 0 keeps all
  top_p: float = 1.0
  min_p: float = 0.0
  seed: int = 0  # with the sample's number and the position, all that a draw depends on
  samples: int = 1
  stop_ids: tuple[int, ...] = ()  # kept in the completion when drawn
  stop_strings: tuple[str, ...] = ()  # end a completion with the token that completes one
  logit_bias: np.ndarray | None = None  # [V] f32, added to the logits; -inf forbids a token
  prompt_logp: bool = False  # also score the prompt
  top_logp: int = 0  # most likely tokens to report at each position
  group_id: str = ''

  def __post_init__(self):
    object.__setattr__(self, 'prompt_ids', np.asarray(self.prompt_ids, np.int32))
    if self.logit_bias is not None:
      object.__setattr__(self, 'logit_bias', np.asarray(self.logit_bias, np.float32))
    least = 0 if self.prompt_logp else 1
    rules = (
        (self.prompt_ids.ndim == 1 and len(self.prompt_ids) > 0, 'prompt_ids must be a list of at least one token'),
        (self.max_tokens >= least, f'max_tokens = {self.max_tokens} must be at least {least}'),
        (0 <= self.min_tokens <= self.max_tokens, f'min_tokens = {self.min_tokens} must be in [0, max_tokens]'),
        (self.samples >= 1, f'samples = {self.samples} must be at least 1'),
        (np.isfinite(self.temperature) and self.temperature >= 0, f'temperature = {self.temperature} must be >= 0'),
        (self.top_k >= 0, f'top_k = {self.top_k} must be >= 0 (0 keeps all)'),
        (0 < self.top_p <= 1, f'top_p = {self.top_p} must be in (0, 1]'),
        (0 <= self.min_p < 1, f'min_p = {self.min_p} must be in [0, 1)'),
        (0 <= self.seed < 2 ** 64, f'seed = {self.seed} must be in [0, 2**64)'),
        (all(self.stop_strings), 'a stop string is empty'),
        (self.top_logp >= 0, f'top_logp = {self.top_logp} must be >= 0'),
        (self.logit_bias is None or self.logit_bias.ndim == 1, 'logit_bias must be a list of numbers'),
    )
    problems = [problem for fine, problem in rules if not fine]
    if problems:
      raise ValueError(f'request {self.id!r}: ' + '; '.join(problems))


@dataclasses.dataclass(frozen=True)
class SamplerLimits:
  """Sizes that fix what is compiled and how much memory is held."""

  slots: int = 32  # sequences decoded at once
  page_size: int = 16  # tokens
  pages: int = 0  # in the pool; 0 is enough for every slot at full context
  max_context: int = 1024  # tokens of prompt and completion
  window: int = 32  # decode steps per device call, at most
  prefill_chunk: int = 128  # prompt tokens per device call, at most
  prefill_budget: int = 0  # prompt tokens computed between two windows; 0: all that there is room for
  stop_ids: int = 8  # per request, at most
  top_logp: int = 0  # alternatives per token that a request may ask for
  biases: int = 4  # different logit biases at one time
  draft_tokens: int = 0  # W, guessed and then verified per decode step; 0 is off
  ngram: int = 3  # longest run of tokens that is looked up
  kv_dtype: str = ''  # keys and values as stored: float32 | bfloat16 | int8 | float8_e4m3fn; empty: the compute dtype
  weight_dtype: str = ''  # of the layers' matrices, with a scale per output: int8 | float8_e4m3fn; '': compute dtype

  def __post_init__(self):
    if self.weight_dtype not in ('', *SCALED_DTYPES):
      raise ValueError(f'sampler weight_dtype = {self.weight_dtype!r} is not one of {tuple(SCALED_DTYPES)}')
    if self.kv_dtype not in ('', *KV_DTYPES):
      raise ValueError(f'sampler kv_dtype = {self.kv_dtype!r} is not one of {KV_DTYPES}')
    for field in dataclasses.fields(self):
      if field.type is not int:
        continue
      may_be_zero = field.name in ('pages', 'prefill_budget', 'top_logp', 'biases', 'draft_tokens')
      value, least = getattr(self, field.name), 0 if may_be_zero else 1
      if not isinstance(value, int) or value < least:
        raise ValueError(f'sampler {field.name} = {value!r} must be a whole number >= {least}')
    if self.pages == 0:
      object.__setattr__(self, 'pages', self.slots * self.pages_per_sequence + 1)
    if self.pages < 2:
      raise ValueError(f'sampler pages = {self.pages}: needs at least 2, one of which is the sink')

  @property
  def pages_per_sequence(self) -> int:
    return -(-self.max_context // self.page_size)

  @property
  def slot_buckets(self) -> tuple[int, ...]:
    """Row counts a window is compiled for: 1, 8, 32, 128, ... and `slots`; few, as each is a compilation."""
    powers = [1] + [8 << 2 * n for n in range(self.slots.bit_length())]
    return (*(power for power in powers if power < self.slots), self.slots)

  @property
  def chunk_buckets(self) -> tuple[int, ...]:
    """Token counts a chunk is compiled for."""
    return tuple(sorted({max(1, self.prefill_chunk // 4), self.prefill_chunk}))

  @property
  def chunk_pages(self) -> int:
    """Earlier pages that the rows of one chunk may look at, all rows together."""
    return min(self.pages, 4 * self.pages_per_sequence)
