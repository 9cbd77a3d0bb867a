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
    monkeypatch.setattr("commfuse_npu.tools.doctor.rivals.FLOWS", ())
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


LOCAL = "--transformer-impl local"


@pytest.mark.parametrize(
    ("words", "named", "not_named"),
    [
        ("", "a flow of 4 chunks 18.5%", "operator by operator"),
        (LOCAL, "a flow of 4 chunks 18.5%", "operator by operator"),
        # It is what runs.
        (f"{LOCAL} --commfuse-flow 4", "", "a flow"),
        (f"{LOCAL} --commfuse-flow 4 --seq-length 1024", "operator by operator 39.8%", "a flow"),
        # It would not start, or layers would not be in it.
        (f"{LOCAL} --commfuse-attention", "", "a flow"),
        (f"{LOCAL} --sliding-window 64", "", "a flow"),
        (f"{LOCAL} --hidden-dropout 0.1", "", "a flow"),
        ("--transformer-impl transformer_engine", "", "a flow"),
        ("--commfuse-flow 4", "CoC as a kernel 6.8%", "a flow"),
        (f"{LOCAL} --commfuse-min-rows 4096", "", "a flow"),
        (f"{LOCAL} --seq-length 8200", "", "a flow"),
    ],
)
def test_a_flow_is_simulated_where_it_can_be(words: str, named: str, not_named: str) -> None:
    (found,) = rivals(words)
    assert named in found.value
    assert not_named not in found.value
    asked = f"--commfuse-flow 4 {LOCAL}" if not words else "--commfuse-flow 4;"
    assert (asked in found.action) == ("a flow" in named)
    assert ("leave --commfuse-flow out" in found.action) == ("operator" in named)


def test_with_a_flow_less_is_shorter() -> None:
    (operators,), (flow,) = rivals(LOCAL), rivals(f"{LOCAL} --commfuse-flow 4")
    assert "MC2" in operators.value
    assert "MC2" not in flow.value


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
