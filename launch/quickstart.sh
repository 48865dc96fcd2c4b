#!/usr/bin/env bash
# Base model -> SFT -> DPO -> RL on this machine, each stage behind a gate. Run again, it goes on where it stopped.
#   launch/quickstart.sh [--config=FILE] [--workdir=DIR] [--config.rl.steps=5 ...]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$("$root/launch/venv.sh")

config=$root/configs/quickstart.py
workdir=$root/runs/quickstart
rest=()
for arg in "$@"; do
  case $arg in
    --config=*) config=${arg#--config=} ;;
    --workdir=*) workdir=${arg#--workdir=} ;;
    *) rest+=("$arg") ;;
  esac
done
# A config named from the repository works in any directory; other paths are as seen from here.
if [ ! -e "$config" ] && [ -e "$root/$config" ]; then config=$root/$config; fi
# Large buffers come and go at every step: huge pages save most of their page faults.
export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m ptjax.main --config="$config" --workdir="$workdir" ${rest[@]+"${rest[@]}"}
