#!/usr/bin/env bash
# Pretrain Llama 3 70B, TP 8 and PP 4 on four nodes of 8 NPUs, with MindSpeed-LLM and CommFuse.
#
#   cd MindSpeed-LLM
#   DATA_PATH=... TOKENIZER_MODEL=... bash <commfuse-npu>/scripts/pretrain_llama3_70b_ptd.sh
#
# configs/llama3_70b.yaml has shape and layout, launch_pretraining.sh says what else can be set.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch_pretraining.sh"
launch_pretraining llama3_70b "$@"
