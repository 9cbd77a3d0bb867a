#!/usr/bin/env bash
# Pretrain a small Llama on CPU with the real megatron-core and fused tensor-parallel layers.
#
#   bash scripts/pretrain_llama_cpu.sh              what overlap is worth over slow links (half a
#                                                   minute), then a training (two minutes)
#   bash scripts/pretrain_llama_cpu.sh --compare    plain and fused: equal bit for bit?
#   bash scripts/pretrain_llama_cpu.sh --help       all options
#
# Sets up .venv by itself.
set -eu
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment cpu
cd "$ROOT"

exec python -m scripts.cpu_pretraining "$@"
