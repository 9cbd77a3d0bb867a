"""What a machine consists of, as the doctor finds it."""

from __future__ import annotations

from commfuse_npu.tools.doctor import Machine
from commfuse_npu.tools.doctor.devices import check_devices, topology
from commfuse_npu.tools.doctor.environment import check_variables
from commfuse_npu.tools.doctor.versions import check_cann, check_torch

__all__ = ["machine_facts"]

_READ_BY = {
    "npu": ("HCCL_", "P2P_HCCL_", "TORCH_HCCL_", "PYTORCH_NPU_", "ASCEND_RT_", "CPU_AFFINITY_"),
    "cuda": ("NCCL_", "TORCH_NCCL_", "PYTORCH_CUDA_", "CUDA_"),
    "cpu": ("GLOO_",),
}
"""Prefixes of the variables that a device's backend reads."""


def machine_facts(device: str, machine: Machine) -> dict[str, str]:
    """Set variables of the device's backend; on NPUs also versions, devices, health and links."""
    facts = {}
    if device == "npu":
        findings = [*check_torch(machine), check_cann(machine)]
        findings += [*check_devices(machine), *check_variables(machine)]
        facts = {finding.what: finding.value for finding in findings}
        facts |= {f"links of {npu}": " ".join(kinds) for npu, kinds in topology(machine).items()}
    prefixes = _READ_BY[device]
    return facts | {k: v for k, v in machine.variables.items() if k.startswith(prefixes)}
