#!/usr/bin/env bash
# All checks that need a GPU: the doctor, the tests marked `gpu`, and compute-sanitizer.
#
#   ci/gpu.sh [SEED]      SEED replays the random shapes of an earlier run
#
# The tests check results and never times: $WORKERS (8) processes share the GPU. Runs on dwtir as it is installed, or
# else on src/. $PYTHON names another interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
seed=${1:-$((RANDOM * 32768 + RANDOM))}

installed() { (cd / && "$python" -c 'import importlib.util as i, sys; sys.exit(not i.find_spec("dwtir"))'); }
installed || export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"

sanitizer=$(command -v compute-sanitizer || command -v /usr/local/cuda/bin/compute-sanitizer) || {
  echo 'compute-sanitizer is missing; it is part of the CUDA toolkit' >&2
  exit 1
}

"$python" -m dwtir doctor --target cuda

echo "Hypothesis seed $seed; to replay: ci/gpu.sh $seed"
DWTIR_REQUIRE_GPU=1 "$python" -m pytest -n "${WORKERS:-8}" -p no:benchmark -m gpu \
  --hypothesis-profile=gpu --hypothesis-seed="$seed"

# The two tools run at the same time: each keeps one core and little of the GPU busy.
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
declare -A jobs
for tool in memcheck racecheck; do
  "$sanitizer" --tool "$tool" --error-exitcode 1 "$python" ci/sanitize.py >"$logs/$tool" 2>&1 &
  jobs[$tool]=$!
done
status=0
for tool in "${!jobs[@]}"; do
  wait "${jobs[$tool]}" || status=1
  echo "compute-sanitizer --tool $tool"
  cat "$logs/$tool"
done
exit "$status"
