#!/usr/bin/env bash
# Start a pretraining with MindSpeed-LLM, with or without CommFuse:
#
#   bash <commfuse-npu>/scripts/launch_pretraining.sh llama3_8b ...         or pretrain_llama3_8b_ptd.sh
#   CONFIG=FILE bash <commfuse-npu>/scripts/launch_pretraining.sh ...       written by commfuse-npu plan
#
# Run it in the root of MindSpeed-LLM, on every node. Shape, training options and layout are in
# configs/<model>.yaml; arguments are passed to pretrain_gpt.py and override them. Environment
# variables:
#
#   CONFIG              a file to use instead of configs/<model>.yaml
#   DATA_PATH           prefix of the preprocessed data; not needed with --mock-data
#   TOKENIZER_MODEL     file or folder of the tokenizer; not needed with --tokenizer-type NullTokenizer
#   CKPT_LOAD_DIR       weights to start from; if equal to CKPT_SAVE_DIR, that training continues
#   CKPT_SAVE_DIR       folder for checkpoints; without it none is saved
#   NPUS_PER_NODE NNODES TP PP CP NUM_LAYER_LIST          override configs/<model>.yaml
#   MASTER_ADDR MASTER_PORT NODE_RANK                     for more than one node
#   USE_COMMFUSE        1 (default, unless CONFIG says otherwise); 0: the same without CommFuse
#   COMMFUSE_LAYERS COMMFUSE_LANES COMMFUSE_CHUNKS COMMFUSE_REDUCE_DTYPE
#   MINDSPEED_LLM_HOME  root of MindSpeed-LLM, if that is not the current folder
#   PYTHON              interpreter that reads the configuration: PyYAML is all it needs
#   DRY_RUN=1           print the command without starting it: needs neither data, NPUs nor torch
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

output="$(PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" \
    "${PYTHON:-python3}" -m commfuse_npu.tools.launch_command "$@")"
log="${output%%$'\n'*}" command="${output#*$'\n'}"
if [ "${DRY_RUN:-0}" = 1 ]; then
    echo "$command"
    exit
fi
cd "${MINDSPEED_LLM_HOME:-.}"
mkdir -p logs
# With pipefail the exit code is that of the command, not of tee.
bash -c "$command" 2>&1 | tee "$log"
