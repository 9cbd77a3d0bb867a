"""Environment variables that are unset or harmful."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial

from commfuse_npu.tools.doctor.devices import listed_npus
from commfuse_npu.tools.doctor.finding import Finding, Level
from commfuse_npu.tools.doctor.launch import Launch
from commfuse_npu.tools.doctor.machine import Machine
from commfuse_npu.tools.doctor.transfers import groups_of, lanes_of
from commfuse_npu.tools.launch_script.options import value_of

__all__ = ["check_variables"]

_about = partial(Finding, "environment")


def check_variables(machine: Machine, launch: Launch | None = None) -> Iterator[Finding]:
    """Environment variables that are unset or harmful, as the launch would see them."""
    variables = {**machine.variables, **(launch.variables if launch else {})}
    yield from _check_connections(variables, launch)
    # Elsewhere than on NPUs an unset one is no more than a remark.
    yield from _check_times(variables, on_npu=bool(listed_npus(machine)))
    yield from _check_buffers(variables)
    yield from _check_harmful(variables)
    yield from _check_communicators(variables, launch)
    yield from _check_matmul_add(variables, launch)
    yield _check_streams(variables, launch)
    yield _check_repair(variables)
    yield _check_determinism(variables)


def _check_connections(variables: Mapping[str, str], launch: Launch | None) -> Iterator[Finding]:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    value = variables.get(name)
    if value == "1":
        yield _about(name, "ok", value)
    elif launch is None or launch.config.tensor_model_parallel_size > 1:
        yield _about(
            name,
            "note" if launch is None and value is None else "error",
            value or "unset",
            "1: Megatron refuses to start with TP above 1 otherwise",
            f"export {name}=1 (scripts/pretrain_*_ptd.sh do)",
        )


def _check_times(variables: Mapping[str, str], on_npu: bool) -> Iterator[Finding]:
    for name, default, least, why in (
        ("HCCL_CONNECT_TIMEOUT", 120, 600, "with lanes there are more communicators to connect"),
        ("HCCL_EXEC_TIMEOUT", 1836, 600, "a first iteration that compiles operators takes long"),
    ):
        given, fix = variables.get(name), f"export {name}=3600"
        if given is not None and not given.isdecimal():
            yield _about(name, "error", given, "a whole number of seconds", fix)
            continue
        seconds = default if given is None else int(given)
        said = given or f"unset ({default} s)"
        if seconds >= least or (name == "HCCL_EXEC_TIMEOUT" and seconds == 0):
            yield _about(name, "ok", said)
        else:
            level: Level = "warning" if on_npu or given is not None else "note"
            yield _about(name, level, said, f"at least {least} s: {why}", fix)


def _check_buffers(variables: Mapping[str, str]) -> Iterator[Finding]:
    # With P2P_HCCL_BUFFSIZE=0 a pair's transfers use the group's communicator [read in torch_npu].
    for name, default, least in (("HCCL_BUFFSIZE", 200, 1), ("P2P_HCCL_BUFFSIZE", 20, 0)):
        given = variables.get(name)
        if given is None or (given.isdecimal() and int(given) >= least):
            yield _about(name, "ok", given or f"unset ({default} MB)")
        else:
            yield _about(name, "error", given, "a whole number of MB", f"export {name}={default}")


def _check_harmful(variables: Mapping[str, str]) -> Iterator[Finding]:
    for name, harmful, why in (
        ("TORCH_HCCL_BLOCKING_WAIT", "1", "the host waits for every transfer: nothing overlaps"),
        ("ASCEND_LAUNCH_BLOCKING", "1", "every kernel is waited for: nothing overlaps"),
        ("TASK_QUEUE_ENABLE", "0", "the host launches kernel by kernel and falls behind"),
    ):
        value = variables.get(name)
        if value == harmful:
            fix = f"export {name}=2" if harmful == "0" else f"unset {name}"
            yield _about(name, "warning", value, f"not {harmful}: {why}", fix)
        else:
            yield _about(name, "ok", value or "unset")


_MOST_WITH_RETRY = 5


def _check_communicators(variables: Mapping[str, str], launch: Launch | None) -> Iterator[Finding]:
    """What HCCL does not do with many communicators (its manual of CANN 9.1)."""
    lanes = lanes_of(launch) if launch else []
    count = sum(one.lanes for one in lanes)
    name = "HCCL_OP_RETRY_ENABLE"
    value = variables.get(name)
    if value and re.search(r":\s*1", value) and (not lanes or count >= _MOST_WITH_RETRY):
        yield _about(
            name,
            "error" if lanes else "warning",
            value,
            f"off: with it HCCL makes at most {_MOST_WITH_RETRY} communicators, and each lane is "
            f"one{f' of {count}' if lanes else ''}, besides Megatron's",
            f"unset {name}, or --commfuse-lanes 1",
        )
    else:
        yield _about(name, "ok", value or "unset")
    name = "HCCL_OP_EXPANSION_MODE"
    value = variables.get(name)
    if value == "AIV":
        yield _about(
            name,
            "warning",
            value,
            "not AIV: it excludes communicators that are busy at once, as lanes are; hangs are "
            "reported with several groups",
            f"unset {name}, or {name}=AI_CPU",
        )
    else:
        yield _about(name, "ok", value or "unset")


def _check_matmul_add(variables: Mapping[str, str], launch: Launch | None) -> Iterator[Finding]:
    """MindSpeed's operator that adds a product to a gradient is compiled against ATB at its first
    use, by all ranks (read in ``mindspeed/ops/npu_matmul_add.py``)."""
    if launch is None or not launch.fuse.use_commfuse:
        return
    by_blocks = value_of(launch.options, "--commfuse-wgrad") == "blocks"
    if not by_blocks and launch.fuse.flow is None:
        return
    name, value = "ATB_HOME_PATH", variables.get("ATB_HOME_PATH")
    option = "--commfuse-wgrad blocks" if by_blocks else "--commfuse-flow"
    if value:
        yield _about(name, "ok", value)
    else:
        yield _about(
            name,
            "warning",
            "unset",
            f"the path of NNAL/ATB: {option} adds products by MindSpeed's operator, which is "
            "compiled against it in the first backward",
            f"install NNAL and source its set_env.sh, or leave {option} out",
        )


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


def _check_repair(variables: Mapping[str, str]) -> Finding:
    """MindSpeed-LLM takes it for ``--enable-high-availability`` (read in 26.1.0)."""
    name = "HIGH_AVAILABILITY"
    value = variables.get(name)
    if not value:
        return _about(name, "ok", "unset")
    why = "unset: it switches on --enable-high-availability, with which --use-commfuse is refused"
    return _about(name, "warning", value, why, f"unset {name}")


def _check_determinism(variables: Mapping[str, str]) -> Finding:
    name = "HCCL_DETERMINISTIC"
    value = variables.get(name) or "unset"
    if value.lower() in ("true", "strict"):
        return _about(name, "ok", value)
    return _about(
        name,
        "note",
        value,
        "true where runs are compared bit for bit: reductions on A2 differ from run to run",
        f"export {name}=true for comparisons only: it costs time",
    )
