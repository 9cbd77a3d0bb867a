"""Where the tensors of a process group are."""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["device_backend"]


def device_backend(backend: str) -> tuple[str, str]:
    """``(device type, name)`` of a group's backend; of ``cpu:gloo,npu:hccl`` the device's is meant.

    What torch.distributed was told about a backend when it was registered says where its tensors
    are.  gloo carries those of CUDA devices too, through the host: its own are on the CPU.

    Raises:
        ValueError: torch.distributed does not know the backend.
    """
    found = []
    for part in backend.split(","):
        device, _, name = part.strip().rpartition(":")
        devices = [device] if device else dist.Backend.backend_capability.get(name, [])
        if not devices:
            known = ", ".join(sorted(dist.Backend.backend_capability))
            raise ValueError(
                f"backend {backend!r} is unknown to torch.distributed, which has {known}; make the "
                "group with hccl or gloo"
            )
        found.append((devices[0], name))
    return next((one for one in found if one[0] != "cpu"), found[0])
