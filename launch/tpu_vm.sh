#!/usr/bin/env bash
# Runs the same ptjax command on every worker of a TPU VM (one host or a pod slice) that already exists.
#   launch/tpu_vm.sh [--dry-run] NAME ZONE --config=FILE --workdir=/SHARED/DIR [...]
# Copies the committed tree to ~/ptjax of each worker, makes its .venv with the tpu extra, and starts one process per
# worker, which find each other by themselves. --workdir is a directory that all workers see (NFS, a mounted bucket);
# run again, it goes on from the last checkpoint there.
# Needs gcloud, logged in, with a default project. --dry-run prints the commands and runs none.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

run() { "$@"; }
if [ "${1:-}" = --dry-run ]; then
  run() { printf '%q ' "$@"; echo; }
  shift
fi
if [ $# -lt 3 ]; then
  sed -n '2,7s/^# \{0,1\}//p' launch/tpu_vm.sh >&2
  exit 2
fi
name=$1 zone=$2
shift 2

archive=$(mktemp -d)/ptjax.tar.gz
trap 'rm -rf "$(dirname "$archive")"' EXIT
run git archive --format=tar.gz --output="$archive" HEAD
run gcloud compute tpus tpu-vm scp "$archive" "$name:ptjax.tar.gz" --zone="$zone" --worker=all
remote='mkdir -p ptjax && tar -xzf ptjax.tar.gz -C ptjax && cd ptjax && python=$(launch/venv.sh tpu)'
remote+=" && \$python -m ptjax.main --coordinator=auto$(printf ' %q' "$@")"
run gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$remote"
