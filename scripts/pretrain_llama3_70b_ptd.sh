#!/usr/bin/env bash
# Pretrain Llama 3 70B, TP 8 and PP 4 on 4 nodes of 8 NPUs; settings: launch_pretraining.sh.
exec bash "$(dirname "${BASH_SOURCE[0]}")/launch_pretraining.sh" llama3_70b "$@"
