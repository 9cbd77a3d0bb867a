"""Where the simulator has something faster than the launch, its flag is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commfuse_npu.plan import Schedule
from commfuse_npu.tools.doctor import CommandResult, Finding
from commfuse_npu.tools.doctor.rivals import check_rivals
from commfuse_npu.tools.simulate.variants import COMPUTE_ONLY, REFERENCE, Variant, variants
from tests.tools.doctor.launches import launch
from tests.tools.doctor.machines import INFO_A2, machine

MC2 = "--use-ascend-mc2"
COC = "--use-ascend-coc --coc-parallel-num 2"
COC_KERNEL = "--use-ascend-coc --coc-fused-kernel"
MEGATRON = "leave --use-commfuse out"


def rivals(words: str = "", npus: str = "") -> list[Finding]:
    made = launch("--config", *words.split())
    answers = {"npu-smi info": CommandResult(0, npus)} if npus else {}
    return list(check_rivals(machine(answers=answers), made, made.schedule))


@pytest.mark.parametrize(
    ("words", "named", "not_named"),
    [
        ("", {COC_KERNEL}, {COC, MEGATRON}),
        ("--seq-length 1024 --commfuse-min-rows 0", {COC_KERNEL, COC, MEGATRON}, set()),
        ("--seq-length 1024", {COC_KERNEL}, {MEGATRON}),  # Megatron's order is what runs
        ("--tensor-model-parallel-size 2", set(), {COC, COC_KERNEL, MEGATRON}),
    ],
)
def test_what_is_faster_is_named_with_its_flag(words, named, not_named) -> None:
    (found,) = rivals(words)
    flags = set(found.action.removeprefix("measure, too: ").split("; "))
    assert named <= flags
    assert not not_named & flags
    assert "(simulated, ascend_910b_server)" in found.value


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("megatron", MEGATRON),
        ("coc-2", COC),
        ("coc-fused", COC_KERNEL),
        ("mc2", MC2),
        ("kernel-ideal", ""),  # nobody can launch it
    ],
)
@pytest.mark.parametrize("as_fast_as", [COMPUTE_ONLY, REFERENCE])
def test_each_rival_is_named_where_it_is_faster_and_only_there(
    monkeypatch, name: str, flag: str, as_fast_as: Variant
) -> None:
    assert name in {"kernel-ideal"} | {one.name for one in variants(8, 8, 1)}
    rival = replace(as_fast_as, name=name)
    monkeypatch.setattr("commfuse_npu.tools.doctor.rivals.variants", lambda *_: [rival])
    (found,) = rivals("--commfuse-fb-overlap")
    if flag and as_fast_as is COMPUTE_ONLY:
        assert (found.level, found.action) == ("note", f"measure, too: {flag}")
    else:
        assert (found.level, found.action) == ("ok", "")


@pytest.mark.parametrize(
    ("kind", "described"),
    [("910B3", "ascend_910b_server"), ("Ascend910", "ascend_910c_supernode")],
)
def test_the_machine_is_that_of_the_npus(kind: str, described: str) -> None:
    (found,) = rivals(npus=INFO_A2.replace("910B3", kind))
    assert described in found.value


@pytest.mark.parametrize(
    "words",
    [
        "--no-use-commfuse",
        "--num-experts 8",
        "--tensor-model-parallel-size 1 --commfuse-dp",
        "--nproc_per_node 4 --nnodes 2",  # a group over two nodes
    ],
)
def test_what_is_not_described_is_not_compared(words: str) -> None:
    assert rivals(words) == []
    assert rivals(npus=INFO_A2.replace("910B3", "310P3")) == []


def test_a_slow_schedule_loses_to_more() -> None:
    made = launch("--config")
    (found,) = check_rivals(machine(), made, Schedule(lanes=1, chunks=1))
    assert MEGATRON in found.action


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("", True),
        ("--commfuse-fb-overlap", False),
        ("--pipeline-model-parallel-size 2 --nnodes 2", False),
        ("--global-batch-size 2", False),
        ("--moe-fb-overlap", False),
    ],
)
def test_forward_backward_overlap_is_named_where_it_would_run(words: str, named: bool) -> None:
    (found,) = rivals(words)
    assert ("forward-backward overlap" in found.value) is named
    assert ("--commfuse-fb-overlap" in found.action) is named
