"""Checks environment variables for values that harm CommFuse."""

import re
from collections.abc import Iterator

from commfuse_npu.tools.doctor.local_machine import Finding, Level, LocalMachine, listed_npus

_FROM_600 = r"0*([6-9]\d\d|[1-9]\d{3,})"
_NOT_1 = "(?!1$).*"
_VARIABLES = {
    "HCCL_CONNECT_TIMEOUT": (
        _FROM_600,
        "export {}=3600, at least 600 (default 120): with lanes there are more communicators to "
        "connect",
    ),
    "HCCL_EXEC_TIMEOUT": (
        rf"|0|{_FROM_600}",
        "export {}=3600, at least 600, or 0 (no limit): a first iteration that compiles operators "
        "takes long",
    ),
    "TORCH_HCCL_BLOCKING_WAIT": (
        _NOT_1,
        "unset {}: with 1 the host waits for every transfer: nothing overlaps",
    ),
    "ASCEND_LAUNCH_BLOCKING": (
        _NOT_1,
        "unset {}: with 1 every kernel is waited for: nothing overlaps",
    ),
    "TASK_QUEUE_ENABLE": (
        "(?!0$).*",
        "export {}=2: with 0 the host launches kernel by kernel and falls behind",
    ),
    # From the HCCL manual of CANN 9.1.
    "HCCL_OP_EXPANSION_MODE": (
        "(?!AIV$).*",
        "unset {0}, or {0}=AI_CPU: AIV excludes communicators that are busy at once, as lanes are; "
        "hangs are reported with several groups",
    ),
    # Retries of operations, from the same manual.
    "HCCL_OP_RETRY_ENABLE": (
        r"(?!.*:\s*1).*",
        "unset {}, or --commfuse-lanes 1: with it HCCL makes at most 5 communicators, and each "
        "lane is one, besides Megatron's",
    ),
    # Each communicator takes a stream from a pool, and so does the side stream [read in the
    # documentation of torch_npu 7.2.0].
    "STREAMS_PER_DEVICE": (
        "(32)?",
        "export {}=32: with 8 lanes share a stream sooner and wait for each other; torch_npu takes "
        "32 for anything else",
    ),
}
"""A pattern of good values, and advice on others.

Values that Megatron, HCCL or the launch itself refuses or warns of are not here.
"""


def check_variables(machine: LocalMachine) -> Iterator[Finding]:
    """Check the variables with which a launch would start."""
    for name, (good, advice) in _VARIABLES.items():
        setting = machine.variables.get(name, "")
        if re.fullmatch(good, setting):
            yield Finding(name, "ok", setting or "unset")
        else:
            # Without NPUs, an unset one is only a note.
            level: Level = "warning" if setting or listed_npus(machine) else "note"
            yield Finding(name, level, setting or "unset", advice.format(name))
