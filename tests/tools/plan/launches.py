"""Launches to plan."""

from pathlib import Path

from commfuse_npu.tools.hardware.description import Hardware
from commfuse_npu.tools.plan.asked_launch import AskedLaunch, ask_about

SERVER = Hardware.find("ascend_910b_server")
CONFIG = Path(__file__).resolve().parents[3] / "configs" / "llama3_8b.yaml"
SIZES = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --vocab-size 512 --seq-length 64 "
    "--micro-batch-size 3 --tensor-model-parallel-size 2"
)
FUSED = f"{SIZES} --sequence-parallel --use-commfuse --bf16 --commfuse-chunks 1"
"""Blocks of any length are fused; without chunks, only long ones."""


def asked(line: str) -> AskedLaunch:
    """The launch of a command line; with ``--config`` first, Llama 3 8B with more options."""
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
ULYSSES = "--context-parallel-size 2 --context-parallel-algo ulysses_cp_algo"
