#!/usr/bin/env bash
# Lint, types and tests. Sets up .venv by itself; further arguments go to pytest.
#
#   bash scripts/test.sh             every promise once
#   bash scripts/test.sh --all       also the combinations and long campaigns (@pytest.mark.long)
set -eu
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment cpu test npu
cd "$ROOT"

tests=(-m "not long")
if [ "${1:-}" = --all ]; then
    tests=()
    shift
fi
ruff check .
ruff format --check .
mypy
exec python -m pytest "${tests[@]}" "$@"
