"""``commfuse-npu doctor``: is this machine ready for CommFuse?

Checks are functions from a :class:`Machine` to findings.  A machine consists of environment
variables, a function that finds packages and a function that runs commands, so that tests can
define their own.  torch, MindSpeed, Megatron and torch_npu are not imported: versions are read from
their files, and the import of torch_npu, which ends the process without CANN, is tried in a
separate process.  :mod:`commfuse_npu.tools.plan` judges launches.

The expected values were read in the sources and manuals of torch_npu, CANN, MindSpeed and
MindSpeed-LLM, and not verified on an NPU.
"""

from __future__ import annotations

from commfuse_npu.packages import Package
from commfuse_npu.tools.doctor.machine import CommandResult, Machine

__all__ = ["CommandResult", "Machine", "Package"]
