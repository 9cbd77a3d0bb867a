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
#   MINDSPEED_LLM_HOME  root of MindSpeed-LLM, if that is not the current folder
#   PYTHON              interpreter that reads the configuration: PyYAML is all it needs
#   DRY_RUN=1           print the command instead of starting it
#
# --lr of configs/ is a peak for training from scratch: pass --lr and --min-lr with CKPT_LOAD_DIR.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

case "${1:--}" in -*) ;; *) CONFIG="${CONFIG:-$1}" && shift ;; esac
: "${CONFIG:?set it to what commfuse-npu plan --write FILE has written, or start pretrain_<model>_ptd.sh}"

LAYOUT_ARGS=(
    ${NPUS_PER_NODE:+--npus-per-node "$NPUS_PER_NODE"}
    ${NNODES:+--nnodes "$NNODES"}
    ${TP:+--tensor-model-parallel-size "$TP"}
    ${PP:+--pipeline-model-parallel-size "$PP"}
    ${CP:+--context-parallel-size "$CP"}
    ${NUM_LAYER_LIST:+--num-layer-list "$NUM_LAYER_LIST"}
)
lines="$(PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" "${PYTHON:-python3}" \
    -m commfuse_npu.tools.model_config "$CONFIG" "${LAYOUT_ARGS[@]}" "$@")"
{ read -ra GPT_ARGS && read -ra COMMFUSE_ARGS && read -ra DISTRIBUTED_ARGS; } <<<"$lines"

if [ "${DISTRIBUTED_ARGS[3]}" != 1 ]; then
    # Otherwise each node would wait for itself, or all would be the first, forever.
    : "${MASTER_ADDR:?set it to the address of node 0}"
    : "${NODE_RANK:?set it to 0 on node 0, 1 on node 1, and so on}"
fi
DISTRIBUTED_ARGS+=(
    --node_rank "${NODE_RANK:=0}"
    --master_addr "${MASTER_ADDR:-localhost}"
    --master_port "${MASTER_PORT:-6001}"
)

DATA_ARGS=(--split "100,0,0")
case " ${GPT_ARGS[*]} $* " in
    *" NullTokenizer "* | *" --tokenizer-model"* | *" --tokenizer-name-or-path"*) ;;
    *" PretrainedFromHF "*)
        DATA_ARGS+=(--tokenizer-name-or-path "${TOKENIZER_MODEL:?set it to the folder of the tokenizer}") ;;
    *) DATA_ARGS+=(--tokenizer-model "${TOKENIZER_MODEL:?set it to the file of the tokenizer}") ;;
esac
case " ${GPT_ARGS[*]} $* " in
    *" --mock-data "* | *" --data-path"* | *" --train-data-path"*) ;;
    *)
        needed="set it to the prefix of the preprocessed data, or pass --mock-data"
        DATA_ARGS+=(--data-path "${DATA_PATH:?$needed}") ;;
esac

CKPT_ARGS=(--ckpt-format torch ${CKPT_SAVE_DIR:+--save "$CKPT_SAVE_DIR"})
CKPT_ARGS+=(${CKPT_LOAD_DIR:+--load "$CKPT_LOAD_DIR"})
# Converted weights have no optimizer state.
if [ "${CKPT_LOAD_DIR:-}" != "${CKPT_SAVE_DIR:-}" ]; then
    CKPT_ARGS+=(${CKPT_LOAD_DIR:+--no-load-optim --no-load-rng})
fi
OUTPUT_ARGS=(
    --log-interval 1 --log-throughput --save-interval 2000 --eval-interval 2000 --eval-iters 0
)
OPTIMIZE_ARGS=(
    --transformer-impl local --use-flash-attn --use-fused-rmsnorm --use-fused-swiglu
    --use-fused-rotary-pos-emb --no-masked-softmax-fusion --attention-softmax-in-fp32
    --no-gradient-accumulation-fusion --use-distributed-optimizer
)

export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
export PYTORCH_NPU_ALLOC_CONF="${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}"
export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-3600}"
export HCCL_EXEC_TIMEOUT="${HCCL_EXEC_TIMEOUT:-3600}"
export TASK_QUEUE_ENABLE="${TASK_QUEUE_ENABLE:-2}"
export CPU_AFFINITY_CONF="${CPU_AFFINITY_CONF:-1}"

ENTRY=(pretrain_gpt.py)
LOG="logs/train_$(basename "$CONFIG" .yaml)"
case "${USE_COMMFUSE:=$((${#COMMFUSE_ARGS[@]} > 0))}" in
    0) COMMFUSE_ARGS=() ;;
    1)
        [ "${#COMMFUSE_ARGS[@]}" != 0 ] || COMMFUSE_ARGS=(--use-commfuse)
        ENTRY=(-m mindspeed_patches.launch pretrain_gpt.py)
        LOG+=_commfuse
        # Find the package in this checkout even if it is not installed.
        export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
        ;;
    *) echo "USE_COMMFUSE is '$USE_COMMFUSE'; set it to 0 or 1" >&2 && exit 2 ;;
esac
# On a shared file system every node needs its own log.
[ "$NODE_RANK" = 0 ] || LOG+="_node$NODE_RANK"

command=(
    torchrun "${DISTRIBUTED_ARGS[@]}" "${ENTRY[@]}" "${GPT_ARGS[@]}" "${DATA_ARGS[@]}"
    "${CKPT_ARGS[@]}" "${OUTPUT_ARGS[@]}" "${OPTIMIZE_ARGS[@]}" "${COMMFUSE_ARGS[@]}"
    --distributed-backend nccl "$@"
)
if [ "${DRY_RUN:-0}" = 1 ]; then
    printf '%q ' "${command[@]}" && echo
    exit
fi
cd "${MINDSPEED_LLM_HOME:-.}"
mkdir -p logs
# With pipefail the exit code is that of torchrun, not of tee.
"${command[@]}" 2>&1 | tee "$LOG.log"
