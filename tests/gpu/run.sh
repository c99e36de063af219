#!/usr/bin/env bash
# Runs GPU tests on a host that has the sources, PyTorch and pytest, and vLLM in FOLDER, but no installed `ec-producer`.
#   run.sh SECONDS REPORTS FOLDER [pytest argument…]    reports go to the folder REPORTS, all output to REPORTS/log.txt
set -uo pipefail
seconds=$1 reports=$2 site=$3; shift 3
cd "$(dirname "$0")/../.."
settings=$(mktemp --suffix=.ini)
printf '[pytest]\nmarkers =\n  gpu: needs a GPU\n  e2e: starts servers\npythonpath = .\n' >"$settings"
export PYTHONPATH=$site HF_HUB_OFFLINE=1 VLLM_USE_V2_MODEL_RUNNER=1 VLLM_USE_FLASHINFER_SAMPLER=0
export FLASHINFER_DISABLE_JIT=1 FLASHINFER_WORKSPACE_BASE=${TMPDIR:-/tmp}
export EC_PRODUCER_REPORT=$reports EC_PRODUCER_COMMAND="pytest $*"
timeout -s KILL "$seconds" python3 -m pytest -c "$settings" --rootdir . -q --tb=short --show-capture=no \
  -p no:cacheprovider --durations=5 -W ignore "$@" 2>&1 | tee -a "$reports/log.txt" | grep -v INFO | tail -n 30
status=${PIPESTATUS[0]}
rm -f "$settings"
exit "$status"
