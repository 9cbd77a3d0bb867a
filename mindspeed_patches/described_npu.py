"""The described machine that this process runs on."""

from __future__ import annotations

import torch

from commfuse_npu.config_file import find_config
from commfuse_npu.hardware.description import Hardware, described
from commfuse_npu.hardware.machine import Machine

__all__ = ["described_machine"]


def described_machine(device_type: str) -> Machine | None:
    """The machine of this NPU at typical figures; ``None`` if it is not described.

    It asks the device for its name: only when this process has chosen its own.
    """
    name = str(torch.get_device_module(device_type).get_device_name())
    description = described(name)
    if description is None:
        return None
    return Hardware.load(find_config(description, "hardware")).machine()
