#!/usr/bin/env bash
# Lint, types and tests. Sets up .venv by itself.
#
#   bash scripts/test.sh                       before every commit: at most 5 minutes on 2 cores
#   bash scripts/test.sh --all                 everything, for a night
#   bash scripts/test.sh tests/plan -k ring    further arguments go to pytest
set -eu
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment cpu test npu
cd "$ROOT"

tier=(-m "not long")
if [ "${1:-}" = --all ]; then
    tier=()
    shift
fi
ruff check .
ruff format --check .
mypy
exec python -m pytest --durations=10 "${tier[@]}" "$@"
