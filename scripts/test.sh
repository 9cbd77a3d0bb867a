#!/usr/bin/env bash
# Lint, types and tests. Sets up .venv by itself.
#
#   bash scripts/test.sh                       before every commit: about 4 minutes on 2 quiet cores
#   bash scripts/test.sh --all                 everything, overnight
#   bash scripts/test.sh tests/plan -k chunks  arguments are passed to pytest
set -eu
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment cpu test npu core
cd "$ROOT"

options=(-m "not long")
if [ "${1:-}" = --all ]; then
    options=()
    shift
fi
# Tests of a file share their processes, so they run on the same worker.
[ $# -gt 0 ] || options+=(--numprocesses auto --maxprocesses 4 --dist loadfile)
ruff check .
ruff format --check .
mypy
exec python -m pytest --durations=10 "${options[@]}" "$@"
