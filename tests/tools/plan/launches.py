"""Launches to ask about: command lines, and scripts as people write them."""

from __future__ import annotations

from pathlib import Path

from commfuse_npu.tools.plan.launch import AskedLaunch, ask_about

CONFIG = Path(__file__).resolve().parents[3] / "configs" / "llama3_8b.yaml"
SIZES = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --vocab-size 512 --seq-length 64 "
    "--micro-batch-size 3 --tensor-model-parallel-size 2"
)
FUSED = f"{SIZES} --sequence-parallel --use-commfuse --bf16 --commfuse-min-rows 0"


def asked(line: str) -> AskedLaunch:
    """Of a command line, or with ``--config`` first that of Llama 3 8B with more options."""
    words = line.split()
    of_config = words[:1] == ["--config"]
    return ask_about(CONFIG if of_config else None, words[of_config:], {})


MODEL = (
    "--num-layers 4 --hidden-size 4096 --num-attention-heads 16 --seq-length 8192 "
    "--micro-batch-size 1 --attention-dropout 0.0 --hidden-dropout 0.0 --transformer-impl local "
    "--use-distributed-optimizer"
)
TP = "--tensor-model-parallel-size 4 --sequence-parallel --seq-length 16384"
EXPERTS = "--num-experts 8 --moe-grouped-gemm --expert-model-parallel-size 4"


def script(options: str, processes: int = 8, program: str = "pretrain_gpt.py") -> str:
    return f"""\
#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
NODES=1
MASTER_ADDR="your master node IP"
DISTRIBUTED_ARGS="
    --nproc_per_node {processes} \\
    --nnodes $NODES \\
    --master_addr $MASTER_ADDR
"
MODEL_ARGS="
    {MODEL} \\
    {options}
"
mkdir -p logs
torchrun $DISTRIBUTED_ARGS {program} $MODEL_ARGS --data-path your data path | tee logs/train.log
"""


SCRIPTS = {
    "dense/full.sh": script(TP),
    "dense/partial.sh": script(f"{TP} --defer-embedding-wgrad-compute"),
    "dense/coc.sh": script(f"{TP} --use-ascend-coc"),
    "dense/coc_partial.sh": script(f"{TP} --use-ascend-coc --defer-embedding-wgrad-compute"),
    "dense/alone.sh": script("--tensor-model-parallel-size 1"),
    "dense/ulysses.sh": script(
        f"{TP} --context-parallel-size 2 --context-parallel-algo ulysses_cp_algo"
    ),
    "dense/lora.sh": script(f"{TP} --lora-target-modules linear_qkv linear_proj"),
    "dense/short.sh": script(f"{TP} --seq-length 1024"),
    "dense/own.sh": script(f"{TP} --spec mine.spec layer_spec"),
    "experts/full.sh": script(f"{TP} {EXPERTS}"),
    "experts/mla.sh": script(f"{TP} {EXPERTS} --multi-latent-attention"),
    "experts/without_dispatch.sh": script(f"{TP} --num-experts 8 --expert-tensor-parallel-size 1"),
    "more/evaluate.sh": script(f"{TP} --skip-train"),
    "more/generate.sh": script(TP, program="inference.py"),
    "more/convert.sh": "python convert_ckpt.py --target-tensor-parallel-size 4\n",
    "more/fsdp2.sh": "torchrun --nproc_per_node 8 train_fsdp2.py examples/fsdp2/some.yaml\n",
    "more/mindspore.sh": f"msrun --worker_num 8 pretrain_gpt.py {MODEL}\n",
    "more/nothing.sh": "export SOMETHING=1\n",
}
