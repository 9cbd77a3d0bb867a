"""What stands against CommFuse in a launch, and what would be fused, from its options."""

from __future__ import annotations

import pytest

from commfuse_npu.plan import PlanError
from commfuse_npu.tools.plan.forms import plan_launch
from commfuse_npu.tools.plan.launch import ask_about
from commfuse_npu.tools.plan.obstacles import Obstacles, obstacles
from tests.tools.plan.launches import EXPERTS, FUSED, MODEL, SERVER, SIZES, TP, ULYSSES, asked

ATTENTION = f"{FUSED} --commfuse-attention --attention-dropout 0.0"


def of(options: str, processes: int = 8) -> Obstacles:
    return obstacles(asked(f"--nproc_per_node {processes} {MODEL} {options}"))


# ------------------------------------------------------------------ layers and their operators


@pytest.mark.parametrize(
    ("line", "operator"),
    [
        ("--config --commfuse-chunks 2 --commfuse-attention", "attention_linear_reduce_scatter"),
        (f"{ATTENTION} --recompute-granularity selective", "linear_reduce_scatter"),
    ],
)
def test_the_projection_of_attention(line: str, operator: str) -> None:
    """The other operators are compared with the wrappers (``test_linear_layers.py``)."""
    (fused,) = (entry for entry in obstacles(asked(line)).layers if entry.layer == "proj")
    assert str(fused) == f"proj: {operator}"


@pytest.mark.parametrize(
    ("options", "rows", "least"),
    [
        ("", 256, 2500),
        ("--seq-length 2048 --hidden-size 32768", 512, 512),
        ("--commfuse-chunks 1", 256, 0),
        ("--commfuse-tuning on", 256, 0),
    ],
)
def test_layers_with_short_blocks_stay_megatrons(options: str, rows: int, least: int) -> None:
    against = of(f"{TP} --seq-length 1024 {options}")
    short = rows < least
    assert (against.fused, against.least) == ("", least)
    message = f"its blocks have 256 rows, and with fewer than {least} Megatron's"
    assert [note.startswith(message) for note in against.notes] == [True] * short + [False]
    reason = f"Megatron's own forward, because a block has fewer than {least} rows"
    assert {reason in str(layer) for layer in against.layers} == {short}
    assert {bool(layer.operator) for layer in against.layers} == {not short}
    assert not [note for note in of("--seq-length 64").notes if "blocks" in note], "not at TP 1"


# ------------------------------------------------------------------ what does not go together

ALONE = f"{FUSED} --tensor-model-parallel-size 1 --attention-dropout 0.0"
DP = "--commfuse-dp --use-distributed-optimizer --nproc_per_node"
OF_ONE = "--tensor-model-parallel-size 1: a group of one transfers nothing; choose at least 2, or"


@pytest.mark.parametrize(
    "line",
    [
        f"A=b torchrun --nproc_per_node 2 -m mindspeed_patches.launch /llm/pretrain_gpt.py {FUSED}",
        f"{ATTENTION} --recompute-granularity full",
        f"{FUSED} --schedules-method other --output-layer-slice-num 1 --pre-tockens 4096",
        f"{ALONE} {DP} 2",
        f"{ALONE} {ULYSSES} --commfuse-ulysses",
        f"{FUSED} --num-attention-heads 6 --kv-channels 16",
        # The launchers switch dropout off.
        "--config --commfuse-attention",
    ],
)
def test_what_starts_is_not_remarked(line: str) -> None:
    launch = asked(line)
    assert obstacles(launch).fused == ""
    assert plan_launch(launch, SERVER).problems == ()
    remarks = "has no effect", "given to the script itself", "without --sequence-parallel"
    assert not [note for note in obstacles(launch).notes for text in remarks if text in note]


@pytest.mark.parametrize(
    ("line", "obstacle"),
    [
        (ALONE, OF_ONE),
        (f"{ALONE} {DP} 2 --commfuse-attention",
         "--commfuse-attention needs --tensor-model-parallel-size of at least 2: it is fused with"),
        (f"{SIZES} --use-ascend-mc2", "--use-ascend-mc2: it replaces Megatron's column- and row-"
         "parallel linear layers by its own; leave one of the two out"),
        (f"{FUSED} --output-layer-slice-num=2", "--output-layer-slice-num 2: it runs the output "),
        (f"{ATTENTION} --pre-tockens 4096",
         "--commfuse-attention with --pre-tockens 4096: a query sees a window of the keys only; "
         "leave one of the two out, or pass the default"),
        (f"{FUSED} --commfuse-attention",
         "--commfuse-attention with --attention-dropout 0.1, Megatron's default: the fused "
         "attention has no dropout; pass --attention-dropout 0.0 or leave --commfuse-attention "),
        (f"{ATTENTION} --commfuse-layers qkv,fc1",
         "--commfuse-attention: proj is not among --commfuse-layers; add it, or leave "),
        (f"{ALONE} --commfuse-dp --nproc_per_node 2",
         "--commfuse-dp needs --use-distributed-optimizer: without it gradients are all-reduced"),
        (f"{ALONE} --commfuse-ulysses --context-parallel-size 2",
         "--commfuse-ulysses needs --context-parallel-algo ulysses_cp_algo, not megatron_cp_algo"),
        (f"{FUSED} --qat-scheme w4 --lora-target-modules linear_qkv",
         "--qat-scheme w4: quantization-aware training quantizes inside the linear layers; leave "
         "one of the two out; --lora-target-modules linear_qkv: LoRA wraps the linear layers "),
    ],
)  # fmt: skip
def test_what_refuses_the_flag_is_named_with_a_way_out(line: str, obstacle: str) -> None:
    assert obstacles(asked(line)).fused.startswith(obstacle)


@pytest.mark.parametrize(
    ("line", "note"),
    [
        (f"{SIZES} --use-commfuse", "without --sequence-parallel column-parallel layers keep"),
        (SIZES, "without --sequence-parallel column-parallel layers keep Megatron's forward; add"),
        (f"pretrain_gpt.py {FUSED}", "--use-commfuse is given to the script itself, which does "
         "not know it; start -m mindspeed_patches.launch SCRIPT"),
        (f"{ATTENTION} --recompute-activations", "--commfuse-attention has no effect: selective "
         "recomputation runs core attention separately"),
        (f"{ALONE} {DP} 1", "--commfuse-dp has no effect: DP 1 transfers nothing"),
        (f"{FUSED} --spec mine.spec layer_spec",
         "--spec mine.spec layer_spec is not read: it is judged as Megatron's GPTModel"),
    ],
)  # fmt: skip
def test_what_starts_but_is_not_as_meant_is_noted(line: str, note: str) -> None:
    against = obstacles(asked(line))
    assert against.fused == ""
    assert [text.startswith(note) for text in against.notes].count(True) == 1
    assert not [text for text in of(f"{TP} --spec mindspeed_llm.x y").notes if "--spec" in text]


@pytest.mark.parametrize(
    ("options", "also"),
    [
        (TP, ["--commfuse-attention", "--commfuse-dp"]),
        (f"{TP} --commfuse-attention", ["--commfuse-dp"]),
        (f"{TP} --attention-dropout 0.1", ["--commfuse-dp"]),
        (f"{TP} --context-parallel-size 2", ["--commfuse-dp"]),
        (f"{TP} {ULYSSES}", ["--commfuse-ulysses", "--commfuse-dp"]),
        (f"{TP} --nproc_per_node 4", ["--commfuse-attention"]),
        ("--config --nproc_per_node 16", ["--commfuse-attention", "--commfuse-dp"]),
        # At TP 1 nothing else is fused.
        ("", ["--commfuse-dp"]),
        ("--use-custom-fsdp", []),
        (f"{TP} --use-ascend-coc", []),
    ],
)
def test_our_other_options(options: str, also: list[str]) -> None:
    against = obstacles(asked(options)) if "--config" in options else of(options)
    notes = [note for note in against.notes if note.endswith(" can be given, too")]
    assert notes == [f"with --use-commfuse {', '.join(also)} can be given, too"] * bool(also)


def test_a_schedule_is_that_of_the_launch() -> None:
    assert asked("--config").schedule.chunks == 2
    assert asked("--config --commfuse-tuning on").schedule.chunks == 1
    with pytest.raises(PlanError, match="taper is 9"):
        plan_launch(asked("--config --commfuse-taper 9"), SERVER)


# ------------------------------------------------------------------ forward-backward overlap

PP = f"{TP} --pipeline-model-parallel-size 2"


@pytest.mark.parametrize(
    ("options", "batches", "obstacle", "paired"),
    [
        (TP, 8, "", 7 / 8),
        (TP, 1, "one micro-batch has no partner", 0.0),
        (f"{TP} --use-ascend-coc", 8, "--use-ascend-coc: its transfers are inside of CoC's "
         "operators; leave it out", 7 / 8),
        (f"{TP} --stage dpo", 8, "--stage dpo: it has a pipeline schedule of its own; leave "
         "--commfuse-fb-overlap out", 7 / 8),
        (PP, 8, "", 5 / 8),
        (PP, 4, "4 micro-batches: 25% of a stage's have a partner", 1 / 4),
        (f"{PP} --num-layers-per-virtual-pipeline-stage 1", 8, "", 11 / 16),
        (f"{PP} --num-virtual-stages-per-pipeline-rank 2", 7,
         "7 micro-batches are no multiple of 2 stages", None),
        ("", 8, "no tensor, expert or context parallelism, so nothing to hide", None),
        ("--num-experts 8 --expert-model-parallel-size 4", 8, "", 7 / 8),
    ],
)  # fmt: skip
def test_forward_backward_overlap(
    options: str, batches: int, obstacle: str, paired: float | None
) -> None:
    replicas = 8 // ((2 if "pipeline" in options else 1) * (4 if TP in options else 1))
    against = of(f"{options} --global-batch-size {batches * replicas}")
    assert against.overlap == obstacle
    assert against.paired == (None if paired is None else pytest.approx(paired))


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        (f"{TP} {EXPERTS} --first-k-dense-replace 1 --multi-latent-attention",
         "TP 4, PP 1, CP 1, EP 4, DP 2, sequence parallel, experts, MLA"),
        (f"{TP} {ULYSSES} --lora-target-modules linear_qkv",
         "TP 4, PP 1, CP 2 (ulysses_cp_algo), DP 1, sequence parallel, LoRA"),
    ],
)  # fmt: skip
def test_a_layout_is_described(options: str, layout: str) -> None:
    plan = plan_launch(asked(f"--nproc_per_node 8 {MODEL} {options}"), SERVER)
    assert plan.layout == layout


def test_deterministic_reductions_take_longer() -> None:
    line = f"torchrun --nproc_per_node 8 pretrain_gpt.py {MODEL} {TP} --global-batch-size 8 --bf16"

    def seconds(words: str, **variables: str) -> float:
        launch = ask_about(None, words.split(), variables)
        return plan_launch(launch, SERVER).forms[0].seconds or 0.0

    exact = {seconds(line, HCCL_DETERMINISTIC="TRUE"), seconds(f"HCCL_DETERMINISTIC=strict {line}"),
             seconds(f"{line} --npu-deterministic")}  # fmt: skip
    (slower,) = exact
    assert seconds(f"HCCL_DETERMINISTIC=false {line}", HCCL_DETERMINISTIC="true") < slower


def test_a_layout_that_does_not_fit_is_a_problem() -> None:
    plan = plan_launch(asked(f"--nproc_per_node 2 {MODEL} {TP}"), SERVER)
    (problem,) = plan.problems
    assert problem.startswith("number of NPUs 2 is not divisible by TP*PP*CP = 4*1*1 = 4; choose")
    assert plan.verdict == f"As it is, the launch would fail at its start: {problem}"
