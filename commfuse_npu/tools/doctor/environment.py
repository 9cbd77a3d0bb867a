"""Checks environment variables for missing and harmful values."""

import re
from collections.abc import Iterator

from commfuse_npu.tools.doctor.machine import Finding, Level, Machine, listed_npus

_FROM_600 = r"0*([6-9]\d\d|[1-9]\d{3,})"
_VARIABLES: tuple[tuple[str, str, str, Level, str], ...] = (
    (
        *("HCCL_CONNECT_TIMEOUT", "unset (120 s)", _FROM_600, "warning"),
        "export {}=3600, at least 600: with lanes there are more communicators to connect",
    ),
    (
        *("HCCL_EXEC_TIMEOUT", "unset (1836 s)", rf"|0|{_FROM_600}", "warning"),
        "export {}=3600, at least 600, or 0 (no limit): a first iteration that compiles operators "
        "takes long",
    ),
    (
        *("CUDA_DEVICE_MAX_CONNECTIONS", "unset (needed with TP above 1)", "1?", "error"),
        "export {}=1 (scripts/pretrain_*_ptd.sh do): Megatron refuses to start with TP above 1 "
        "otherwise",
    ),
    (
        *("HCCL_BUFFSIZE", "unset (200 MB)", r"|0*[1-9]\d*", "error"),
        "export {}=200, a whole number of MB",
    ),
    # With 0, the transfers of a pair use the group's communicator [read in torch_npu].
    (
        *("P2P_HCCL_BUFFSIZE", "unset (20 MB)", r"\d*", "error"),
        "export {}=20, a whole number of MB",
    ),
    (
        *("TORCH_HCCL_BLOCKING_WAIT", "unset", "(?!1$).*", "warning"),
        "unset {}: with 1 the host waits for every transfer: nothing overlaps",
    ),
    (
        *("ASCEND_LAUNCH_BLOCKING", "unset", "(?!1$).*", "warning"),
        "unset {}: with 1 every kernel is waited for: nothing overlaps",
    ),
    (
        *("TASK_QUEUE_ENABLE", "unset", "(?!0$).*", "warning"),
        "export {}=2: with 0 the host launches kernel by kernel and falls behind",
    ),
    # From the HCCL manual of CANN 9.1.
    (
        *("HCCL_OP_EXPANSION_MODE", "unset", "(?!AIV$).*", "warning"),
        "unset {0}, or {0}=AI_CPU: AIV excludes communicators that are busy at once, as lanes are; "
        "hangs are reported with several groups",
    ),
    # Retries of operations, from the same manual.
    (
        *("HCCL_OP_RETRY_ENABLE", "unset", r"(?!.*:\s*1).*", "warning"),
        "unset {}, or --commfuse-lanes 1: with it HCCL makes at most 5 communicators, and each "
        "lane is one, besides Megatron's",
    ),
    # Each communicator takes a stream from a pool, and so does the side stream [read in the
    # documentation of torch_npu 7.2.0].
    (
        *("STREAMS_PER_DEVICE", "unset (32 from torch_npu 7.2.0 on)", "(32)?", "warning"),
        "export {}=32: with 8 lanes share a stream sooner and wait for each other; torch_npu takes "
        "32 for anything else",
    ),
    # MindSpeed-LLM treats it like the option [read in 26.1.0].
    (
        *("HIGH_AVAILABILITY", "unset", "", "warning"),
        "unset {}: it switches on --enable-high-availability, with which --use-commfuse is refused",
    ),
    # The launch warns of it too (mindspeed_patches/feature.py).
    (
        *("ATB_HOME_PATH", "unset", ".+", "note"),
        "install NNAL and source its atb/set_env.sh: without it weight gradients are accumulated "
        "in plain torch, slower",
    ),
    (
        *("HCCL_DETERMINISTIC", "unset", "(?i)true|strict", "note"),
        "export {}=true where runs are compared bit for bit: reductions on A2 differ from run to "
        "run otherwise; it costs time",
    ),
)
"""The name, what is printed if it is unset, a pattern of good values, the level of others, and
advice on them."""


def check_variables(machine: Machine) -> Iterator[Finding]:
    """Check the variables with which a launch would start."""
    on_npu = bool(listed_npus(machine))
    for name, unset, good, level, advice in _VARIABLES:
        setting = machine.variables.get(name, "")
        value = setting or unset
        if re.fullmatch(good, setting):
            yield Finding("environment", name, "ok", value)
        else:
            # Without NPUs, an unset one is only a note.
            at = level if setting or on_npu else "note"
            yield Finding("environment", name, at, value, advice.format(name))
