#!/usr/bin/env bash
# Prints the Python to run ptjax with: that of .venv in the repository, made and filled here when it is not up to date.
#   launch/venv.sh [EXTRA]      EXTRA: test, tpu, cuda, notebooks, aot, reference; none installs what a run needs
# PTJAX_PYTHON=/path/to/python names one that has everything, and nothing is made or installed.
set -euo pipefail
if [ -n "${PTJAX_PYTHON:-}" ]; then
  echo "$PTJAX_PYTHON"
  exit
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extra=${1:-}
stamp=.venv/installed${extra:+-$extra}
wanted=$(cat pyproject.toml launch/constraints.txt | cksum)

works() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' > /dev/null 2>&1; }

if ! works .venv/bin/python || ! .venv/bin/python -m pip --version > /dev/null 2>&1; then
  python=
  for candidate in python3 python3.12 python3.11; do
    if works "$candidate"; then python=$candidate; break; fi
  done
  if [ -z "$python" ]; then
    echo "ptjax needs Python 3.11 or 3.12 on the PATH: apt-get install python3.11-venv, or uv python install 3.12" >&2
    exit 1
  fi
  if ! "$python" -m venv --clear .venv; then
    echo "$python cannot make a virtual environment: apt-get install python3-venv, then run this again" >&2
    exit 1
  fi
fi

if [ "$(cat "$stamp" 2> /dev/null)" != "$wanted" ]; then
  echo "installing ptjax${extra:+[$extra]} into $PWD/.venv (some minutes the first time)" >&2
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-input \
    --constraint launch/constraints.txt --editable ".${extra:+[$extra]}" >&2
  echo "$wanted" > "$stamp"
  echo "$wanted" > .venv/installed
fi
echo "$PWD/.venv/bin/python"
