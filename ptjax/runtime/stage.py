"""One stage on disk while it runs: resume, save, stop on a signal, metrics and rollouts, so that loops hold none of it.

A loop asks `steps` for the steps that are left and `log`s each. What was logged past the restored step is dropped
first, so a stage that was killed at any moment leaves the same files as one that was not.
"""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator

from absl import logging

from ptjax.runtime import devices
from ptjax.runtime.checkpoint import Checkpoints
from ptjax.runtime.metrics import Metrics, Progress


class Stopped(RuntimeError):
  """A signal asked the run to stop; everything up to the last finished step is saved."""

  exit_code = 0


class Stage:
  """The directory <workdir>/<name> and what a loop writes there; only process 0 writes metrics and rollouts."""

  def __init__(self, name: str, workdir: str | os.PathLike, *, every: int, keep: int, interrupt: devices.Interrupt):
    self.name, self.workdir = name, pathlib.Path(workdir)
    self.directory = self.workdir / name
    self.directory.mkdir(parents=True, exist_ok=True)
    self._every, self._keep, self._interrupt = every, keep, interrupt
    self._rollouts = self.directory / 'rollouts.jsonl'
    self._metrics = self._progress = None
    self.last = {}  # the values of the last logged step, by full name

  @property
  def checkpoint_directory(self) -> str:
    return str(self.directory / 'checkpoints')

  def steps(self, total: int, trainer, **parts) -> Iterator[int]:
    """Yields the steps that are left of `total`, saving after every `every`-th and after the last.

    Args:
      trainer: its `state` is restored, then saved after the loop's body has run.
      **parts: objects with state_dict and load_state_dict (JSON), such as the curriculum.

    Raises:
      Stopped: a signal came; the last finished step has been saved.
    """
    with Checkpoints(self.checkpoint_directory, keep=self._keep) as checkpoints:
      start = self._restore(checkpoints, trainer, parts)
      host_state = lambda: {name: part.state_dict() for name, part in parts.items()}
      with self._open(total, start):
        for step in range(start, total):
          yield step
          stop = self._interrupt.stop_requested()
          if stop or step + 1 == total or (step + 1) % self._every == 0:
            checkpoints.save(step + 1, trainer.state, host_state())
          if stop and step + 1 < total:
            checkpoints.wait()
            raise Stopped(f'stopped in stage {self.name} after step {step + 1} of {total}, which is saved; '
                          'the same command goes on from there')

  def log(self, step: int, *, progress: dict[str, float], tokens_per_s: float, **groups) -> None:
    """Writes a step's scalars to metrics.jsonl and TensorBoard and moves the progress bar."""
    groups = dict(groups, perf=dict(tokens_per_s=tokens_per_s))
    self.last = {f'{group}/{name}': value for group, values in groups.items() for name, value in values.items()
                 if isinstance(value, (int, float))}
    if self._metrics is not None:
      self._metrics.write(step, **groups)
      self._progress.update(step + 1, tokens_per_s=tokens_per_s, **progress)

  def add_rollouts(self, records: list[dict]) -> None:
    """Appends readable rollouts, each with its `step`, to rollouts.jsonl."""
    if devices.is_main():
      with open(self._rollouts, 'a', encoding='utf-8') as f:
        f.writelines(json.dumps(record, ensure_ascii=False, default=str) + '\n' for record in records)

  def _restore(self, checkpoints, trainer, parts) -> int:
    restored = checkpoints.restore_latest(trainer.state)
    if restored is None:
      return 0
    trainer.state, host_state, step = restored
    for name, part in parts.items():
      part.load_state_dict(host_state[name])
    logging.info('stage %s goes on after step %d', self.name, step)
    return step

  def _open(self, total, start):
    if not devices.is_main():
      return contextlib.nullcontext()
    if self._rollouts.exists():
      with open(self._rollouts, encoding='utf-8', newline='\n') as f:
        kept = [line for number, line in enumerate(f, 1) if line.endswith('\n') and self._step_of(line, number) < start]
      partial = self._rollouts.with_suffix('.partial')
      partial.write_text(''.join(kept), encoding='utf-8')
      os.replace(partial, self._rollouts)
    self._metrics = Metrics(self.workdir, self.name, resume_step=start - 1)
    self.last = {name: value for name, value in self._metrics.last.items()
                 if name.count('/') == 1 and isinstance(value, (int, float))}  # as `log` keeps them
    self._progress = Progress(self.name, total, start)
    both = contextlib.ExitStack()
    both.enter_context(self._metrics)
    both.enter_context(self._progress)
    return both

  def _step_of(self, line: str, number: int) -> int:
    try:
      return int(json.loads(line)['step'])
    except (ValueError, TypeError, KeyError) as error:
      raise RuntimeError(f'{self._rollouts}:{number}: is not a rollout with its step ({error}); fix: take the line '
                         'out, or move the file away') from error
