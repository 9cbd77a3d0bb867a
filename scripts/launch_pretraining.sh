#!/usr/bin/env bash
# A pretraining with MindSpeed-LLM, with CommFuse or without. Sourced by pretrain_<model>_ptd.sh:
#
#   launch_pretraining llama3_8b "$@"
#
# or run with what commfuse-npu plan --write FILE has written:
#
#   CONFIG=FILE bash <commfuse-npu>/scripts/launch_pretraining.sh
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

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# What the processes get besides; each can be set otherwise.
ENVIRONMENT=(CUDA_DEVICE_MAX_CONNECTIONS PYTORCH_NPU_ALLOC_CONF HCCL_CONNECT_TIMEOUT
    HCCL_EXEC_TIMEOUT TASK_QUEUE_ENABLE CPU_AFFINITY_CONF)
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
export PYTORCH_NPU_ALLOC_CONF="${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}"
export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-3600}"
export HCCL_EXEC_TIMEOUT="${HCCL_EXEC_TIMEOUT:-3600}"
export TASK_QUEUE_ENABLE="${TASK_QUEUE_ENABLE:-2}"
export CPU_AFFINITY_CONF="${CPU_AFFINITY_CONF:-1}"

launch_pretraining() {
    local config="${CONFIG:-$ROOT/configs/$1.yaml}" model words word name
    shift
    model="${config##*/}" model="${model%.yaml}"
    is_switch DRY_RUN "${DRY_RUN:=0}" || return

    # The layout, where the environment or the arguments change it, is checked like that of the file.
    local changes=(--)
    [ -z "${TP:-}" ] || changes+=(--tensor-model-parallel-size "$TP")
    [ -z "${PP:-}" ] || changes+=(--pipeline-model-parallel-size "$PP")
    [ -z "${CP:-}" ] || changes+=(--context-parallel-size "$CP")
    [ -z "${NUM_LAYER_LIST:-}" ] || changes+=(--num-layer-list "$NUM_LAYER_LIST")
    [ -z "${NPUS_PER_NODE:-}" ] || changes+=(--npus-per-node "$NPUS_PER_NODE")
    [ -z "${NNODES:-}" ] || changes+=(--nnodes "$NNODES")
    changes+=("$@")
    from_config() {
        PYTHONPATH="$ROOT" "${PYTHON:-python3}" -m commfuse_npu.tools.model_config \
            "$config" --emit "$1" "${changes[@]}"
    }
    words="$(from_config arguments)" || return
    NPUS_PER_NODE="$(from_config npus_per_node)" || return
    NNODES="$(from_config nnodes)" || return
    TP="$(from_config tensor_model_parallel_size)" || return
    local tokenizer_option fused
    tokenizer_option="$(from_config tokenizer_option)" || return
    fused="$(from_config commfuse_options)" || return
    [ -z "$fused" ] || : "${USE_COMMFUSE:=1}"
    is_switch USE_COMMFUSE "${USE_COMMFUSE:=0}" || return

    if [ "$DRY_RUN" = 0 ]; then
        cd "${MINDSPEED_LLM_HOME:-.}" || return 2
        if [ ! -f pretrain_gpt.py ]; then
            complain "there is no pretrain_gpt.py in $PWD; start in the root of MindSpeed-LLM," \
                "or set MINDSPEED_LLM_HOME to it"
            return 2
        fi
    fi
    if [ "$NNODES" -gt 1 ]; then
        # Nodes that all wait for themselves, or that are all the first, would wait for ever.
        required MASTER_ADDR "the address of node 0" || return
        required NODE_RANK "0 on that node, up to $((NNODES - 1)) on the others" || return
    fi
    DISTRIBUTED_ARGS=(
        --nproc_per_node "$NPUS_PER_NODE"
        --nnodes "$NNODES"
        --node_rank "${NODE_RANK:=0}"
        --master_addr "${MASTER_ADDR:-localhost}"
        --master_port "${MASTER_PORT:-6001}"
    )

    GPT_ARGS=()
    while IFS= read -r word; do GPT_ARGS+=("$word"); done <<< "$words"
    if [ -n "$tokenizer_option" ] && ! given "$tokenizer_option" "$@"; then
        required TOKENIZER_MODEL "the file or folder of the tokenizer" || return
        exists TOKENIZER_MODEL "$TOKENIZER_MODEL" || return
        GPT_ARGS+=("$tokenizer_option" "$TOKENIZER_MODEL")
    fi

    DATA_ARGS=(--split 100,0,0)
    if ! given --mock-data "$@" && ! given --data-path "$@" && ! given --train-data-path "$@"; then
        required DATA_PATH "the prefix of the preprocessed data, or pass --mock-data" || return
        exists DATA_PATH "$DATA_PATH"* || return
        DATA_ARGS=(--data-path "$DATA_PATH" "${DATA_ARGS[@]}")
    fi

    OUTPUT_ARGS=(--log-interval 1 --log-throughput --save-interval 2000 --eval-interval 2000
        --eval-iters 0 --ckpt-format torch)
    [ -z "${CKPT_SAVE_DIR:-}" ] || OUTPUT_ARGS+=(--save "$CKPT_SAVE_DIR")
    if [ -n "${CKPT_LOAD_DIR:-}" ]; then
        OUTPUT_ARGS+=(--load "$CKPT_LOAD_DIR")
        # Converted weights come without the state of an optimizer.
        [ "$CKPT_LOAD_DIR" = "${CKPT_SAVE_DIR:-}" ] || OUTPUT_ARGS+=(--no-load-optim --no-load-rng)
    fi

    warn_of_learning_rate "$config" "$@"

    OPTIMIZE_ARGS=(
        --transformer-impl local
        --use-flash-attn
        --use-fused-rmsnorm
        --use-fused-swiglu
        --use-fused-rotary-pos-emb
        --no-masked-softmax-fusion
        --attention-softmax-in-fp32
        --no-gradient-accumulation-fusion
        --use-distributed-optimizer
    )
    # The entry: MindSpeed-LLM's own, or the module that adds CommFuse to it and then runs it.
    local entry=(pretrain_gpt.py) log="train_$model"
    if [ "$USE_COMMFUSE" = 1 ]; then
        while IFS= read -r word; do
            OPTIMIZE_ARGS+=("$word")
        done <<< "${fused:---use-commfuse}"
        if [ "$TP" -eq 1 ] && ! given --commfuse-ulysses "$@" "${OPTIMIZE_ARGS[@]}" \
            && ! given --commfuse-dp "$@" "${OPTIMIZE_ARGS[@]}"; then
            complain "USE_COMMFUSE=1 with TP 1: a group of one has nothing to transfer;" \
                "choose TP of at least 2, --commfuse-ulysses, --commfuse-dp, or USE_COMMFUSE=0"
            return 2
        fi
        for name in LAYERS SCHEDULE LANES CHUNKS REDUCE_DTYPE; do
            word="COMMFUSE_$name"
            [ -z "${!word:-}" ] || OPTIMIZE_ARGS+=("$(option_of "$word")" "${!word}")
        done
        entry=(-m mindspeed_patches.launch pretrain_gpt.py) log="${log}_commfuse"
        # The package is found in this checkout, whether it is installed or not.
        case ":${PYTHONPATH:-}:" in
            *":$ROOT:"*) ;;
            *) PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" ;;
        esac
        export PYTHONPATH
        ENVIRONMENT+=(PYTHONPATH)
    fi
    # On a shared file system every node writes a log of its own.
    [ "$NODE_RANK" = 0 ] || log="${log}_node$NODE_RANK"

    local command=(torchrun "${DISTRIBUTED_ARGS[@]}" "${entry[@]}" "${GPT_ARGS[@]}"
        "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" "${OPTIMIZE_ARGS[@]}" --distributed-backend nccl "$@")
    if [ "$DRY_RUN" = 1 ]; then
        print_command "${command[@]}"
        return
    fi

    if ! command -v torchrun > /dev/null; then
        complain "torchrun is not on PATH; activate the environment that torch_npu is in"
        return 2
    fi
    mkdir -p logs || return
    # Without pipefail the exit code would be tee's, and a failure would look like a success.
    set -o pipefail
    "${command[@]}" 2>&1 | tee "logs/$log.log"
}

complain() {
    echo "pretrain: error: $*" >&2
}

# warn_of_learning_rate CONFIG ARGUMENT...: weights are loaded, and trained on as if from scratch.
warn_of_learning_rate() {
    local config="$1" rate word previous=""
    shift
    ! given --lr "$@" || return 0
    if [ -z "${CKPT_LOAD_DIR:-}" ]; then
        given --load "$@" && given --finetune "$@" || return 0
    elif [ "$CKPT_LOAD_DIR" = "${CKPT_SAVE_DIR:-}" ]; then
        return 0
    fi
    for word in "${GPT_ARGS[@]}"; do
        [ "$previous" != --lr ] || rate="$word"
        previous="$word"
    done
    echo "pretrain: warning: weights are loaded, and --lr $rate of $config is a peak for training" \
        "from scratch; MindSpeed-LLM's launches go on with 1.25e-6 (7B, 8B) and 1e-6 (13B, 70B):" \
        "pass --lr and --min-lr" >&2
}

# is_switch NAME VALUE
is_switch() {
    case "$2" in
        0 | 1) ;;
        *)
            complain "$1 is '$2'; set it to 0 or 1"
            return 2
            ;;
    esac
}

# required NAME MEANING: set, or in a dry run <NAME> in its place.
required() {
    [ -z "${!1:-}" ] || return 0
    if [ "$DRY_RUN" = 1 ]; then
        echo "pretrain: $1 is not set; <$1> stands for it" >&2
        printf -v "$1" '<%s>' "$1"
        return
    fi
    complain "$1 is not set; set it to $2"
    return 2
}

# exists NAME PATH...: one of the paths is there; a dry run does not look.
exists() {
    local name="$1" path
    shift
    [ "$DRY_RUN" = 0 ] || return 0
    for path in "$@"; do
        [ ! -e "$path" ] || return 0
    done
    complain "$name is '${!name}', but there is nothing of that name"
    return 2
}

# given OPTION ARGUMENT...: whether an option is among arguments.
given() {
    local option="$1" argument
    shift
    for argument in "$@"; do
        case "$argument" in "$option" | "$option="*) return 0 ;; esac
    done
    return 1
}

# option_of NAME: --commfuse-lanes for COMMFUSE_LANES.
option_of() {
    echo "--$1" | tr 'A-Z_' 'a-z-'
}

# One line that can be pasted into a shell.
print_command() {
    local name line=""
    if [ -n "${MINDSPEED_LLM_HOME:-}" ]; then
        line="cd $(quoted "$MINDSPEED_LLM_HOME") && "
    fi
    for name in "${ENVIRONMENT[@]}"; do
        line+="$name=$(quoted "${!name}") "
    done
    for name in "$@"; do
        line+="$(quoted "$name") "
    done
    echo "${line% }"
}

# quoted WORD: as a shell reads it back. (printf %q would escape every comma.)
quoted() {
    case "$1" in
        *[!A-Za-z0-9_./:=,@%+-]* | "") printf "'%s'" "${1//\'/\'\\\'\'}" ;;
        *) printf '%s' "$1" ;;
    esac
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -euo pipefail
    if [ -z "${CONFIG:-}" ]; then
        complain "CONFIG is not set; set it to what commfuse-npu plan --write FILE has written," \
            "or start pretrain_<model>_ptd.sh"
        exit 2
    fi
    launch_pretraining "" "$@"
fi
