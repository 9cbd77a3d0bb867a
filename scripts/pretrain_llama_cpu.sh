#!/usr/bin/env bash
# Pretrain a small Llama on CPU with the real megatron-core and fused tensor-parallel layers.
#
#   bash scripts/pretrain_llama_cpu.sh                       2 processes, about four minutes; at the
#                                                            end without and with overlap over slow links
#   bash scripts/pretrain_llama_cpu.sh --compare             plain and fused: the same bits?
#   bash scripts/pretrain_llama_cpu.sh --compare --link-rate 60   over links of 60 MB/s: how fast?
#   bash scripts/pretrain_llama_cpu.sh --help                all options
#
# Sets up .venv by itself.
set -eu
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment cpu
cd "$ROOT"

exec python -m scripts.cpu_pretraining "$@"
