#!/usr/bin/env bash
# Pretrain Llama 3 8B, TP 8 on one node of 8 NPUs, with MindSpeed-LLM and CommFuse.
#
#   cd MindSpeed-LLM
#   DATA_PATH=... TOKENIZER_MODEL=... bash <commfuse-npu>/scripts/pretrain_llama3_8b_ptd.sh
#
# configs/llama3_8b.yaml has shape and layout, launch_pretraining.sh says what else can be set.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch_pretraining.sh"
launch_pretraining llama3_8b "$@"
