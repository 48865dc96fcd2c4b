"""Where numbers go while a stage runs: metrics.jsonl, TensorBoard, one progress bar, and result tables.

One line of metrics.jsonl is one step of one stage: {"stage", "step", "time", "<group>/<name>": number, ...}. A step is
written once: writing it again, or an older one, is refused, and after a kill the lines past the restored step are
dropped before the stage goes on. This file is the only place that may write to the terminal; no number is computed
here beyond the time left.
"""

from collections.abc import Mapping, Sequence
import json
import math
import os
import sys
import time
from typing import Any

from absl import logging
import numpy as np
from rich import console as rich_console
from rich import progress as rich_progress
from rich import table as rich_table
from rich import text as rich_text
import tensorboardX

FILE_NAME = 'metrics.jsonl'
_PLAIN_WIDTH = 160  # columns of a table where there is no terminal to ask


class Metrics:
  """Writes one stage's scalars, each step once, to metrics.jsonl and to TensorBoard."""

  def __init__(self, workdir: str | os.PathLike, stage: str, resume_step: int = -1):
    """Opens the files and drops the stage's lines past `resume_step`.

    Args:
      resume_step: the last step that the restored state has seen; -1 when the stage starts from nothing. Lines of
        other stages are kept.
    """
    self._stage = stage
    self._last_step = resume_step
    self._path = os.path.join(workdir, FILE_NAME)
    os.makedirs(workdir, exist_ok=True)
    kept = [record for record in _drop_after(self._path, stage, resume_step) if record['stage'] == stage]
    self.last = kept[-1] if kept else {}  # the line of the last step that is kept
    self._file = open(self._path, 'a', encoding='utf-8')
    self._events = tensorboardX.SummaryWriter(
        os.path.join(workdir, 'tensorboard', stage), purge_step=resume_step + 1, flush_secs=10)

  def write(self, step: int, **groups: Mapping[str, Any]) -> None:
    """Appends one line and flushes it: `write(3, rl={'kl': 0.1, 'share': {'gcd': 0.5}})`.

    Names are joined by '/', here rl/kl and rl/share/gcd. Values are Python, numpy or jax scalars; a number that is not
    finite is written as the string 'NaN', 'Infinity' or '-Infinity', so that every line is valid JSON.

    Raises:
      ValueError: a value is not a scalar, or the step is not later than the last one written.
      RuntimeError: the file cannot be written, for example because the disk is full.
    """
    step = int(step)
    if step <= self._last_step:
      raise ValueError(f'step {step} of {self._stage} comes after step {self._last_step}: each step is written once')
    scalars = dict(_flatten('', groups))
    record = {'stage': self._stage, 'step': step, 'time': round(time.time(), 3)}
    record.update((name, _json_number(value)) for name, value in scalars.items())
    try:
      self._file.write(json.dumps(record, allow_nan=False) + '\n')
      self._file.flush()
    except OSError as e:
      raise RuntimeError(f'cannot write {self._path}: {e.strerror}. The same command goes on from the last checkpoint '
                         'once there is room.') from e
    self._last_step = step
    for name, value in scalars.items():
      if math.isfinite(value):  # TensorBoard shows a gap
        self._events.add_scalar(name, value, step)

  def close(self) -> None:
    """Flushes and closes both files."""
    self._file.close()
    self._events.close()

  def __enter__(self) -> 'Metrics':
    return self

  def __exit__(self, *exc) -> None:
    self.close()


def read(workdir: str | os.PathLike) -> list[dict[str, Any]]:
  """Returns the lines of metrics.jsonl in file order, non-finite numbers as floats; [] if there is no file.

  A last line that a kill cut short is left out.

  Raises:
    RuntimeError: any other line is not JSON.
  """
  path = os.path.join(workdir, FILE_NAME)
  return [{k: v if k == 'stage' else float(v) if isinstance(v, str) else v for k, v in record.items()}
          for record in _read_lines(path)]


def copy(workdir: str | os.PathLike, stage: str, target: str | os.PathLike) -> None:
  """Writes the stage's lines of metrics.jsonl, as they are, to the file `target`."""
  records = [record for record in _read_lines(os.path.join(workdir, FILE_NAME)) if record['stage'] == stage]
  with open(target, 'w', encoding='utf-8') as f:
    f.writelines(json.dumps(record, allow_nan=False) + '\n' for record in records)


class Progress:
  """A bar for one stage: step, a few values, tokens per second, time left; log lines where there is no terminal."""

  def __init__(self, stage: str, total: int, start: int = 0, *, console: rich_console.Console | None = None,
               log_every_s: float = 15.0):
    """Shows nothing before `__enter__`.

    Args:
      total: steps of the whole stage.
      start: steps that were done before (a resumed stage); the time left is judged by the steps of this run alone.
      log_every_s: least time between two log lines; the last step always gets one.
    """
    console = console or rich_console.Console(file=sys.stdout)
    self._stage, self._total, self._start, self._log_every_s = stage, total, start, log_every_s
    self._began = time.monotonic()
    self._logged = -math.inf
    self._bar = None
    if console.is_terminal:
      self._bar = rich_progress.Progress(
          rich_progress.TextColumn('{task.description:<8}', markup=False), rich_progress.BarColumn(bar_width=24),
          rich_progress.MofNCompleteColumn(), rich_progress.TextColumn('{task.fields[values]}', markup=False),
          console=console)
      self._task = self._bar.add_task(stage, total=total, completed=start, values='')

  def update(self, step: int, *, tokens_per_s: float | None = None, **values: float) -> None:
    """Shows that `step` steps are done, with values such as loss=0.31 or reward=0.5."""
    now = time.monotonic()
    parts = [f'{name} {_short(value)}' for name, value in values.items()]
    if tokens_per_s is not None:
      parts.append(f'{float(tokens_per_s):,.0f} tokens/s')
    if step > self._start:
      left_s = (now - self._began) / (step - self._start) * max(self._total - step, 0)
      parts.append(f'{_clock(left_s)} left')
    shown = '  '.join(parts)
    if self._bar is not None:
      self._bar.update(self._task, completed=step, values=shown)
    elif step >= self._total or now - self._logged >= self._log_every_s:
      self._logged = now
      logging.info('%s step %d/%d  %s', self._stage, step, self._total, shown)

  def __enter__(self) -> 'Progress':
    self._began = time.monotonic()
    if self._bar is not None:
      self._bar.start()
    return self

  def __exit__(self, *exc) -> None:
    if self._bar is not None:
      self._bar.stop()


def table(rows: Sequence[Mapping[str, Any]], title: str = '', *, console: rich_console.Console | None = None) -> None:
  """Prints rows as a table on stdout; the columns are the rows' keys in order of first appearance.

  Floats are shown with three decimals, a missing or None value as a dash. No cell is read as markup.
  """
  if console is None:
    console = rich_console.Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
  columns = list(dict.fromkeys(key for row in rows for key in row))
  numeric = {c for c in columns if any(isinstance(row.get(c), (int, float, np.number)) for row in rows)}
  view = rich_table.Table(title=rich_text.Text(title) if title else None, title_justify='left')
  for column in columns:
    view.add_column(rich_text.Text(column), justify='right' if column in numeric else 'left')
  for row in rows:
    view.add_row(*(rich_text.Text(_cell(row.get(column))) for column in columns))
  console.print(view)


def _flatten(prefix: str, values: Mapping[str, Any]):
  for name, value in values.items():
    if isinstance(value, Mapping):
      yield from _flatten(f'{prefix}{name}/', value)
      continue
    array = np.asarray(value)
    if array.shape != () or array.dtype.kind not in 'biuf' and array.dtype.name != 'bfloat16':
      raise ValueError(f'metric {prefix}{name} must be one number, not {type(value).__name__} of shape {array.shape}')
    yield f'{prefix}{name}', int(array) if array.dtype.kind in 'biu' else float(array)


def _json_number(value: int | float) -> int | float | str:
  if isinstance(value, int) or math.isfinite(value):
    return value
  return 'NaN' if math.isnan(value) else 'Infinity' if value > 0 else '-Infinity'


def _read_lines(path: str) -> list[dict[str, Any]]:
  if not os.path.exists(path):
    return []
  with open(path, encoding='utf-8', errors='replace') as f:
    lines = f.read().splitlines()
  records = []
  for number, line in enumerate(lines, start=1):
    try:
      record = json.loads(line)
      if not isinstance(record, dict) or not isinstance(record.get('step'), int) or 'stage' not in record:
        raise RuntimeError(f'{path}, line {number} has no "stage" and whole "step"; repair the line or move it away')
      records.append(record)
    except json.JSONDecodeError as e:
      if number < len(lines):
        raise RuntimeError(f'{path}, line {number} is not JSON ({e}); repair the line or move the file away') from e
      logging.warning('%s, line %d was cut short when the run was stopped; it is dropped', path, number)
  return records


def _drop_after(path: str, stage: str, step: int) -> list[dict[str, Any]]:
  """Rewrites the file, whole or not at all, without the stage's lines past `step` and a torn last one; returns it."""
  if not os.path.exists(path):
    return []
  records = _read_lines(path)
  kept = [record for record in records if record['stage'] != stage or record['step'] <= step]
  with open(f'{path}.partial', 'w', encoding='utf-8') as f:
    f.writelines(json.dumps(record, allow_nan=False) + '\n' for record in kept)
    f.flush()
    os.fsync(f.fileno())
  os.replace(f'{path}.partial', path)
  if len(kept) < len(records):
    logging.info('%s: %d lines of %s past step %d dropped', path, len(records) - len(kept), stage, step)
  return kept


def _short(value: Any) -> str:
  return f'{float(value):.4g}'


def _clock(seconds: float) -> str:
  minutes, rest = divmod(int(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f'{hours}:{minutes:02d}:{rest:02d}' if hours else f'{minutes}:{rest:02d}'


def _cell(value: Any) -> str:
  if value is None:
    return '-'
  return f'{float(value):.3f}' if isinstance(value, (float, np.floating)) else str(value)
