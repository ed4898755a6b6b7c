#!/usr/bin/env bash
# Trains the embedded default with OPPO, after its own set-up: bash scripts/demo.sh [--help] [Hydra overrides]
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
bash "$ROOT/scripts/setup.sh"
exec "${OPPO_VENV:-$ROOT/.venv}/bin/python" -m verl_oppo.demo.run "$@"
