"""Variables, one at a time; NPUs and their links, as npu-smi lists them."""

from __future__ import annotations

import json
import os

import pytest

from commfuse_npu.tools import cli
from commfuse_npu.tools.doctor import CommandResult, Package
from commfuse_npu.tools.doctor.devices import check_devices, check_links
from commfuse_npu.tools.doctor.environment import check_variables
from commfuse_npu.tools.finding import Finding
from tests.tools.doctor.machines import (
    INFO_A3,
    NPU_ANSWERS,
    machine,
    only,
    summary,
    topology,
)
from tests.tools.plan.launches import SIZES, asked


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "ok"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", None, "note"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "8", "error"),
        ("HCCL_CONNECT_TIMEOUT", None, "note"),
        ("HCCL_CONNECT_TIMEOUT", "600", "ok"),
        ("HCCL_CONNECT_TIMEOUT", "120", "warning"),
        ("HCCL_CONNECT_TIMEOUT", "0", "warning"),
        ("HCCL_CONNECT_TIMEOUT", "10m", "error"),
        ("HCCL_EXEC_TIMEOUT", None, "ok"),
        ("HCCL_EXEC_TIMEOUT", "0", "ok"),
        ("HCCL_EXEC_TIMEOUT", "60", "warning"),
        ("HCCL_BUFFSIZE", None, "ok"),
        ("HCCL_BUFFSIZE", "64", "ok"),
        ("HCCL_BUFFSIZE", "0", "error"),
        ("HCCL_BUFFSIZE", "64MB", "error"),
        ("P2P_HCCL_BUFFSIZE", "20", "ok"),
        ("P2P_HCCL_BUFFSIZE", "0", "ok"),
        ("P2P_HCCL_BUFFSIZE", "-1", "error"),
        ("HCCL_OP_RETRY_ENABLE", None, "ok"),
        ("HCCL_OP_RETRY_ENABLE", "L0:0, L1:0, L2:0", "ok"),
        ("HCCL_OP_RETRY_ENABLE", "L0:0, L1:1, L2:0", "warning"),
        ("HCCL_OP_EXPANSION_MODE", None, "ok"),
        ("HCCL_OP_EXPANSION_MODE", "AI_CPU", "ok"),
        ("HCCL_OP_EXPANSION_MODE", "AIV", "warning"),
        ("TORCH_HCCL_BLOCKING_WAIT", "1", "warning"),
        ("TORCH_HCCL_BLOCKING_WAIT", "0", "ok"),
        ("ASCEND_LAUNCH_BLOCKING", "1", "warning"),
        ("TASK_QUEUE_ENABLE", "0", "warning"),
        ("TASK_QUEUE_ENABLE", None, "ok"),
        ("STREAMS_PER_DEVICE", None, "ok"),
        ("STREAMS_PER_DEVICE", "32", "ok"),
        ("STREAMS_PER_DEVICE", "8", "warning"),
        ("STREAMS_PER_DEVICE", "16", "warning"),
        ("HIGH_AVAILABILITY", None, "ok"),
        ("HIGH_AVAILABILITY", "recover", "warning"),
        ("HCCL_DETERMINISTIC", None, "note"),
        ("HCCL_DETERMINISTIC", "false", "note"),
        ("HCCL_DETERMINISTIC", "TRUE", "ok"),
    ],
)
def test_a_variable(name: str, value: str | None, level: str) -> None:
    variables = {} if value is None else {name: value}
    found = only(check_variables(machine(variables)), name)
    assert found.level == level
    if level not in ("ok", "note"):
        assert found.value == value
        assert found.expected
        assert found.action


def test_on_npus_the_default_time_to_connect_is_too_short() -> None:
    found = only(check_variables(machine({}, {}, NPU_ANSWERS)), "HCCL_CONNECT_TIMEOUT")
    assert summary(found) == ("warning", "unset (120 s)")


def test_a_launch_needs_one_connection() -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    for line, said in (
        (SIZES, ("error", "unset")),
        (f"{name}=1 {SIZES}", ("ok", "1")),
        ("--config", ("ok", "1")),  # by its launcher
    ):
        assert summary(only(check_variables(machine(), asked(line)), name)) == said
    alone = asked(f"{SIZES} --tensor-model-parallel-size 1")
    assert not [f for f in check_variables(machine({name: "8"}), alone) if f.what == name]


def test_retries_leave_room_for_few_lanes() -> None:
    name, variables = "HCCL_OP_RETRY_ENABLE", machine({"HCCL_OP_RETRY_ENABLE": "L1:1"})
    assert only(check_variables(variables, asked("--config")), name).level == "ok"
    found = only(check_variables(variables, asked("--config --commfuse-schedule shifted")), name)
    assert found.level == "error"
    assert "at most 5 communicators, and each lane is one of 7" in found.expected
    for lanes, level in ((4, "ok"), (5, "error")):
        few = asked(f"--config --commfuse-lanes {lanes}")
        assert only(check_variables(variables, few), name).level == level


def test_a_product_that_is_added_needs_atb() -> None:
    name, blocks = "ATB_HOME_PATH", asked("--config --commfuse-wgrad blocks")
    missing = only(check_variables(machine(), blocks), name)
    assert missing.level == "warning"
    assert "--commfuse-wgrad" in missing.expected
    there = only(check_variables(machine({name: "/usr/local/atb"}), blocks), name)
    assert summary(there) == ("ok", "/usr/local/atb")
    assert not [f for f in check_variables(machine(), asked("--config")) if f.what == name]


def test_streams_are_counted_against_the_pool() -> None:
    name = "STREAMS_PER_DEVICE"
    assert only(check_variables(machine(), asked("--config")), name).level == "ok"
    many = "--commfuse-dp --use-distributed-optimizer --tensor-model-parallel-size 4 --nnodes 8"
    found = only(check_variables(machine(), asked(f"--config {many} --commfuse-lanes 14")), name)
    assert found.level == "warning"
    # 3 and 2 x 14 lanes and the second stream; the job, TP and DP, and two with others.
    assert found.value == "37 streams: 32 of lanes and sums, 5 of Megatron's groups"


# ------------------------------------------------------------------ NPUs and links


def test_without_npus_the_cpu_form_is_named() -> None:
    (found,) = check_devices(machine())
    assert summary(found) == ("note", "no NPU found (there is no npu-smi)")
    assert found.action


def test_devices_and_their_health_are_listed() -> None:
    found = list(check_devices(machine({}, {"torch_npu": Package("2.7.1")}, NPU_ANSWERS)))
    assert summary(only(found, "NPUs")) == ("ok", "2 x 910B3")
    assert summary(only(found, "health")) == ("warning", "NPU 1 (Warning)")
    assert summary(only(found, "links")) == ("ok", "1 pairs HCCS")
    assert "full mesh" in only(found, "links").action
    answers = {"npu-smi info": CommandResult(0, INFO_A3)}
    found = list(check_devices(machine({}, {}, answers)))
    assert summary(only(found, "NPUs")) == ("ok", "2 x Ascend910")
    assert summary(only(found, "torch_npu")) == ("error", "not found")


@pytest.mark.parametrize(
    "result", [CommandResult(255, "dcmi failed\n"), CommandResult(0, "+--+\n")]
)
def test_an_npu_smi_that_lists_nothing_is_an_error(result: CommandResult) -> None:
    (found,) = check_devices(machine({}, {}, {"npu-smi info": result}))
    assert found.level == "error"
    assert found.value == f"npu-smi info lists none: {result.last_line}"


def test_links_tell_the_schedule() -> None:
    def links(*rows: str) -> Finding:
        table = topology([row.split() for row in rows])
        answers = {"npu-smi info -t topo": CommandResult(0, table)}
        return check_links(machine({}, {}, answers))

    switched = links("X SIO HCCS_SW", "SIO X HCCS_SW", "HCCS_SW HCCS_SW X")
    assert summary(switched) == ("ok", "2 pairs HCCS_SW, 1 pairs SIO")
    assert "1 or 2 lanes" in switched.action
    slow = links("X PHB HCCS", "PHB X HCCS", "HCCS HCCS X")
    assert summary(slow) == ("warning", "2 pairs HCCS, 1 pairs PHB")
    unknown = {"npu-smi info -t topo": CommandResult(1, "not supported\n")}
    found = check_links(machine({}, {}, unknown))
    assert summary(found) == ("note", "unknown: npu-smi info -t topo said not supported")


def test_the_npu_smi_on_the_path_is_asked(tmp_path, monkeypatch, capsys) -> None:
    script = tmp_path / "npu-smi"
    for name in ("npu-smi info", "npu-smi info -t topo"):
        (tmp_path / name.split()[-1]).write_text(NPU_ANSWERS[name].output, "utf-8")
    script.write_text(
        f'#!/bin/sh\nif [ "$2" = -t ]; then cat "{tmp_path}/$3"; else cat "{tmp_path}/info"; fi\n',
        "utf-8",
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert cli.main(["doctor", "--json"]) == 1
    findings = {f["what"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["NPUs"]["value"] == "2 x 910B3"
    assert findings["links"]["value"] == "1 pairs HCCS"
    # NPUs, and nothing to use them with.
    assert findings["torch_npu"]["level"] == "error"
