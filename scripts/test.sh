#!/usr/bin/env bash
# Lint, types and tests. Sets up .venv by itself; further arguments go to pytest.
set -eu
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment cpu test npu
cd "$ROOT"

ruff check .
ruff format --check .
mypy
exec python -m pytest "$@"
