"""--job=sandbox_check: what isolation this host grants, what each tier leaves open, and which one runs would use.

  python -m ptjax.main --job=sandbox_check

Every tier is found by rehearsing whole jobs in it, so this takes a few seconds and believes nothing it was told.
"""

import os
import platform
import sys

from rich import console
from rich import table

from ptjax.verify import languages
from ptjax.verify import sandbox
from ptjax.verify.sandbox import linux
from ptjax.verify.sandbox import tiers


def job(config, **unused) -> None:
  """Prints the tables. Raises sandbox.SandboxUnavailable where no tier from config.sandbox.min_isolation up holds."""
  shown = console.Console(file=sys.stdout)
  shown.print(f'Linux {platform.release()}, {linux.MACHINE}, Landlock version {linux.landlock_abi()}, '
              f'uid {os.geteuid()}, {len(os.sched_getaffinity(0))} cores', highlight=False)
  failures = sandbox.survey()
  unavailable, box = None, None
  try:
    box = sandbox.Sandbox(min_isolation=config.sandbox.min_isolation, workers=1, readable=languages.readable())
  except sandbox.SandboxUnavailable as e:
    unavailable = e
  rows = table.Table('tier', 'on this host', 'does not stop', show_lines=True)
  for tier, open_to in tiers.TIERS.items():
    failure = failures.get(tier, f"only with min_isolation='none' and {sandbox.UNSAFE_SWITCH}=1")
    used = box is not None and tier == box.tier
    found = 'holds, and is used' if used else 'holds' if not failure else f'no: {failure}\nfix: {tiers.FIXES[tier]}'
    rows.add_row(tier, found, open_to)
  shown.print(rows, highlight=False, markup=False)
  if unavailable is not None:
    raise unavailable
  with box:
    shown.print(_languages(box), highlight=False, markup=False)


def _languages(box: sandbox.Sandbox) -> table.Table:
  rows = table.Table('language', f'in tier {box.tier}')
  rows.add_row('python', box.interpreter)
  for name, language in languages.LANGUAGES.items():
    try:
      languages.lookup(name)
      failure = languages.try_out(name, box)
    except ValueError as e:
      failure = str(e)
    rows.add_row(name, f'no: {failure}' if failure else language.program)
  return rows
