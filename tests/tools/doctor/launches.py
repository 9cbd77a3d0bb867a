"""Launches to ask the doctor about."""

from __future__ import annotations

from commfuse_npu.tools.doctor import Launch, read_launch
from tests.tools.doctor.machines import CONFIG

SIZES = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --vocab-size 512 --seq-length 64 "
    "--micro-batch-size 3 --tensor-model-parallel-size 2"
)
FUSED = f"{SIZES} --sequence-parallel --use-commfuse --bf16 --commfuse-min-rows 0"


def launch(*words: str) -> Launch:
    """Of a command line, or with ``--config`` first that of Llama 3 8B with more options."""
    config = CONFIG if words[:1] == ("--config",) else None
    found = read_launch(config, words[1:] if config else words, {})
    assert found is not None
    return found
