"""Environment variables that are unset or harmful."""

from __future__ import annotations

from collections.abc import Mapping

from commfuse_npu.tools.doctor.devices import listed_npus
from commfuse_npu.tools.doctor.finding import Finding, Level, about
from commfuse_npu.tools.doctor.launch import Launch
from commfuse_npu.tools.doctor.machine import Machine

__all__ = ["check_variables"]

_about = about("environment")


def check_variables(machine: Machine, launch: Launch | None = None) -> list[Finding]:
    """Environment variables that are unset or harmful, as the launch would see them."""
    variables = {**machine.variables, **(launch.variables if launch else {})}
    # Elsewhere an unset one is no more than a remark.
    on_npu = bool(listed_npus(machine))
    return [
        *_check_connections(variables, launch),
        *_check_times(variables, on_npu),
        *_check_buffers(variables),
        *_check_harmful(variables),
        *_check_determinism(variables),
    ]


def _check_connections(variables: Mapping[str, str], launch: Launch | None) -> list[Finding]:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    value = variables.get(name)
    if value == "1":
        return [_about(name, "ok", value)]
    if launch is not None and launch.config.tensor_model_parallel_size == 1:
        return []
    needed = launch is not None or value is not None
    return [
        _about(
            name,
            "error" if needed else "note",
            value or "unset",
            "1: Megatron refuses to start with TP above 1 otherwise",
            f"export {name}=1 (scripts/pretrain_*_ptd.sh do)",
        )
    ]


def _check_times(variables: Mapping[str, str], on_npu: bool) -> list[Finding]:
    found = []
    for name, default, least, why in (
        ("HCCL_CONNECT_TIMEOUT", 120, 600, "with lanes there are more communicators to connect"),
        ("HCCL_EXEC_TIMEOUT", 1836, 600, "a first iteration that compiles operators takes long"),
    ):
        given = variables.get(name)
        if given is not None and not given.isdecimal():
            found.append(
                _about(name, "error", given, "a whole number of seconds", f"export {name}=3600")
            )
            continue
        seconds = default if given is None else int(given)
        if seconds >= least or (name == "HCCL_EXEC_TIMEOUT" and seconds == 0):
            found.append(_about(name, "ok", given or f"unset ({default} s)"))
            continue
        found.append(
            _about(
                name,
                "warning" if on_npu or given is not None else "note",
                given or f"unset ({default} s)",
                f"at least {least} s: {why}",
                f"export {name}=3600",
            )
        )
    return found


def _check_buffers(variables: Mapping[str, str]) -> list[Finding]:
    found = []
    for name, default in (("HCCL_BUFFSIZE", 200), ("P2P_HCCL_BUFFSIZE", 20)):
        given = variables.get(name)
        if given is None or (given.isdecimal() and int(given) > 0):
            found.append(_about(name, "ok", given or f"unset ({default} MB)"))
        else:
            found.append(
                _about(name, "error", given, "a whole number of MB", f"export {name}={default}")
            )
    return found


def _check_harmful(variables: Mapping[str, str]) -> list[Finding]:
    found = []
    for name, harmful, why in (
        ("TORCH_HCCL_BLOCKING_WAIT", "1", "the host waits for every transfer: nothing overlaps"),
        ("ASCEND_LAUNCH_BLOCKING", "1", "every kernel is waited for: nothing overlaps"),
        ("TASK_QUEUE_ENABLE", "0", "the host launches kernel by kernel and falls behind"),
    ):
        value = variables.get(name)
        if value == harmful:
            fix = f"export {name}=2" if harmful == "0" else f"unset {name}"
            level: Level = "warning"
            found.append(_about(name, level, value, f"not {harmful}: {why}", fix))
        else:
            found.append(_about(name, "ok", value or "unset"))
    return found


def _check_determinism(variables: Mapping[str, str]) -> list[Finding]:
    name = "HCCL_DETERMINISTIC"
    value = variables.get(name)
    if value is not None and value.lower() in ("true", "strict"):
        return [_about(name, "ok", value)]
    return [
        _about(
            name,
            "note",
            value or "unset",
            "true where runs are compared bit for bit: reductions on A2 differ from run to run",
            f"export {name}=true for comparisons only: it costs time",
        )
    ]
