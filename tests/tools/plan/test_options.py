"""What is said of a launch and its options: what is fused, its messages, its lanes."""

from __future__ import annotations

import pytest

from commfuse_npu.tools.finding import Finding
from commfuse_npu.tools.plan.checks import check_launch
from commfuse_npu.tools.plan.transfers import FusedLayer, check_lanes, fused_layers
from tests.tools.doctor.machines import only, summary
from tests.tools.plan.launches import FUSED, SIZES, ULYSSES, asked

CONFIG = "--config --commfuse-min-rows 1024 --commfuse-chunks 2"
ATTENTION = f"{FUSED} --commfuse-attention --attention-dropout 0.0"
BLOCK = 1024 * 2 * 4096 * 2
SMALL = 32 * 3 * 64 * 2


def layers(line: str) -> dict[str, FusedLayer]:
    return {one.layer: one for one in fused_layers(asked(line))}


@pytest.mark.parametrize(
    ("line", "layer", "operator", "sent", "size"),
    [
        (CONFIG, "fc1", "all_gather_linear", 2, 4 * BLOCK),
        (CONFIG, "fc2", "linear_reduce_scatter", 2, 4 * BLOCK),
        # Without sequence parallelism a result is summed, and then gathered.
        (FUSED.replace("--sequence-parallel", ""), "fc2", "linear_all_reduce", 2, SMALL),
        (FUSED.replace("--bf16", ""), "qkv", "all_gather_linear", 1, 2 * SMALL),
        (FUSED.replace("--bf16", "--fp16"), "qkv", "all_gather_linear", 1, SMALL),
        ("--config --commfuse-chunks 4 --commfuse-lanes 3", "qkv", "all_gather_linear", 28,
         BLOCK // 4),
        (f"{CONFIG} --commfuse-attention", "proj", "attention_linear_reduce_scatter", 14,
         BLOCK // 2),
        (f"{CONFIG} --commfuse-attention", "fc2", "linear_reduce_scatter", 14, BLOCK // 2),
        # Attention travels in batches beside linear layers in collectives.
        (f"{CONFIG} --commfuse-attention --commfuse-schedule collective", "proj",
         "attention_linear_reduce_scatter", 14, BLOCK // 2),
        # 32 queries of batch 3: no chunk has less than one.
        (f"{ATTENTION} --commfuse-chunks 5", "proj", "attention_linear_reduce_scatter", 5,
         7 * SMALL // 32),
        (f"{ATTENTION} --commfuse-chunks 40", "proj", "attention_linear_reduce_scatter", 32,
         SMALL // 32),
        (f"{ATTENTION} --recompute-granularity selective", "proj", "linear_reduce_scatter", 1,
         SMALL),
    ],
)  # fmt: skip
def test_operators_and_messages(line: str, layer: str, operator: str, sent: int, size: int) -> None:
    found = layers(line)[layer]
    assert (found.operator, found.transfers, found.transfer_bytes) == (operator, sent, size)
    assert str(found) == f"{layer}: {operator}, {sent} transfers of {size / 2**20:.2f} MB"


def test_what_stays_megatrons_has_a_reason() -> None:
    found = layers(f"{FUSED} --commfuse-min-rows 97")["proj"]
    assert (found.operator, found.transfers) == ("", 0)
    assert str(found) == (
        "proj: Megatron's own forward, because a block has fewer rows than the 97 of "
        "--commfuse-min-rows"
    )
    assert layers(f"{FUSED} --commfuse-min-rows 96")["proj"].operator


# ------------------------------------------------------------------ lanes


def lanes(words: str, **environ: str) -> list[Finding]:
    return list(check_lanes(asked(f"{CONFIG} {words}"), environ))


@pytest.mark.parametrize(
    ("words", "said", "action"),
    [
        ("", "256 MB per NPU: 1 tensor lanes with 2 x 128 MB", "--hccl-group-buffer commfuse:128"),
        ("--commfuse-schedule shifted", "224 MB per NPU: 7 tensor lanes with 2 x 16 MB",
         "--hccl-group-buffer commfuse:16"),
        ("--hccl-group-buffer tp:400", "400 MB per NPU: 1 tensor lanes with 2 x 200 MB",
         "--hccl-group-buffer commfuse:128 takes 256 MB"),
        ("--hccl-group-buffer tp:400;commfuse:32 --commfuse-lanes 3",
         "192 MB per NPU: 3 tensor lanes with 2 x 32 MB", "--hccl-group-buffer commfuse:16"),
        # Lanes are made where blocks are too short to use them.
        ("--seq-length 1024", "32 MB per NPU: 1 tensor lanes with 2 x 16 MB",
         "nothing uses them: leave --use-commfuse out"),
        # 40 million fp32 gradients over 4 ranks are 38 MiB; two lanes each way.
        ("--tensor-model-parallel-size 4 --commfuse-dp --overlap-grad-reduce --nnodes 2",
         "768 MB per NPU: 1 tensor lanes with 2 x 128 MB, 4 data lanes with 2 x 64 MB",
         "--hccl-group-buffer commfuse:128"),
        ("--tensor-model-parallel-size 1 --commfuse-dp --overlap-grad-reduce --nnodes 2",
         "128 MB per NPU: 4 data lanes with 2 x 16 MB",
         "--hccl-group-buffer commfuse:64 sets the size of each"),
        (f"--tensor-model-parallel-size 4 --commfuse-ulysses {ULYSSES}",
         "160 MB per NPU: 1 tensor lanes with 2 x 64 MB, 1 context lanes with 2 x 16 MB",
         "--hccl-group-buffer commfuse:64"),
    ],
)  # fmt: skip
def test_the_memory_of_lanes_is_counted(words: str, said: str, action: str) -> None:
    (memory,) = lanes(words)
    assert summary(memory) == ("note", said)
    assert memory.action.startswith(action)


def test_a_buffer_that_is_too_small_is_warned_about() -> None:
    memory, largest = lanes("--hccl-group-buffer commfuse:4")
    assert memory.value == "8 MB per NPU: 1 tensor lanes with 2 x 4 MB"
    assert summary(largest) == ("warning", "128.0 MB")
    assert largest.action == "--hccl-group-buffer commfuse:128"
    assert lanes("--no-use-commfuse") == []
    memory, _ = lanes("--hccl-group-buffer tp:400", HCCL_BUFFSIZE="50")
    assert memory.value.endswith("1 tensor lanes with 2 x 50 MB")


# ------------------------------------------------------------------ what is wrong with its options

ALONE = f"{FUSED} --tensor-model-parallel-size 1 --attention-dropout 0.0"
DP = "--commfuse-dp --use-distributed-optimizer --nproc_per_node"
OF_ONE = "--tensor-model-parallel-size"


@pytest.mark.parametrize(
    "line",
    [
        SIZES + " --sequence-parallel",
        f"A=b torchrun --nproc_per_node 2 -m mindspeed_patches.launch /llm/pretrain_gpt.py {FUSED}",
        f"{ATTENTION} --recompute-granularity full",
        f"{FUSED} --schedules-method other --output-layer-slice-num 1 --pre-tockens 4096",
        f"{SIZES} --sequence-parallel --use-ascend-mc2",
        f"{ALONE} {DP} 2",
        f"{ALONE} {ULYSSES} --commfuse-ulysses",
        f"{FUSED} --num-attention-heads 6 --kv-channels 16",
        # The launchers switch dropout off.
        "--config --commfuse-attention",
    ],
)
def test_what_starts_is_not_remarked(line: str) -> None:
    assert check_launch(asked(line)) == []


@pytest.mark.parametrize(
    ("line", "what", "level", "value"),
    [
        (f"{FUSED} --num-attention-heads 6", "layout", "error",
         "hidden size 64 is not divisible by heads 6; choose --hidden-size 60 or 66"),
        (f"{SIZES} --use-commfuse", "--sequence-parallel", "warning", "not given"),
        (SIZES, "--sequence-parallel", "warning", "not given"),
        (f"pretrain_gpt.py {FUSED}", "--use-commfuse", "warning",
         "given to the script itself"),
        (ALONE, OF_ONE, "error", "1"),
        (f"{ALONE} --commfuse-allow-nothing", OF_ONE, "warning", "1"),
        (f"{ALONE} --commfuse-allow-nothing --commfuse-attention", OF_ONE, "error", "1"),
        (f"{FUSED} --use-ascend-mc2", "--use-ascend-mc2", "error", "given"),
        (f"{FUSED} --output-layer-slice-num=2", "--output-layer-slice-num", "error", "2"),
        (f"{FUSED} --commfuse-fb-overlap --stage dpo", "--stage", "error", "dpo"),
        (f"{ATTENTION} --pre-tockens 4096", "--pre-tockens", "error", "4096"),
        (f"{FUSED} --commfuse-attention", "--attention-dropout", "error",
         "0.1, Megatron's default"),
        (f"{ATTENTION} --commfuse-layers qkv,fc1", "--commfuse-attention", "error",
         "given, but proj is not in the list of layers to fuse"),
        (f"{ATTENTION} --recompute-activations", "--commfuse-attention", "warning",
         "given, but selective recomputation runs the core attention by itself"),
        (f"{ALONE} {DP} 1", "--commfuse-dp", "warning", "given, but DP 1 transfers nothing"),
        (f"{ALONE} --commfuse-dp --nproc_per_node 2", "--commfuse-dp", "error", "given"),
        (f"{ALONE} --commfuse-ulysses --context-parallel-size 2", "--commfuse-ulysses", "error",
         "given"),
        ("--config --nproc_per_node 6 --nnodes 4 --global-batch-size 66 --commfuse-schedule "
         "two_level", "--commfuse-schedule", "error",
         "group size 8 is not a multiple of node_size 6; two_level needs whole nodes, use shifted "
         "otherwise"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_named_with_a_way_out(
    line: str, what: str, level: str, value: str
) -> None:
    found = only(check_launch(asked(line)), what)
    assert summary(found) == (level, value)
    assert found.action
    assert found.expected or "given, but" in value or what in ("layout", "--commfuse-schedule")
