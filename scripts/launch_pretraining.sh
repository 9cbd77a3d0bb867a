#!/usr/bin/env bash
# A pretraining with MindSpeed-LLM, with CommFuse or without:
#
#   bash <commfuse-npu>/scripts/launch_pretraining.sh llama3_8b ...         or pretrain_llama3_8b_ptd.sh
#   CONFIG=FILE bash <commfuse-npu>/scripts/launch_pretraining.sh ...       written by commfuse-npu plan
#
# Start it in the root of MindSpeed-LLM, on every node. Shape, training options and layout are in
# configs/<model>.yaml; arguments go to pretrain_gpt.py and take the place of what is there. From the
# environment:
#
#   CONFIG              another file than configs/<model>.yaml
#   DATA_PATH           prefix of the preprocessed data; not needed with --mock-data
#   TOKENIZER_MODEL     file or folder of the tokenizer; not needed with --tokenizer-type NullTokenizer
#   CKPT_LOAD_DIR       weights to start from. If it is CKPT_SAVE_DIR too: go on where that stopped
#   CKPT_SAVE_DIR       where checkpoints go; without it none is kept
#   NPUS_PER_NODE NNODES TP PP CP NUM_LAYER_LIST          instead of what configs/<model>.yaml says
#   MASTER_ADDR MASTER_PORT NODE_RANK                     for more than one node
#   USE_COMMFUSE        1 (default, unless CONFIG says otherwise); 0 is MindSpeed-LLM as it is, the same in all other respects
#   COMMFUSE_LAYERS COMMFUSE_SCHEDULE COMMFUSE_LANES COMMFUSE_CHUNKS COMMFUSE_REDUCE_DTYPE
#   MINDSPEED_LLM_HOME  root of MindSpeed-LLM, if that is not the current folder
#   PYTHON              interpreter that reads the configuration: PyYAML is all it needs
#   DRY_RUN=1           print the command and start nothing: needs neither data, NPUs nor torch
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
# With pipefail the exit code is that of the command, not tee's.
bash -c "$command" 2>&1 | tee "$log"
