"""Environment variables, one at a time; NPUs and their links as npu-smi lists them."""

from __future__ import annotations

import pytest

from commfuse_npu.tools.doctor.environment import check_variables
from commfuse_npu.tools.doctor.machine import (
    ABSENT,
    CommandResult,
    Finding,
    check_devices,
    check_links,
    run_command,
)
from tests.tools.doctor.machines import INFO_A3, NPU_ANSWERS, machine, only, summary, topology


@pytest.mark.parametrize(
    ("name", "levels"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", {None: "ok", "1": "ok", "8": "error"}),
        ("HCCL_CONNECT_TIMEOUT",
         {None: "note", "600": "ok", "599": "warning", "0": "warning", "10m": "warning"}),
        ("HCCL_EXEC_TIMEOUT", {None: "ok", "0": "ok", "600": "ok", "60": "warning"}),
        ("HCCL_BUFFSIZE", {None: "ok", "64": "ok", "0": "error", "64MB": "error"}),
        ("P2P_HCCL_BUFFSIZE", {"0": "ok", "-1": "error"}),
        ("HCCL_OP_RETRY_ENABLE", {None: "ok", "L0:0, L1:0": "ok", "L0:0, L1:1": "warning"}),
        ("HCCL_OP_EXPANSION_MODE", {None: "ok", "AI_CPU": "ok", "AIV": "warning"}),
        ("TORCH_HCCL_BLOCKING_WAIT", {"1": "warning", "0": "ok"}),
        ("ASCEND_LAUNCH_BLOCKING", {"1": "warning"}),
        ("TASK_QUEUE_ENABLE", {"0": "warning", None: "ok"}),
        ("STREAMS_PER_DEVICE", {None: "ok", "32": "ok", "8": "warning", "16": "warning"}),
        ("HIGH_AVAILABILITY", {None: "ok", "recover": "warning"}),
        ("ATB_HOME_PATH", {None: "note", "/usr/local/atb": "ok"}),
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


# ------------------------------------------------------------------ NPUs and links


def test_devices_and_their_health_are_listed() -> None:
    findings = list(check_devices(machine({}, {}, NPU_ANSWERS)))
    assert summary(only(findings, "NPUs")) == ("ok", "2 x 910B3")
    assert summary(only(findings, "driver")) == ("ok", "25.2.0")
    assert summary(only(findings, "health")) == ("warning", "NPU 1 (Warning)")
    assert summary(only(findings, "links")) == ("ok", "1 pairs HCCS")
    findings = list(check_devices(machine({}, {}, {"npu-smi info": CommandResult(0, INFO_A3)})))
    assert summary(only(findings, "NPUs")) == ("ok", "2 x Ascend910")
    assert run_command("no-npu-smi") == CommandResult(ABSENT, "there is no no-npu-smi")
    for answer, level, value in (
        (CommandResult(ABSENT, ""), "note", "no NPU found (there is no npu-smi)"),
        (CommandResult(255, "dcmi failed\n"), "error", "npu-smi info lists none: dcmi failed"),
        (CommandResult(0, "+--+\n"), "error", "npu-smi info lists none: +--+"),
    ):
        (nothing,) = check_devices(machine({}, {}, {"npu-smi info": answer}))
        assert (*summary(nothing), bool(nothing.action)) == (level, value, True)


def test_links_over_pcie_are_warned_about() -> None:
    def links(*rows: str) -> Finding:
        answer = CommandResult(0, topology([row.split() for row in rows]))
        return check_links(machine({}, {}, {"npu-smi info -t topo": answer}))

    switched = links("X SIO HCCS_SW", "SIO X HCCS_SW", "HCCS_SW HCCS_SW X")
    assert summary(switched) == ("ok", "2 pairs HCCS_SW, 1 pairs SIO")
    slow = links("X PHB HCCS", "PHB X HCCS", "HCCS HCCS X")
    assert summary(slow) == ("warning", "2 pairs HCCS, 1 pairs PHB")
    assert slow.action.startswith("PHB goes over PCIe or the host: keep TP within the NPUs")
    unknown = {"npu-smi info -t topo": CommandResult(1, "not supported\n")}
    finding = check_links(machine({}, {}, unknown))
    assert summary(finding) == ("note", "unknown: npu-smi info -t topo said not supported")
