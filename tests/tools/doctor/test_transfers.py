"""Buffers of lanes, and transfers that do not fit them."""

from __future__ import annotations

from collections.abc import Mapping

from commfuse_npu.tools.doctor import Finding, diagnose
from tests.tools.doctor.launches import launch
from tests.tools.doctor.machines import NOTHING, machine, summary


def transfers(words: str, variables: Mapping[str, str] = NOTHING) -> list[Finding]:
    made = machine(variables)
    report = diagnose(made, launch("--config", *words.split()))
    return [f for f in report.findings if f.what in ("memory for lanes", "largest transfer")]


def test_buffers_of_lanes_are_counted() -> None:
    (memory,) = transfers("")
    assert memory.value == "224 MB per NPU: 7 tensor lanes with 2 x 16 MB", "sized to the messages"
    (memory,) = transfers("--hccl-group-buffer tp:400")
    assert memory.value == "2800 MB per NPU: 7 tensor lanes with 2 x 200 MB"
    assert memory.action.startswith("--hccl-group-buffer commfuse:16 takes 224 MB")
    (memory,) = transfers("--hccl-group-buffer tp:400;commfuse:32 --commfuse-lanes 3")
    assert memory.value == "192 MB per NPU: 3 tensor lanes with 2 x 32 MB"
    memory, largest = transfers("--hccl-group-buffer commfuse:4")
    assert memory.value == "56 MB per NPU: 7 tensor lanes with 2 x 4 MB"
    assert summary(largest) == ("warning", "16.0 MB")
    assert largest.action == "--hccl-group-buffer commfuse:16"


def test_lanes_are_made_where_blocks_are_too_short_to_use_them() -> None:
    (memory,) = transfers("--seq-length 1024")
    assert memory.value == "224 MB per NPU: 7 tensor lanes with 2 x 16 MB"
    assert memory.action == "nothing uses them: leave --use-commfuse out"


def test_lanes_of_data_and_context_parallelism_are_counted() -> None:
    dp = "--tensor-model-parallel-size 4 --commfuse-dp --overlap-grad-reduce --nnodes 2"
    (memory,) = transfers(dp)
    # 40 million fp32 gradients over 4 ranks are 38 MiB; two lanes each way.
    assert memory.value == (
        "704 MB per NPU: 3 tensor lanes with 2 x 32 MB, 4 data lanes with 2 x 64 MB"
    )
    (alone,) = transfers(f"{dp} --tensor-model-parallel-size 1")
    assert alone.value.endswith("4 data lanes with 2 x 16 MB")
    assert alone.action == "--hccl-group-buffer commfuse:64 sets the size of each"
    ulysses = "--tensor-model-parallel-size 4 --context-parallel-size 2 --commfuse-ulysses"
    (memory,) = transfers(f"{ulysses} --context-parallel-algo ulysses_cp_algo")
    assert memory.value.endswith("1 context lanes with 2 x 16 MB")
