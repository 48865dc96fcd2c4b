"""The nouns that every part of ptjax passes around, with the shapes they promise.

Nothing here imports jax: verifiers and their sandboxes use these types in processes that must never start it. Facts
(loss mask, behavior log-prob, policy version, finish reason) are stored when they happen and never re-derived.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

STATUSES = ('pass', 'fail', 'timeout', 'error')


@dataclasses.dataclass(frozen=True)
class Task:
  """One verifiable thing to do. `id` is stable across runs: curriculum, audit and evaluation key on it."""

  id: str
  domain: str
  messages: tuple[dict, ...]  # the prompt: {"role", "content"} in chat order
  verifier: str  # a row of ptjax.verify.base.VERIFIERS
  reference: Any = None  # what the verifier compares with; never shown to the policy
  tests: dict | None = None  # {"style": call|stdio|asserts|unittest|pytest, "text", "language", "credit"}
  files: dict = dataclasses.field(default_factory=dict)
  limits: dict = dataclasses.field(default_factory=dict)  # sandbox.Limits fields
  level: int = 0  # difficulty, 0 is easiest
  demonstration: str | None = None  # a right completion, for supervised fine-tuning


@dataclasses.dataclass
class Rollout:
  """One completion as it was drawn: P prompt tokens, T drawn tokens; per-token arrays all have length T."""

  task_id: str
  group_id: str  # rollouts of one task in one step share it
  prompt_ids: np.ndarray  # [P] int32
  token_ids: np.ndarray  # [T] int32, the end-of-turn token kept if it was drawn
  mask: np.ndarray  # [T] bool, True where the policy drew the token
  behavior_logp: np.ndarray  # [T] f32, nats, under the law each token was drawn from
  version: np.ndarray  # [T] int32, the policy version that drew each token
  finish_reason: str  # 'stop' (end token or stop string drawn) | 'length' | 'cancelled'
  temperature: float
  model_logp: np.ndarray | None = None  # [T] f32, nats, under the model alone: temperature 1, no bias, no truncation
  prompt_logp: np.ndarray | None = None  # [P] f32, nats, under the model alone, nan for the first; if it was asked for
  top_ids: np.ndarray | None = None  # [T, A] int32, the model's A most likely tokens, if they were asked for
  top_logp: np.ndarray | None = None  # [T, A] f32
  prompt_top_ids: np.ndarray | None = None  # [P, A] int32
  prompt_top_logp: np.ndarray | None = None  # [P, A] f32
  stop_string: str = ''  # that ended it
  stop_start: int = -1  # where that begins in the text of token_ids
  steps: int = 0  # decode steps it took part in; below T where guessed tokens were accepted
  drafted: int = 0  # tokens guessed ahead of it, and of those
  accepted: int = 0  # drawn
  text: str = ''

  def __post_init__(self):
    optional = (self.model_logp, self.top_ids, self.top_logp)
    lengths = {len(a) for a in (self.token_ids, self.mask, self.behavior_logp, self.version)}
    lengths |= {len(a) for a in optional if a is not None}
    if len(lengths) != 1:
      raise ValueError(f'rollout of {self.task_id}: per-token arrays differ in length: {sorted(lengths)}')


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What a verifier found. `error` means the verifier or host broke: never trained on, never counted as 0.

  `timeout` is the policy's own fault. `format_ok` says whether the answer was stated in the asked form, whatever its
  value; it is reported beside the score and pays nothing by itself.
  """

  status: str
  score: float  # in [0, 1]
  evidence: dict = dataclasses.field(default_factory=dict)  # JSON-able, what was compared and how
  verifier_version: str = ''
  format_ok: bool = False

  def __post_init__(self):
    if self.status not in STATUSES:
      raise ValueError(f'verdict status {self.status!r} is not one of {STATUSES}')
    if not 0.0 <= self.score <= 1.0:
      raise ValueError(f'verdict score {self.score} is outside [0, 1]')


class Batch(NamedTuple):
  """Rows of packed token trees, built and checked on the host and put on devices once.

  A row holds segments (a prompt and everything sampled from it); a segment holds a trunk (branch 0, the prompt) and
  branches (its completions). A token attends to earlier tokens of its segment that lie on the trunk or on its own
  branch, so a prompt shared by R completions is computed once. `parent_BT[t]` is the row index of the token that
  predicts token t (the trunk's last token for the first token of a branch, else t - 1). Branch ids are unique in a
  row and run from 1 to at most the row's sequence limit.
  """

  token_BT: np.ndarray  # int32
  segment_BT: np.ndarray  # int32, 0 is padding
  branch_BT: np.ndarray  # int32, 0 is the trunk
  position_BT: np.ndarray  # int32, restarts in each segment; branches all go on from the trunk's end
  parent_BT: np.ndarray  # int32
  mask_BT: np.ndarray  # bool, True where the token is trained on
  advantage_BT: np.ndarray  # f32; 1 for supervised tokens
  behavior_logp_BT: np.ndarray  # f32, nats, under the law the token was drawn from
  old_logp_BT: np.ndarray  # f32, nats, the policy that a policy loss is clipped around; the behavior's unless replaced
  ref_logp_BT: np.ndarray  # f32, nats


class TokenizedSequence(NamedTuple):
  """A prompt with its completions, ready to be packed as one segment."""

  prompt_ids: np.ndarray  # [P] int32
  completions: list  # of dict(token_ids, mask, advantage, behavior_logp, ref_logp), arrays [T]
