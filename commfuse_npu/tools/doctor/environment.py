"""Checks environment variables for missing and harmful values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from commfuse_npu.tools.doctor.devices import listed_npus
from commfuse_npu.tools.doctor.machine import Machine
from commfuse_npu.tools.finding import Finding, Level
from commfuse_npu.tools.plan.launch import AskedLaunch
from commfuse_npu.tools.plan.transfers import groups_of, lanes_of

__all__ = ["check_variables"]

_make_finding = partial(Finding, "environment")
_MOST_WITH_RETRY = 5
_POOL = 32


class _Variable(NamedTuple):
    """A variable: the text if it is unset, a test for good values, and advice on bad ones."""

    name: str
    unset: str
    good: Callable[[str], bool]
    level: Level
    expected: str
    action: str = "unset {}"


def _number(least: int) -> Callable[[str], bool]:
    return lambda value: not value or (value.isdecimal() and int(value) >= least)


def _other_than(harmful: str) -> Callable[[str], bool]:
    return lambda value: value != harmful


_MEGABYTES = "a whole number of MB"
_VARIABLES = (
    _Variable("HCCL_BUFFSIZE", "unset (200 MB)", _number(1), "error", _MEGABYTES, "export {}=200"),
    # With 0, the transfers of a pair use the group's communicator [read in torch_npu].
    _Variable(
        "P2P_HCCL_BUFFSIZE", "unset (20 MB)", _number(0), "error", _MEGABYTES, "export {}=20"
    ),
    _Variable(
        *("TORCH_HCCL_BLOCKING_WAIT", "unset", _other_than("1"), "warning"),
        "not 1: the host waits for every transfer: nothing overlaps",
    ),
    _Variable(
        *("ASCEND_LAUNCH_BLOCKING", "unset", _other_than("1"), "warning"),
        "not 1: every kernel is waited for: nothing overlaps",
    ),
    _Variable(
        *("TASK_QUEUE_ENABLE", "unset", _other_than("0"), "warning"),
        "not 0: the host launches kernel by kernel and falls behind",
        "export {}=2",
    ),
    # From the HCCL manual of CANN 9.1.
    _Variable(
        *("HCCL_OP_EXPANSION_MODE", "unset", _other_than("AIV"), "warning"),
        "not AIV: it excludes communicators that are busy at once, as lanes are; hangs are "
        "reported with several groups",
        "unset {0}, or {0}=AI_CPU",
    ),
    # MindSpeed-LLM treats it like the option [read in 26.1.0].
    _Variable(
        *("HIGH_AVAILABILITY", "unset", lambda value: not value, "warning"),
        "unset: it switches on --enable-high-availability, with which --use-commfuse is refused",
    ),
    _Variable(
        *("HCCL_DETERMINISTIC", "unset", lambda v: v.lower() in ("true", "strict"), "note"),
        "true where runs are compared bit for bit: reductions on A2 differ from run to run",
        "export {}=true for comparisons only: it costs time",
    ),
)


def check_variables(machine: Machine, launch: AskedLaunch | None = None) -> Iterator[Finding]:
    """Check the variables as the launch would see them."""
    variables = {**machine.variables, **(launch.variables if launch else {})}
    value = variables.get
    yield from _check_connections(value("CUDA_DEVICE_MAX_CONNECTIONS"), launch)
    # Without NPUs, an unset one is only a note.
    on_npu = bool(listed_npus(machine))
    for name, default, why in (
        ("HCCL_CONNECT_TIMEOUT", 120, "with lanes there are more communicators to connect"),
        ("HCCL_EXEC_TIMEOUT", 1836, "a first iteration that compiles operators takes long"),
    ):
        yield _check_time(name, value(name), default, why, on_npu)
    for variable in _VARIABLES:
        setting = variables.get(variable.name, "")
        if variable.good(setting):
            yield _make_finding(variable.name, "ok", setting or variable.unset)
        else:
            action = variable.action.format(variable.name)
            yield _make_finding(
                variable.name, variable.level, setting or variable.unset, variable.expected, action
            )
    yield _check_retry(variables.get("HCCL_OP_RETRY_ENABLE", ""), launch)
    # All ranks compile MindSpeed's operator on its first use (read in
    # mindspeed/ops/npu_matmul_add.py).
    blocks = launch and launch.fuse.use_commfuse and launch.fuse.commfuse_wgrad == "blocks"
    if blocks and (home := value("ATB_HOME_PATH")):
        yield _make_finding("ATB_HOME_PATH", "ok", home)
    elif blocks:
        expected = (
            "the path of NNAL/ATB: --commfuse-wgrad blocks adds products by MindSpeed's operator, "
            "which is compiled against it in the first backward"
        )
        action = "install NNAL and source its set_env.sh, or leave --commfuse-wgrad blocks out"
        yield _make_finding("ATB_HOME_PATH", "warning", "unset", expected, action)
    yield _check_streams(value("STREAMS_PER_DEVICE"), launch)


def _check_connections(value: str | None, launch: AskedLaunch | None) -> Iterator[Finding]:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if value == "1":
        yield _make_finding(name, "ok", value)
    elif launch is None or launch.config.tensor_model_parallel_size > 1:
        level: Level = "note" if launch is None and value is None else "error"
        expected = "1: Megatron refuses to start with TP above 1 otherwise"
        action = f"export {name}=1 (scripts/pretrain_*_ptd.sh do)"
        yield _make_finding(name, level, value or "unset", expected, action)


def _check_time(name: str, value: str | None, default: int, why: str, on_npu: bool) -> Finding:
    action = f"export {name}=3600"
    if value is not None and not value.isdecimal():
        return _make_finding(name, "error", value, "a whole number of seconds", action)
    seconds, text = int(value or default), value or f"unset ({default} s)"
    # Unlimited execution is fine, an unlimited connection is not.
    if seconds >= 600 or (seconds == 0 and name == "HCCL_EXEC_TIMEOUT"):
        return _make_finding(name, "ok", text)
    level: Level = "warning" if on_npu or value is not None else "note"
    return _make_finding(name, level, text, f"at least 600 s: {why}", action)


def _check_retry(value: str, launch: AskedLaunch | None) -> Finding:
    """HCCL can retry operations only with few communicators (its manual of CANN 9.1)."""
    name = "HCCL_OP_RETRY_ENABLE"
    lanes = sum(group.lanes for group in lanes_of(launch)) if launch else 0
    if not re.search(r":\s*1", value) or 0 < lanes < _MOST_WITH_RETRY:
        return _make_finding(name, "ok", value or "unset")
    expected = (
        f"off: with it HCCL makes at most {_MOST_WITH_RETRY} communicators, and each lane is one"
        f"{f' of {lanes}' if lanes else ''}, besides Megatron's"
    )
    level: Level = "error" if lanes else "warning"
    return _make_finding(name, level, value, expected, f"unset {name}, or --commfuse-lanes 1")


def _check_streams(value: str | None, launch: AskedLaunch | None) -> Finding:
    """torch_npu assigns streams in turn from a pool of 32 or 8 (its documentation of 7.2.0).

    Each communicator uses one, and operations use one more as side stream.
    """
    finding = partial(_make_finding, "STREAMS_PER_DEVICE")
    if value not in (None, "32"):
        expected = (
            "32: streams come from a pool in turn, and with 8 of them lanes share one sooner and "
            "wait for each other"
            if value == "8"
            else "32 or 8: torch_npu takes 32 for anything else"
        )
        return finding("warning", str(value), expected, "export STREAMS_PER_DEVICE=32")
    streams = 1 + sum(group.lanes for group in lanes_of(launch)) if launch else 0
    groups = len(groups_of(launch)) if launch else 0
    if streams + groups <= _POOL:
        return finding("ok", value or "unset (32 from torch_npu 7.2.0 on)")
    text = f"{streams + groups} streams: {streams} of lanes and sums, {groups} of Megatron's groups"
    expected = f"at most {_POOL}: lanes that share a stream wait for each other"
    return finding("warning", text, expected, "--commfuse-lanes 2, or --no-commfuse-dp")
