#!/bin/bash
# Llama 3 8B with 4 layers, TP 8, sequence parallelism, --use-commfuse.
# The same launch without the flag has the same losses and gradient norms.
export CUDA_DEVICE_MAX_CONNECTIONS=1
export PYTORCH_NPU_ALLOC_CONF=expandable_segments:True
export HCCL_CONNECT_TIMEOUT=3600
export HCCL_EXEC_TIMEOUT=3600
export TASK_QUEUE_ENABLE=2
export CPU_AFFINITY_CONF=1

DATA_PATH=${DATA_PATH:?the data set, without its endings}
TOKENIZER_MODEL=${TOKENIZER_MODEL:?the folder of the tokenizer}

OPTIONS=(
    --use-mcore-models
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 1
    --sequence-parallel
    --num-layers 4
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type rope
    --rotary-base 500000
    --normalization RMSNorm
    --norm-epsilon 1e-05
    --swiglu
    --disable-bias-linear
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --untie-embeddings-and-output-weights
    --init-method-std 0.01
    --make-vocab-size-divisible-by 1
    --tokenizer-type PretrainedFromHF
    --micro-batch-size 1
    --global-batch-size 8
    --train-iters 15
    --lr 0.0003
    --min-lr 3e-05
    --lr-decay-style cosine
    --lr-warmup-fraction 0.01
    --weight-decay 0.1
    --clip-grad 1.0
    --adam-beta1 0.9
    --adam-beta2 0.95
    --bf16
    --tokenizer-name-or-path "$TOKENIZER_MODEL"
    --data-path "$DATA_PATH"
    --split 100,0,0
    --log-interval 1
    --log-throughput
    --save-interval 2000
    --eval-interval 2000
    --eval-iters 0
    --ckpt-format torch
    --transformer-impl local
    --use-flash-attn
    --use-fused-rmsnorm
    --use-fused-swiglu
    --use-fused-rotary-pos-emb
    --no-masked-softmax-fusion
    --attention-softmax-in-fp32
    --no-gradient-accumulation-fusion
    --use-distributed-optimizer
    --use-commfuse
    --distributed-backend nccl
)

torchrun --nproc_per_node 8 --nnodes 1 --node_rank 0 --master_addr localhost --master_port 6001 pretrain_gpt.py "${OPTIONS[@]}"
