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
echo "[test] pytest: unit tests in a minute or two, then the end-to-end runs (minutes each); at most $limit s together"
started=$SECONDS status=0
# -INT first: pytest then reports what ran and its fixtures end their processes.
timeout --foreground --signal=INT --kill-after=60 "$limit" "$BIN/python" -m pytest -p no:cacheprovider --durations=15 "$@" || status=$?
if [ "$status" -eq 124 ]; then
    echo "[test] FAILED: the tests did not end within $limit s (OPPO_TEST_TIMEOUT); the last test named above was running" >&2
fi
echo "[test] set-up and checks $started s, pytest $((SECONDS - started)) s, exit status $status"
exit "$status"
