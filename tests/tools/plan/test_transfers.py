"""What a launch would fuse, in how many messages, and the lanes that they take."""

from __future__ import annotations

import pytest

from commfuse_npu.plan import Schedule
from commfuse_npu.tools.finding import Finding
from commfuse_npu.tools.plan.transfers import FusedLayer, check_lanes, fused_layers
from tests.tools.doctor.machines import summary
from tests.tools.plan.launches import FUSED, asked

ATTENTION = f"{FUSED} --commfuse-attention --attention-dropout 0.0"


def layers(line: str) -> dict[str, FusedLayer]:
    return {one.layer: one for one in fused_layers(asked(line))}


def test_what_a_launch_would_fuse() -> None:
    block = 1024 * 2 * 4096 * 2
    gathered = ("all_gather_linear", "", 14, block // 2, block)
    scattered = ("linear_reduce_scatter", "", 14, block // 2, block // 2)
    found = layers("--config")
    assert str(asked("--config").schedule).startswith("shifted, 7 lanes, 2 chunks")
    assert {name: one[1:] for name, one in found.items()} == {
        **dict.fromkeys(("qkv", "fc1", "output"), gathered),
        **dict.fromkeys(("proj", "fc2"), scattered),
    }
    assert str(found["fc1"]) == "fc1: all_gather_linear, 14 transfers of 8.00 MB"


@pytest.mark.parametrize(
    ("line", "layer", "operator", "sent", "size"),
    [
        # Without sequence parallelism a result is summed, and then gathered.
        (FUSED.replace("--sequence-parallel", ""), "fc2", "linear_all_reduce", 2, 32 * 3 * 64 * 2),
        (FUSED, "fc2", "linear_reduce_scatter", 1, 32 * 3 * 64 * 2),
        (FUSED.replace("--bf16", ""), "qkv", "all_gather_linear", 1, 32 * 3 * 64 * 4),
        (FUSED.replace("--bf16", "--fp16"), "qkv", "all_gather_linear", 1, 32 * 3 * 64 * 2),
        ("--config --commfuse-chunks 4 --commfuse-lanes 3", "qkv", "all_gather_linear", 28,
         1024 * 2 * 4096 * 2 // 4),
        ("--config --commfuse-attention", "proj", "attention_linear_reduce_scatter", 14,
         1024 * 2 * 4096),
        ("--config --commfuse-attention", "fc2", "linear_reduce_scatter", 14, 1024 * 2 * 4096),
        ("--config --commfuse-attention --no-commfuse-attention", "proj", "linear_reduce_scatter",
         14, 1024 * 2 * 4096),
        (f"{ATTENTION} --recompute-granularity selective", "proj", "linear_reduce_scatter", 1,
         32 * 3 * 64 * 2),
    ],
)  # fmt: skip
def test_operators_and_messages(line: str, layer: str, operator: str, sent: int, size: int) -> None:
    found = layers(line)[layer]
    assert (found.operator, found.transfers, found.transfer_bytes) == (operator, sent, size)


@pytest.mark.parametrize("chunks", [1, 3, 5, 40])
def test_transfers_of_attention_are_those_of_its_schedule(chunks: int) -> None:
    """32 queries, of batch 3, in a group of two."""
    runs = Schedule(chunks=chunks).runs(32, "last")
    largest = max(run.stop - run.start for run in runs) * 3 * 64 * 2
    found = layers(f"{ATTENTION} --commfuse-chunks {chunks}")["proj"]
    assert (found.transfers, found.transfer_bytes) == (len(runs), largest)


def test_what_stays_megatrons_has_a_reason() -> None:
    found = layers(f"{FUSED} --commfuse-min-rows 100")["proj"]
    assert (found.operator, found.transfers) == ("", 0)
    assert str(found) == (
        "proj: Megatron's own forward, because a block has fewer rows than the 100 of "
        "--commfuse-min-rows"
    )
    assert layers(f"{FUSED} --commfuse-min-rows 96")["proj"].operator
    experts = layers(f"{FUSED} --num-experts 8 --moe-grouped-gemm --n-shared-experts 1")
    assert "fc1" not in experts
    assert experts["shared_fc1"].operator == "all_gather_linear"
    assert experts["experts"].reason.startswith("grouped GEMMs")


# ------------------------------------------------------------------ lanes


def lanes(words: str, **environ: str) -> list[Finding]:
    return list(check_lanes(asked(f"--config {words}"), environ))


@pytest.mark.parametrize(
    ("words", "said", "action"),
    [
        ("", "224 MB per NPU: 7 tensor lanes with 2 x 16 MB", "--hccl-group-buffer commfuse:16"),
        ("--hccl-group-buffer tp:400", "2800 MB per NPU: 7 tensor lanes with 2 x 200 MB",
         "--hccl-group-buffer commfuse:16 takes 224 MB"),
        ("--hccl-group-buffer tp:400;commfuse:32 --commfuse-lanes 3",
         "192 MB per NPU: 3 tensor lanes with 2 x 32 MB", "--hccl-group-buffer commfuse:16"),
        # Lanes are made where blocks are too short to use them.
        ("--seq-length 1024", "224 MB per NPU: 7 tensor lanes with 2 x 16 MB",
         "nothing uses them: leave --use-commfuse out"),
        # 40 million fp32 gradients over 4 ranks are 38 MiB; two lanes each way.
        ("--tensor-model-parallel-size 4 --commfuse-dp --overlap-grad-reduce --nnodes 2",
         "704 MB per NPU: 3 tensor lanes with 2 x 32 MB, 4 data lanes with 2 x 64 MB",
         "--hccl-group-buffer commfuse:32"),
        ("--tensor-model-parallel-size 1 --commfuse-dp --overlap-grad-reduce --nnodes 2",
         "128 MB per NPU: 4 data lanes with 2 x 16 MB",
         "--hccl-group-buffer commfuse:64 sets the size of each"),
        ("--tensor-model-parallel-size 4 --context-parallel-size 2 --commfuse-ulysses "
         "--context-parallel-algo ulysses_cp_algo",
         "128 MB per NPU: 3 tensor lanes with 2 x 16 MB, 1 context lanes with 2 x 16 MB",
         "--hccl-group-buffer commfuse:16"),
    ],
)  # fmt: skip
def test_the_memory_of_lanes_is_counted(words: str, said: str, action: str) -> None:
    (memory,) = lanes(words)
    assert summary(memory) == ("note", said)
    assert memory.action.startswith(action)


def test_a_buffer_that_is_too_small_is_warned_about() -> None:
    memory, largest = lanes("--hccl-group-buffer commfuse:4")
    assert memory.value == "56 MB per NPU: 7 tensor lanes with 2 x 4 MB"
    assert summary(largest) == ("warning", "16.0 MB")
    assert largest.action == "--hccl-group-buffer commfuse:16"
    assert lanes("--no-use-commfuse") == []
    (memory,) = lanes("--hccl-group-buffer tp:400", HCCL_BUFFSIZE="50")
    assert memory.value.endswith("7 tensor lanes with 2 x 50 MB")
