#!/usr/bin/env bash
# The first hour on a server with eight NPUs: is it ready, how fast is it, and which launch is
# fastest? Runs the doctor, all steps of commfuse-npu measure, and ten iterations of a launch in
# each form: plain, Megatron's order, CommFuse, MC2, CoC. Ends with a verdict, FOLDER/measured.md,
# and FOLDER/measured.yaml for simulate and plan. Read and rehearsed, not run on NPUs.
#
#   cd MindSpeed-LLM
#   bash <commfuse-npu>/scripts/first_hour.sh                        Llama 3 8B, mock data
#   LAUNCH=my_pretrain.sh bash <commfuse-npu>/scripts/first_hour.sh  another launch of one server
#   DEVICE=cpu bash scripts/first_hour.sh                            a laptop: two minutes, all small
#
# Running the same command again continues with unfinished steps. Arguments go to the launch.
# measure starts its own ranks; the launch is read from its script and started with torchrun.
# Environment variables:
#
#   LAUNCH    launch script; default pretrain_llama3_8b_ptd.sh, with 16 samples per iteration,
#             because 64 would take the whole hour
#   MODEL     model in configs/ whose layers are measured; default llama3_8b
#   RANKS     number of NPUs; default 8
#   FOLDER    for all results; default first_hour
#   MINUTES   no step or form starts later, and a running one is stopped 10 % later; default 50
#   ANYWAY    1: measure even if the doctor has found errors
#   HCCL_DETERMINISTIC=true  so that forms have equal bits; takes time
#
# and of scripts/launch_pretraining.sh: MINDSPEED_LLM_HOME, DATA_PATH, TOKENIZER_MODEL, PYTHON.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

: "${DEVICE:=npu}" "${MODEL:=llama3_8b}" "${FOLDER:=first_hour}" "${MINUTES:=50}"
case "$DEVICE" in
    npu)
        : "${RANKS:=8}" "${LAUNCH:=}"
        if [ -z "$LAUNCH" ]; then
            LAUNCH="$ROOT/scripts/pretrain_${MODEL}_ptd.sh"
            set -- --global-batch-size 16 "$@"
            [ -n "${DATA_PATH:-}" ] || set -- --mock-data "$@"
            [ -n "${TOKENIZER_MODEL:-}" ] || set -- --tokenizer-type NullTokenizer "$@"
        fi
        ;;
    cpu)
        prepare_environment cpu
        : "${RANKS:=2}" "${LAUNCH:=$ROOT/scripts/pretrain_llama_cpu.sh}"
        set -- --num-layers 2 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 4 \
            --num-query-groups 2 --seq-length 128 --micro-batch-size 2 --global-batch-size 4 "$@"
        ;;
    *)
        echo "first_hour: error: DEVICE is '$DEVICE'; set it to npu or cpu" >&2
        exit 2
        ;;
esac
PYTHON="$(command -v "${PYTHON:-python3}")"
commfuse_npu() {
    PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" -m commfuse_npu "$@"
}

if ! commfuse_npu doctor && [ "${ANYWAY:-0}" != 1 ]; then
    echo "first_hour: the doctor found errors (above); fix them, or set ANYWAY=1" >&2
    exit 1
fi

printf -v words ' %q' "$LAUNCH" "$@"
options=(--device "$DEVICE" --ranks "$RANKS" --config "$MODEL" --folder "$FOLDER" --minutes "$MINUTES"
    --launch "${words# }")
commfuse_npu measure "${options[@]}"
