#!/usr/bin/env bash
# Pretrain Llama 2 13B, TP 8 on one node of 8 NPUs, with MindSpeed-LLM and CommFuse.
#
#   cd MindSpeed-LLM
#   DATA_PATH=... TOKENIZER_MODEL=... bash <commfuse-npu>/scripts/pretrain_llama2_13b_ptd.sh
#
# configs/llama2_13b.yaml has shape and layout, launch_pretraining.sh says what else can be set.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch_pretraining.sh"
launch_pretraining llama2_13b "$@"
