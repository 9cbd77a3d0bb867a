"""What a machine consists of, as the doctor finds it."""

from __future__ import annotations

from commfuse_npu.tools.doctor import Machine
from commfuse_npu.tools.doctor.devices import check_devices, topology
from commfuse_npu.tools.doctor.environment import check_variables
from commfuse_npu.tools.doctor.torch_install import check_cann, check_torch

__all__ = ["machine_facts"]

_READ_BY = {
    "npu": ("HCCL_", "P2P_HCCL_", "TORCH_HCCL_", "PYTORCH_NPU_", "ASCEND_RT_", "CPU_AFFINITY_"),
    "cuda": ("NCCL_", "TORCH_NCCL_", "PYTORCH_CUDA_", "CUDA_"),
    "cpu": ("GLOO_",),
}
"""How the variables begin that a device's backend reads, and what it runs on."""


def machine_facts(device: str, machine: Machine) -> dict[str, str]:
    """By what they are of: on NPUs what the doctor looks at, elsewhere the variables that are set.

    Of NPUs: torch, torch_npu, CANN, the driver, devices and their health, how many pairs are linked
    in which way and each device's links, and the variables that HCCL and torch_npu read, with what
    they take for one that is unset.
    """
    facts = {}
    if device == "npu":
        looked_at = (
            *check_torch(machine),
            check_cann(machine),
            *check_devices(machine),
            *check_variables(machine),
        )
        facts = {finding.what: finding.value for finding in looked_at}
        facts |= {f"links of {npu}": " ".join(kinds) for npu, kinds in topology(machine).items()}
    of_backend = _READ_BY[device]
    return facts | {k: v for k, v in machine.variables.items() if k.startswith(of_backend)}
