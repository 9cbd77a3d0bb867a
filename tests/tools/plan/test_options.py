"""The report on a launch and its options: fused layers, messages, lanes, rivals."""

from __future__ import annotations

import pytest

from commfuse_npu.tools.finding import Finding
from commfuse_npu.tools.launch_script.options import Options
from commfuse_npu.tools.plan.checks import check_launch
from commfuse_npu.tools.plan.judgement import Judgement, fuse_options, judge_launch
from commfuse_npu.tools.plan.transfers import FusedLayer, check_lanes, fused_layers
from tests.tools.doctor.machines import only, summary
from tests.tools.plan.launches import EXPERTS, FUSED, LIMITED, MODEL, SIZES, TP, ULYSSES, asked

CONFIG = "--config --commfuse-chunks 2"
ATTENTION = f"{FUSED} --commfuse-attention --attention-dropout 0.0"
BLOCK = 1024 * 2 * 4096 * 2
SMALL = 32 * 3 * 64 * 2


def layers(line: str) -> dict[str, FusedLayer]:
    return {layer.layer: layer for layer in fused_layers(asked(line))}


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
        # 32 queries of batch 3: a chunk has at least one query.
        (f"{ATTENTION} --commfuse-chunks 5", "proj", "attention_linear_reduce_scatter", 5,
         7 * SMALL // 32),
        (f"{ATTENTION} --commfuse-chunks 40", "proj", "attention_linear_reduce_scatter", 32,
         SMALL // 32),
        (f"{ATTENTION} --recompute-granularity selective", "proj", "linear_reduce_scatter", 1,
         SMALL),
    ],
)  # fmt: skip
def test_operators_and_messages(line: str, layer: str, operator: str, sent: int, size: int) -> None:
    fused = layers(line)[layer]
    assert (fused.operator, fused.transfers, fused.transfer_bytes) == (operator, sent, size)
    assert str(fused) == f"{layer}: {operator}, {sent} transfers of {size / 2**20:.2f} MB"
    assert layers(f"{LIMITED} --hidden-size 32768 --micro-batch-size 8")["proj"].operator
    short = layers(LIMITED)["proj"]
    assert (short.operator, short.transfers) == ("", 0)
    assert str(short).startswith(
        "proj: Megatron's own forward, because a block has fewer than 1310"
    )


# ------------------------------------------------------------------ lanes


def lanes(words: str, **environ: str) -> list[Finding]:
    return list(check_lanes(asked(f"{CONFIG} {words}"), environ))


@pytest.mark.parametrize(
    ("words", "said", "action"),
    [
        ("", "256 MB per NPU: 1 tensor lanes with 2 x 128 MB", ""),
        ("--commfuse-lanes 7", "224 MB per NPU: 7 tensor lanes with 2 x 16 MB", ""),
        # Lanes are created even if no layer of the model uses them.
        ("--commfuse-layers kv_up", "32 MB per NPU: 1 tensor lanes with 2 x 16 MB",
         "nothing uses them: leave --use-commfuse out"),
        # 40 million fp32 gradients over 4 ranks are 38 MiB; two lanes each way.
        ("--tensor-model-parallel-size 4 --commfuse-dp --overlap-grad-reduce --nnodes 2",
         "768 MB per NPU: 1 tensor lanes with 2 x 128 MB, 4 data lanes with 2 x 64 MB", ""),
        ("--tensor-model-parallel-size 1 --commfuse-dp --overlap-grad-reduce --nnodes 2",
         "128 MB per NPU: 4 data lanes with 2 x 16 MB", ""),
        # One bucket of all gradients, in buffers of HCCL's size.
        ("--tensor-model-parallel-size 1 --commfuse-dp --nnodes 2",
         "1600 MB per NPU: 4 data lanes with 2 x 200 MB", ""),
        (f"--tensor-model-parallel-size 4 --commfuse-ulysses {ULYSSES}",
         "160 MB per NPU: 1 tensor lanes with 2 x 64 MB, 1 context lanes with 2 x 16 MB", ""),
    ],
)  # fmt: skip
def test_the_memory_of_lanes_is_counted(words: str, said: str, action: str) -> None:
    (memory,) = lanes(words)
    assert summary(memory) == ("note", said)
    assert memory.action == action


def test_a_transfer_beyond_the_largest_buffer_is_warned_about() -> None:
    memory, largest = lanes("--micro-batch-size 4")
    assert memory.value.endswith("1 tensor lanes with 2 x 200 MB")
    assert summary(largest) == ("warning", "256.0 MB")
    assert largest.action == "choose a smaller --micro-batch-size"
    (memory,) = lanes("--tensor-model-parallel-size 1 --commfuse-dp --nnodes 2", HCCL_BUFFSIZE="50")
    assert memory.value.endswith("4 data lanes with 2 x 50 MB")
    assert lanes("--no-use-commfuse") == []


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
        (f"{FUSED} --num-attention-heads 6", "layout", "error", "hidden size 64 is not divisible"),
        (f"{SIZES} --use-commfuse", "--sequence-parallel", "warning", "not given"),
        (SIZES, "--sequence-parallel", "warning", "not given"),
        (f"pretrain_gpt.py {FUSED}", "--use-commfuse", "warning", "given to the script itself"),
        (ALONE, OF_ONE, "error", "1"),
        (f"{FUSED} --use-ascend-mc2", "--use-ascend-mc2", "error", "given"),
        (f"{FUSED} --output-layer-slice-num=2", "--output-layer-slice-num", "error", "2"),
        (f"{FUSED} --commfuse-fb-overlap --stage dpo", "--stage", "error", "dpo"),
        (f"{ATTENTION} --pre-tockens 4096", "--pre-tockens", "error", "4096"),
        (f"{FUSED} --commfuse-attention", "--attention-dropout", "error", "0.1, Megatron's"),
        (f"{ATTENTION} --commfuse-layers qkv,fc1", "--commfuse-attention", "error",
         "given, but proj is not in the list of layers to fuse"),
        (f"{ATTENTION} --recompute-activations", "--commfuse-attention", "warning",
         "given, but selective recomputation runs core attention separately"),
        (f"{ALONE} {DP} 1", "--commfuse-dp", "warning", "given, but DP 1 transfers nothing"),
        (f"{ALONE} --commfuse-dp --nproc_per_node 2", "--commfuse-dp", "error", "given"),
        (f"{ALONE} --commfuse-ulysses --context-parallel-size 2", "--commfuse-ulysses", "error",
         "given"),
        ("--config --commfuse-taper 9", "--commfuse-taper", "error", "taper is 9"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_named_with_a_way_out(
    line: str, what: str, level: str, value: str
) -> None:
    finding = only(check_launch(asked(line)), what)
    assert finding.level == level
    assert finding.value.startswith(value)
    assert finding.action
    assert finding.expected or "given, but" in value or what in ("layout", "--commfuse-taper")


# ------------------------------------------------------------------ from its options alone

PP = f"{TP} --pipeline-model-parallel-size 2"


def judged(options: str, processes: int | None = 8) -> Judgement:
    words = f"{MODEL} {options}".split()
    return judge_launch(Options(words), processes, fuse_options(words))


@pytest.mark.parametrize(
    ("options", "batches", "obstacle", "without", "paired"),
    [
        (TP, 8, "", "", 7 / 8),
        (TP, 1, "one micro-batch has no partner", None, 0.0),
        (f"{TP} --use-ascend-coc", 8, "--use-ascend-coc: its transfers are inside", "", 7 / 8),
        (f"{TP} --stage dpo", 8, "--stage dpo: it has a pipeline schedule", None, 7 / 8),
        (PP, 8, "", "", 5 / 8),
        (PP, 4, "4 micro-batches: 25% of a stage's have a partner", None, 1 / 4),
        (f"{PP} --num-layers-per-virtual-pipeline-stage 1", 8, "", "", 11 / 16),
        (f"{PP} --num-virtual-stages-per-pipeline-rank 2", 7,
         "7 micro-batches are no multiple of 2 stages", None, None),
        ("", 8, "no tensor, expert or context parallelism", None, None),
        ("--num-experts 8 --expert-model-parallel-size 4", 8, "", "", 7 / 8),
    ],
)  # fmt: skip
def test_forward_backward_overlap(
    options: str, batches: int, obstacle: str, without: str | None, paired: float | None
) -> None:
    replicas = 8 // ((2 if "pipeline" in options else 1) * (4 if TP in options else 1))
    overlap = judged(f"{options} --global-batch-size {batches * replicas}").overlap
    assert overlap.obstacle.startswith(obstacle)
    assert bool(overlap.obstacle) is bool(obstacle)
    assert overlap.without == (overlap.obstacle if without is None else without)
    assert overlap.paired == (None if paired is None else pytest.approx(paired))
    assert overlap.transfers is (options != "")


def test_a_layout_is_described() -> None:
    judgement = judged(f"{TP} {EXPERTS} --first-k-dense-replace 1 --multi-latent-attention", 16)
    assert str(judgement.layout) == (
        "TP 4, PP 1, CP 1, EP 4, DP 4, sequence parallel, experts, MLA"
    )
    cp = judged(f"{TP} {ULYSSES} --lora-target-modules linear_qkv")
    assert str(cp.layout) == "TP 4, PP 1, CP 2 (ulysses_cp_algo), DP 1, sequence parallel, LoRA"
    assert judged("").data_parallel_alone
    for options, processes in (("", 1), ("--use-custom-fsdp", 8), (TP, 8)):
        assert not judged(options, processes).data_parallel_alone
    for processes in (None, 6):
        judgement = judged(TP, processes)
        assert judgement.layout.data is None
        assert judgement.overlap.obstacle == "it does not say how many processes it has"
        assert "DP unknown" in str(judgement.layout)


@pytest.mark.parametrize(
    ("options", "refused", "kind"),
    [
        ("--use-ascend-coc", {"--use-ascend-coc", "--tensor-model-parallel-size 1"},
         "another overlap"),
        (f"{TP} --use-ascend-coc --lora-target-modules linear_qkv",
         {"--use-ascend-coc", "--lora-target-modules linear_qkv"}, "LoRA"),
        (f"{TP} --schedules-method dualpipev", {"--schedules-method dualpipev"},
         "another overlap"),
        (f"{TP} --qat-scheme w4", {"--qat-scheme w4"}, "else"),
    ],
)  # fmt: skip
def test_what_refuses_the_flag(options: str, refused: set[str], kind: str) -> None:
    judgement = judged(options)
    assert (set(judgement.refused), judgement.kind, judgement.verdict) == (refused, kind, "refused")


@pytest.mark.parametrize(
    ("flag", "options", "why"),
    [
        ("attention", f"{TP} --attention-dropout 0.1", "--attention-dropout 0.1"),
        ("ulysses", f"{TP} --context-parallel-size 2",
         "needs --context-parallel-algo ulysses_cp_algo, not megatron_cp_algo: others do not "
         "exchange heads, or do so over a part of the group"),
        ("ulysses", f"{TP} {ULYSSES}", ""),
        ("dp", "--tensor-model-parallel-size 8", "DP 1 transfers nothing"),
        ("dp", f"{TP} --context-parallel-size 2", ""),
    ],
)  # fmt: skip
def test_our_other_options(flag: str, options: str, why: str) -> None:
    assert judged(options).why_not[f"--commfuse-{flag}"] == why


@pytest.mark.parametrize(
    ("options", "rows", "least"),
    [
        ("", 256, 2500),
        ("--seq-length 2048 --hidden-size 32768", 512, 512),
        ("--commfuse-chunks 1", 256, 0),
        ("--commfuse-tuning on", 256, 0),
    ],
)
def test_short_blocks_do_not_hide_that_a_layer_can_be_fused(
    options: str, rows: int, least: int
) -> None:
    judgement = judged(f"{TP} --seq-length 1024 {options}")
    assert (judgement.verdict, judgement.rows, judgement.least) == ("full", rows, least)
    assert judgement.short is (rows < least)
    message = f"its blocks have 256 rows, and with fewer than {least} Megatron's"
    assert [note.startswith(message) for note in judgement.notes] == [True] * judgement.short


def test_a_model_of_ones_own_is_not_read() -> None:
    note = "--spec mine.spec layer_spec is not read: it is judged as Megatron's GPTModel"
    assert judged(f"{TP} --spec mine.spec layer_spec").notes == [note]
    assert judged(f"{TP} --spec mindspeed_llm.spec layer_spec").notes == []
