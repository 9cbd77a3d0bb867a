"""Checks environment variables for missing and harmful values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from commfuse_npu.tools.doctor.machine import Finding, Level, Machine, listed_npus

__all__ = ["check_variables"]


class _Variable(NamedTuple):
    """A variable: the text if it is unset, a pattern of good values, and advice on bad ones."""

    name: str
    unset: str
    good: str
    level: Level
    expected: str
    action: str = "unset {}"


_FROM_600 = r"0*([6-9]\d\d|[1-9]\d{3,})"
_MEGABYTES = "a whole number of MB"
_VARIABLES = (
    _Variable(
        *("HCCL_CONNECT_TIMEOUT", "unset (120 s)", _FROM_600, "warning"),
        "at least 600 s: with lanes there are more communicators to connect",
        "export {}=3600",
    ),
    _Variable(
        *("HCCL_EXEC_TIMEOUT", "unset (1836 s)", rf"|0|{_FROM_600}", "warning"),
        "0 (no limit) or at least 600 s: a first iteration that compiles operators takes long",
        "export {}=3600",
    ),
    _Variable(
        *("CUDA_DEVICE_MAX_CONNECTIONS", "unset (needed with TP above 1)", "1?", "error"),
        "1: Megatron refuses to start with TP above 1 otherwise",
        "export {}=1 (scripts/pretrain_*_ptd.sh do)",
    ),
    _Variable(
        *("HCCL_BUFFSIZE", "unset (200 MB)", r"|0*[1-9]\d*", "error", _MEGABYTES, "export {}=200"),
    ),
    # With 0, the transfers of a pair use the group's communicator [read in torch_npu].
    _Variable("P2P_HCCL_BUFFSIZE", "unset (20 MB)", r"\d*", "error", _MEGABYTES, "export {}=20"),
    _Variable(
        *("TORCH_HCCL_BLOCKING_WAIT", "unset", "(?!1$).*", "warning"),
        "not 1: the host waits for every transfer: nothing overlaps",
    ),
    _Variable(
        *("ASCEND_LAUNCH_BLOCKING", "unset", "(?!1$).*", "warning"),
        "not 1: every kernel is waited for: nothing overlaps",
    ),
    _Variable(
        *("TASK_QUEUE_ENABLE", "unset", "(?!0$).*", "warning"),
        "not 0: the host launches kernel by kernel and falls behind",
        "export {}=2",
    ),
    # From the HCCL manual of CANN 9.1.
    _Variable(
        *("HCCL_OP_EXPANSION_MODE", "unset", "(?!AIV$).*", "warning"),
        "not AIV: it excludes communicators that are busy at once, as lanes are; hangs are "
        "reported with several groups",
        "unset {0}, or {0}=AI_CPU",
    ),
    # Retries of operations, from the same manual.
    _Variable(
        *("HCCL_OP_RETRY_ENABLE", "unset", r"(?!.*:\s*1).*", "warning"),
        "off: with it HCCL makes at most 5 communicators, and each lane is one, besides Megatron's",
        "unset {}, or --commfuse-lanes 1",
    ),
    # Each communicator takes a stream from a pool, and so does the side stream [read in the
    # documentation of torch_npu 7.2.0].
    _Variable(
        *("STREAMS_PER_DEVICE", "unset (32 from torch_npu 7.2.0 on)", "(32)?", "warning"),
        "32: with 8 lanes share a stream sooner and wait for each other; torch_npu takes 32 for "
        "anything else",
        "export {}=32",
    ),
    # MindSpeed-LLM treats it like the option [read in 26.1.0].
    _Variable(
        *("HIGH_AVAILABILITY", "unset", "", "warning"),
        "unset: it switches on --enable-high-availability, with which --use-commfuse is refused",
    ),
    # The launch warns of it too (mindspeed_patches/feature.py).
    _Variable(
        *("ATB_HOME_PATH", "unset", ".+", "note"),
        "the folder of ATB: without it weight gradients are accumulated in plain torch, slower",
        "install NNAL and source its atb/set_env.sh",
    ),
    _Variable(
        *("HCCL_DETERMINISTIC", "unset", "(?i)true|strict", "note"),
        "true where runs are compared bit for bit: reductions on A2 differ from run to run",
        "export {}=true for comparisons only: it costs time",
    ),
)


def check_variables(machine: Machine) -> Iterator[Finding]:
    """Check the variables with which a launch would start."""
    on_npu = bool(listed_npus(machine))
    for name, unset, good, level, expected, action in _VARIABLES:
        setting = machine.variables.get(name, "")
        value = setting or unset
        if re.fullmatch(good, setting):
            yield Finding("environment", name, "ok", value)
        else:
            # Without NPUs, an unset one is only a note.
            at = level if setting or on_npu else "note"
            yield Finding("environment", name, at, value, expected, action.format(name))
