"""``commfuse-npu doctor``: is this machine, and is this launch, ready for CommFuse?

Checks are functions from a :class:`Machine` to findings; a machine is a mapping of environment
variables, a finder of packages and a runner of commands, so that tests make machines up.  Nothing
of torch, MindSpeed, Megatron or torch_npu is imported: versions are read from their files, and
torch_npu, which ends the process without CANN, is tried in a process of its own.

What is expected was read in the sources and manuals of torch_npu, CANN, MindSpeed and MindSpeed-LLM
and not seen on an NPU.
"""

from __future__ import annotations

from commfuse_npu.packages import Package
from commfuse_npu.tools.doctor.finding import Finding
from commfuse_npu.tools.doctor.launch import Launch, read_launch
from commfuse_npu.tools.doctor.machine import CommandResult, Machine
from commfuse_npu.tools.doctor.report import Report, diagnose

__all__ = [
    "CommandResult",
    "Finding",
    "Launch",
    "Machine",
    "Package",
    "Report",
    "diagnose",
    "read_launch",
]
