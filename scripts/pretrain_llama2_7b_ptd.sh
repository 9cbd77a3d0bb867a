#!/usr/bin/env bash
# Pretrain Llama 2 7B, TP 8 on one node of 8 NPUs, with MindSpeed-LLM and CommFuse.
#
#   cd MindSpeed-LLM
#   DATA_PATH=... TOKENIZER_MODEL=... bash <commfuse-npu>/scripts/pretrain_llama2_7b_ptd.sh
#
# MindSpeed-LLM's own launch (2.3.0) has a layout without tensor parallelism. That one, and with
# what CommFuse has for it:
#
#   TP=1 PP=2 USE_COMMFUSE=0 ... --micro-batch-size 1 --overlap-grad-reduce
#   TP=1 PP=2 ... --micro-batch-size 1 --overlap-grad-reduce --commfuse-dp
#
# configs/llama2_7b.yaml has shape and layout, launch_pretraining.sh says what else can be set.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch_pretraining.sh"
launch_pretraining llama2_7b "$@"
