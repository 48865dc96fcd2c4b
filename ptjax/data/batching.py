"""Packs prompts with their completions into rows of token trees: the one place where a `types.Batch` is built.

Mask, position, parent and branch are written from the lengths of what was packed; nothing is ever derived from token
ids, so a pad id that equals the end id does no harm. Shapes are static: every batch of one call has the same shape, and
its width is one of the few that were declared, so a program is compiled once per width. Nothing is cut: what does not
fit is an error or is left out and counted.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ptjax import types

TOO_LONG = ('error', 'drop')


class Packed(NamedTuple):
  """Micro-batches of one shape, and how many completions were left out because they do not fit a row."""

  batches: list[types.Batch]
  dropped: int


class _Row:
  """What a row has room for while segments are placed in it."""

  def __init__(self):
    self.tokens = self.branches = self.trained = 0
    self.segments = []

  def fits(self, piece: types.TokenizedSequence, limits) -> bool:
    tokens, branches, trained = size(piece)
    return (self.tokens + tokens <= limits[0] and self.branches + branches <= limits[1]
            and self.trained + trained <= limits[2])

  def add(self, piece: types.TokenizedSequence) -> None:
    tokens, branches, trained = size(piece)
    self.tokens, self.branches, self.trained = self.tokens + tokens, self.branches + branches, self.trained + trained
    self.segments.append(piece)


def size(piece: types.TokenizedSequence) -> tuple[int, int, int]:
  """Tokens, branches and trained tokens that a segment takes of a row."""
  tokens = len(piece.prompt_ids) + sum(len(c['token_ids']) for c in piece.completions)
  return tokens, len(piece.completions), sum(int(np.sum(c['mask'])) for c in piece.completions)


def pack(
    sequences: Iterable[types.TokenizedSequence],
    *,
    rows: int,
    seq_len: int | Sequence[int],
    max_branches: int,
    loss_tokens: int | None = None,
    unit: int = 1,
    too_long: str = 'error',
    pad_id: int = 0,
) -> Packed:
  """Packs each prompt with its completions, sharing the prompt, first fit, longest first, into batches `[rows, T]`.

  Completions whose prompt they cannot all share in one row are spread over segments that repeat the prompt, which
  leaves every log-prob as it was. A completion's `advantage` is 1, its log-probs 0, where its dict has none.

  Args:
    sequences: prompts of >= 1 token with their completions.
    rows: B of every batch.
    seq_len: T, or several widths of which the one with the least padded work is taken.
    max_branches: most completions in a row, the static bound of per-sequence sums.
    loss_tokens: most trained tokens in a row; T when not given.
    unit: completions that must stay neighbours in one row: 2 for preference pairs.
    too_long: 'error', or 'drop' to leave out and count units that fit no row even alone.
    pad_id: fills the right end of a row.

  Raises:
    ValueError: an empty prompt, arrays of unequal length, a unit that fits no row with too_long='error', or an
      impossible limit.
  """
  if too_long not in TOO_LONG:
    raise ValueError(f'too_long is {too_long!r}; known: {", ".join(TOO_LONG)}')
  widths = sorted({seq_len} if isinstance(seq_len, int) else set(seq_len))
  if min(rows, max_branches, unit, *widths) < 1 or max_branches % unit:
    raise ValueError(f'rows {rows}, seq_len {widths}, max_branches {max_branches}, unit {unit}: all must be >= 1 and '
                     'max_branches a multiple of unit')
  kept, dropped = _fitting(sequences, (widths[-1], max_branches, loss_tokens or widths[-1]), unit, too_long)
  plans = [(width, _place(kept, (width, max_branches, loss_tokens or width), unit)) for width in widths]
  plans = [(-(-max(len(placed), 1) // rows) * width, width, placed) for width, placed in plans if placed is not None]
  _, width, placed = min(plans, key=lambda plan: plan[:2])
  while len(placed) % rows or not placed:
    placed.append(_Row())
  filled = [_fill(row.segments, width, pad_id) for row in placed]
  batches = [types.Batch(*(np.stack(field) for field in zip(*filled[i:i + rows]))) for i in range(0, len(filled), rows)]
  return Packed(batches, dropped)


def _fitting(sequences, limits, unit: int, too_long: str) -> tuple[list[types.TokenizedSequence], int]:
  """The sequences without the units that fit no row of these limits, and the number of completions left out."""
  kept, dropped = [], 0
  for n, sequence in enumerate(sequences):
    _check_sequence(sequence, n, unit)
    units = [sequence.completions[i:i + unit] for i in range(0, len(sequence.completions), unit)]
    fits = [_Row().fits(types.TokenizedSequence(sequence.prompt_ids, u), limits) for u in units]
    if not all(fits) and too_long == 'error':
      sizes = size(types.TokenizedSequence(sequence.prompt_ids, units[fits.index(False)]))
      raise ValueError(
          f'sequence {n}: prompt and completion take {sizes[0]} tokens of which {sizes[2]} are trained, over the '
          f"row's {limits[0]} and {limits[2]}; raise seq_len or loss_tokens, shorten it, or set too_long='drop'")
    good = [c for u, fit in zip(units, fits) if fit for c in u]
    dropped += len(sequence.completions) - len(good)
    if good:
      kept.append(types.TokenizedSequence(sequence.prompt_ids, good))
  return kept, dropped


def _check_sequence(sequence: types.TokenizedSequence, n: int, unit: int) -> None:
  if len(sequence.prompt_ids) < 1:
    raise ValueError(f'sequence {n}: the prompt is empty, so nothing predicts the first token; begin it with one')
  if not sequence.completions or len(sequence.completions) % unit:
    raise ValueError(f'sequence {n}: {len(sequence.completions)} completions; need a multiple of {unit}, at least one')
  for k, completion in enumerate(sequence.completions):
    length = len(completion['token_ids'])
    for key, value in completion.items():
      if np.ndim(value) != 1 or len(value) != length:
        raise ValueError(f'sequence {n}, completion {k}: {key} has shape {np.shape(value)}, token_ids has ({length},)')


def _place(sequences, limits, unit: int) -> list[_Row] | None:
  """Rows holding every sequence, or None when one of its units is too large for these limits."""
  pieces = [piece for sequence in sequences for piece in _pieces(sequence, limits, unit)]
  if not all(_Row().fits(piece, limits) for piece in pieces):
    return None
  rows = []
  for piece in sorted(pieces, key=lambda piece: -size(piece)[0]):
    row = next((row for row in rows if row.fits(piece, limits)), None)
    if row is None:
      row = _Row()
      rows.append(row)
    row.add(piece)
  return rows


def _pieces(sequence: types.TokenizedSequence, limits, unit: int) -> list[types.TokenizedSequence]:
  """The sequence as segments of at most one row each, the prompt repeated."""
  pieces = []
  for i in range(0, len(sequence.completions), unit):
    more = sequence.completions[i:i + unit]
    joined = pieces and types.TokenizedSequence(sequence.prompt_ids, pieces[-1].completions + more)
    if joined and _Row().fits(joined, limits):
      pieces[-1] = joined
    else:
      pieces.append(types.TokenizedSequence(sequence.prompt_ids, more))
  return pieces


def _fill(segments: list[types.TokenizedSequence], width: int, pad_id: int) -> types.Batch:
  """One row, every field `[T]`. Tokens that nothing predicts (a segment's first, padding) are their own parent."""
  whole, real = (lambda: np.zeros(width, np.int32)), (lambda: np.zeros(width, np.float32))
  row = types.Batch(np.full(width, pad_id, np.int32), whole(), whole(), whole(), np.arange(width, dtype=np.int32),
                    np.zeros(width, bool), real(), real(), real(), real())
  start = branch = 0
  for number, segment in enumerate(segments, 1):
    trunk = len(segment.prompt_ids)
    at = slice(start, start + trunk)
    row.token_BT[at] = segment.prompt_ids
    row.position_BT[at] = np.arange(trunk)
    row.parent_BT[at] = np.maximum(np.arange(trunk) - 1, 0) + start
    trunk_end, cursor = start + trunk - 1, start + trunk
    for completion in segment.completions:
      branch += 1
      length = len(completion['token_ids'])
      at = slice(cursor, cursor + length)
      row.token_BT[at] = completion['token_ids']
      row.branch_BT[at] = branch
      row.position_BT[at] = trunk + np.arange(length)
      row.parent_BT[at] = np.arange(cursor - 1, cursor + length - 1)
      row.parent_BT[cursor:cursor + min(length, 1)] = trunk_end
      row.mask_BT[at] = completion['mask']
      row.advantage_BT[at] = completion.get('advantage', 1.0)
      row.behavior_logp_BT[at] = row.old_logp_BT[at] = completion.get('behavior_logp', 0.0)
      row.ref_logp_BT[at] = completion.get('ref_logp', 0.0)
      cursor += length
    row.segment_BT[start:cursor] = number
    start = cursor
  return row


def supervised(
    prompt_ids: np.ndarray, completion_ids: np.ndarray, mask: np.ndarray | None = None
) -> types.TokenizedSequence:
  """A prompt with one completion, of which all tokens, or those of the mask, are trained on."""
  return types.TokenizedSequence(np.asarray(prompt_ids, np.int32), [_trained(completion_ids, mask)])


def preference(
    prompt_ids: np.ndarray, pairs: Sequence[tuple], masks: Sequence[tuple] | None = None
) -> types.TokenizedSequence:
  """A prompt with pairs of completions in the order chosen, rejected; pack it with unit=2.

  Args:
    prompt_ids: [P].
    pairs: (chosen token ids, rejected token ids); a side that is None stays empty, for unpaired labels.
    masks: the same for which of those tokens count; all of them when not given.
  """
  masks = [(None, None)] * len(pairs) if masks is None else masks
  sides = [_trained(() if ids is None else ids, mask)
           for pair, both in zip(pairs, masks, strict=True) for ids, mask in zip(pair, both, strict=True)]
  return types.TokenizedSequence(np.asarray(prompt_ids, np.int32), sides)


def _trained(token_ids, mask) -> dict:
  token_ids = np.asarray(token_ids, np.int32)
  return {'token_ids': token_ids, 'mask': np.ones(len(token_ids), bool) if mask is None else np.asarray(mask, bool)}


def groups(
    rollouts: Sequence[types.Rollout], advantage_UR: np.ndarray, trainable_UR: np.ndarray
) -> list[types.TokenizedSequence]:
  """One sequence per task from a step's rollouts, R neighbours per task; untrainable rollouts are left out.

  Raises:
    ValueError: the number of rollouts is not U * R, or neighbours of one group differ in prompt.
  """
  U, R = advantage_UR.shape
  if len(rollouts) != U * R:
    raise ValueError(f'{len(rollouts)} rollouts for advantages of shape {(U, R)}; they must be U * R')
  sequences = []
  for u in range(U):
    members = rollouts[u * R:(u + 1) * R]
    if any(not np.array_equal(m.prompt_ids, members[0].prompt_ids) for m in members):
      raise ValueError(f'group {members[0].group_id}: its rollouts do not share one prompt')
    completions = [
        {
            'token_ids': m.token_ids,
            'mask': m.mask,
            'advantage': np.full(len(m.token_ids), advantage_UR[u, r], np.float32),
            'behavior_logp': m.behavior_logp,
        } for r, m in enumerate(members) if trainable_UR[u, r] and len(m.token_ids)
    ]
    if completions:
      sequences.append(types.TokenizedSequence(members[0].prompt_ids, completions))
  return sequences


def share_prefix(sequences: Sequence[types.TokenizedSequence], *, min_tokens: int = 8) -> list[types.TokenizedSequence]:
  """The same examples with a prompt beginning that several have in common, such as a system message, computed once.

  Sequences that agree in their first `min_tokens` tokens become one: its trunk is their longest common prefix, and the
  rest of each prompt, untrained, opens the branch of its completion. Sequences with several completions stay as they
  are, since their prompt is shared already. Order within a group is kept.
  """
  clusters, out = {}, []
  for sequence in sequences:
    if len(sequence.completions) == 1 and len(sequence.prompt_ids) > min_tokens:
      clusters.setdefault(sequence.prompt_ids[:min_tokens].tobytes(), []).append(sequence)
    else:
      out.append(sequence)
  for members in clusters.values():
    shortest = min(len(m.prompt_ids) for m in members)
    ids = np.stack([m.prompt_ids[:shortest] for m in members])
    differs = (ids != ids[:1]).any(axis=0)
    common = int(np.argmax(differs)) if differs.any() else shortest
    out.append(types.TokenizedSequence(members[0].prompt_ids[:common], [
        _prefixed(m.prompt_ids[common:], m.completions[0]) for m in members]))
  return out


def _prefixed(untrained_ids: np.ndarray, completion: dict) -> dict:
  """The completion with untrained tokens put before it; its other arrays are filled with zeros there."""
  return {
      key: np.concatenate([untrained_ids if key == 'token_ids' else np.zeros(len(untrained_ids), value.dtype), value])
      for key, value in ((key, np.asarray(value)) for key, value in completion.items())
  }


def split(batch: types.Batch, parts: int) -> list[types.Batch]:
  """The batch as `parts` micro-batches of consecutive rows.

  Raises:
    ValueError: the rows do not divide evenly.
  """
  rows = len(batch.token_BT)
  if parts < 1 or rows % parts:
    raise ValueError(f'{rows} rows do not split into {parts} equal micro-batches')
  return [types.Batch(*(field[i:i + rows // parts] for field in batch)) for i in range(0, rows, rows // parts)]


def check_batch(batch: types.Batch, *, max_branches: int, vocab_size: int) -> None:
  """Checks on the host every promise that `types.Batch` makes.

  Raises:
    ValueError: names the field, the row and the column of the first broken promise.
  """
  shape = batch.token_BT.shape
  kinds = dict.fromkeys(types.Batch._fields, np.int32) | {'mask_BT': np.bool_} | dict.fromkeys(
      ('advantage_BT', 'behavior_logp_BT', 'old_logp_BT', 'ref_logp_BT'), np.float32)
  for name, value in zip(types.Batch._fields, batch):
    if value.shape != shape or value.ndim != 2 or value.dtype != kinds[name]:
      raise ValueError(f'batch.{name} is {value.dtype}{value.shape}; need {np.dtype(kinds[name])}{shape} of rank 2')
    if value.dtype == np.float32:
      _refuse(name, batch.mask_BT & ~np.isfinite(value), 'is not finite on a trained token')
  _refuse('token_BT', (batch.token_BT < 0) | (batch.token_BT >= vocab_size), f'is outside [0, {vocab_size})')
  _refuse('branch_BT', (batch.branch_BT < 0) | (batch.branch_BT > max_branches), f'is outside [0, {max_branches}]')
  _refuse('mask_BT', batch.mask_BT & (batch.branch_BT == 0), 'is true on a prompt or padding token')
  for b in range(shape[0]):
    _check_row(types.Batch(*(field[b] for field in batch)), b)


def _refuse(name: str, bad: np.ndarray, why: str) -> None:
  if bad.any():
    row, column = np.argwhere(bad)[0]
    raise ValueError(f'batch.{name}[{row}, {column}] {why}')


def _check_row(row: types.Batch, b: int) -> None:
  """Follows the runs of equal (segment, branch) and compares positions and parents with what they must be."""
  segment_T, branch_T = row.segment_BT, row.branch_BT
  changes = np.flatnonzero((np.diff(segment_T) != 0) | (np.diff(branch_T) != 0)) + 1
  starts = np.concatenate([[0], changes])
  ends = np.append(changes, len(segment_T))
  number, last_branch, trunk_end, trunk = 0, 0, 0, 0
  position_T, parent_T = np.zeros_like(segment_T), np.arange(len(segment_T), dtype=np.int32)
  for start, end in zip(starts, ends):
    segment, branch, index_T = segment_T[start], branch_T[start], np.arange(start, end)
    if segment == 0 and branch == 0 and end == len(segment_T):
      break
    if branch == 0 and segment == number + 1:
      number, trunk_end, trunk = number + 1, end - 1, end - start
      position_T[start:end], parent_T[start:end] = index_T - start, np.maximum(index_T - 1, start)
    elif segment == number and branch > last_branch:
      last_branch = branch
      position_T[start:end], parent_T[start:end] = trunk + index_T - start, index_T - 1
      parent_T[start] = trunk_end
    else:
      raise ValueError(f'batch row {b}, column {start}: segment {segment}, branch {branch} breaks the order of trunk, '
                       'then branches with rising ids, segments 1, 2, ..., padding 0 at the right')
  for name, want_T in (('position_BT', position_T), ('parent_BT', parent_T)):
    got_T = getattr(row, name)
    wrong = np.flatnonzero(got_T != want_T)
    if wrong.size:
      t = wrong[0]
      raise ValueError(f'batch.{name}[{b}, {t}] is {got_T[t]}; its segment and branch make it {want_T[t]}')
