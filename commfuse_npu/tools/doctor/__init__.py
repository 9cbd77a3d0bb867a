"""``commfuse-npu doctor``: is this machine ready for CommFuse, and for a launch?

Checks are functions from a :class:`Machine` to findings; a machine is a mapping of environment
variables, a finder of packages and a runner of commands, so that tests make machines up.  Nothing
of torch, MindSpeed, Megatron or torch_npu is imported: versions are read from their files, and
torch_npu, which ends the process without CANN, is tried in a process of its own.  What a launch by
itself is refused with, and what it would bring, is judged by :mod:`commfuse_npu.tools.plan`.

What is expected was read in the sources and manuals of torch_npu, CANN, MindSpeed and MindSpeed-LLM
and not seen on an NPU.
"""

from __future__ import annotations

from commfuse_npu.packages import Package
from commfuse_npu.tools.doctor.machine import CommandResult, Machine

__all__ = ["CommandResult", "Machine", "Package"]
