#!/usr/bin/env bash
# Runs the tests, or those named:  launch/test.sh [tests/learn ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(launch/venv.sh test)
exec "$python" -m pytest -q -n 2 --dist=worksteal --durations=10 "$@"
