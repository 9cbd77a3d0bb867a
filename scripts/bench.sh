#!/usr/bin/env bash
# Measure how much communication each form hides, on links with a limited rate.
#
#   bash scripts/bench.sh --quick                            less than 3 minutes
#   bash scripts/bench.sh --json bench.json                  less than 25 minutes
#   bash scripts/bench.sh --help                             all options
#
# The Markdown table goes to stdout, progress to stderr. Sets up .venv by itself.
set -eu
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment cpu

exec python -m commfuse_npu.tools.cli bench "$@"
