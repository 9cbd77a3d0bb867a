"""Where the simulator has something faster than the launch, its flag is named."""

from __future__ import annotations

import pytest

from commfuse_npu.plan import Schedule
from commfuse_npu.tools.doctor import CommandResult, Finding
from commfuse_npu.tools.doctor.fuse_options import schedule_of
from commfuse_npu.tools.doctor.rivals import check_rivals
from tests.tools.doctor.launches import launch
from tests.tools.doctor.machines import INFO_A2, machine

MC2 = "--use-ascend-mc2"
COC = "--use-ascend-coc --coc-parallel-num 2"
COC_KERNEL = "--use-ascend-coc --coc-fused-kernel"
MEGATRON = "leave --use-commfuse out"


def rivals(words: str = "", npus: str = "") -> list[Finding]:
    made = launch("--config", *words.split())
    answers = {"npu-smi info": CommandResult(0, npus)} if npus else {}
    return list(check_rivals(machine(answers=answers), made, schedule_of(made.config, made.fuse)))


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("", {MC2, COC_KERNEL}),
        ("--tensor-model-parallel-size 2 --seq-length 1024 --commfuse-min-rows 0", {MC2}),
        ("--seq-length 1024 --commfuse-min-rows 0", {MC2, COC_KERNEL, COC, MEGATRON}),
        ("--seq-length 1024", {MC2, COC_KERNEL}),  # Megatron's order is what runs
        ("--commfuse-chunks 8", {MC2, COC_KERNEL}),
    ],
)
def test_what_is_faster_is_named_with_its_flag(words: str, flags: set[str]) -> None:
    (found,) = rivals(words)
    assert found.level == "note"
    assert set(found.action.removeprefix("measure, too: ").split("; ")) == flags
    assert "(simulated, ascend_910b_server): " in found.value


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
