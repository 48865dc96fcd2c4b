#!/usr/bin/env bash
# Runs one job as N jax.distributed processes on this machine. Process 0 writes here, the others to DIR/process_I.log.
#   launch/local.sh N --config=FILE --workdir=DIR [...]
# When one process ends badly the others are stopped; SIGINT and SIGTERM reach all of them.
set -euo pipefail
count=${1:?usage: launch/local.sh N --config=FILE --workdir=DIR [...]}
shift
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$("$root/launch/venv.sh")
logs=
flags=()
for arg in "$@"; do
  case $arg in
    --workdir=*) logs=${arg#--workdir=}; mkdir -p "$logs" ;;
    --config=*)  # one named from the repository works in any directory
      config=${arg#--config=}
      if [ ! -e "$config" ] && [ -e "$root/$config" ]; then arg=--config=$root/$config; fi ;;
  esac
  flags+=("$arg")
done
logs=${logs:-$(mktemp -d)}
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

pids=()
for ((i = 0; i < count; i++)); do
  if ((i > 0)); then exec > "$logs/process_$i.log" 2>&1; fi
  "$python" -m ptjax.main "${flags[@]}" --coordinator="127.0.0.1:$port" --num_processes="$count" --process_id="$i" &
  pids+=($!)
done

signalled=
trap 'signalled=1; kill -TERM "${pids[@]}" 2> /dev/null || true' INT TERM
while [ -n "$(jobs -rp)" ]; do
  if ! wait -n && [ -z "$signalled" ]; then
    sleep 5 # the others may be about to say why they end too; without their peer they cannot go on
    kill -KILL "${pids[@]}" 2> /dev/null || true
  fi
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit "$status"
