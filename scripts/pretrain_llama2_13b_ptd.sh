#!/usr/bin/env bash
# Pretrain Llama 2 13B, TP 8 on one node of 8 NPUs; launch_pretraining.sh lists the settings.
exec bash "$(dirname "${BASH_SOURCE[0]}")/launch_pretraining.sh" llama2_13b "$@"
