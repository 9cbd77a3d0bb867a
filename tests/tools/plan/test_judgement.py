"""What CommFuse would do in a launch, from its options alone."""

from __future__ import annotations

import pytest

from commfuse_npu.tools.launch_script.options import Options
from commfuse_npu.tools.plan.judgement import Judgement, fuse_options, judge_launch
from tests.tools.plan.launches import EXPERTS, MODEL, TP, ULYSSES

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
    found = judged(f"{options} --global-batch-size {batches * replicas}").overlap
    assert found.obstacle.startswith(obstacle)
    assert bool(found.obstacle) is bool(obstacle)
    assert found.without == (found.obstacle if without is None else without)
    assert found.paired == (None if paired is None else pytest.approx(paired))
    assert found.transfers is (options != "")


def test_a_layout_is_described() -> None:
    found = judged(f"{TP} {EXPERTS} --first-k-dense-replace 1 --multi-latent-attention", 16)
    assert str(found.layout) == ("TP 4, PP 1, CP 1, EP 4, DP 4, sequence parallel, experts, MLA")
    cp = judged(f"{TP} {ULYSSES} --lora-target-modules linear_qkv")
    assert str(cp.layout) == "TP 4, PP 1, CP 2 (ulysses_cp_algo), DP 1, sequence parallel, LoRA"
    for processes in (None, 6):
        found = judged(TP, processes)
        assert found.layout.data is None
        assert found.overlap.obstacle == "it does not say how many processes it has"
        assert "DP unknown" in str(found.layout)


@pytest.mark.parametrize(
    ("options", "refused", "kind", "verdict"),
    [
        ("--use-ascend-coc", {"--use-ascend-coc", "--tensor-model-parallel-size 1"},
         "another overlap", "refused"),
        (f"{TP} --use-ascend-coc --lora-target-modules linear_qkv",
         {"--use-ascend-coc", "--lora-target-modules linear_qkv"}, "LoRA", "refused"),
        (f"{TP} --schedules-method dualpipev", {"--schedules-method dualpipev"},
         "another overlap", "refused"),
        (f"{TP} --qat-scheme w4", {"--qat-scheme w4"}, "else", "refused"),
    ],
)  # fmt: skip
def test_what_refuses_the_flag(options: str, refused: set[str], kind: str, verdict: str) -> None:
    found = judged(options)
    assert set(found.refused) == set(refused)
    assert (found.kind, found.verdict) == (kind, verdict)


def test_at_tp_1_data_parallelism_alone() -> None:
    assert judged("").data_parallel_alone
    for options, processes in (("", 1), ("--use-custom-fsdp", 8), (TP, 8)):
        assert not judged(options, processes).data_parallel_alone


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
    ("options", "least"),
    [
        ("", 2500),
        ("--commfuse-min-rows 257", 257),
        ("--commfuse-min-rows 256", 256),
        ("--commfuse-chunks 1", 0),
        ("--commfuse-tuning on", 0),
    ],
)
def test_short_blocks_do_not_hide_that_a_layer_can_be_fused(options: str, least: int) -> None:
    found = judged(f"{TP} --seq-length 1024 {options}")
    assert (found.verdict, found.rows, found.least) == ("full", 256, least)
    assert found.short is (least > 256)
    said = f"its blocks have 256 rows, and with fewer than {least} Megatron's"
    assert [note.startswith(said) for note in found.notes] == [True] * found.short


def test_a_model_of_ones_own_is_not_read() -> None:
    said = "--spec mine.spec layer_spec is not read: it is judged as Megatron's GPTModel"
    assert judged(f"{TP} --spec mine.spec layer_spec").notes == [said]
    assert judged(f"{TP} --spec mindspeed_llm.spec layer_spec").notes == []
