"""Environment variables that are unset or harmful."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from commfuse_npu.tools.doctor.devices import listed_npus
from commfuse_npu.tools.doctor.finding import Finding, Level
from commfuse_npu.tools.doctor.launch import Launch
from commfuse_npu.tools.doctor.machine import Machine
from commfuse_npu.tools.doctor.transfers import groups_of, lanes_of

__all__ = ["check_variables"]

_about = partial(Finding, "environment")


def _number(least: int) -> Callable[[str], bool]:
    return lambda value: not value or (value.isdecimal() and int(value) >= least)


def _other_than(harmful: str) -> Callable[[str], bool]:
    return lambda value: value != harmful


_VARIABLES: tuple[tuple[str, str, Callable[[str], bool], Level, str, str], ...] = (
    (
        *("HCCL_BUFFSIZE", "unset (200 MB)", _number(1), "error"),
        *("a whole number of MB", "export {}=200"),
    ),
    (
        # With 0 a pair's transfers use the group's communicator [read in torch_npu].
        *("P2P_HCCL_BUFFSIZE", "unset (20 MB)", _number(0), "error"),
        *("a whole number of MB", "export {}=20"),
    ),
    (
        *("TORCH_HCCL_BLOCKING_WAIT", "unset", _other_than("1"), "warning"),
        *("not 1: the host waits for every transfer: nothing overlaps", "unset {}"),
    ),
    (
        *("ASCEND_LAUNCH_BLOCKING", "unset", _other_than("1"), "warning"),
        *("not 1: every kernel is waited for: nothing overlaps", "unset {}"),
    ),
    (
        *("TASK_QUEUE_ENABLE", "unset", _other_than("0"), "warning"),
        *("not 0: the host launches kernel by kernel and falls behind", "export {}=2"),
    ),
    (
        # Its manual of CANN 9.1.
        *("HCCL_OP_EXPANSION_MODE", "unset", _other_than("AIV"), "warning"),
        "not AIV: it excludes communicators that are busy at once, as lanes are; hangs are "
        "reported with several groups",
        "unset {0}, or {0}=AI_CPU",
    ),
    (
        # MindSpeed-LLM takes it for the option [read in 26.1.0].
        *("HIGH_AVAILABILITY", "unset", lambda value: not value, "warning"),
        "unset: it switches on --enable-high-availability, with which --use-commfuse is refused",
        "unset {}",
    ),
    (
        *("HCCL_DETERMINISTIC", "unset", lambda v: v.lower() in ("true", "strict"), "note"),
        "true where runs are compared bit for bit: reductions on A2 differ from run to run",
        "export {}=true for comparisons only: it costs time",
    ),
)
"""Name, what is said of one that is unset, whether a value will do, what else it is and needs."""


def check_variables(machine: Machine, launch: Launch | None = None) -> Iterator[Finding]:
    """Environment variables that are unset or harmful, as the launch would see them."""
    variables = {**machine.variables, **(launch.variables if launch else {})}
    yield from _check_connections(variables, launch)
    # Elsewhere than on NPUs an unset one is no more than a remark.
    yield from _check_times(variables, on_npu=bool(listed_npus(machine)))
    for name, unset, good, level, expected, action in _VARIABLES:
        value = variables.get(name, "")
        if good(value):
            yield _about(name, "ok", value or unset)
        else:
            yield _about(name, level, value or unset, expected, action.format(name))
    yield _check_retry(variables, launch)
    yield from _check_matmul_add(variables, launch)
    yield _check_streams(variables, launch)


def _check_connections(variables: Mapping[str, str], launch: Launch | None) -> Iterator[Finding]:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    value = variables.get(name)
    if value == "1":
        yield _about(name, "ok", value)
    elif launch is None or launch.config.tensor_model_parallel_size > 1:
        level: Level = "note" if launch is None and value is None else "error"
        expected = "1: Megatron refuses to start with TP above 1 otherwise"
        fix = f"export {name}=1 (scripts/pretrain_*_ptd.sh do)"
        yield _about(name, level, value or "unset", expected, fix)


def _check_times(variables: Mapping[str, str], on_npu: bool) -> Iterator[Finding]:
    for name, default, never, why in (
        ("HCCL_CONNECT_TIMEOUT", 120, None, "with lanes there are more communicators to connect"),
        ("HCCL_EXEC_TIMEOUT", 1836, 0, "a first iteration that compiles operators takes long"),
    ):
        given, fix = variables.get(name), f"export {name}=3600"
        if given is not None and not given.isdecimal():
            yield _about(name, "error", given, "a whole number of seconds", fix)
            continue
        seconds = default if given is None else int(given)
        said = given or f"unset ({default} s)"
        if seconds >= 600 or seconds == never:
            yield _about(name, "ok", said)
        else:
            level: Level = "warning" if on_npu or given is not None else "note"
            yield _about(name, level, said, f"at least 600 s: {why}", fix)


_MOST_WITH_RETRY = 5


def _check_retry(variables: Mapping[str, str], launch: Launch | None) -> Finding:
    """HCCL repeats operations of few communicators only (its manual of CANN 9.1)."""
    name = "HCCL_OP_RETRY_ENABLE"
    value = variables.get(name, "")
    lanes = sum(one.lanes for one in lanes_of(launch)) if launch else 0
    if not re.search(r":\s*1", value) or 0 < lanes < _MOST_WITH_RETRY:
        return _about(name, "ok", value or "unset")
    expected = (
        f"off: with it HCCL makes at most {_MOST_WITH_RETRY} communicators, and each lane is one"
        f"{f' of {lanes}' if lanes else ''}, besides Megatron's"
    )
    level: Level = "error" if lanes else "warning"
    return _about(name, level, value, expected, f"unset {name}, or --commfuse-lanes 1")


def _check_matmul_add(variables: Mapping[str, str], launch: Launch | None) -> Iterator[Finding]:
    """MindSpeed's operator that adds a product to a gradient is compiled against ATB at its first
    use, by all ranks (read in ``mindspeed/ops/npu_matmul_add.py``)."""
    if launch is None or not launch.fuse.use_commfuse or launch.fuse.commfuse_wgrad != "blocks":
        return
    name, option = "ATB_HOME_PATH", "--commfuse-wgrad blocks"
    if value := variables.get(name):
        yield _about(name, "ok", value)
        return
    expected = (
        f"the path of NNAL/ATB: {option} adds products by MindSpeed's operator, which is compiled "
        "against it in the first backward"
    )
    fix = f"install NNAL and source its set_env.sh, or leave {option} out"
    yield _about(name, "warning", "unset", expected, fix)


_POOL = 32


def _check_streams(variables: Mapping[str, str], launch: Launch | None) -> Finding:
    """torch_npu takes streams in turn from a pool of 32 or 8 (its documentation of 7.2.0).

    Each communicator takes one, and operations one to work beside the first.
    """
    name = "STREAMS_PER_DEVICE"
    value = variables.get(name)
    if value in (None, "32"):
        count = 1 + sum(one.lanes for one in lanes_of(launch)) if launch else 0
        used = count + (len(groups_of(launch)) if launch else 0)
        if used > _POOL:
            return _about(
                name,
                "warning",
                f"{used} streams: {count} of lanes and sums, {used - count} of Megatron's groups",
                f"at most {_POOL}: a lane waits for what shares its stream",
                "--commfuse-lanes 2, or --no-commfuse-dp",
            )
        return _about(name, "ok", value or "unset (32 from torch_npu 7.2.0 on)")
    expected = (
        "32: streams come from a pool in turn, and with 8 of them lanes share one sooner and wait "
        "for each other"
        if value == "8"
        else "32 or 8: torch_npu takes 32 for anything else"
    )
    return _about(name, "warning", str(value), expected, f"export {name}=32")
