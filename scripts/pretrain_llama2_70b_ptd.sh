#!/usr/bin/env bash
# Pretrain Llama 2 70B, TP 8 and PP 4 on four nodes of 8 NPUs; launch_pretraining.sh says what can be set.
exec bash "$(dirname "${BASH_SOURCE[0]}")/launch_pretraining.sh" llama2_70b "$@"
