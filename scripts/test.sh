#!/usr/bin/env bash
# Runs ruff and the tests, after its own set-up: bash scripts/test.sh [pytest arguments]
# With arguments only the tests they select run; paths are relative to the repository.
#
#   OPPO_TEST_TIMEOUT  seconds that the tests may take together (default: 4200)
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
bash "$ROOT/scripts/setup.sh"
BIN="${OPPO_VENV:-$ROOT/.venv}/bin"
cd "$ROOT"

echo "[test] ruff: check and format"
"$BIN/ruff" check --output-format concise .
"$BIN/ruff" format --check .

limit="${OPPO_TEST_TIMEOUT:-4200}"
started=$SECONDS

# Runs pytest for what is left of the limit. -INT first: it then reports what ran, and its fixtures end their processes.
run_pytest() {
    local left=$((limit - SECONDS + started)) status=0
    timeout --foreground --signal=INT --kill-after=60 "$((left > 1 ? left : 1))" \
        "$BIN/python" -m pytest -p no:cacheprovider --durations=15 "$@" || status=$?
    if [ "$status" -eq 124 ]; then
        echo "[test] FAILED: the tests did not end within $limit s (OPPO_TEST_TIMEOUT); the last test named above was running" >&2
    fi
    return "$status"
}

status=0
if [ "$#" -gt 0 ]; then
    echo "[test] pytest $*: at most $limit s"
    run_pytest "$@" || status=$?
else
    echo "[test] pytest: unit tests, two files at a time, about 7 minutes; at most $limit s with the end-to-end runs"
    # In pytest's own order: modules on a shared Ray come last.
    run_pytest --ignore=tests/e2e -n 2 --dist loadfile --no-loadscope-reorder || status=$?
    echo "[test] pytest: end-to-end runs, two at a time, about 13 minutes"
    run_pytest tests/e2e || status=$?
fi
echo "[test] set-up and checks $started s, pytest $((SECONDS - started)) s, exit status $status"
exit "$status"
