#!/usr/bin/env bash
# Pretrain Llama 2 7B, TP 8 on one node of 8 NPUs; launch_pretraining.sh lists the settings.
#
# MindSpeed-LLM's own launch (2.3.0) has a layout without tensor parallelism. That layout, without
# and with CommFuse's data parallelism:
#
#   TP=1 PP=2 USE_COMMFUSE=0 ... --micro-batch-size 1 --overlap-grad-reduce
#   TP=1 PP=2 ... --micro-batch-size 1 --overlap-grad-reduce --commfuse-dp
exec bash "$(dirname "${BASH_SOURCE[0]}")/launch_pretraining.sh" llama2_7b "$@"
