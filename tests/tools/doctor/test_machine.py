"""Environment variables, one at a time; NPUs and their links as npu-smi lists them."""

from __future__ import annotations

import pytest

from commfuse_npu.tools.doctor import CommandResult, Package
from commfuse_npu.tools.doctor.devices import check_devices, check_links
from commfuse_npu.tools.doctor.environment import check_variables
from commfuse_npu.tools.finding import Finding
from tests.tools.doctor.machines import INFO_A3, NPU_ANSWERS, machine, only, summary, topology
from tests.tools.plan.launches import SIZES, asked

CONNECTIONS, RETRY = "CUDA_DEVICE_MAX_CONNECTIONS", "HCCL_OP_RETRY_ENABLE"
STREAMS, ATB = "STREAMS_PER_DEVICE", "ATB_HOME_PATH"


@pytest.mark.parametrize(
    ("name", "levels"),
    [
        (CONNECTIONS, {None: "note", "1": "ok", "8": "error"}),
        ("HCCL_CONNECT_TIMEOUT",
         {None: "note", "600": "ok", "120": "warning", "0": "warning", "10m": "error"}),
        ("HCCL_EXEC_TIMEOUT", {None: "ok", "0": "ok", "60": "warning"}),
        ("HCCL_BUFFSIZE", {None: "ok", "64": "ok", "0": "error", "64MB": "error"}),
        ("P2P_HCCL_BUFFSIZE", {"0": "ok", "-1": "error"}),
        (RETRY, {None: "ok", "L0:0, L1:0": "ok", "L0:0, L1:1": "warning"}),
        ("HCCL_OP_EXPANSION_MODE", {None: "ok", "AI_CPU": "ok", "AIV": "warning"}),
        ("TORCH_HCCL_BLOCKING_WAIT", {"1": "warning", "0": "ok"}),
        ("ASCEND_LAUNCH_BLOCKING", {"1": "warning"}),
        ("TASK_QUEUE_ENABLE", {"0": "warning", None: "ok"}),
        (STREAMS, {None: "ok", "32": "ok", "8": "warning", "16": "warning"}),
        ("HIGH_AVAILABILITY", {None: "ok", "recover": "warning"}),
        ("HCCL_DETERMINISTIC", {None: "note", "false": "note", "TRUE": "ok"}),
    ],
)  # fmt: skip
def test_a_variable(name: str, levels: dict[str | None, str]) -> None:
    for value, level in levels.items():
        variables = {} if value is None else {name: value}
        entry = only(check_variables(machine(variables)), name)
        assert entry.level == level, value
        if level not in ("ok", "note"):
            assert (entry.value, bool(entry.expected), bool(entry.action)) == (value, True, True)
    # On NPUs the default time to connect is too short.
    entry = only(check_variables(machine({}, {}, NPU_ANSWERS)), "HCCL_CONNECT_TIMEOUT")
    assert summary(entry) == ("warning", "unset (120 s)")


BLOCKS = "--config --commfuse-wgrad blocks"
MANY = (
    "--config --commfuse-dp --use-distributed-optimizer --tensor-model-parallel-size 4 --nnodes 8 "
    "--commfuse-lanes 14"
)


@pytest.mark.parametrize(
    ("line", "variables", "name", "said"),
    [
        (SIZES, {}, CONNECTIONS, ("error", "unset")),
        (f"{CONNECTIONS}=1 {SIZES}", {}, CONNECTIONS, ("ok", "1")),
        ("--config", {}, CONNECTIONS, ("ok", "1")),  # set by its launcher
        (f"{SIZES} --tensor-model-parallel-size 1", {CONNECTIONS: "8"}, CONNECTIONS, None),
        # With retries HCCL makes 5 communicators at most.
        ("--config --commfuse-lanes 4", {RETRY: "L1:1"}, RETRY, ("ok", "L1:1")),
        ("--config --commfuse-lanes 5", {RETRY: "L1:1"}, RETRY, ("error", "L1:1")),
        # Adding a product to a sum uses MindSpeed's operator.
        (BLOCKS, {}, ATB, ("warning", "unset")),
        (BLOCKS, {ATB: "/usr/local/atb"}, ATB, ("ok", "/usr/local/atb")),
        ("--config", {}, ATB, None),
        ("--config", {}, STREAMS, ("ok", "unset (32 from torch_npu 7.2.0 on)")),
        # 3 + 2 x 14 lanes and the second stream; groups: the job, TP, DP, and two more.
        (MANY, {}, STREAMS,
         ("warning", "37 streams: 32 of lanes and sums, 5 of Megatron's groups")),
    ],
)  # fmt: skip
def test_a_variable_of_a_launch(line, variables, name, said) -> None:
    named = [row for row in check_variables(machine(variables), asked(line)) if row.subject == name]
    assert [summary(row) for row in named] == [said] * (said is not None)


# ------------------------------------------------------------------ NPUs and links


def test_devices_and_their_health_are_listed() -> None:
    findings = list(check_devices(machine({}, {"torch_npu": Package("2.7.1")}, NPU_ANSWERS)))
    assert summary(only(findings, "NPUs")) == ("ok", "2 x 910B3")
    assert summary(only(findings, "driver")) == ("ok", "25.2.0")
    assert summary(only(findings, "health")) == ("warning", "NPU 1 (Warning)")
    assert summary(only(findings, "links")) == ("ok", "1 pairs HCCS")
    findings = list(check_devices(machine({}, {}, {"npu-smi info": CommandResult(0, INFO_A3)})))
    assert summary(only(findings, "NPUs")) == ("ok", "2 x Ascend910")
    assert summary(only(findings, "torch_npu")) == ("error", "not found")
    for answer, level, value in (
        (None, "note", "no NPU found (there is no npu-smi)"),
        (CommandResult(255, "dcmi failed\n"), "error", "npu-smi info lists none: dcmi failed"),
        (CommandResult(0, "+--+\n"), "error", "npu-smi info lists none: +--+"),
    ):
        (nothing,) = check_devices(machine({}, {}, {"npu-smi info": answer}))
        assert (*summary(nothing), bool(nothing.action)) == (level, value, True)


def test_links_tell_the_schedule() -> None:
    def links(*rows: str) -> Finding:
        answer = CommandResult(0, topology([row.split() for row in rows]))
        return check_links(machine({}, {}, {"npu-smi info -t topo": answer}))

    switched = links("X SIO HCCS_SW", "SIO X HCCS_SW", "HCCS_SW HCCS_SW X")
    assert summary(switched) == ("ok", "2 pairs HCCS_SW, 1 pairs SIO")
    assert "--commfuse-lanes 1 or 2" in switched.action
    slow = links("X PHB HCCS", "PHB X HCCS", "HCCS HCCS X")
    assert summary(slow) == ("warning", "2 pairs HCCS, 1 pairs PHB")
    unknown = {"npu-smi info -t topo": CommandResult(1, "not supported\n")}
    finding = check_links(machine({}, {}, unknown))
    assert summary(finding) == ("note", "unknown: npu-smi info -t topo said not supported")
