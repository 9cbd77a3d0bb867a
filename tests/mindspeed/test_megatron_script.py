"""MindSpeed on Megatron-LM's own ``pretrain_gpt.py``, on CPU: the same bits with CommFuse.

``MINDSPEED_HOME`` and ``MEGATRON_HOME`` name checkouts that belong together, such as the branches
``core_r0.16.0`` of both; ``MINDSPEED_LLM_HOME`` is not set.
"""

import os
from pathlib import Path

import pytest

from tests.mindspeed.test_rehearsals import (
    ENGINE,
    LAYERS,
    NAIVE,
    PLAIN_WGRAD,
    RECOMPUTE,
    SEVERAL,
    STAGES,
    assert_always_fused,
    rehearsed,
    why_not,
)

SKIPPED = why_not("MINDSPEED_HOME", "MEGATRON_HOME")
if os.environ.get("MINDSPEED_LLM_HOME"):
    SKIPPED = "MINDSPEED_LLM_HOME is set: its launches are in test_rehearsals.py; unset it"
pytestmark = [
    pytest.mark.skipif(SKIPPED is not None, reason=str(SKIPPED)),
    pytest.mark.timeout(1500),
]

OVERLAP = "--commfuse-overlap"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none "
    "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
)
TURNS = {
    "recomputed": (2, f"{NAIVE} {RECOMPUTE} --hidden-dropout 0.1 {OVERLAP}"),
    "transformer_engine": (2, f"{ENGINE} {PLAIN_WGRAD} {OVERLAP}"),
    "experts_recomputed": (2, f"{NAIVE} {EXPERTS} {RECOMPUTE} {OVERLAP}"),
    "pipeline": (4, f"{NAIVE} {STAGES} {OVERLAP}"),
}
FUSED = {
    "local": (NAIVE, LAYERS),
    "transformer_engine": (f"{ENGINE} {PLAIN_WGRAD}", ("qkv", "fc1", "output")),
}


@pytest.mark.parametrize("case", TURNS)
def test_overlap_changes_no_bit_in_megatrons_script(case: str, tmp_path: Path) -> None:
    processes, options = TURNS[case]
    _, commfuse = rehearsed(tmp_path, processes, options, iterations=3, model=SEVERAL)
    assert all(record.overlapped > 0 for record in commfuse)


@pytest.mark.parametrize("case", FUSED)
def test_fused_layers_change_no_bit_in_megatrons_script(case: str, tmp_path: Path) -> None:
    options, fused = FUSED[case]
    _, commfuse = rehearsed(tmp_path, 2, options, iterations=3)
    assert set().union(*(record.fused for record in commfuse)) == set(fused)
    assert_always_fused(commfuse, tmp_path, *fused)
