"""What is said about the options of a launch."""

from __future__ import annotations

import pytest

from commfuse_npu.tools.finding import Finding
from commfuse_npu.tools.plan.checks import check_launch
from tests.tools.doctor.machines import only, summary
from tests.tools.plan.launches import FUSED, SIZES, asked

ATTENTION = f"{FUSED} --commfuse-attention --attention-dropout 0.0"
ALONE = f"{FUSED} --tensor-model-parallel-size 1 --attention-dropout 0.0"
DP = "--commfuse-dp --use-distributed-optimizer --nproc_per_node"
ULYSSES = "--context-parallel-size 2 --context-parallel-algo ulysses_cp_algo --commfuse-ulysses"
OF_ONE = "--tensor-model-parallel-size"


def check(line: str) -> list[Finding]:
    return check_launch(asked(line))


@pytest.mark.parametrize(
    "line",
    [
        SIZES + " --sequence-parallel",
        FUSED,
        f"A=b torchrun --nproc_per_node 2 -m mindspeed_patches.launch /llm/pretrain_gpt.py {FUSED}",
        ATTENTION,
        f"{ATTENTION} --recompute-granularity full",
        f"{FUSED} --schedules-method other",
        f"{FUSED} --output-layer-slice-num 1",
        f"{SIZES} --sequence-parallel --use-ascend-mc2",
        f"{ATTENTION.replace('--use-commfuse', '')} --multi-latent-attention",
        f"{FUSED} --pre-tockens 4096",
        f"{ALONE} {DP} 2",
        f"{ALONE} {ULYSSES}",
        f"{FUSED} --num-attention-heads 6 --kv-channels 16",
        # The launchers switch dropout off.
        "--config --commfuse-attention",
    ],
)
def test_what_starts_is_not_remarked(line: str) -> None:
    assert check(line) == []


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
        (f"{FUSED} --schedules-method dualpipev", "--schedules-method", "error", "dualpipev"),
        (f"{FUSED} --output-layer-slice-num=2", "--output-layer-slice-num", "error", "2"),
        (f"{FUSED} --commfuse-fb-overlap --stage dpo", "--stage", "error", "dpo"),
        (f"{ATTENTION} --multi-latent-attention", "--multi-latent-attention", "error", "given"),
        (f"{ATTENTION} --pre-tockens 4096", "--pre-tockens", "error", "4096"),
        (f"{FUSED} --commfuse-attention", "--attention-dropout", "error",
         "0.1, Megatron's default"),
        (f"{ATTENTION} --commfuse-layers qkv,fc1", "--commfuse-attention", "error",
         "given, but proj is not in the list of layers to fuse"),
        (f"{ATTENTION} --recompute-activations", "--commfuse-attention", "warning",
         "given, but selective recomputation runs the core attention by itself"),
        (f"{ATTENTION} --recompute-granularity selective", "--commfuse-attention", "warning",
         "given, but selective recomputation runs the core attention by itself"),
        (f"{ALONE} {DP} 1", "--commfuse-dp", "warning", "given, but DP 1 transfers nothing"),
        (f"{ALONE} --commfuse-dp --nproc_per_node 2", "--commfuse-dp", "error", "given"),
        (f"{ALONE} --commfuse-ulysses --context-parallel-algo ulysses_cp_algo",
         "--commfuse-ulysses", "error", "given"),
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
    found = only(check(line), what)
    assert summary(found) == (level, value)
    assert found.action
    assert found.expected or "given, but" in value or what in ("layout", "--commfuse-schedule")


def test_the_way_out_names_the_option_of_ours() -> None:
    (found,) = check(f"{FUSED} --commfuse-attention")
    assert found.action == "pass --attention-dropout 0.0 or leave --commfuse-attention out"
    assert "--commfuse-attention, which is refused then" in found.expected
    assert "add --commfuse-dp" in only(check(ALONE), OF_ONE).action
