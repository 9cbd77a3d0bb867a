"""One variable at a time."""

from __future__ import annotations

import pytest

from commfuse_npu.tools.doctor.environment import check_variables
from tests.tools.doctor.machines import NPU_ANSWERS, machine, only, summary
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
    found = only(check_variables(variables, asked("--config")), name)
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
